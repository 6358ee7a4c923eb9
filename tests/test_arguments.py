"""Bad input to flex_attention gets one clear error that names the argument and says what to do."""

from __future__ import annotations

import pytest
import torch

from flexpress import AuxRequest, create_block_mask, flex_attention, mods


def tensor(*shape, **how):
    return torch.randn(*(shape or (1, 2, 20, 16)), **how)


MASK = create_block_mask(mods.causal, None, None, 20, 20, "cpu")

BAD = {
    "list": (dict(query=[1.0]), TypeError, r"query must be a torch.Tensor, got list"),
    "three dimensions": (dict(key=torch.randn(2, 20, 16)), ValueError, r"key must have 4 dimensions .* got shape \(2, 20, 16\)"),
    "dtype": (dict(query=tensor().double()), TypeError, r"query has dtype torch.float64; supported are float16, bfloat16 and float32"),
    "mixed dtypes": (dict(value=tensor().half()), TypeError, r"value has dtype torch.float16 but query has torch.float32"),
    "head_dim": (dict(key=tensor(1, 2, 20, 8)), ValueError, r"same head_dim, got query \(1, 2, 20, 16\) and key \(1, 2, 20, 8\)"),
    "kv length": (dict(value=tensor(1, 2, 21, 16)), ValueError, r"same length, got key \(1, 2, 20, 16\) and value \(1, 2, 21, 16\)"),
    "kv heads": (dict(value=tensor(1, 1, 20, 16)), ValueError, r"same number of heads"),
    "kv batch": (dict(value=tensor(2, 2, 20, 16)), ValueError, r"key and value must have the same batch size"),
    "batch": (dict(key=tensor(3, 2, 20, 16), value=tensor(3, 2, 20, 16)), ValueError, r"query's batch size or 1"),
    "gqa not enabled": (dict(query=tensor(1, 4, 20, 16)), ValueError, r"pass enable_gqa=True"),
    "gqa not a multiple": (dict(query=tensor(1, 3, 20, 16), enable_gqa=True), ValueError, r"multiple of key/value heads"),
    "large head_dim": (dict(query=tensor(1, 2, 20, 300), key=tensor(1, 2, 20, 300)), NotImplementedError, r"head_dim 300"),
    "device": (dict(key=tensor().to("meta")), ValueError, r"key is on meta but query is on cpu"),
    "scale": (dict(scale="big"), TypeError, r"scale must be a number, got str"),
    "mask function": (dict(block_mask=mods.causal), TypeError, r"make a BlockMask of it with create_block_mask"),
    "mask type": (dict(block_mask=3), TypeError, r"block_mask must be a BlockMask"),
    "mask lengths": (dict(query=tensor(1, 2, 30, 16), block_mask=MASK), ValueError, r"made for lengths \(20, 20\).*Q_LEN=30, KV_LEN=20"),
    "mask heads": (dict(block_mask=create_block_mask(mods.causal, None, 3, 20, 20, "cpu")), ValueError,
                   r"its H is 3, which must be 1 or 2"),
    "option": (dict(kernel_options={"BLOK_M": 64}), ValueError, r"no 'BLOK_M'; known are BLOCK_M"),
    "option value": (dict(kernel_options={"BLOCK_M": 48}), ValueError, r"powers of two from 16"),
    "precision": (dict(kernel_options={"FLOAT32_PRECISION": "fast"}), ValueError, r"write 'ieee' or 'tf32'"),
    "tile": (dict(block_mask=create_block_mask(mods.causal, None, None, 20, 20, "cpu", 16), kernel_options={"BLOCK_N": 64}), ValueError,
             r"does not divide the block mask's block size 16"),
    "lse and aux": (dict(return_lse=True, return_aux=AuxRequest(lse=True)), ValueError, r"exclude each other"),
    "captured device": (dict(score_mod=mods.alibi(torch.rand(2, device="meta"))), ValueError,
                        r"captures slopes, .* on meta, but the call is on cpu"),
    "not a function": (dict(score_mod=3), TypeError, r"score_mod must be a function, got int"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_arguments(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        flex_attention(**{"query": tensor(), "key": tensor(), "value": tensor(), **arguments})
    assert len(str(caught.value)) < 500


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    """Also those whose shape cannot be asked for."""
    nested = torch.nested.nested_tensor([torch.randn(2, 20, 16), torch.randn(2, 30, 16)], layout=layout)
    with pytest.raises(NotImplementedError, match="key is a nested tensor; pack the sequences"):
        flex_attention(tensor(), nested, nested)
