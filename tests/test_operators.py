"""What torch sees of a call: operators, in its exporter, tracers, counters, checkpointing and on tensors without values."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flexpress
from flexpress import cache_clear, cached_attention, create_block_mask, create_mask, flex_attention, mods, update_cache, varlen_attention
from flexpress.codegen.device import counters
from flexpress.codegen.mod.graphs.graph_text import read_graph, text_of
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.graphs.programs import read_program
from flexpress.operators import attention_operators as operators
from support.devices import DEVICES

OPS = torch.ops.flexpress


class Layer(torch.nn.Module):
    """Projections around attention with learned slopes and a mask of documents, made inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(16, 16)
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.3]))
        self.register_buffer("documents", torch.arange(64) // 20)

    def forward(self, x):
        y = self.project(x)

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + self.slopes[h] * (kv_idx - q_idx)

        def mask_mod(b, h, q_idx, kv_idx):
            return (self.documents[q_idx] == self.documents[kv_idx]) & (q_idx >= kv_idx)

        mask = create_block_mask(mask_mod, None, None, x.shape[2], x.shape[2], x.device)
        return self.project(flex_attention(y, y, y, score_mod, mask))


def layer_and_input(device, length=48):
    return Layer().to(device), torch.randn(2, 2, length, 16, device=device)


def targets(graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if "flexpress" in str(n.target)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    layer, x = layer_and_input(device)
    exported = torch.export.export(layer, (x,), strict=strict)
    assert targets(exported.graph) == ["flexpress.block_lists.default", "flexpress.flex_attention.default"]
    torch.testing.assert_close(exported.module()(x), layer(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
def test_export_for_any_length(strict, device):
    layer, x = layer_and_input(device)
    exported = torch.export.export(layer, (x,), dynamic_shapes={"x": {2: torch.export.Dim("S", min=2, max=64)}}, strict=strict)
    for length in (33, 64):
        _, y = layer_and_input(device, length)
        torch.testing.assert_close(exported.module()(y), layer(y))


def test_an_exported_program_runs_in_another_process(tmp_path):
    layer, x = layer_and_input("cpu")
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.save((x, layer(x)), tmp_path / "expected.pt")
    code = (
        "import sys, torch, flexpress\n"
        "x, expected = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(x), expected)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "layer.pt2"), str(tmp_path / "expected.pt")], check=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "input_pos", "k_cache", "v_cache"])
def test_a_tensor_that_is_missing_is_named(name):
    """torch passes None for one, whatever the schema says. Caches stay as they were."""
    caches = {"k_cache": torch.zeros(2, 48, 2, 32), "v_cache": torch.zeros(2, 48, 2, 32)}
    given = dict(q=torch.randn(2, 3, 128), k=torch.randn(2, 3, 64), v=torch.randn(2, 3, 64), input_pos=torch.tensor([4, 20]).int())
    for mode in (contextlib.nullcontext(), torch.inference_mode()):
        with mode, pytest.raises(TypeError, match=f"^{name} must be a tensor, got None"):
            OPS.mha_with_cache(**{**given, **caches, name: None})
    assert not any(cache.any() for cache in caches.values())


def test_a_damaged_program_is_refused():
    graph, _ = bind(mods.sliding_window(3), "mask")
    good = json.loads(text_of(graph))
    assert read_graph(text_of(graph)) is read_graph(text_of(graph))

    def broken(change):
        parts = json.loads(json.dumps(good))
        change(parts)
        return json.dumps(parts)

    changes = [
        lambda p: p["nodes"][0].__setitem__(0, "__import__('os')"),
        lambda p: p["nodes"][0].__setitem__(3, "score; import os"),
        lambda p: p["scalars"][0].__setitem__(0, "x): os.system('true') #"),
        lambda p: p["nodes"][-1].__setitem__(1, [99, 0]),
        lambda p: p["nodes"][-1].__setitem__(1, [-1, 0]),
        lambda p: p["nodes"][-1].__setitem__(2, "complex64"),
        lambda p: p.pop("nodes"),
        lambda p: p.__setitem__("kind", "zone"),
    ]
    for change in changes:
        with pytest.raises(ValueError, match="this is no mod that flexpress wrote"):
            read_graph(broken(change))
    for text in ("", "[]", '{"other": 1}'):
        with pytest.raises(ValueError, match="this is no program"):
            read_program(text)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_attention(tracing, device):
    layer, x = layer_and_input(device)
    made = make_fx(layer, tracing_mode=tracing, _allow_non_fake_inputs=True)(x)
    assert targets(made.graph) == [f"flexpress.{name}.default" for name in ("block_lists", "transposed_lists", "flex_attention")]
    torch.testing.assert_close(made(x), layer(x))


@pytest.mark.parametrize("device", DEVICES)
def test_make_fx_records_the_backward_pass(device):
    def step(q, k, v, slopes):
        out = flex_attention(q, k, v, mods.alibi(slopes), mask_mod=mods.causal)
        return torch.autograd.grad(out.square().sum(), (q, k, v, slopes))

    arguments = [torch.randn(1, 2, 20, 16, device=device, requires_grad=True) for _ in range(3)]
    arguments.append(torch.rand(2, device=device, requires_grad=True))
    made = make_fx(step)(*arguments)
    assert targets(made.graph) == ["flexpress.flex_attention.default", "flexpress.flex_attention_backward.default"]
    for found, expected in zip(made(*arguments), step(*arguments), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["no_grad", "frozen", "make_fx"])
def test_what_was_recorded_without_gradients_may_be_trained(way, device):
    """Then the program says nothing of what a backward pass needs, which is computed there."""
    layer, x = Layer().to(device), torch.randn(1, 2, 40, 16, device=device)
    x, exact = (x.detach().requires_grad_() for _ in range(2))
    layer.requires_grad_(way == "no_grad")
    if way == "make_fx":
        made = make_fx(layer, _allow_non_fake_inputs=True)(x.detach())
    else:
        with torch.set_grad_enabled(way == "frozen"):
            made = torch.export.export(layer, (x.detach(),)).module()
    inputs = [x, *(p for p in made.parameters() if p.requires_grad)]
    found = torch.autograd.grad(made(x).square().sum(), inputs)
    expected = torch.autograd.grad(layer(exact).square().sum(), [exact, *(p for p in layer.parameters() if p.requires_grad)])
    torch.testing.assert_close(found[0], expected[0])
    assert sorted(g.norm().item() for g in found) == pytest.approx(sorted(g.norm().item() for g in expected), rel=1e-4)


def test_rows_of_another_call_are_refused():
    q = torch.randn(1, 2, 20, 16)
    for out, rows in ((q, torch.empty(0)), (q[:, :1], torch.zeros(1, 2, 20, 2))):
        with pytest.raises(ValueError, match="are not what flexpress::flex_attention gives"):
            OPS.flex_attention_backward(q, None, q, q, q, out, rows, [], [], [], [], [], 0.25, "{}", [])


@pytest.mark.parametrize("device", DEVICES)
def test_caches_under_autocast(device):
    """What torch records has autocast's dtype, too."""
    q, cache = torch.randn(2, 2, 1, 16, device=device), torch.randn(2, 40, 2, 16, device=device)
    kv_len = torch.tensor([11, 30], dtype=torch.int32, device=device)

    def attend(q):
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            return cached_attention(q, cache, cache, kv_len, return_lse=True)

    expected = attend(q)
    with FlopCounterMode(display=False):
        counted = attend(q)
    for found in (counted, torch.compile(attend, backend="aot_eager", fullgraph=True)(q)):
        assert found[0].dtype == torch.bfloat16
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def shapes_and_strides(result):
    return [(t.shape, t.stride(), t.dtype, t.device.type) for t in (result if isinstance(result, tuple) else (result,))]


CALLS = {
    "flex": lambda q, k, v: flex_attention(q, k, v, return_lse=True, mask_mod=mods.causal),
    "flex in the order of tokens": lambda q, k, v: flex_attention(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))),
    "gqa": lambda q, k, v: flex_attention(q, k[:, :1], v[:, :1, :, :8], enable_gqa=True),
    "packed": lambda q, k, v: varlen_attention(
        *(t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 3, 20], dtype=torch.int32, device=q.device), return_lse=True
    ),
    "flash": lambda q, k, v: flexpress.flash.flash_attn_func(q, k, v, causal=True),
    "probabilities": lambda q, k, v: flex_attention(
        q, k, v, return_aux=flexpress.AuxRequest(entropy=True, top_index=True, column_sums=True)
    )[1][2:],
    "statistics": lambda q, k, v: flex_attention(q, k, v, return_aux=flexpress.AuxRequest(max_scores=True))[1].max_scores,
}


@pytest.mark.parametrize("call", CALLS)
def test_fake_tensors_have_the_looks_of_results(call):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    expected = shapes_and_strides(CALLS[call](q, k, v))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert shapes_and_strides(CALLS[call](*map(mode.from_tensor, (q, k, v)))) == expected


def test_fake_tensors_outside_of_their_mode():
    with FakeTensorMode():
        q = torch.empty(1, 2, 20, 16)
    assert shapes_and_strides(flex_attention(q, q, q)) == shapes_and_strides(flex_attention(*[torch.randn(1, 2, 20, 16)] * 3))


def test_fake_caches():
    with FakeTensorMode():
        cache, kv_len = torch.zeros(3, 16, 2, 16), torch.full((3,), 4, dtype=torch.int32)
        new = torch.randn(3, 2, 1, 16)
        assert update_cache(new, new, cache, cache, kv_len) is None
        out, lse = cached_attention(torch.randn(3, 4, 1, 16), cache, cache, kv_len, return_lse=True, mask_mod=mods.sliding_window(3))
        assert out.shape == (3, 4, 1, 16) and lse.shape == (3, 4, 1)
        assert create_mask(mods.causal, None, None, 5, 6, "cpu").shape == (1, 1, 5, 6)
        assert create_block_mask(mods.causal, None, None, 300, 300, "cpu").kv_indices.shape == (1, 1, 3, 3)


def test_meta_tensors():
    q = torch.empty(1, 4, 20, 16, device="meta", dtype=torch.bfloat16)
    out, lse = flex_attention(q, q, q, mods.softcap(2.0), mask_mod=mods.causal, return_lse=True)
    assert shapes_and_strides((out, lse)) == [
        ((1, 4, 20, 16), (1280, 320, 16, 1), torch.bfloat16, "meta"),
        ((1, 4, 20), (80, 20, 1), torch.float32, "meta"),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_of_scaled_dot_product_attention(device):
    q, k, v = (torch.randn(2, 4, 32, 16, device=device, requires_grad=True) for _ in range(3))
    counts = []
    for attention in (flex_attention, torch.nn.functional.scaled_dot_product_attention):
        with FlopCounterMode(display=False) as forward:
            out = attention(q, k, v)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts.append((forward.get_total_flops(), backward.get_total_flops()))
    assert counts[0] == (2 * 2 * 2 * 4 * 32 * 32 * 16, 5 * 2 * 2 * 4 * 32 * 32 * 16)
    assert device == "cpu" or counts[0] == counts[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("saved, runs", [([OPS.flex_attention.default], 1), ([], 2)])
def test_selective_checkpointing_by_name(saved, runs, device, monkeypatch):
    layer, x = layer_and_input(device)
    counted, forward = [], operators.forward
    expected = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    monkeypatch.setattr(operators, "forward", lambda *args, **kwargs: counted.append(1) or forward(*args, **kwargs))
    context = functools.partial(create_selective_checkpoint_contexts, saved)
    out = checkpoint(layer, x, use_reentrant=False, context_fn=context)
    found = torch.autograd.grad(out.square().sum(), layer.parameters())
    assert len(counted) == runs
    for g, other in zip(found, expected, strict=True):
        torch.testing.assert_close(g, other)


class Seen(TorchDispatchMode):
    """Keeps the calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flexpress":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    layer, x = layer_and_input(device)
    cache, kv_len = torch.randn(3, 16, 2, 16, device=device), torch.full((3,), 4, dtype=torch.int32, device=device)
    with Seen() as seen:
        layer(x.requires_grad_()).sum().backward()
        create_mask(mods.sliding_window(3), None, None, 20, 20, device)
        new = torch.randn(3, 2, 1, 16, device=device)
        update_cache(new, new, cache, cache.clone(), kv_len)
        cached_attention(new, cache, cache, kv_len, mask_mod=mods.sliding_window(3))
        aux, learned = flexpress.AuxRequest(entropy=True, column_sums=True), new.clone().requires_grad_()
        _, aux = flex_attention(learned, new, new, mods.alibi(torch.ones(2, device=device)), return_aux=aux)
        torch.autograd.grad(aux.entropy.sum() + aux.column_sums.sum(), learned)
    names = [function.__name__ for function, _ in seen.calls]
    assert names == [
        f"{name}.default"
        for name in (
            "block_lists",
            "transposed_lists",
            "flex_attention",
            "flex_attention_backward",
            "dense_mask",
            "update_cache",
            "cached_attention",
            "flex_attention",
            "probability_statistics",
            "probability_gradients",
        )
    ]
    for function, args in seen.calls:
        if "backward" in function.__name__ or "gradients" in function.__name__:  # it has no derivative
            args = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.library.opcheck(function, args)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_gradients_are_refused_in_words(device):
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)
    with FlopCounterMode(display=False):
        (gradient,) = torch.autograd.grad(flex_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        gradient.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_mode_changes_no_result(device):
    layer, x = layer_and_input(device)
    expected = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    with Seen() as seen:
        found = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    assert len(seen.calls) == 4
    for g, other in zip(found, expected, strict=True):
        torch.testing.assert_close(g, other)


def test_saved_programs_have_no_paths():
    layer, x = layer_and_input("cpu")
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,), strict=False), buffer)
    exported = torch.export.load(io.BytesIO(buffer.getvalue()))
    programs = [a for n in exported.graph.nodes if "flexpress" in str(n.target) for a in n.args if isinstance(a, str) and "{" in a]
    assert len(programs) == 2 and not any("/" in p or ".py" in p for p in programs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_writes_to_caches_that_share_their_memory(backend, device):
    lengths = torch.tensor([4, 9, 16], dtype=torch.int32, device=device)
    new = [torch.randn(3, 2, 1, 16, device=device) for _ in range(2)]

    def step(caches, key, value):
        update_cache(key * 1, value * 2, caches[0], caches[1], lengths)
        return cached_attention(key, caches[0], caches[1], lengths), caches.sum()

    caches = [torch.zeros(2, 3, 16, 2, 16, device=device) for _ in range(2)]
    expected = step(caches[0], *new)
    found = torch.compile(step, backend=backend, fullgraph=True)(caches[1], *new)
    torch.testing.assert_close(caches[1], caches[0])
    torch.testing.assert_close(found, expected)


def test_operators_keep_no_memory_of_a_stream_that_may_be_captured(monkeypatch):
    """Where torch warms up for a CUDA graph, memory that outlives the call would be the graph's."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device, stream = torch.device("cpu"), 5
    with counters.nothing_kept():
        first = counters.counter(device, stream)
        with counters.held_counter(device, stream) as held:
            assert held is not first
        assert counters.counter(device, stream) is not held and not counters.may_keep(stream) and counters.may_keep(0)
    kept = counters.counter(device, stream)
    with counters.nothing_kept():  # what is there already may be used
        assert counters.counter(device, stream) is kept
        with counters.held_counter(device, stream) as held:
            assert held is kept
    assert counters.counter(device, stream) is kept
    cache_clear()
