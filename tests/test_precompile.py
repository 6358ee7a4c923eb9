"""flexpress.precompile: after it a call compiles nothing, and it launches no attention kernel itself."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from flexpress import (
    AuxRequest,
    cache_clear,
    cache_info,
    create_block_mask,
    flex_attention,
    mods,
    precompile,
    printed_kernels,
    varlen_attention,
)
from flexpress.codegen import registry
from flexpress.codegen.device import interpret
from support.costs import costs
from support.dense import dense_attention, relative_error
from support.devices import DEVICES
from support.fake_hopper import Variant, pass_for_hopper

SHAPE = (1, 2, 40, 16)


pytestmark = pytest.mark.usefixtures("own_directory")


def attend(device: str, backward: bool, shape=SHAPE, **call) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(shape, device=device, requires_grad=backward) for _ in range(3))
    out = flex_attention(q, k, v, **call)
    (out[0] if isinstance(out, tuple) else out).sum().backward() if backward else None
    return q, k, v, out


def calls(device: str) -> dict[str, dict]:
    slopes = torch.rand(2, device=device, requires_grad=True)
    return {
        "plain": {},
        "mods": {"score_mod": mods.alibi(slopes), "mask_mod": mods.causal},
        "block mask": {"block_mask": create_block_mask(mods.sliding_window(9), None, None, 40, 40, device)},
        "learned scale": {"scale": torch.tensor(0.3, device=device, requires_grad=True)},
        "options": {"kernel_options": {"BLOCK_M": 64, "BLOCK_N": 16, "bwd_BLOCK_M1": 32}},
        "few queries": {"mask_mod": mods.causal_offset(300)},
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("way", ["shapes", "meta", "examples"])
@pytest.mark.parametrize("name", ["plain", "mods", "block mask", "learned scale", "options", "few queries"])
def test_the_call_compiles_nothing(name, way, backward, device):
    call = calls(device)[name]
    shapes = [(1, 2, 8, 16), (1, 2, 308, 16), (1, 2, 308, 16)] if name == "few queries" else [SHAPE] * 3
    given = shapes
    if way != "shapes":
        given = [torch.empty(shape, device="meta" if way == "meta" else device) for shape in shapes]
    made = precompile(*given, **call, backward=backward, device=None if way == "examples" else device, dtype=torch.float32)
    names = sorted(kernel.path.name for kernel in made)
    assert all(kernel.path.exists() and kernel.seconds > 0 for kernel in made)
    wanted = {"decode_" if name == "few queries" else "forward_", *(["backward_dq", "backward_dkv", "backward_delta"] if backward else [])}
    assert all(any(found.startswith(prefix) for found in names) for prefix in wanted)

    def really():
        q, k, v = (torch.randn(shape, device=device, requires_grad=backward) for shape in shapes)
        with torch.set_grad_enabled(backward):
            out = flex_attention(q, k, v, **call)
        if backward:
            out.sum().backward()

    assert costs(really) == (0, 0)
    assert costs(really) == (0, 0)
    assert precompile(*given, **call, backward=backward, device=None if way == "examples" else device, dtype=torch.float32) == []


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_right_afterwards_and_examples_are_not_written(device):
    q, k, v = torch.randn(3, *SHAPE, device=device).unbind()
    copies = [t.clone() for t in (q, k, v)]
    precompile(q, k, v, mask_mod=mods.causal, max_scores=True)
    assert all(map(torch.equal, (q, k, v), copies))
    call = lambda: flex_attention(q, k, v, mask_mod=mods.causal, return_aux=AuxRequest(lse=True, max_scores=True))
    assert costs(call) == (0, 0)
    out, aux = call()
    expected, lse, largest = dense_attention(q, k, v, mask_mod=mods.causal)
    assert all(relative_error(*pair) < 2e-6 for pair in ((out, expected), (aux.lse, lse), (aux.max_scores, largest)))


LOOKS = [AuxRequest(entropy=True, top_index=True), AuxRequest(lse=True, column_sums=True), AuxRequest(max_scores=True, entropy=True)]


def check_statistics(device: str, request: AuxRequest, backward: bool, packed: bool) -> None:
    """A call that looks at the probabilities compiles nothing either, and gives what is asked for."""
    slopes, ends = torch.rand(2, device=device), torch.tensor([0, 13, 40], dtype=torch.int32, device=device)
    shape, more = ((40, 2, 16), {"cu_seqlens_q": ends}) if packed else (SHAPE, {})
    call = {"score_mod": mods.alibi(slopes), "mask_mod": mods.causal}
    made = precompile(*[shape] * 3, **call, **more, return_aux=request, backward=backward, dtype=torch.float32, device=device)
    assert any("rows" in kernel.path.name or "statistics" in kernel.path.name for kernel in made)
    q, k, v = torch.randn(3, *shape, device=device).unbind()
    q.requires_grad_(backward)

    def attend():
        run = varlen_attention if packed else flex_attention
        return run(q, k, v, **more, **call, return_aux=request)[1]

    assert costs(attend) == (0, 0) and costs(attend) == (0, 0)
    aux = attend()
    assert [getattr(aux, name) is not None for name in request._fields] == list(request)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("request_of", LOOKS, ids=["rows", "columns", "both"])
def test_statistics(request_of, backward, device):
    check_statistics(device, request_of, backward, packed=False)
    check_statistics(device, request_of, backward, packed=True)


def test_statistics_in_cpp(monkeypatch):
    monkeypatch.setenv("FLEXPRESS_CPU", "cpp")
    monkeypatch.setenv("FLEXPRESS_CXXFLAGS", "-O1")
    check_statistics("cpu", AuxRequest(entropy=True, column_sums=True), True, packed=False)


def test_no_attention_kernel_runs(monkeypatch):
    """But those that make block lists do."""
    ran = []
    monkeypatch.setattr(interpret._Interpreted, "run", lambda self, *_: ran.append(self.function.__name__))
    precompile(SHAPE, SHAPE, SHAPE, mods.softcap(3.0), mask_mod=mods.causal, backward=True, dtype=torch.float32, device="cpu")
    assert ran == ["block_lists", "block_lists"]
    ran.clear()
    precompile((1, 2, 1, 16), (1, 2, 900, 16), (1, 2, 900, 16), dtype=torch.float32, device="cpu")
    assert ran == []
    precompile(SHAPE, SHAPE, SHAPE, return_aux=AuxRequest(entropy=True, column_sums=True), dtype=torch.float32, device="cpu")
    assert ran == []


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 2048, 128), (2, 4, 8, 64)])
def test_kernels_for_hopper(monkeypatch, shape, causal, backward):
    """Without a GPU: what is compiled is counted, what is launched noted."""
    obtained, launched = [], []

    class Recorder(Variant):
        def launch(self, grid, args, _) -> None:
            launched.append(self.name)

        def launch_plain(self, *_) -> None:
            launched.append(self.name)

    def variant(name):
        obtained.append(name)
        return Recorder(name)

    keys = (2, 4, 2048, shape[3])
    mask = create_block_mask(mods.causal, None, None, shape[2], 2048, "cpu") if causal else None
    pass_for_hopper(monkeypatch, variant)
    registry.clear()
    precompile(shape, keys, keys, block_mask=mask, dtype=torch.bfloat16, device="cpu", backward=backward)
    first = "decode" if shape[2] == 8 else "hopper_forward"
    assert any(name.startswith(first) for name in obtained) and any(name.startswith("hopper_backward") for name in obtained) == backward
    assert not [name for name in launched if not name.startswith("block_")]
    obtained.clear()
    q, k, v = (torch.zeros(s, dtype=torch.bfloat16, requires_grad=backward) for s in (shape, keys, keys))
    out = flex_attention(q, k, v, block_mask=mask)
    if backward:
        out.sum().backward()
    assert obtained == [] and any(name.startswith(first) for name in launched)
    registry.clear()


def test_one_that_spills_is_passed_over(monkeypatch):
    obtained = []

    def variant(name):
        obtained.append(name)
        return Variant(name, local=4000 if name.startswith("hopper") else 0)

    pass_for_hopper(monkeypatch, variant)
    registry.clear()
    shape = (2, 4, 2048, 128)
    precompile(shape, shape, shape, dtype=torch.bfloat16, device="cpu")
    assert [name.partition("_d128")[0] for name in obtained] == ["hopper_forward", "forward"]
    q = torch.zeros(shape, dtype=torch.bfloat16)
    flex_attention(q, q, q)
    assert len(obtained) == 2
    registry.clear()


def test_a_list_of_calls(monkeypatch):
    """Side by side: each begins before any is done."""
    module, begun = sys.modules["flexpress.precompile"], threading.Barrier(3)
    prepare = module._prepare
    monkeypatch.setattr(module, "_prepare", lambda *args: begun.wait(60) >= 0 and prepare(*args))
    shapes = {"query": SHAPE, "key": SHAPE, "value": SHAPE, "dtype": torch.float32, "device": "cpu", "backward": True}
    calls = [{**shapes, "score_mod": mod} for mod in (mods.softcap(2.0), lambda score, *_: score + 1.0, lambda score, *_: score * 2.0)]
    made = precompile(calls)
    assert len([k for k in made if k.path.name.startswith("forward")]) == 3
    assert precompile(calls) == []
    with pytest.raises(TypeError, match="value must be a torch.Tensor or a shape"):
        precompile([{k: v for k, v in shapes.items() if k != "value"}])
    with pytest.raises(TypeError, match="a list of dicts"):
        precompile([shapes, SHAPE])


def test_threads_precompile_at_once():
    """Each kernel is compiled once, however many threads want it."""
    errors = []

    def work(i: int) -> None:
        try:
            precompile(SHAPE, SHAPE, SHAPE, mods.softcap(1.0 + i), backward=True, dtype=torch.float32, device="cpu")
            precompile(SHAPE, SHAPE, SHAPE, mask_mod=mods.causal if i % 2 else mods.prefix_lm(3), dtype=torch.float32, device="cpu")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(set(printed_kernels())) == len(printed_kernels()) == cache_info().compiles
    assert costs(lambda: attend("cpu", True, score_mod=mods.softcap(7.0))) == (0, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lengths", [(7, 0, 33), (530,)])
def test_packed_sequences(lengths, backward, device):
    cu_seqlens, shape = torch.tensor([0, *lengths], device=device).cumsum(0), (sum(lengths), 2, 16)
    call = {"score_mod": mods.softcap(3.0), "mask_mod": mods.causal}
    made = precompile(shape, shape, shape, **call, cu_seqlens_q=cu_seqlens, backward=backward, dtype=torch.float32)
    assert any(kernel.path.name.startswith("forward_varlen_softcap_varlen_causal") for kernel in made)

    def really():
        q, k, v = (torch.randn(shape, device=device, requires_grad=backward) for _ in range(3))
        out = varlen_attention(q, k, v, cu_seqlens, **call)
        if backward:
            out.sum().backward()

    assert costs(really) == (0, 0)
    with pytest.raises(ValueError, match="varlen_attention takes no block_mask"):
        mask = create_block_mask(mods.causal, None, None, 40, 40, device)
        precompile(shape, shape, shape, block_mask=mask, cu_seqlens_q=cu_seqlens, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_real_shapes(backward):
    """The kernels for Hopper where there is one; on disk, for another process, too."""
    q, k, v = torch.randn(3, 2, 8, 4096, 128, device="cuda", dtype=torch.bfloat16).unbind()
    slopes = torch.rand(8, device="cuda", requires_grad=backward)
    shape, call = tuple(q.shape), {"score_mod": mods.alibi(slopes), "mask_mod": mods.sliding_window(512)}
    made = precompile(shape, shape, shape, **call, dtype=torch.bfloat16, backward=backward)
    assert any("forward_alibi_sliding_window" in kernel.path.name and kernel.seconds > 0.05 for kernel in made)
    q, k, v = (t.requires_grad_(backward) for t in (q, k, v))

    def really():
        out = flex_attention(q, k, v, **call)
        if backward:
            out.sum().backward()

    assert costs(really) == (0, 0)
    cache_clear()
    assert costs(really) == (0, 0)
    expected = dense_attention(q[:1, :2, :1024], k[:1, :2, :1024], v[:1, :2, :1024], **call)[0]
    found = flex_attention(*(t[:1, :2, :1024] for t in (q, k, v)), **call)
    assert relative_error(found, expected) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["sinks", "sinks that learn nothing", "sinks that learn nothing, negative scale", "dropout", "both"])
def test_sinks_and_dropout(kind, packed, backward, device):
    """Of a shape, of meta tensors and of tensors; the call draws the number that it would draw without."""
    learned, dropout_p = backward and "learn nothing" not in kind, 0.0 if kind.startswith("sinks") else 0.25
    scale = -0.5 if kind.endswith("negative scale") else None
    sinks = None if kind == "dropout" else torch.randn(2, device=device, requires_grad=learned)
    shape = (40, 2, 16) if packed else SHAPE
    call = {"mask_mod": mods.causal, "dropout_p": dropout_p, "scale": scale}
    starts = {"cu_seqlens_q": torch.tensor([0, 40], device=device)} if packed else {}

    def compiled(sinks):
        options = {"backward": backward, "dtype": torch.float32, "device": device}
        options = {**options, **call, "dropout_p": 2 * dropout_p}
        return precompile(shape, shape, shape, sinks=sinks, **starts, **options)

    state = torch.random.get_rng_state()
    assert compiled((2,) if learned and sinks is not None else sinks)
    assert torch.equal(state, torch.random.get_rng_state())
    if sinks is not None:
        meta = torch.empty(2, device="meta", requires_grad=learned)
        assert compiled(meta) == compiled(sinks) == []

    def really():
        q, k, v = (torch.randn(shape, device=device, requires_grad=backward) for _ in range(3))
        out = (varlen_attention if packed else flex_attention)(q, k, v, sinks=sinks, **starts, **call)
        if backward:
            out.sum().backward()

    assert costs(really) == (0, 0)


def test_nothing_to_compute_is_nothing_to_compile():
    assert precompile((1, 2, 0, 16), SHAPE, SHAPE, dtype=torch.float32, device="cpu", backward=True) == []
    assert precompile([]) == []


def test_strides_of_meta_tensors_count():
    meta = torch.empty(1, 40, 2, 16, device="meta").transpose(1, 2)
    strided = torch.randn(1, 2, 16, 40).transpose(2, 3)
    assert [k.path.name.partition("_")[0] for k in precompile(meta, meta, meta, device="cpu")] == ["forward"]
    q = torch.randn(1, 40, 2, 16).transpose(1, 2)
    assert costs(lambda: flex_attention(q, q, q)) == (0, 0)
    precompile(*[strided.to("meta")] * 3, device="cpu")
    assert costs(lambda: flex_attention(strided, strided, strided)) == (0, 0)


@pytest.mark.parametrize(
    "given, more, error, message",
    [
        (SHAPE, {}, TypeError, "query is a shape, so dtype is needed"),
        (SHAPE, {"dtype": "float16"}, TypeError, "query is a shape, so dtype is needed: .*, got 'float16'"),
        ("meta", {"dtype": torch.float32}, TypeError, "query must be a torch.Tensor or a shape"),
        (SHAPE, {"dtype": torch.float32, "device": "meta"}, ValueError, "device is 'meta'"),
        (SHAPE, {"dtype": torch.float32, "backward": "yes"}, TypeError, "backward must be True or False, got str 'yes'"),
        (SHAPE, {"dtype": torch.float32, "device": "x"}, TypeError, "device must be a torch.device or its name, got 'x'"),
        (torch.empty(SHAPE), {"device": "cuda"}, ValueError, "query is on cpu, but device is cuda"),
        ((1, 2, -4, 16), {"dtype": torch.float32}, ValueError, r"query is a shape, whose extents must be 0 or more, got \(1, 2, -4, 16\)"),
        (SHAPE[1:], {"dtype": torch.float32, "device": "cpu"}, ValueError, "query must have 4 dimensions"),
        (SHAPE, {"dtype": torch.float64, "device": "cpu"}, TypeError, "query has dtype torch.float64"),
    ],
)
def test_wrong_arguments(given, more, error, message):
    with pytest.raises(error, match=message):
        precompile(given, given, given, **more)
