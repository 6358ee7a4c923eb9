"""The kernels for Hopper in exported files: which files hold them, and that their launches compute the same, in a stand-in for Gluon."""

from __future__ import annotations

import pytest
import torch

from flexpress import export
from flexpress.mods import alibi, alibi_slopes, causal, document, sliding_window, softcap
from support.dense import dense_attention, relative_error
from support.exported import saved, tensors
from support.exported_hopper import pass_for_hopper, poisoned


def near(bias):
    """Distances, and a number for every key."""
    return lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs() * 0.125 + bias[kv_idx]


CASES = {  # what is exported; how many launches each kernel gets in a call with gradients, and in one without
    "plain": (dict(D=64, Q_LEN=200, KV_LEN=300), {}, (1, 1)),
    "a value's head dim of its own": (dict(D=72, D_V=40, Q_LEN=130, KV_LEN=200), {}, (1, 1)),
    "heads and keys that are shared": (dict(D=64, Z=2, Hq=4, Hkv=2, Q_LEN=140, KV_LEN=130), dict(enable_gqa=True), (1, 1)),
    "a window and learned slopes": (
        dict(D=64, Hq=2, Hkv=2, Q_LEN=200, KV_LEN=200, learned=True),
        dict(score_mod="alibi", mask_mod=sliding_window(90)),
        (1, 1),
    ),
    "documents": (dict(D=64, Q_LEN=300, KV_LEN=300), dict(mask_mod="documents"), (1, 1)),
    "a softcap": (dict(D=64, Q_LEN=130, KV_LEN=150), dict(score_mod=softcap(2.0)), (1, 1)),
    "the portable backward pass after scores without scale": (
        dict(D=128, Q_LEN=130, KV_LEN=150, learned=True),
        dict(score_mod="near"),
        (1, 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_the_same_on_hopper(monkeypatch, tmp_path, name):
    sizes, options, launches = CASES[name]
    sizes = dict(Z=1, Hq=2, Hkv=2) | sizes
    learned = sizes.pop("learned", False)
    q, k, v = tensors("cpu", dtype=torch.bfloat16, grad=True, **sizes)
    captured, options = _captured(options, sizes, learned)
    path, module = saved(tmp_path, q, k, v, **options)
    kernels = pass_for_hopper(module, path)
    poisoned(monkeypatch)
    with torch.no_grad():
        out, lse = module.attention(q, k, v, **captured, return_lse=True)
    mods = options.get("score_mod"), options.get("mask_mod")
    exact, exact_lse, _ = dense_attention(q, k, v, *mods)
    assert relative_error(out, exact) <= 1e-2 and relative_error(lse, exact_lse) <= 1e-3
    wanted = [q, k, v, *(t for t in captured.values() if t.requires_grad)]
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    for with_lse in (False, True):
        found, found_lse = module.attention(q, k, v, **captured, return_lse=True)
        assert torch.equal(found, out) and torch.equal(found_lse, lse)
        losses = [
            (o * d_out.to(o.dtype)).sum() + (e * d_lse.to(e.dtype)).sum() * with_lse for o, e in ((found, found_lse), (exact, exact_lse))
        ]
        gradients = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses]
        for mine, right in zip(*gradients, strict=True):
            assert relative_error(mine, right) <= 2e-2
    forward, backward = launches
    assert {n: s.count for n, s in kernels.items()} == {
        "HOPPER_FORWARD": 1,
        "HOPPER_FORWARD_WITH_ROWS": 2 * forward,
        **({"HOPPER_BACKWARD": 2 * backward} if backward else {}),
    }


def _captured(options: dict, sizes: dict, learned: bool) -> tuple[dict, dict]:
    """Tensors for what a case names, and its mods."""
    slopes = alibi_slopes(sizes["Hq"]).requires_grad_(learned)
    bias = torch.randn(sizes["KV_LEN"], generator=torch.Generator().manual_seed(1)).requires_grad_(learned)
    ids = torch.arange(sizes["Q_LEN"], dtype=torch.int32) // 70
    named = {
        "alibi": (alibi(slopes), {"slopes": slopes}),
        "near": (near(bias), {"bias": bias}),
        "documents": (document(ids, causal), {"ids": ids}),
    }
    found, captured = dict(options), {}
    for key, value in options.items():
        if isinstance(value, str):
            found[key], of_mod = named[value]
            captured |= of_mod
    return captured, found


def test_where_it_is_not_hopper_or_too_small(tmp_path):
    """A CPU, few queries, few tiles: the portable kernel."""
    q, k, v = tensors("cpu", dtype=torch.bfloat16, Z=1, Hq=1, Hkv=1, D=64, Q_LEN=70, KV_LEN=70)
    path, module = saved(tmp_path, q, k, v)
    plain = module.attention(q, k, v)
    assert not module.on_hopper(q)
    kernels = pass_for_hopper(module, path, multiprocessors=2)
    assert module.on_hopper(q) and not module.on_hopper(q[:, :, :64]) and not module.on_hopper(q.expand(2, -1, -1, -1))
    module.multiprocessors = lambda _: 3
    assert not module.on_hopper(q)
    assert torch.equal(module.attention(q, k, v), plain) and kernels["HOPPER_FORWARD"].count == 0


@pytest.mark.parametrize("refused", ["HOPPER_FORWARD_WITH_ROWS", "HOPPER_BACKWARD"])
@pytest.mark.parametrize("scored", [False, True])
def test_a_kernel_that_does_not_compile(tmp_path, refused, scored):
    """The portable one takes its place, whichever kernel the other pass gets."""
    q, k, v = tensors("cpu", dtype=torch.bfloat16, grad=True, Z=1, Hq=2, Hkv=2, D=64, Q_LEN=130, KV_LEN=100)
    slopes = alibi_slopes(2)
    mods = (alibi(slopes),) if scored else ()
    captured = {"slopes": slopes} if scored else {}
    path, module = saved(tmp_path, q, k, v, *mods)
    kernels = pass_for_hopper(module, path, refused=(refused,))
    out, exact = module.attention(q, k, v, **captured), dense_attention(q, k, v, *mods)[0]
    d_out = torch.randn_like(out)
    found, right = (torch.autograd.grad(o, (q, k, v), d_out.to(o.dtype)) for o in (out, exact))
    assert all(relative_error(mine, wanted) <= 2e-2 for mine, wanted in zip(found, right, strict=True))
    forward = refused != "HOPPER_FORWARD_WITH_ROWS"
    # scores with distances are without scale in the one kernel for Hopper, and so in both
    assert (kernels["HOPPER_FORWARD_WITH_ROWS"].count, kernels["HOPPER_BACKWARD"].count) == (forward, not forward and not scored)


def test_deterministic_gradients_are_portable(tmp_path):
    q, k, v = tensors("cpu", dtype=torch.bfloat16, grad=True, Z=1, Hq=2, Hkv=2, D=64, Q_LEN=130, KV_LEN=100)
    path, module = saved(tmp_path, q, k, v)
    kernels = pass_for_hopper(module, path)
    torch.use_deterministic_algorithms(True)
    try:
        module.attention(q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels["HOPPER_FORWARD_WITH_ROWS"].count == 1 and kernels["HOPPER_BACKWARD"].count == 0


def meta(D=128, dtype=torch.bfloat16, grad=False):
    return [torch.empty(1, 4, 300, D, dtype=dtype, device="meta").requires_grad_(grad) for _ in range(3)]


def test_what_a_file_says_of_hopper():
    for given, options, message in (
        (meta(dtype=torch.float32), {}, "float32 has no wgmma of its precision"),
        (meta(32), {}, "head dims are 32 and 32; there are tiles for 33 to 256"),
        (meta(), {"target": "sm_80"}, "the kernel for Hopper needs sm_90, this is sm_80"),
        (meta(), {"kernel_options": {"BACKEND": "PORTABLE"}}, "BACKEND is PORTABLE"),
        (meta(), {"kernel_options": {"USE_TMA": False}}, "USE_TMA is False"),
    ):
        text = export(*given, **options)
        assert f"There are no kernels made for Hopper: {message}." in text
        assert "gluon" not in text and "hopper_forward" not in text
    text = export(*meta(), backward=True)
    assert "are made for it serve calls that they are faster for, forward and backward.\n" in text
    bias = torch.randn(300).requires_grad_()
    text = export(*meta(), near(bias))
    assert "There is none for Hopper's backward pass: gradients of a captured tensor that varies with the key" in text
    assert "HOPPER_FORWARD_WITH_ROWS = " in text and "HOPPER_BACKWARD = " not in text


def test_a_backend_that_is_asked_for(tmp_path):
    for given, options, message in (
        (meta(32), {"BACKEND": "HOPPER"}, "'HOPPER', but head dims are 32 and 32; .*; leave BACKEND out"),
        (meta(), {"BACKEND": "HOPPER", "BLOCK_M": 64}, "this kernel has tiles of its own"),
        (meta(), {"BACKEND": "DECODE"}, "BACKEND"),
    ):
        with pytest.raises(ValueError, match=message):
            export(*given, kernel_options=options)
    q, k, v = tensors("cpu", dtype=torch.bfloat16, Z=1, Hq=1, Hkv=1, D=64, Q_LEN=20, KV_LEN=30)
    path, module = saved(tmp_path, q, k, v, kernel_options={"BACKEND": "HOPPER"})
    kernels = pass_for_hopper(module, path, multiprocessors=100)
    out = module.attention(q, k, v)
    assert kernels["HOPPER_FORWARD"].count == 1 and relative_error(out, dense_attention(q, k, v)[0]) <= 1e-2
