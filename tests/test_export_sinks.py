"""Exported files of attention with sinks: what the library computes, their gradients too."""

from __future__ import annotations

import pytest
import torch

from flexpress import export, flex_attention
from flexpress.mods import alibi, alibi_slopes, causal, sliding_window
from support.dense import relative_error
from support.devices import DEVICES
from support.exported import run_alone, saved, some_sinks, tensors
from support.exported_hopper import pass_for_hopper, poisoned

SIZES = dict(Hq=4, Hkv=2, KV_LEN=170)


def compared(module, q, k, v, sinks, captured: dict, tolerance: float, scale=None, **library) -> None:
    """Output, lse and gradients, of a loss of the output alone and of both, beside the library's."""
    named = {} if scale is None else {"scale": scale}
    found = module.attention(q, k, v, sinks=sinks, **captured, **named, return_lse=True)
    expected = flex_attention(q, k, v, **library, **named, sinks=sinks, enable_gqa=True, return_lse=True)
    learned = [t for t in (q, k, v, sinks, *captured.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator).to(t) for t in found]
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) <= tolerance
    for with_lse in (False, True):
        losses = [(out * weights[0]).sum() + (lse.clamp(min=-9) * weights[1]).sum() * with_lse for out, lse in (found, expected)]
        gradients = [torch.autograd.grad(loss, learned, retain_graph=True) for loss in losses]
        for mine, theirs in zip(*gradients, strict=True):
            assert relative_error(mine, theirs) <= tolerance and mine.dtype == theirs.dtype


@pytest.mark.parametrize("scale, learned", [(0.2, False), (-0.3, True)])
@pytest.mark.parametrize("device", DEVICES)
def test_it_computes_what_the_library_does(tmp_path, device, scale, learned):
    """With mods, tails, a sink of -inf and one above all scores; a negative scale, of which the backward pass needs the sinks' scores."""
    slopes = alibi_slopes(4, device).requires_grad_()
    sinks = some_sinks(4, torch.float32, device).requires_grad_(learned)
    mods = dict(score_mod=alibi(slopes), mask_mod=sliding_window(40))
    path, module = saved(tmp_path, *tensors(device, **SIZES, grad=True), **mods, sinks=sinks, scale=scale, enable_gqa=True, target="sm_90")
    tolerance = 1e-5 if device == "cpu" else 2e-2
    for length in (150, 3):
        q, k, v = tensors(device, **SIZES, Q_LEN=length, grad=True)
        compared(module, q, k, v, sinks, {"slopes": slopes, "window": 40}, tolerance, scale, **mods)
    assert ("gradient of sinks" in run_alone(path)) == learned


def test_in_cpp(tmp_path, in_cpp):
    """The library's bits; few queries have a kernel of their own."""
    sinks = some_sinks(4, torch.bfloat16).requires_grad_()
    path, module = saved(tmp_path, *tensors("cpu", **SIZES, grad=True), mask_mod=causal, sinks=sinks, enable_gqa=True)
    for length in (150, 3):
        compared(module, *tensors("cpu", **SIZES, Q_LEN=length, grad=True), sinks, {}, 0.0, mask_mod=causal)
        with torch.no_grad():
            q, k, v = tensors("cpu", **SIZES, Q_LEN=length)
            library = flex_attention(q, k, v, mask_mod=causal, sinks=sinks, enable_gqa=True)
            assert torch.equal(module.attention(q, k, v, sinks=sinks), library)
    assert "gradient of sinks" in run_alone(path)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("target", ["sm_90", "cpu"])
def test_without_keys(tmp_path, target, learned):
    """Each row's lse is its sink."""
    q, k, v = tensors("cpu", **SIZES, grad=True)
    sinks = some_sinks(4, torch.float32).requires_grad_(learned)
    _, module = saved(tmp_path, q, k, v, sinks=sinks, target=target, enable_gqa=True)
    out, lse = module.attention(q, k[:, :, :0], v[:, :, :0], sinks=sinks, return_lse=True)
    assert torch.equal(lse, sinks[:, None].expand(lse.shape)) and not out.any()
    of_q, *of_sinks = torch.autograd.grad(lse[:, 1:].sum() + out.sum(), [q, *([sinks] if learned else [])])
    assert not of_q.any() and all(torch.equal(found, torch.tensor([0.0, 300, 300, 300])) for found in of_sinks)


def test_a_mod_may_capture_them(tmp_path):
    """They are an argument of their own then, beside that of the mod."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def shifted(score, b, h, q_idx, kv_idx):
        return score + sinks[h] * (q_idx - kv_idx) * 0.01

    _, module = saved(tmp_path, *tensors("cpu", **SIZES, grad=True), score_mod=shifted, sinks=sinks, enable_gqa=True)
    q, k, v = tensors("cpu", **SIZES, Q_LEN=20, grad=True)
    compared(module, q, k, v, sinks, {"sinks_": sinks}, 1e-5, score_mod=shifted)


def test_sinks_of_any_strides(tmp_path):
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, k, v = tensors("cpu", **SIZES, Q_LEN=20, grad=True)
    _, module = saved(tmp_path, q, k, v, sinks=sinks[::2], enable_gqa=True)
    compared(module, q, k, v, sinks[::2], {}, 1e-5)


def test_what_is_refused(tmp_path):
    q, k, v = tensors("cpu", **SIZES)
    for sinks, error in ((torch.zeros(3), "must have shape \\(4,\\)"), (torch.zeros(4).double(), "must be float16, bfloat16 or float32")):
        with pytest.raises((ValueError, TypeError), match=error):
            export(q, k, v, sinks=sinks, enable_gqa=True)
    _, module = saved(tmp_path, q, k, v, sinks=torch.zeros(4), enable_gqa=True)
    for sinks, error in (
        (None, "sinks must be a tensor of torch.float32"),
        (torch.zeros(4).half(), "sinks must be a tensor of torch.float32"),
        (torch.zeros(8), "sinks must have shape \\(4,\\)"),
        (torch.zeros(4, requires_grad=True), "sinks requires grad"),
    ):
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=error):
            module.attention(q, k, v, sinks=sinks)


@pytest.mark.parametrize("scored", [False, True])
def test_on_hopper(monkeypatch, tmp_path, scored):
    """Where a score_mod adds distances, the forward kernel leaves largest scores without scale, which may be those of sinks."""
    q, k, v = tensors("cpu", dtype=torch.bfloat16, grad=True, Z=1, Hq=2, Hkv=1, Q_LEN=100, KV_LEN=130, D=64)
    slopes, sinks = alibi_slopes(2), torch.tensor([0.5, 2.0], requires_grad=True)
    captured, mods = ({"slopes": slopes}, {"score_mod": alibi(slopes)}) if scored else ({}, {})
    path, module = saved(tmp_path, q, k, v, **mods, sinks=sinks, enable_gqa=True, target="sm_90")
    kernels = pass_for_hopper(module, path)
    poisoned(monkeypatch)
    compared(module, q, k, v, sinks, captured, 2e-2, **mods)
    assert {name: kernel.count for name, kernel in kernels.items() if kernel.count} == {"HOPPER_FORWARD_WITH_ROWS": 1, "HOPPER_BACKWARD": 2}
    kernels["HOPPER_FORWARD_WITH_ROWS"].refused = True  # the portable kernel's largest scores have the scale
    compared(module, q, k, v, sinks, captured, 2e-2, **mods)
    assert sum(kernel.count for kernel in kernels.values()) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim, scored", [(64, False), (128, True)])
def test_a_gpu_computes_what_the_library_does(tmp_path, head_dim, scored):
    """gpt-oss's shape, and learned slopes, by whichever kernels serve."""
    q, k, v = tensors("cuda", Z=2, Hq=16, Hkv=2, Q_LEN=1000, KV_LEN=1000, D=head_dim, grad=True)
    slopes = alibi_slopes(16, "cuda").requires_grad_()
    sinks = torch.randn(16, device="cuda").requires_grad_()
    captured, mods = ({"slopes": slopes}, {"score_mod": alibi(slopes)}) if scored else ({"window": 128}, {"mask_mod": sliding_window(128)})
    path, module = saved(tmp_path, q, k, v, **mods, sinks=sinks, enable_gqa=True)
    compared(module, q, k, v, sinks, captured, 2e-2, **mods)
    assert "gradient of sinks" in run_alone(path)
