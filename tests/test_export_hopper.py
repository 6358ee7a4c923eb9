"""The kernels for Hopper in exported files: which files hold them, and that their launches compute the same, in a stand-in for Gluon."""

from __future__ import annotations

import pytest
import torch

from flexpress import export, flex_attention
from flexpress.mods import alibi, alibi_slopes, causal, document, sliding_window
from support.dense import dense_attention, relative_error
from support.exported import load, run_alone, saved, tensors
from support.exported_hopper import pass_for_hopper, poisoned


def near(bias):
    """Distances, and a number for every key."""
    return lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs() * 0.125 + bias[kv_idx]


CASES = {  # what is exported; whether a kernel for Hopper serves its backward pass
    "plain": (dict(D=64, Q_LEN=130, KV_LEN=200), {}, True),
    "a value's head dim of its own": (dict(D=72, D_V=40, Q_LEN=70, KV_LEN=150), {}, True),
    "heads and keys that are shared": (dict(D=64, Z=2, Hq=2, Hkv=1, Q_LEN=100, KV_LEN=130), dict(enable_gqa=True), True),
    "a window and learned slopes": (
        dict(D=64, Hq=2, Hkv=2, Q_LEN=150, KV_LEN=150, learned=True),
        dict(score_mod="alibi", mask_mod=sliding_window(90)),
        True,
    ),
    "documents": (dict(D=64, Q_LEN=200, KV_LEN=200), dict(mask_mod="documents"), True),
    "a number for every key, whose gradient the portable kernels compute": (
        dict(D=128, Q_LEN=100, KV_LEN=130, learned=True),
        dict(score_mod="near"),
        False,
    ),
    "learned slopes, wide: after scores without scale": (
        dict(D=136, D_V=64, Q_LEN=100, KV_LEN=130, learned=True),
        dict(score_mod="alibi"),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_the_same_on_hopper(monkeypatch, tmp_path, name):
    sizes, options, backward = CASES[name]
    sizes = dict(Z=1, Hq=2, Hkv=2) | sizes
    learned = sizes.pop("learned", False)
    q, k, v = tensors("cpu", dtype=torch.bfloat16, grad=True, **sizes)
    captured, options = _captured(options, sizes, learned)
    path, module = saved(tmp_path, q, k, v, **options)
    assert ("largest scores are still without scale" in path.read_text()) == (options.get("score_mod") is not None and "slopes" in captured)
    kernels = pass_for_hopper(module, path)
    poisoned(monkeypatch)
    with torch.no_grad():
        out, lse = module.attention(q, k, v, **captured, return_lse=True)
    mods = options.get("score_mod"), options.get("mask_mod")
    exact, exact_lse, _ = dense_attention(q, k, v, *mods)
    assert relative_error(out, exact) <= 1e-2 and relative_error(lse, exact_lse) <= 1e-3
    wanted = [q, k, v, *(t for t in captured.values() if t.requires_grad)]
    torch.manual_seed(1)  # gradients of slopes are differences
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    results = module.attention(q, k, v, **captured, return_lse=True), (exact, exact_lse)
    assert torch.equal(results[0][0], out) and torch.equal(results[0][1], lse)
    for with_lse in (False, True):
        losses = [(o * d_out.to(o.dtype)).sum() + (e * d_lse.to(e.dtype)).sum() * with_lse for o, e in results]
        gradients = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses]
        for mine, right in zip(*gradients, strict=True):
            assert relative_error(mine, right) <= 2e-2
    ran = {kernel: stand_in.count for kernel, stand_in in kernels.items() if not kernel.endswith("SCALED")}
    assert ran == {"HOPPER_FORWARD": 1, "HOPPER_FORWARD_WITH_ROWS": 1, **({"HOPPER_BACKWARD": 2} if backward else {})}


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
    """A CPU, few queries, few tiles, few keys: the portable kernel."""
    q, k, v = tensors("cpu", dtype=torch.bfloat16, Z=1, Hq=1, Hkv=1, D=64, Q_LEN=70, KV_LEN=70)
    path, module = saved(tmp_path, q, k, v)
    plain = module.attention(q, k, v)
    few = module.FEW_KEYS
    assert not module.on_hopper(q, k)
    kernels = pass_for_hopper(module, path, multiprocessors=2)
    assert module.on_hopper(q, k) and not module.on_hopper(q[:, :, :64], k)
    module.FEW_KEYS = few
    assert not module.on_hopper(q, k) and module.on_hopper(q, k.repeat(1, 1, 8, 1)) and module.on_hopper(q.repeat(5, 1, 1, 1), k)
    module.multiprocessors = lambda _: 3
    assert not module.on_hopper(q, k)
    assert torch.equal(module.attention(q, k, v), plain) and kernels["HOPPER_FORWARD"].count == 0


@pytest.mark.parametrize("learned", [False, True])
def test_a_kernel_that_does_not_compile(tmp_path, learned):
    """The portable one takes its place, whichever kernel the other pass gets. Scores of distances are without scale in the forward kernel
    for Hopper, and not in the portable one: there are two for the backward pass."""
    q, k, v = tensors("cpu", dtype=torch.bfloat16, grad=True, Z=1, Hq=2, Hkv=2, D=64, Q_LEN=130, KV_LEN=100)
    slopes = alibi_slopes(2).requires_grad_(learned)
    mods = (alibi(slopes),) if learned else ()
    captured = {"slopes": slopes} if learned else {}
    wanted = [q, k, v, *([slopes] if learned else [])]
    path, _ = saved(tmp_path, q, k, v, *mods)
    exact = dense_attention(q, k, v, *mods)[0]
    backward = "HOPPER_BACKWARD_SCALED" if learned else "HOPPER_BACKWARD"
    for refused, served in (("HOPPER_FORWARD_WITH_ROWS", backward), ("HOPPER_BACKWARD", "HOPPER_FORWARD_WITH_ROWS")):
        module = load(path, refused)
        kernels = pass_for_hopper(module, path, refused=(refused,))
        out = module.attention(q, k, v, **captured)
        torch.manual_seed(1)  # gradients of slopes are differences
        d_out = torch.randn_like(out)
        found, right = (torch.autograd.grad(o, wanted, d_out.to(o.dtype), retain_graph=True) for o in (out, exact))
        assert all(relative_error(mine, theirs) <= 2e-2 for mine, theirs in zip(found, right, strict=True))
        assert {name for name, stand_in in kernels.items() if stand_in.count} == {served}


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
        (meta(16), {}, "head dims are 16 and 16; there are tiles for 17 to 256"),
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
    assert "There is none for Hopper's backward pass: gradients of a captured tensor that is read by more than batch entry and head" in text
    assert "HOPPER_FORWARD_WITH_ROWS = " in text and "HOPPER_BACKWARD = " not in text


def test_a_backend_that_is_asked_for(tmp_path):
    for given, options, message in (
        (meta(16), {"BACKEND": "HOPPER"}, "names HOPPER, but head dims are 16 and 16; .*; leave BACKEND out"),
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


def on_a_hopper_gpu(test):
    is_there = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return pytest.mark.gpu(pytest.mark.skipif(not is_there, reason="needs a Hopper GPU")(test))


def poison() -> None:
    """Fill memory that is then free with NaN: what a kernel does not write shows."""
    torch.full((1 << 26,), float("nan"), device="cuda")


KERNELS = "FORWARD", "FORWARD_WITH_ROWS", "BACKWARD", "BACKWARD_SCALED"


def served(module) -> dict[str, int]:
    """How many variants of each kernel for Hopper were compiled; none may be refused."""
    launches = {name: getattr(module, f"HOPPER_{name}", None) for name in KERNELS}
    assert not any(launch.refused for launch in launches.values() if launch)
    return {name: len(launch.compiled) for name, launch in launches.items() if launch}


@on_a_hopper_gpu
@pytest.mark.parametrize(
    "head_dims, dtype, kind",
    [
        ((128, 128), torch.bfloat16, "plain"),
        ((64, 64), torch.float16, "window"),
        ((128, 128), torch.bfloat16, "window"),
        ((192, 128), torch.bfloat16, "documents"),
        ((256, 256), torch.bfloat16, "plain"),
        ((72, 40), torch.float16, "documents"),
        ((128, 128), torch.bfloat16, "near"),
        ((192, 128), torch.bfloat16, "slopes"),
    ],
)
def test_a_gpu_computes_what_the_library_computes(tmp_path, head_dims, dtype, kind):
    """Forward, and gradients of all, of lse too. Of lengths, one is whole blocks, and one few tiles, whose forward kernel is portable."""
    options = {"D": head_dims[0], "D_V": head_dims[1], "dtype": dtype, "Z": 2, "Hq": 8, "Hkv": 4, "grad": True}
    example = tensors("cuda", Q_LEN=1024, KV_LEN=1024, **options)
    bias, slopes = torch.randn(1024, device="cuda"), alibi_slopes(8, "cuda").requires_grad_()
    ids = torch.arange(1024, dtype=torch.int32, device="cuda") // 300
    bias.requires_grad_()
    mods, captured = {
        "plain": ({}, {}),
        "window": ({"score_mod": alibi(slopes), "mask_mod": sliding_window(300)}, {"slopes": slopes}),
        "slopes": ({"score_mod": alibi(slopes)}, {"slopes": slopes}),
        "documents": ({"mask_mod": document(ids, causal)}, {"ids": ids}),
        "near": ({"score_mod": near(bias)}, {"bias": bias}),
    }[kind]
    path, module = saved(tmp_path, *example, **mods, enable_gqa=True)
    for length in (1024, 1000, 130):
        q, k, v = (t[:, :, :length].detach().requires_grad_() for t in example)
        wanted = [q, k, v, *(t for t in captured.values() if t.requires_grad)]
        poison()
        out, lse = module.attention(q, k, v, **captured, return_lse=True)
        library, library_lse = flex_attention(q, k, v, **mods, enable_gqa=True, return_lse=True)
        exact, exact_lse, _ = dense_attention(q, k, v, mods.get("score_mod"), mods.get("mask_mod"))
        assert relative_error(out, exact) <= 1.05 * relative_error(library, exact) and relative_error(lse, library_lse) <= 1e-5
        with torch.no_grad():
            assert relative_error(module.attention(q, k, v, **captured), out) <= 1e-3
        d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
        for with_lse in (False, True):
            results = (out, lse), (library, library_lse), (exact, exact_lse)
            losses = [(o * d_out.to(o.dtype)).sum() + (e * d_lse.to(e.dtype)).sum() * with_lse for o, e in results]
            poison()
            found = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses]
            for mine, theirs, right in zip(*found, strict=True):
                assert relative_error(mine, right) <= 1.05 * relative_error(theirs, right) + 1e-5
    backward = {"plain": ["BACKWARD"], "documents": ["BACKWARD"], "window": ["BACKWARD", "BACKWARD_SCALED"]}.get(kind, [])
    assert served(module) == dict.fromkeys(["FORWARD", "FORWARD_WITH_ROWS", *backward], 1)
    assert "gradient of value" in run_alone(path)


@on_a_hopper_gpu
def test_streams_and_graphs_beside_each_other(tmp_path):
    """Every launch has a counter of its own, in a CUDA graph, too."""
    sets = [tensors("cuda", D=64, Z=2, Hq=16, Hkv=16, Q_LEN=n, KV_LEN=n, grad=True) for n in (700, 1500, 2500)]
    _, module = saved(tmp_path, *sets[0])
    attention = module.attention

    def step(q, k, v):
        out = attention(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), out.detach())

    expected = [step(*s) for s in sets]
    own, graphs, outs = [torch.cuda.Stream() for _ in sets], [], []
    with torch.no_grad():
        plain = [attention(*s) for s in sets]
        for s in sets:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(attention(*s))
            graphs.append(graph)
    for _ in range(20):
        found = []
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph, s in zip(own, graphs, sets, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                found.append(step(*s))
        torch.cuda.synchronize()
        for out, mine, right, replayed in zip(outs, found, expected, plain, strict=True):
            assert torch.equal(out, replayed) and torch.equal(mine[0], right[0])
            assert all(torch.equal(a, b) for a, b in zip(mine[2:], right[2:], strict=True))
            assert relative_error(mine[1], right[1]) <= 1e-2
    assert served(module) == {"FORWARD": 1, "FORWARD_WITH_ROWS": 1, "BACKWARD": 1}
