"""Bad input to flex_attention gets one clear error that names the argument and says what to do."""

from __future__ import annotations

import inspect
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs

import flexpress
from flexpress import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    ModError,
    create_block_mask,
    create_mask,
    evaluate_mod,
    flex_attention,
    mods,
    varlen_attention,
)


def tensor(*shape, **how):
    return torch.randn(*(shape or (1, 2, 20, 16)), **how)


MASK = create_block_mask(mods.causal, None, None, 20, 20, "cpu")

BAD = {
    "list": (dict(query=[1.0]), TypeError, r"query must be a torch.Tensor, got list"),
    "list with dropout_p": (dict(query=[1.0], dropout_p=0.1), TypeError, r"query must be a torch.Tensor, got list"),
    "list with statistics": (dict(query=[1.0], return_aux=AuxRequest(entropy=True)), TypeError, r"query must be a torch.Tensor, got list"),
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
    "large head_dim": (dict(query=tensor(1, 2, 20, 600), key=tensor(1, 2, 20, 600)), NotImplementedError, r"head_dim 600"),
    "device": (dict(key=tensor().to("meta")), ValueError, r"key is on meta but query is on cpu"),
    "scale": (dict(scale="big"), TypeError, r"scale must be a number, got str"),
    "scale that is a bool": (dict(scale=True), TypeError, r"scale must be a number, got bool"),
    "scale that is complex": (dict(scale=1j), TypeError, r"scale must be a number, got complex"),
    "scale too large": (dict(scale=10**400), ValueError, r"scale must be finite in float32, got int too large"),
    "scale too large for float32": (dict(scale=1e39), ValueError, r"scale must be finite in float32, got 1e\+39"),
    "scale that is NaN": (dict(scale=float("nan")), ValueError, r"scale must be finite in float32, got nan"),
    "scale of several numbers": (dict(scale=torch.ones(2)), ValueError, r"scale must be a number, got a tensor .* \(2,\)"),
    "scale that is a complex tensor": (dict(scale=torch.tensor(1j)), ValueError, r"scale must be a number, got .* torch.complex64"),
    "complex": (dict(query=tensor().to(torch.complex64)), TypeError, r"query has dtype torch.complex64; supported are"),
    "integers": (dict(query=tensor().long()), TypeError, r"query has dtype torch.int64; supported are"),
    "bools": (dict(value=tensor() > 0), TypeError, r"value has dtype torch.bool but query has torch.float32"),
    "nothing": (dict(key=None), TypeError, r"key must be a torch.Tensor, got NoneType"),
    "array": (dict(value=tensor().numpy()), TypeError, r"value must be a torch.Tensor, got ndarray"),
    "other device": (dict(key=tensor(device="meta")), ValueError, "key is on meta but query is on cpu"),
    "aux": (dict(return_aux=True), TypeError, r"return_aux must be AuxRequest\(lse=..., max_scores=...\), got True"),
    "aux that is a class": (
        dict(return_aux=AuxRequest),
        TypeError,
        r"return_aux must be AuxRequest\(lse=..., max_scores=...\), got <class",
    ),
    "aux that is a result": (dict(return_aux=AuxOutput()), TypeError, r"return_aux must be AuxRequest\(.*, got AuxOutput\(lse=None"),
    "aux with a word": (dict(return_aux=AuxRequest(entropy="yes")), TypeError, "return_aux.entropy must be True or False, got str 'yes'"),
    "aux with an array": (dict(return_aux=AuxRequest(lse=np.ones(2))), TypeError, "return_aux.lse must be True or False, got ndarray"),
    "aux that is a tuple": (dict(return_aux=(True, False)), TypeError, r"return_aux must be AuxRequest"),
    "block mask of lists": (dict(block_mask=[[0, 1]]), TypeError, r"block_mask must be a BlockMask .*, got list"),
    "mask_mod": (dict(mask_mod=MASK), TypeError, r"mask_mod must be a function, got BlockMask"),
    "mask function": (dict(block_mask=mods.causal), TypeError, r"make a BlockMask of it with create_block_mask"),
    "mask type": (dict(block_mask=3), TypeError, r"block_mask must be a BlockMask"),
    "mask lengths": (dict(query=tensor(1, 2, 30, 16), block_mask=MASK), ValueError, r"made for lengths \(20, 20\).*Q_LEN=30, KV_LEN=20"),
    "mask lengths of keys": (
        dict(key=tensor(1, 2, 30, 16), value=tensor(1, 2, 30, 16), block_mask=MASK),
        ValueError,
        r"made for lengths \(20, 20\).*Q_LEN=20, KV_LEN=30",
    ),
    "mask heads": (
        dict(block_mask=create_block_mask(mods.causal, None, 3, 20, 20, "cpu")),
        ValueError,
        r"its H is 3, which must be 1 or 2",
    ),
    "option": (dict(kernel_options={"BLOK_M": 64}), ValueError, r"no 'BLOK_M'; known are BLOCK_M"),
    "option of the backward pass": (dict(kernel_options={"bwd_BLOK_M1": 64}), ValueError, r"no 'bwd_BLOK_M1'; known are .* bwd_num_warps"),
    "option for one pass alone": (dict(kernel_options={"bwd_PRESCALE_QK": True}), ValueError, r"no 'bwd_PRESCALE_QK'"),
    "option with the other prefix": (dict(kernel_options={"fwd_BLOCK_M1": 64}), ValueError, r"no 'fwd_BLOCK_M1'"),
    "option of torch's insides": (dict(kernel_options={"OUTPUT_LOGSUMEXP": True}), ValueError, r"no 'OUTPUT_LOGSUMEXP'"),
    "option that is no word": (dict(kernel_options={3: 64}), ValueError, r"no 3"),
    "options": (dict(kernel_options="x"), TypeError, r"kernel_options must be a dict of options, got str"),
    "no options": (dict(kernel_options=""), TypeError, r"kernel_options must be a dict of options, got str"),
    "backend": (
        dict(kernel_options={"BACKEND": "FLASH"}),
        ValueError,
        r"is 'FLASH'; write 'AUTO', 'CPP', 'HOPPER', 'PORTABLE', 'DECODE', 'TRITON', 'GLUON' or 'TRITON_DECODE'",
    ),
    "backend of another type": (dict(kernel_options={"BACKEND": ["AUTO"]}), ValueError, r"write 'AUTO', 'CPP'"),
    "backend and its old form": (dict(kernel_options={"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True}), ValueError, r"exclude each"),
    "switch": (dict(kernel_options={"PRESCALE_QK": "no"}), ValueError, r"'PRESCALE_QK'\] is 'no'; write False or True"),
    "option too large": (dict(kernel_options={"BLOCK_N": 512}), ValueError, r"powers of two from 16 to 256"),
    "backward option too large": (dict(kernel_options={"BLOCK_M1": 512}), ValueError, r"powers of two from 16 to 256"),
    "warps": (dict(kernel_options={"num_warps": 3}), ValueError, r"'num_warps'\] is 3; it must be a power of two"),
    "stages": (dict(kernel_options={"num_stages": True}), ValueError, r"'num_stages'\] is True"),
    "stages of the backward pass": (dict(kernel_options={"bwd_num_stages": 0}), ValueError, r"'bwd_num_stages'\] is 0"),
    "option value": (dict(kernel_options={"BLOCK_M": 48}), ValueError, r"powers of two from 16"),
    "precision": (dict(kernel_options={"FLOAT32_PRECISION": "fast"}), ValueError, r"write 'ieee' or 'tf32'"),
    "tile": (
        dict(block_mask=create_block_mask(mods.causal, None, None, 20, 20, "cpu", 16), kernel_options={"BLOCK_N": 64}),
        ValueError,
        r"does not divide the block mask's block size 16",
    ),
    "tile that leaves a rest": (
        dict(block_mask=create_block_mask(mods.causal, None, None, 20, 20, "cpu", 48), kernel_options={"BLOCK_N": 32}),
        ValueError,
        r"= 32 does not divide the block mask's block size 48",
    ),
    "tile of the backward pass": (
        dict(block_mask=create_block_mask(mods.causal, None, None, 20, 20, "cpu", 16), kernel_options={"BLOCK_M1": 64}),
        ValueError,
        r"kernel_options\['BLOCK_M1'\] = 64 does not divide the block mask's block size 16",
    ),
    "lse and aux": (dict(return_lse=True, return_aux=AuxRequest(lse=True)), ValueError, r"exclude each other"),
    "captured device": (
        dict(score_mod=mods.alibi(torch.rand(2, device="meta"))),
        ValueError,
        r"captures slopes, .* on meta, but the call is on cpu",
    ),
    "not a function": (dict(score_mod=3), TypeError, r"score_mod must be a function, got int"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_arguments(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        flex_attention(**{"query": tensor(), "key": tensor(), "value": tensor(), **arguments})
    assert len(str(caught.value)) < 500


COUNTS, INDICES = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)


def blocks(*lists, **more):
    return lambda: BlockMask((32, 32), *lists, **{"BLOCK_SIZE": 16, **more})


def made(**more):
    given = dict(mask_mod=mods.causal, B=None, H=None, Q_LEN=8, KV_LEN=8, device="cpu")
    return lambda: create_block_mask(**{**given, **more})


def packed(**more):
    given = dict(q=torch.randn(8, 2, 16), k=torch.randn(8, 2, 16), v=torch.randn(8, 2, 16), cu_seqlens_q=torch.tensor([0, 3, 8]))
    return lambda: varlen_attention(**{**given, **more})


def dense(*args):
    return lambda: create_mask(*args, "cpu")


def flash(name, *tensors, **more):
    return lambda: getattr(flexpress.flash, name)(*tensors, **more)


BSHD = torch.randn(1, 8, 2, 16)
ELSEWHERE = {
    "more keys than int32": (
        lambda: flex_attention(BSHD, *[BSHD[:, :, :1].expand(1, 8, 2**31, 16)] * 2),
        ValueError,
        r"key has shape \(1, 8, 2147483648, 16\); kernels count in 32 bits",
    ),
    "create_block_mask mask_mod": (made(mask_mod=3), TypeError, "mask_mod must be a function, got int"),
    "create_block_mask B": (made(B=-1), ValueError, "B is -1; it must be at least 0"),
    "create_block_mask H": (made(H=True), TypeError, "H must be an integer, got True"),
    "create_block_mask Q_LEN": (made(Q_LEN=-1), ValueError, "Q_LEN is -1; it must be at least 0"),
    "create_block_mask Q_LEN, more than int32": (made(Q_LEN=2**31), ValueError, "Q_LEN is 2147483648; it must be at most 2147483647"),
    "create_block_mask B, more than int64": (made(B=2**70), ValueError, "B is 1180591620717411303424; it must be at most 2147483647"),
    "create_block_mask Q_LEN, a bool": (made(Q_LEN=True), TypeError, "Q_LEN must be an integer, got True"),
    "create_block_mask KV_LEN": (made(KV_LEN=2.0), TypeError, "KV_LEN must be an integer, got 2.0"),
    "create_block_mask KV_LEN, a tensor": (made(KV_LEN=torch.tensor([8])), TypeError, "KV_LEN must be an integer, got tensor"),
    "create_block_mask BLOCK_SIZE": (made(BLOCK_SIZE=0), ValueError, "BLOCK_SIZE is 0; it must be at least 1"),
    "create_block_mask BLOCK_SIZE, more than int64": (made(BLOCK_SIZE=2**64), ValueError, "BLOCK_SIZE is 18446744073709551616; .* at most"),
    "create_block_mask BLOCK_SIZE, one": (made(BLOCK_SIZE=(16, 2**63)), ValueError, r"BLOCK_SIZE\[1\] is 9223372036854775808;"),
    "create_block_mask BLOCK_SIZE, a pair": (made(BLOCK_SIZE=(16, -1)), ValueError, r"BLOCK_SIZE\[1\] is -1"),
    "create_block_mask BLOCK_SIZE, three": (made(BLOCK_SIZE=(1, 2, 3)), ValueError, r"BLOCK_SIZE must be .* got \(1, 2, 3\)"),
    "create_block_mask BLOCK_SIZE, a float": (made(BLOCK_SIZE=16.0), TypeError, "BLOCK_SIZE must be .* got 16.0"),
    "create_block_mask BLOCK_SIZE, a word": (made(BLOCK_SIZE="16"), TypeError, "BLOCK_SIZE must be .* got '16'"),
    "create_block_mask BLOCK_SIZE, a bool": (made(BLOCK_SIZE=True), TypeError, "BLOCK_SIZE must be .* got True"),
    "create_block_mask capacity": (made(capacity=-1), ValueError, "capacity is -1"),
    "create_block_mask capacity, a float": (made(capacity=1.5), TypeError, "capacity must be an integer, got 1.5"),
    "create_block_mask device": (made(device="gpu"), TypeError, "device must be a torch.device or its name, got 'gpu'"),
    "create_mask mod_fn": (dense(3, None, None, 8, 8), TypeError, "mod_fn must be a mask_mod or a score_mod, got int"),
    "create_mask KV_LEN": (dense(mods.causal, None, None, 8, "8"), TypeError, "KV_LEN must be an integer, got '8'"),
    "create_mask Q_LEN": (dense(mods.causal, None, None, -8, 8), ValueError, "Q_LEN is -8"),
    "BlockMask seq_lengths": (lambda: BlockMask((20,), COUNTS, INDICES), ValueError, r"seq_lengths must be a pair .* got \(20,\)"),
    "BlockMask seq_lengths, floats": (lambda: BlockMask((20.0, 2), COUNTS, INDICES), TypeError, r"seq_lengths\[0\] must be an integer"),
    "BlockMask seq_lengths, a number": (lambda: BlockMask(20, COUNTS, INDICES), TypeError, "seq_lengths must be a pair .* got 20"),
    "BlockMask seq_lengths, bools": (lambda: BlockMask((True, 2), COUNTS, INDICES), TypeError, "must be an integer, got True"),
    "BlockMask BLOCK_SIZE": (blocks(COUNTS, INDICES, BLOCK_SIZE=0), ValueError, "BLOCK_SIZE is 0"),
    "BlockMask BLOCK_SIZE, more than int64": (
        blocks(COUNTS, INDICES, BLOCK_SIZE=2**64),
        ValueError,
        "it must be at most 9223372036854775807",
    ),
    "to_string(0)": (lambda: MASK.to_string(0), ValueError, "grid_size is 0; it must be at least 1"),
    "to_string of no columns": (lambda: MASK.to_string((2, 0)), ValueError, r"grid_size\[1\] is 0; it must be at least 1"),
    "to_string of a word": (lambda: MASK.to_string("ab"), TypeError, "grid_size must be -1, a number or a pair of numbers, got 'ab'"),
    "to_string's limit": (lambda: MASK.to_string(limit="x"), TypeError, "limit must be an integer, got 'x'"),
    "BlockMask mask_mod": (blocks(COUNTS, INDICES, mask_mod=3), TypeError, "mask_mod must be a function, got int"),
    "BlockMask kv_num_blocks": (blocks([[[1, 1]]], INDICES), TypeError, "kv_num_blocks must be a torch.Tensor of int32, got list"),
    "BlockMask kv_num_blocks' dtype": (blocks(COUNTS.float(), INDICES), TypeError, "kv_num_blocks must hold integers .* got torch.float32"),
    "BlockMask kv_num_blocks' shape": (
        blocks(COUNTS[..., :1], INDICES),
        ValueError,
        r"kv_num_blocks has shape \(1, 1, 1\), but kv_indices \(1, 1, 2, 2\) needs \(1, 1, 2\)",
    ),
    "BlockMask kv_num_blocks' device": (blocks(COUNTS.to("meta"), INDICES), NotImplementedError, "kv_num_blocks is on meta"),
    "BlockMask kv_indices": (blocks(COUNTS, None), TypeError, "kv_indices must be a torch.Tensor of int32, got NoneType"),
    "BlockMask kv_indices' dtype": (blocks(COUNTS, INDICES > 0), TypeError, "kv_indices must hold integers .* got torch.bool"),
    "BlockMask kv_indices' rank": (blocks(COUNTS[0, 0, 0], INDICES[0, 0, 0]), ValueError, r"kv_indices must have shape .* got \(2,\)"),
    "BlockMask full lists, one alone": (blocks(COUNTS, INDICES, COUNTS), ValueError, "full_kv_indices go together: give both or neither"),
    "BlockMask full lists of other heads": (
        blocks(COUNTS, INDICES, COUNTS.expand(1, 3, 2), INDICES.expand(1, 3, 2, 2)),
        ValueError,
        r"full_kv_indices has shape \(1, 3, 2, 2\) but kv_indices \(1, 1, 2, 2\)",
    ),
    "BlockMask full lists of other rows": (
        blocks(COUNTS, INDICES, COUNTS[..., :1], INDICES[:, :, :1]),
        ValueError,
        r"full_kv_indices has shape \(1, 1, 1, 2\) but kv_indices \(1, 1, 2, 2\)",
    ),
    "BlockMask full counts": (blocks(COUNTS, INDICES, COUNTS[..., :1], INDICES), ValueError, r"full_kv_num_blocks has shape \(1, 1, 1\)"),
    "BlockMask q lists, one alone": (blocks(COUNTS, INDICES, q_indices=INDICES), ValueError, "q_num_blocks and q_indices go together"),
    "from_kv_blocks kv_indices": (lambda: BlockMask.from_kv_blocks(COUNTS, [[0]]), TypeError, "kv_indices must be .* got list"),
    "from_kv_blocks seq_lengths": (lambda: BlockMask.from_kv_blocks(COUNTS, INDICES, seq_lengths=(20,)), ValueError, "seq_lengths must be"),
    "seq_lengths, set": (lambda: setattr(create_block_mask(mods.causal, None, None, 8, 8, "cpu"), "seq_lengths", 3), TypeError, "pair"),
    "adjust": (lambda: MASK.adjust(True, 3), TypeError, "new_q_len must be an integer, got True"),
    "varlen_attention q with dropout_p": (packed(q=None, dropout_p=0.1), TypeError, "q must be a torch.Tensor, got NoneType"),
    "varlen_attention q": (packed(q=[1.0]), TypeError, "q must be a torch.Tensor .* got list"),
    "varlen_attention cu_seqlens_q": (packed(cu_seqlens_q=[0, 3, 8]), TypeError, "cu_seqlens_q must be a torch.Tensor .* got list"),
    "varlen_attention cu_seqlens_q's dtype": (packed(cu_seqlens_q=torch.tensor([False, True])), TypeError, "has dtype torch.bool"),
    "varlen_attention scale": (packed(scale=10**400), ValueError, "scale must be finite"),
    "varlen_attention options": (packed(kernel_options={"bwd_X": 1}), ValueError, "no 'bwd_X'"),
    "varlen_attention v": (packed(v=torch.randn(8, 2, 16, dtype=torch.complex64)), TypeError, "v must have the same dtype"),
    "flash_attn_func k": (flash("flash_attn_func", BSHD, [BSHD], BSHD), TypeError, "k must be a torch.Tensor .* got list"),
    "flash_attn_func bias": (flash("flash_attn_func", BSHD, BSHD, BSHD, torch.ones(1, 1, 1, 8) > 0), TypeError, "bias must have"),
    "flash_attn_func softmax_scale": (flash("flash_attn_func", BSHD, BSHD, BSHD, softmax_scale="x"), TypeError, "scale must be a number"),
    "flash_attn_qkvpacked_func qkv": (flash("flash_attn_qkvpacked_func", BSHD), ValueError, "qkv must have shape"),
    "wait_for_kernels": (lambda: flexpress.wait_for_kernels("x"), TypeError, "timeout must be a number of seconds, .* got 'x'"),
    "export target": (lambda: flexpress.export(*[tensor()] * 3, target=[]), TypeError, r"target must be one of sm_80.* and cpu, got \[\]"),
    "evaluate_mod scores": (lambda: evaluate_mod(mods.softcap(1.0), [1.0]), TypeError, "scores must be a torch.Tensor .* got list"),
}


@pytest.mark.parametrize("case", sorted(ELSEWHERE))
def test_bad_calls_of_other_functions(case):
    call, error, message = ELSEWHERE[case]
    with pytest.raises(error, match=message) as caught:
        call()
    assert len(str(caught.value)) < 500


FLAGS = [
    (function, name)
    for module in (flexpress, flexpress.flash, flexpress.flash_attn)
    for function in map(vars(module).get, module.__all__)
    if inspect.isfunction(function)
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.annotation in ("bool", "bool | None")
]


@pytest.mark.parametrize("function, name", FLAGS, ids=[f"{function.__module__}.{function.__name__}-{name}" for function, name in FLAGS])
@pytest.mark.parametrize("given", [np.array([True]), torch.tensor(True), "no", 2, 1.0, []], ids=lambda given: type(given).__name__)
def test_flags_are_bools(function, name, given):
    parameters = inspect.signature(function).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty]
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got {type(given).__name__}"):
        function(**{**dict.fromkeys(required, (1, 1, 8, 16)), **({"device": "cpu"} if "device" in parameters else {}), name: given})


@pytest.mark.parametrize("given", [1, np.True_, np.int64(1)])
def test_other_libraries_bools_and_ones_are_flags(given):
    q, k = tensor(1, 4, 20, 16), tensor()
    out, lse = flex_attention(q, k, k, enable_gqa=given, return_lse=given, deterministic=given)
    assert torch.equal(out, flex_attention(q, k, k, enable_gqa=True)) and lse.shape == (1, 4, 20)
    assert not isinstance(flex_attention(q, q, q, enable_gqa=given, return_lse=1 - int(given)), tuple)


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor([0.5]), Fraction(1, 2), 0.5])
def test_numbers_of_other_libraries_are_scales(scale):
    q = tensor()
    assert torch.equal(flex_attention(q, q, q, scale=scale), flex_attention(q, q, q, scale=0.5))


def test_numpy_integers_are_lengths():
    mask = create_block_mask(mods.causal, np.int64(1), None, np.int32(20), np.int64(20), "cpu", np.int64(16))
    assert mask == create_block_mask(mods.causal, None, None, 20, 20, "cpu", 16) and type(mask.seq_lengths[0]) is int


def test_torchs_options_that_change_nothing_are_accepted(caplog):
    q = tensor()
    caplog.set_level("DEBUG", "flexpress")
    options = {
        "BLOCKS_ARE_CONTIGUOUS": True,
        "WRITE_DQ": False,
        "bwd_WRITE_DQ": True,
        "FORCE_USE_FLEX_ATTENTION": True,
        "kpack": 2,
        "matrix_instr_nonkdim": 16,
        "waves_per_eu": 1,
        "num_consumer_groups": 2,
        "num_buffers_warp_spec": 3,
        "SPLIT_KV": 4,
        "IS_DIVISIBLE": True,
        "fwd_num_stages": 1,
        "bwd_BLOCK_N2": 32,
        "fwd_PRESCALE_QK": False,
        "FLOAT32_PRECISION": "'ieee'",
        "USE_TMA": None,
    }
    torch.testing.assert_close(
        flex_attention(q, q, q, mask_mod=mods.causal, kernel_options=options), flex_attention(q, q, q, mask_mod=mods.causal)
    )
    ignored = [r.getMessage() for r in caplog.records if "no effect" in r.getMessage()]
    assert "kernel_options['waves_per_eu'] = 1 has no effect here" in ignored and not any("num_stages" in line for line in ignored)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(tensor(), tensor(), tensor()).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="query has dtype torch.float64"):
            flex_attention(*[tensor().double()] * 3)


def test_modes_without_gradients():
    """A mask made in inference mode serves training, and what is computed under no_grad wants no gradient."""
    q = tensor().requires_grad_()
    with torch.inference_mode():
        mask = create_block_mask(mods.causal, None, None, 20, 20, "cpu", (1, 16))
        foreign = theirs.create_block_mask(mods.causal, None, None, 20, 20, "cpu", (1, 16))
        inferred = flex_attention(q, q, q, block_mask=mask)
    assert inferred.is_inference() and not inferred.requires_grad
    with torch.no_grad():
        assert not flex_attention(q, q, q, block_mask=mask).requires_grad
    for used in (mask, foreign):
        out = flex_attention(q, q, q, block_mask=used)
        assert torch.equal(out, inferred) and torch.autograd.grad(out.sum(), q)[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    """Also those whose shape cannot be asked for."""
    nested = torch.nested.nested_tensor([torch.randn(2, 20, 16), torch.randn(2, 30, 16)], layout=layout)
    with pytest.raises(NotImplementedError, match="key is a nested tensor; pack the sequences"):
        flex_attention(tensor(), nested, nested)
    with pytest.raises(NotImplementedError, match="dropout_seed is a nested tensor"):
        flex_attention(*[tensor()] * 3, dropout_p=0.1, dropout_seed=nested)
    for read in (lambda q_idx: nested, lambda q_idx: nested[q_idx], lambda q_idx: nested[0, 0, q_idx, 0]):
        with pytest.raises(ModError, match=r"captures \w+, which is a nested tensor; pack the sequences"):
            flex_attention(*[tensor()] * 3, lambda s, b, h, q_idx, kv_idx, read=read: s + read(q_idx))
    for recipe in (mods.alibi, mods.tree):
        with pytest.raises(TypeError, match="must be a tensor of shape .* got a nested tensor of dtype torch.float32; give"):
            recipe(nested)
    with pytest.raises(TypeError, match="cap must be a number, got a nested tensor"):
        mods.softcap(nested)
