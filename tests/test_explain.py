"""flexpress.explain, and the choice between the kernels for Hopper and the portable ones."""

from __future__ import annotations

import pytest
import torch

from flexpress import create_block_mask, explain, flex_attention, mods
from flexpress.codegen import backward, forward, kernel


@pytest.fixture
def hopper(monkeypatch):
    """Tensors of the host pass for a Hopper GPU's, for as long as nothing is launched."""
    for module in (kernel, forward, backward):
        monkeypatch.setattr(module, "backend_of", lambda _: "cuda")
    monkeypatch.setattr(forward, "capability_of", lambda _: (9, 0))


def tensors(head_dim=128, head_dim_v=None, dtype=torch.bfloat16, wants=True, length=256):
    widths = (head_dim, head_dim, head_dim_v or head_dim)
    return [torch.zeros(1, 4, length, d, dtype=dtype, requires_grad=wants) for d in widths]


LEARNED = torch.zeros(4, requires_grad=True)
CASES = {  # tensors, arguments, and a word of the reasons forward and backward; None: the kernels for Hopper
    "plain": (tensors(), {}, None, None),
    "fp16, 64": (tensors(64, dtype=torch.float16), {}, None, None),
    "float32": (tensors(dtype=torch.float32), {}, "wgmma", "wgmma"),
    "no gradients": (tensors(wants=False), {}, None, ""),
    "a short head dim": (tensors(32), {}, "head dims", "head dims"),
    "head dim 256": (tensors(256), {}, None, "head dims"),
    "unequal head dims": (tensors(192, 128), {}, None, "head dims"),
    "an odd head dim": (tensors(100), {}, "TMA", "head dims"),
    "strides": ([t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors()], {}, "TMA", None),  # copied for the backward pass
    "portable": (tensors(), {"kernel_options": {"BACKEND": "TRITON"}}, "BACKEND", "BACKEND"),
    "a tile": (tensors(), {"kernel_options": {"BLOCK_M": 64}}, "BLOCK_M", None),
    "a tile backward": (tensors(), {"kernel_options": {"BLOCK_M1": 64}}, None, "dkv_BLOCK_M"),
    "no TMA": (tensors(), {"kernel_options": {"USE_TMA": False}}, "USE_TMA", "TMA"),
    "deterministic": (tensors(), {"deterministic": True}, None, "deterministic"),
    "learned": (tensors(), {"score_mod": lambda s, b, h, m, n: s + LEARNED[h]}, None, "captured"),
    "causal": (tensors(), {"block_mask": create_block_mask(mods.causal, None, None, 256, 256, device="cpu")}, None, None),
    "small blocks": (tensors(), {"block_mask": create_block_mask(mods.causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)},
                     "block sizes", "block sizes"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_reason_is_named(name, hopper):
    given, arguments, *reasons = CASES[name]
    text = explain(*given, **arguments)
    lines = text.splitlines()
    assert len(lines) == (1 if name == "no gradients" else 2)
    for line, what, reason in zip(lines, ("forward", "backward"), reasons, strict=False):
        assert line.startswith(what) and ("GLUON" in line) == (reason is None)
        assert reason is None or reason in line


def test_forced(hopper):
    """BACKEND="GLUON" is an error where the kernel does not serve, before anything is launched."""
    q, k, v = tensors(32)
    with pytest.raises(ValueError, match="'GLUON', but head dims are 32 and 32.*leave BACKEND out"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "GLUON"})
    with pytest.raises(ValueError, match="'AUTO', 'TRITON', 'GLUON'"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "CUTE"})


def test_on_the_cpu():
    text = explain(*tensors())
    assert "forward   TRITON: the kernel for Hopper needs sm_90, this is cpu" in text and "interpreter" in text
    with pytest.raises(ValueError, match="needs sm_90"):
        flex_attention(*tensors(), kernel_options={"BACKEND": "GLUON"})
