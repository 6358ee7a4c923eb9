"""Under torch.compile: layers that break the graph, and what breaks it. test_compiled_calls.py has calls that do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import flexpress
from flexpress import create_block_mask, flex_attention, mods, varlen_attention
from flexpress.graphs import in_graph
from support.dense import dense_attention
from support.devices import DEVICES

dynamo = pytest.importorskip("torch._dynamo")
pytestmark = pytest.mark.usefixtures("fresh_compiler")

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler"))]


def inputs(device, length=20):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]


class Layer(torch.nn.Module):
    """Mods and masks made inside what is compiled, of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.1, 0.3]))

    def forward(self, q, k, v, window):
        scaled = q * 1.5
        slopes = self.slopes * 2

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx)

        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

        mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], q.device)
        return flex_attention(scaled, k, v, score_mod, mask) * 0.5 + q.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_layer_computes_what_the_layer_does(backend, device):
    layer, q, k, v = Layer().to(device), *inputs(device)
    wanted = layer(q, k, v, 7)
    gradients = torch.autograd.grad(wanted.square().mean(), (q, k, v, layer.slopes))
    compiled = torch.compile(layer, backend=backend)
    for _ in range(2):
        found = compiled(q, k, v, 7)
        torch.testing.assert_close(found, wanted)
        for g, expected in zip(torch.autograd.grad(found.square().mean(), (q, k, v, layer.slopes)), gradients, strict=True):
            torch.testing.assert_close(g, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_training_step(device):
    """The backward pass begins inside what is compiled."""
    q, k, v = inputs(device)

    def step(q, k, v):
        loss = flex_attention(q, k, v, mods.alibi(torch.tensor([0.1, 0.2], device=device)), mask_mod=mods.causal).sum() * 2
        loss.backward()
        return loss

    loss = step(q, k, v)
    wanted, q.grad, k.grad, v.grad = [t.grad for t in (q, k, v)], None, None, None
    torch.testing.assert_close(torch.compile(step, backend="eager")(q, k, v), loss)
    for t, expected in zip((q, k, v), wanted, strict=True):
        torch.testing.assert_close(t.grad, expected)


def test_flex_attention_itself_compiled():
    q, k, v = inputs("cpu")
    out = torch.compile(flex_attention, backend="eager")(q, k, v, mask_mod=mods.causal)
    torch.testing.assert_close(out, dense_attention(q, k, v, None, mods.causal)[0].float())


def refused(score, b, h, q_idx, kv_idx):
    return torch.special.bessel_j0(score)


def prints(score, b, h, q_idx, kv_idx):
    print(end="")
    return score * 2


def test_a_mod_that_cannot_be_traced_is_a_graph_break_with_a_warning():
    def run(q, k, v):
        return flex_attention(q * 2, k, v, prints) + 1

    q, k, v = inputs("cpu")
    with pytest.warns(UserWarning, match="torch.compile cannot trace the score_mod of flex_attention .*: the call is a graph break"):
        found = torch.compile(run, backend="eager")(q, k, v)
    torch.testing.assert_close(found, run(q, k, v))
    dynamo.reset()
    with pytest.warns(UserWarning), pytest.raises(dynamo.exc.Unsupported, match="print"):
        torch.compile(run, backend="eager", fullgraph=True)(q, k, v)


def test_a_mod_that_is_refused_says_so_in_a_graph_and_outside():
    def run(q, k, v):
        return flex_attention(q * 2, k, v, refused) + 1

    q, k, v = inputs("cpu")
    with (
        pytest.warns(UserWarning),
        pytest.raises(flexpress.ModError, match="special_bessel_j0 is not a supported operation\n  File .*test_torch"),
    ):
        torch.compile(run, backend="eager")(q, k, v)
    dynamo.reset()
    with pytest.warns(UserWarning), pytest.raises(dynamo.exc.Unsupported, match="flexpress refuses this score_mod.*bessel_j0"):
        torch.compile(run, backend="eager", fullgraph=True)(q, k, v)


def test_a_call_is_no_graph_break():
    def run(q, k, v):
        return flex_attention(q * 2, k, v) + 1

    report = dynamo.explain(run)(*inputs("cpu"))
    assert (report.graph_break_count, report.graph_count) == (0, 1)


def test_a_torch_that_has_other_names(monkeypatch):
    """The call is a graph break, and right."""
    monkeypatch.setattr(in_graph, "_is_known", lambda: False)
    monkeypatch.setattr(in_graph._is_known, "_dynamo_marked_constant", True, raising=False)
    q, k, v = inputs("cpu")
    run = lambda q: flex_attention(q * 2, k, v, mods.softcap(2.0)) + 1
    torch.testing.assert_close(torch.compile(run, backend="eager")(q), run(q))


def test_other_functions_inside_what_is_compiled():
    """Each public function that launches, and methods of a mask."""
    q = torch.randn(12, 2, 16)
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
    cache = torch.zeros(1, 16, 2, 16)
    kv_len = torch.tensor([4], dtype=torch.int32)

    def run(q):
        packed = varlen_attention(q, q, q, lengths, mask_mod=mods.causal)
        mask = create_block_mask(mods.causal, None, None, 40, 40, "cpu", 16)
        part = mask[:, :, 1:].adjust(20, 40)
        picture = flexpress.create_mask(mods.causal, None, None, 5, 5, "cpu")
        doubled = flexpress.evaluate_mod(mods.softcap(2.0), torch.ones(1, 1, 3, 3))
        new = q[:4].transpose(0, 1)[None] * 2
        flexpress.update_cache(new, new, cache, cache, kv_len)
        read = flexpress.cached_attention(new, cache, cache, kv_len)
        flat = flexpress.flash.flash_attn_func(q[None], q[None], q[None], causal=True)
        return packed + 1, part.to_dense(), mask.kv_indices, picture, doubled, read, flat

    for found, wanted in zip(torch.compile(run, backend="eager")(q), run(q), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_marks_do_not_import_the_compiler():
    """It takes seconds."""
    code = "import flexpress, sys; assert 'torch._dynamo' not in sys.modules and 'torch._inductor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("library", [flexpress, torchs], ids=["ours", "torchs"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_masks_of_other_lengths_and_block_sizes(library, dynamic):
    """Numbers of a mask that become symbols: those of blocks are none to kernels."""

    def call(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask)

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=dynamic)
    for length, size in ((20, 128), (130, 128), (256, 128), (130, 64), (130, (16, 48))):
        mask = library.create_block_mask(mods.sliding_window(9), None, None, length, length, "cpu", size)
        torch.testing.assert_close(compiled(*inputs("cpu", length), mask), call(*inputs("cpu", length), mask))


WITH_NUMBERS = {
    "clamp": lambda score, distance, n, x: score + distance.clamp(-n, n) + torch.clamp(score, max=x),
    "tensor": lambda score, distance, n, x: score * torch.tensor(x) + torch.tensor(n) * (distance > 0),
    "new_tensor": lambda score, distance, n, x: torch.where(distance > n, score, score.new_tensor(x)),
    "alpha": lambda score, distance, n, x: torch.sub(torch.add(score, n, alpha=x), x, alpha=n),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_numbers_of_mods_that_become_symbols(name):
    def call(q, k, v, n, x):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: WITH_NUMBERS[name](score, q_idx - kv_idx, n, x))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, x in ((3, 1.5), (5, 0.25)):
        torch.testing.assert_close(compiled(*inputs("cpu"), n, x), call(*inputs("cpu"), n, x), atol=1e-5, rtol=1e-4)


CALLS_WITH_A_WINDOW = {
    "mask_mod": lambda x, w: flexpress.flex_attention(x, x, x, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < w)),
    "score_mod": lambda x, w: flexpress.flex_attention(x, x, x, lambda s, b, h, i, j: torch.where(i - j < w, s, -3.0) + (i + w >= j)),
    "block mask": lambda x, w: flexpress.flex_attention(
        x, x, x, block_mask=flexpress.create_block_mask(lambda b, h, i, j: i - j < w, None, None, 8, 8, "cpu")
    ),
    "packed": lambda x, w: flexpress.varlen_attention(
        *[x[0].transpose(0, 1)] * 3, torch.tensor([0, 3, 8]), mask_mod=lambda b, h, i, j: (i >= j) & (i - j < w)
    ),
    "cached": lambda x, w: flexpress.cached_attention(
        x, *[x.transpose(1, 2)] * 2, torch.tensor([8], dtype=torch.int32), mask_mod=lambda b, h, i, j: (i >= j) & (i - j < w)
    ),
}


@pytest.mark.usefixtures("in_cpp")
@pytest.mark.parametrize("name", CALLS_WITH_A_WINDOW)
def test_numbers_that_become_symbols_may_leave_32_bits(name):
    """A window of sys.maxsize, for none. No kernel takes such a number: it is part of one."""
    call, x = CALLS_WITH_A_WINDOW[name], torch.randn(1, 2, 8, 16)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for window in (2, 3, sys.maxsize):
        torch.testing.assert_close(compiled(x, window), call(x, window), msg=f"{name} with {window}")


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_a_mod_computes_of_numbers_alone(dynamic):
    """It is computed when the mod is traced, of numbers that are constants to torch's compiler (at first all, and infinity always)."""

    def call(q, k, v, x):
        def score_mod(score, b, h, q_idx, kv_idx):
            like = torch.full_like(score, x)
            return torch.where(torch.isinf(like) | (like.abs().log() > 0), score, score * torch.full_like(score, 0.5).exp())

        return flex_attention(q, k, v, score_mod)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for x in (1.5, 0.25, float("inf")):
        torch.testing.assert_close(compiled(*inputs("cpu"), x), call(*inputs("cpu"), x), atol=1e-5, rtol=1e-4)


SETTINGS = {}


@pytest.mark.parametrize("later", [lambda out: out, lambda out: out * SETTINGS["x"]], ids=["both mods", "what follows, too"])
def test_a_float_of_a_global_that_becomes_a_symbol(later):
    def call(q, k, v):
        def mask_mod(b, h, q_idx, kv_idx):
            return q_idx - kv_idx < SETTINGS["x"]

        return later(flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * SETTINGS["x"], mask_mod=mask_mod))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for x in (3.5, 4.5, 0.5):
        SETTINGS["x"] = x
        torch.testing.assert_close(compiled(*inputs("cpu")), call(*inputs("cpu")), atol=1e-5, rtol=1e-4)


def test_a_bool_beside_a_number_that_becomes_a_symbol():
    def call(q, k, v, n, x):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx - kv_idx > n, score, torch.clamp(score, max=x))

        return flex_attention(q * x, k, v, score_mod)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, x in ((3, 1.5), (5, 0.25)):
        torch.testing.assert_close(compiled(*inputs("cpu"), n, x), call(*inputs("cpu"), n, x), atol=1e-5, rtol=1e-4)


def with_vectors(score, at, by):
    return (
        score
        + torch.dot(at, by)
        - torch.linalg.norm(at - by)
        + (at.view(2, -1) @ by.view(-1, 2)).flatten().sum()
        + (at.unsqueeze(0) * by.unsqueeze(1)).sum(-1).abs().mean()
    )


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mod, width", [(with_vectors, 4), (lambda score, at, by: score + torch.dot(at, by), 64)], ids=["all", "dot"])
def test_vectors_of_tensors_whose_sizes_become_symbols(mod, width, dynamic):
    """The width of a vector is part of its kernel: another is compiled anew."""

    def call(q, k, v, table):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: mod(score, table[q_idx], table[kv_idx]))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length, n in ((20, width), (17, width), (17, width // 2)):
        table = torch.linspace(-1, 1, length * n).view(length, n)
        found, expected = (f(*inputs("cpu", length), table) for f in (compiled, call))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_numbers_of_options_that_become_symbols():
    def call(q, k, v, size):
        mask = create_block_mask(mods.causal, None, None, q.shape[2], k.shape[2], q.device, size)
        return flex_attention(q, k, v, block_mask=mask, kernel_options={"BLOCK_N": size, "num_warps": 4})

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for size in (128, 64):
        torch.testing.assert_close(compiled(*inputs("cpu"), size), call(*inputs("cpu"), size))


def test_threads_share_what_is_compiled():
    q, k, v = (t.detach() for t in inputs("cpu"))

    def run(q, by):
        return flex_attention(q * 2, k, v, lambda score, b, h, q_idx, kv_idx: score * by)

    compiled, expected = torch.compile(run, backend="aot_eager", fullgraph=True), [run(q, by) for by in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for found, wanted in zip(threads.map(lambda by: compiled(q, by), range(4)), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_gradient_flows_through_what_a_mod_computes_without(backend):
    def run(q, k, v, slopes):
        def score_mod(score, b, h, q_idx, kv_idx):
            with torch.no_grad():
                shift = slopes[h] * (kv_idx - q_idx)
            return score + shift + slopes[h]

        return flex_attention(q, k, v, score_mod)

    q, k, v = inputs("cpu")
    slopes = torch.tensor([0.1, 0.3], requires_grad=True)
    weight = torch.randn(q.shape)
    found = torch.autograd.grad((torch.compile(run, backend=backend, fullgraph=True)(q, k, v, slopes) * weight).sum(), (q, slopes))
    for g, expected in zip(found, torch.autograd.grad((run(q, k, v, slopes) * weight).sum(), (q, slopes)), strict=True):
        torch.testing.assert_close(g, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("score_reads", ["nothing", "the mask's tensor", "another"])
def test_no_gradient_flows_through_a_mask(backend, score_reads):
    def run(q, limits, slopes):
        read = {"the mask's tensor": limits, "another": slopes}.get(score_reads)
        score_mod = None if read is None else lambda score, b, h, q_idx, kv_idx: score + read[kv_idx]
        return flex_attention(q, q, q, score_mod, mask_mod=lambda b, h, q_idx, kv_idx: limits[kv_idx] > -1)

    q = inputs("cpu")[0]
    limits, slopes = torch.randn(2, q.shape[2]).requires_grad_().unbind()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    weight = torch.randn(q.shape)
    found, expected = (
        torch.autograd.grad((f(q, limits, slopes) * weight).sum(), (q, limits, slopes), allow_unused=True, materialize_grads=True)
        for f in (compiled, run)
    )
    for g, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(g, wanted)
    if score_reads != "the mask's tensor":
        assert not compiled(q.detach(), limits, slopes.detach()).requires_grad


def test_random_numbers_in_a_mod_are_refused():
    def noisy(score, b, h, q_idx, kv_idx):
        return score + torch.rand(())

    q, k, v = inputs("cpu")
    with pytest.warns(UserWarning), pytest.raises(dynamo.exc.Unsupported, match="flexpress refuses this score_mod"):
        torch.compile(lambda q: flex_attention(q, k, v, noisy), backend="eager", fullgraph=True)(q)


@pytest.mark.parametrize("name, value", [("NONSENSE", 1), ("BLOCK_M", "wide")])
def test_options_that_come_later(name, value):
    q, options = torch.randn(1, 1, 20, 16), {}
    compiled = torch.compile(lambda q: flex_attention(q, q, q, kernel_options=options), backend="eager", fullgraph=True)
    compiled(q)
    options[name] = value
    with pytest.raises(Exception, match=name):
        compiled(q)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_flags_that_compare_sizes(heads, dynamic):
    """gpt-fast's prefill asks for GQA by the numbers of heads."""
    q, k = torch.randn(1, 2, 32, 16), torch.randn(1, heads, 32, 16)

    def attend(q, k):
        return flex_attention(q, k, k, enable_gqa=q.shape[1] != k.shape[1], return_lse=q.shape[2] > 1)

    torch._dynamo.reset()
    found = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)(q, k)
    for value, expected in zip(found, attend(q, k), strict=True):
        torch.testing.assert_close(value, expected)


def test_floats_that_change_are_one_more_graph():
    """As in torch, where a mod's floats and `scale` are one graph for the first values, and one for all others. Inductor begins with what
    other backends do."""
    q, offsets = torch.randn(1, 2, 32, 16), torch.tensor([0, 20, 32], dtype=torch.int32)

    def attend(q, slope, scale):
        out = flex_attention(q, q, q, lambda s, b, h, i, j: s * slope + (i - j) * slope, scale=scale)
        mask = create_block_mask(lambda b, h, i, j: (i - j) * slope <= 4.5, None, None, 32, 32, "cpu")
        rows = q[0].transpose(0, 1)
        return out, varlen_attention(rows, rows, rows, offsets, scale=scale), mask.kv_num_blocks

    torch._dynamo.reset()
    dynamo.utils.counters.clear()
    compiled = torch.compile(attend, backend="inductor", fullgraph=True)
    for slope in (0.1, 0.25, 0.7, 1.5):
        for found, expected in zip(compiled(q, slope, slope + 1), attend(q, slope, slope + 1), strict=True):
            torch.testing.assert_close(found, expected)
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_scale_that_a_tensor_holds():
    q = torch.randn(1, 2, 32, 16)
    with dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(lambda q, t: flex_attention(q, q, q, scale=t.item()), backend="aot_eager", fullgraph=True)
        for scale in (0.4, 0.7):
            torch.testing.assert_close(compiled(q, torch.tensor(scale)), flex_attention(q, q, q, scale=scale))


def everywhere(a):
    """A float in arithmetic, made a tensor, and chosen."""

    def score_mod(s, b, h, i, j):
        s = torch.clamp(s, -a, a).abs() ** a + torch.tensor(a)
        return torch.where((i - j) * 1.0 > a, -a, s).masked_fill(i < j - 4, a)

    return score_mod


@pytest.mark.parametrize(
    ("score_mod", "graphs"),
    [
        (everywhere, 2),
        (lambda a: lambda s, b, h, i, j: s * max(a, 0.3), 4),  # of the number itself
        (lambda a: mods.softcap(a), 2),
    ],
    ids=["everywhere", "a number's maximum", "of a recipe"],
)
def test_floats_that_a_mod_captures(score_mod, graphs):
    q = torch.randn(1, 2, 32, 16)

    def attend(q, a):
        return flex_attention(q, q, q, score_mod(a))

    dynamo.reset()
    dynamo.utils.counters.clear()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for a in (0.5, 0.25, 0.3, 0.7):
        torch.testing.assert_close(compiled(q, a), attend(q, a))
    assert dynamo.utils.counters["stats"]["unique_graphs"] == graphs
