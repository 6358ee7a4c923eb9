"""Elements that a score_mod reads for every score, in the forward kernel for Hopper, which copies them where TMA can. On a CPU its text
runs in a stand-in for Gluon."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexpress import create_block_mask, dropout_mask, explain, flex_attention, mods
from flexpress.codegen import registry
from flexpress.codegen.run.preview import hopper_compilation
from flexpress.codegen.text.render import render
from support.dense import dense_attention, dropped_attention, relative_error
from support.evaluate import make_mod
from support.fake_hopper import forward_on_cpu

READS = {  # a tensor's dimensions, and how a mod reads it
    "bhqk": "bias[b, h, q_idx, kv_idx]",
    "hbqk": "bias[h, b, q_idx, kv_idx]",
    "hqk": "bias[h, q_idx, kv_idx]",
    "bqk": "bias[b, q_idx, kv_idx]",
    "1hqk": "bias[0, h, q_idx, kv_idx]",
    "qk": "bias[q_idx, kv_idx]",
    "2qk": "bias[h // 2, q_idx, kv_idx]",
    "3qk": "bias[(h + b) // count, q_idx, kv_idx]",
    "4qk": "bias[b + 1 - h % 2, q_idx, kv_idx]",
}
MODS = [
    "score + {e}",
    "score * {e}",
    "torch.tanh({e}) - 0.5 * score * slopes[h]",
    "{e}",  # the score itself is left out
    "{e} + score * {e} + by_key[kv_idx] + by_query[q_idx]",
    "torch.where({e} > 0.3, float('-inf'), score + 0.1 * (q_idx - kv_idx))",
    "score + {e} + bias[(q_idx + 1) % 40, kv_idx]",  # the second in today's way: with "qk" alone
]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh():
    """What one test pretends to have compiled is not there in another."""
    registry.clear()
    yield
    registry.clear()


def bias_of(dims: str, sizes: dict[str, int], dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Rows are 16 bytes apart or multiples of it, as part of a wider tensor."""
    shape, step = [sizes[d] for d in dims], 16 // dtype.itemsize
    wide = -(-shape[-1] // step) * step + step
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], wide, generator=generator).to(device, dtype)[..., : shape[-1]]


def whole(bias: torch.Tensor, lengths: tuple[int, int]) -> torch.Tensor:
    """In float64, with zeros where it has no elements."""
    (Q, K), (rows, columns) = lengths, bias.shape[-2:]
    return F.pad(bias.double(), (0, max(0, K - columns), 0, max(0, Q - rows)))


problems = st.fixed_dictionaries(
    dict(
        dims=st.sampled_from(list(READS)),
        text=st.sampled_from(MODS[:-1]),
        dtype=st.sampled_from(HALF),
        of_bias=st.sampled_from([*HALF, torch.float32]),
        widths=st.sampled_from([(64, 64), (128, 128), (32, 96), (96, 24)]),
        lengths=st.tuples(st.integers(65, 300), st.integers(10, 300)),
        more=st.tuples(st.integers(-40, 20), st.integers(-9, 20)),  # rows and columns of the bias
        mask=st.sampled_from([None, "causal", "window"]),
        separate_full=st.booleans(),
    )
)
MASKS = {None: None, "causal": mods.causal, "window": mods.sliding_window(70)}


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems)
def test_any_reads(problem):
    """Also where the tensor ends before the positions do, and beyond."""
    (Q, K), (d_qk, d_v) = problem["lengths"], problem["widths"]
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, Q, d_qk), (2, 2, K, d_qk), (2, 2, K, d_v)
    q, k, v = (torch.randn(shape, generator=generator).to(problem["dtype"]) for shape in shapes)
    more_rows, more_columns = problem["more"]
    sizes = {"1": 1, "2": 2, "3": 3, "4": 4, "b": 2, "h": 4, "q": Q + more_rows, "k": max(1, K + more_columns)}
    bias = bias_of(problem["dims"], sizes, problem["of_bias"])
    values = {"slopes": torch.rand(4, generator=generator), "by_key": torch.randn(K, generator=generator)}
    values |= {"by_query": torch.randn(Q, generator=generator), "torch": torch, "bias": bias, "count": 2}
    text = problem["text"].format(e=READS[problem["dims"]])
    mask_mod = MASKS[problem["mask"]]
    mask = mask_mod and create_block_mask(mask_mod, None, None, Q, K, "cpu", separate_full_blocks=problem["separate_full"])
    registry.clear()
    with pytest.MonkeyPatch.context() as patch:
        launched = forward_on_cpu(patch)
        for _ in range(2):
            out, lse = flex_attention(q, k, v, make_mod(text, "score", values), block_mask=mask, enable_gqa=True, return_lse=True)
    registry.clear()
    assert [launch.spec.flag["ELEMENTS"].dtype for launch in launched] == [bias.dtype] * 2
    assert "ptr_bias" not in render(launched[0].spec)
    dense = {**values, "bias": whole(bias, (Q, K)), **{name: values[name].double() for name in ("slopes", "by_key", "by_query")}}
    wanted, wanted_lse, _ = dense_attention(q, k, v, make_mod(text, "score", dense), mask_mod)
    assert relative_error(out, wanted) < 5e-3
    seen = torch.isfinite(wanted_lse)
    assert torch.equal(seen, torch.isfinite(lse)) and relative_error(lse[seen], wanted_lse[seen]) < 1e-4


def problem_of(dtype: torch.dtype = torch.bfloat16, lengths: tuple[int, int] = (150, 200), width: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 2, n, width, generator=generator).to(dtype) for n in (lengths[0], lengths[1], lengths[1])]


def test_one_is_copied_and_the_other_read(monkeypatch):
    launched = forward_on_cpu(monkeypatch)
    values = {"bias": bias_of("qk", {"q": 150, "k": 200}, torch.bfloat16)}
    text = MODS[-1].format(e=READS["qk"])
    out = flex_attention(*problem_of(), make_mod(text, "score", values))
    assert launched[0].spec.flag["ELEMENTS"] and "ptr_bias" in render(launched[0].spec)
    wanted = dense_attention(*problem_of(), make_mod(text, "score", {"bias": values["bias"].double()}))[0]
    assert relative_error(out, wanted) < 5e-3


def test_expanded_dimensions_and_empty_tensors(monkeypatch):
    launched = forward_on_cpu(monkeypatch)
    one = bias_of("qk", {"q": 150, "k": 200}, torch.float16)
    for bias in (one.expand(2, 2, 150, 200), one.new_zeros(2, 2, 0, 200), one.new_zeros(2, 2, 150, 0)):
        out = flex_attention(*problem_of(), make_mod("score + " + READS["bhqk"], "score", {"bias": bias}))
        dense = make_mod("score + " + READS["bhqk"], "score", {"bias": whole(bias, (150, 200))})
        assert relative_error(out, dense_attention(*problem_of(), dense)[0]) < 5e-3
    assert launched[0].spec.flag["ELEMENTS"] and launched[1].spec.flag["ELEMENTS"] and launched[0].spec.mods[0].copied.place == "0, 0"


def test_other_tensors_in_later_calls(monkeypatch):
    """Elsewhere in memory, of other sizes, and at an odd address, from where threads read it."""
    launched = forward_on_cpu(monkeypatch)
    wide = bias_of("hqk", {"h": 3, "q": 170, "k": 250}, torch.bfloat16)
    odd = torch.randn(1 + 2 * 150 * 200).bfloat16()[1:].view(2, 150, 200)
    kept = wide[:2, :150, :200]
    for bias in (kept, kept.clone(), wide[1:], odd, kept):
        out = flex_attention(*problem_of(), make_mod("score + " + READS["hqk"], "score", {"bias": bias}))
        dense = make_mod("score + " + READS["hqk"], "score", {"bias": whole(bias, (150, 200))})
        assert relative_error(out, dense_attention(*problem_of(), dense)[0]) < 5e-3
    assert [bool(launch.spec.flag["ELEMENTS"]) for launch in launched] == [True, True, True, False, True]


@pytest.mark.parametrize(
    "text, width",
    [
        ("score + bias[h, q_idx + 1, kv_idx]", 64),
        ("score + bias[h, q_idx, kv_idx + 8]", 64),
        ("score + bias[h, kv_idx, q_idx]", 64),
        ("score + bias[b - 1, q_idx, kv_idx]", 64),
        ("score + bias[kv_idx % 2, q_idx, kv_idx]", 64),
        ("score + bias[h, q_idx, 2 * kv_idx]", 64),
        ("score + odd[h, q_idx, kv_idx]", 64),
        ("score + across[h, q_idx, kv_idx]", 64),
        ("score + wide[h, q_idx, kv_idx]", 64),
        ("score + counts[h, q_idx, kv_idx]", 64),
        ("score + bias[h, q_idx, kv_idx]", 160),
    ],
)
def test_what_threads_read_themselves(monkeypatch, text, width):
    """Other indices, rows that are not contiguous or no multiples of 16 bytes apart, other dtypes, head dims that leave no room."""
    launched = forward_on_cpu(monkeypatch)
    bias = bias_of("hqk", {"h": 2, "q": 300, "k": 410}, torch.bfloat16)
    values = {"bias": bias, "odd": bias[..., :403].contiguous(), "wide": bias.double(), "counts": (8 * bias).int()}
    values["across"] = bias.transpose(1, 2)
    q, k, v = problem_of(width=width)
    out = flex_attention(q, k, v, make_mod(text, "score", values))
    assert [launch.spec.flag["ELEMENTS"] for launch in launched] == [None]
    dense = make_mod(text, "score", {name: t.double() for name, t in values.items()})
    assert relative_error(out, dense_attention(q, k, v, dense)[0]) < 5e-3


@pytest.mark.parametrize(
    "width, dtype, counts, buffers", [(64, torch.bfloat16, (0, 1, 2, 6), [2, 2, 1, 1]), (128, torch.float32, (0, 2, 3), [1, 1, 0])]
)
def test_numbers_of_keys_take_room_from_them(monkeypatch, width, dtype, counts, buffers):
    """Both lie in shared memory."""
    launched = forward_on_cpu(monkeypatch)
    bias, tables = bias_of("qk", {"q": 150, "k": 200}, dtype), torch.randn(6, 200)
    for count in counts:
        terms = [f"t{i}[kv_idx]" for i in range(count)]
        values = {"bias": bias, **{f"t{i}": tables[i] for i in range(count)}}
        text = " + ".join(["score", READS["qk"], *(f"0.1 * {term}" for term in terms)])
        out = flex_attention(*problem_of(width=width), make_mod(text, "score", values))
        dense = make_mod(text, "score", {name: t.double() for name, t in values.items()})
        assert relative_error(out, dense_attention(*problem_of(width=width), dense)[0]) < 5e-3
    assert [launch.spec.flag["ELEMENT_STAGES"] for launch in launched] == buffers


def test_numbers_of_64_bits_take_twice_the_room():
    bias = torch.zeros(8, 512, 512, dtype=torch.bfloat16)
    found = []
    for dtype in (torch.int32, torch.int64):
        mask = mods.document(torch.zeros(512, dtype=dtype), mods.causal)
        compilation = hopper_compilation("sm_90", lambda s, b, h, m, n: s + bias[h, m, n], mask, head_dim=64)
        found.append(compilation.spec.flag["ELEMENT_STAGES"])
    assert found == [2, 1]


def test_dropout(monkeypatch):
    launched = forward_on_cpu(monkeypatch)
    bias, seed = bias_of("hqk", {"h": 2, "q": 150, "k": 200}, torch.bfloat16), torch.tensor([17])
    out = flex_attention(*problem_of(), make_mod("score + " + READS["hqk"], "score", {"bias": bias}), dropout_p=0.3, dropout_seed=seed)
    kept = dropout_mask(seed, (2, 2, 150, 200), 0.3)
    dense = make_mod("score + " + READS["hqk"], "score", {"bias": bias.double()})
    assert launched[0].spec.flag["ELEMENTS"] and relative_error(out, dropped_attention(*problem_of(), kept, 0.3, dense)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dims, head_dim, dtype, of_bias",
    [
        ("bhqk", 128, torch.bfloat16, torch.bfloat16),
        ("hbqk", 64, torch.float16, torch.float16),
        ("hqk", 128, torch.bfloat16, torch.float32),
        ("1hqk", 96, torch.bfloat16, torch.bfloat16),
        ("qk", 64, torch.bfloat16, torch.float32),
        ("3qk", 64, torch.bfloat16, torch.bfloat16),
    ],
)
def test_at_real_lengths(dims, head_dim, dtype, of_bias):
    """The kernel for Hopper serves, tails and heads in groups, and errors of the output and of every gradient, the bias's too, are at most
    twice those of a plain computation. A view at an odd address gives the same bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    lengths, generator = (1100, 1300), torch.Generator().manual_seed(2)
    shapes = (2, 4, lengths[0], head_dim), (2, 2, lengths[1], head_dim), (2, 2, lengths[1], head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes)
    sizes = {"1": 1, "3": 3, "b": 2, "h": 4, "q": lengths[0], "k": lengths[1]}
    bias = bias_of(dims, sizes, of_bias, device="cuda").requires_grad_()
    slopes = torch.rand(4, generator=generator).cuda()
    text = "score + torch.tanh({e}) - slopes[h] * {e}".format(e=READS[dims])
    others = {"slopes": slopes, "count": 2, "torch": torch}
    mod = make_mod(text, "score", {**others, "bias": bias})
    for mask_mod in (None, mods.sliding_window(300)):
        mask = mask_mod and create_block_mask(mask_mod, None, None, *lengths, device="cuda")
        given = dict(block_mask=mask, enable_gqa=True)
        assert "HOPPER" in explain(q, k, v, mod, **given).splitlines()[0].split(";")[0]
        out = flex_attention(q, k, v, mod, **given)
        weights = torch.randn_like(out)
        results = [(out, *torch.autograd.grad(out, (q, k, v, bias), weights))]
        shifted = torch.empty(bias.numel() + 1, dtype=of_bias, device="cuda")[1:].view(bias.shape).copy_(bias.detach())
        again = flex_attention(q, k, v, make_mod(text, "score", {**others, "bias": shifted}), **given)
        assert torch.equal(again, out)
        for precision in (torch.float64, dtype):
            inputs = [t.detach().to(precision if precision != dtype else t.dtype).requires_grad_() for t in (q, k, v, bias)]
            dense = make_mod(text, "score", {**others, "bias": inputs[3], "slopes": slopes.to(precision)})
            plain = dense_attention(*inputs[:3], dense, mask_mod, precision=precision)[0]
            results.append((plain, *torch.autograd.grad(plain, inputs, weights.to(precision))))
        for found, exact, plain in zip(*results, strict=True):
            assert relative_error(found, exact) <= 2 * relative_error(plain, exact)
