"""varlen_attention against dense float64 attention, sequence by sequence: lengths, mods, gradients, and nothing made twice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import ModError, and_masks, cache_clear, cache_info, mods, or_masks, varlen, varlen_attention
from flexpress.attention import attend
from flexpress.codegen.mod.bind import bind
from flexpress.codegen.run.masks import automatic_lists, block_starts
from support.block_lists import check_bounds
from support.dense import dense_attention, relative_error
from support.gradients import assert_gradients

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = {"cpu": [0, 0, 1, 2, 15, 16, 40, 65, 130], "cuda": [0, 1, 17, 128, 300, 777, 1024]}
HEAD_DIMS = {"cpu": [1, 8, 16, 31, 40], "cuda": [16, 31, 64, 80, 128, 192]}
LAYOUTS = ["contiguous", "heads_first", "sliced", "wide_head_dim", "packed"]
FLOORS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def offsets(lengths, device="cpu", dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def score_mods(n: int, heads: int, longest: int, device: str) -> dict:
    """By name: (function from learned tensors to the score_mod, the tensors). b is the sequence, m and k are positions inside it."""
    generator = torch.Generator().manual_seed(n)

    def learned(*shape):
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    return {
        "none": (lambda: None, []),
        "alibi": (mods.alibi, [learned(heads)]),
        "softcap": (lambda: mods.softcap(3.0), []),
        "position": (lambda: lambda s, b, h, m, k: s + 0.02 * m - 0.01 * k, []),
        "sequence": (lambda t: lambda s, b, h, m, k: s * t[b, h] + t[b, 0], [learned(n, heads)]),
        "rows": (lambda t: lambda s, b, h, m, k: s * t[b, m], [learned(n, longest)]),
        "columns": (lambda t: lambda s, b, h, m, k: torch.tanh(s) + t[h, k], [learned(heads, longest)]),
        "table": (lambda t: lambda s, b, h, m, k: s + t[h, m - k + longest], [learned(heads, 2 * longest + 1)]),
        "bias": (lambda t: lambda s, b, h, m, k: s + t[b, h, m, k], [learned(n, heads, longest, longest)]),
    }


def mask_mods(n: int, device: str) -> dict:
    sizes = torch.arange(n, device=device) * 3 + 1
    return {
        "none": None,
        "causal": mods.causal,
        "window": mods.sliding_window(9),
        "prefix": mods.prefix_lm(sizes.int()),
        "sequence_window": lambda b, h, m, k: (m - k).abs() < sizes[b],
        "shifted": lambda b, h, m, k: m + sizes[b] - 7 >= k,
        "first_tokens": or_masks(and_masks(mods.causal, mods.sliding_window(5)), lambda b, h, m, k: k < 2),
        "chunks": lambda b, h, m, k: m // 7 == k // 7,
        "heads": lambda b, h, m, k: (m >= k) | (h % 2 == 1),
        "some_sequences": lambda b, h, m, k: b % 2 == 0,
        "nothing": lambda b, h, m, k: m < 0,
    }


SCORE_MODS, MASK_MODS = sorted(score_mods(1, 1, 1, "cpu")), sorted(mask_mods(1, "cpu"))


def tensor_of(shape, layout: str, dtype, device: str, generator) -> torch.Tensor:
    """A random (tokens, heads, head_dim) tensor in one of LAYOUTS."""

    def random(*sizes):
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    T, H, D = shape
    if layout == "heads_first":
        return random(H, T, D).transpose(0, 1)
    if layout == "sliced":
        return random(T + 3, H + 1, D + 5)[2 : T + 2, 1:, 3 : D + 3]
    if layout == "wide_head_dim":
        return random(T, H, 2 * D)[..., ::2]
    if layout == "packed":
        return random(T, 3, H, D)[:, 1]
    return random(T, H, D)


def by_sequence(q, k, v, lengths_q, lengths_k, score_mod, mask_mod, scale, precision):
    """out (total_q, Hq, Dv) and lse (total_q, Hq) by dense attention within each sequence."""
    outs, rows = [], []
    pieces = [t.split(lengths) for t, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
    for b, parts in enumerate(zip(*pieces, strict=True)):
        if not len(parts[0]):
            continue
        x, y, z = (t.transpose(0, 1)[None] for t in parts)
        if not len(parts[1]):
            outs.append(parts[0].new_zeros((*parts[0].shape[:2], v.shape[2]), dtype=precision))
            rows.append(torch.full(parts[0].shape[:2], -math.inf, dtype=torch.promote_types(precision, torch.float32), device=q.device))
            continue
        score = None if score_mod is None else lambda s, _, h, m, n, b=b: score_mod(s, torch.full_like(h, b), h, m, n)
        mask = None if mask_mod is None else lambda _, h, m, n, b=b: mask_mod(torch.full_like(h, b), h, m, n)
        out, lse, _ = dense_attention(x, y, z, score, mask, scale, precision)
        outs.append(out[0].transpose(0, 1))
        rows.append(lse[0].transpose(0, 1))
    return torch.cat(outs), torch.cat(rows)


@st.composite
def problems(draw, device):
    lengths = draw(st.lists(st.sampled_from(LENGTHS[device]), min_size=1, max_size=5).filter(any))
    kv_lengths = None
    if draw(st.booleans()):
        size = len(lengths)
        kv_lengths = draw(st.lists(st.sampled_from(LENGTHS[device]), min_size=size, max_size=size).filter(any))
    D = draw(st.sampled_from(HEAD_DIMS[device]))
    return {
        "lengths": lengths,
        "kv_lengths": kv_lengths,
        "Hkv": draw(st.sampled_from([1, 2])),
        "group": draw(st.sampled_from([1, 2, 3])),
        "D": D,
        "Dv": draw(st.one_of(st.just(D), st.sampled_from(HEAD_DIMS[device]))),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "offsets": draw(st.sampled_from([torch.int32, torch.int64])),
        "layouts": draw(st.tuples(*[st.sampled_from(LAYOUTS)] * 3)),
        "score": draw(st.sampled_from(SCORE_MODS)),
        "mask": draw(st.sampled_from(MASK_MODS)),
        "backward": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, None, 0.3])),
        "deterministic": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
        "apart": draw(st.booleans()),
    }


def check_problem(p: dict, device: str) -> None:
    """`apart`: blocks begin where sequences do, however short these are."""
    with pytest.MonkeyPatch.context() as patch:
        if p["apart"]:
            patch.setattr(varlen, "LONG", 0)
        _check_problem(p, device)


def _check_problem(p: dict, device: str) -> None:
    lengths, kv_lengths = p["lengths"], p["kv_lengths"] or p["lengths"]
    n, Hq, Tq, Tk = len(lengths), p["Hkv"] * p["group"], sum(lengths), sum(kv_lengths)
    generator = torch.Generator(device=device).manual_seed(p["seed"])
    shapes = (Tq, Hq, p["D"]), (Tk, p["Hkv"], p["D"]), (Tk, p["Hkv"], p["Dv"])
    inputs = [
        tensor_of(shape, layout, p["dtype"], device, generator).requires_grad_() for shape, layout in zip(shapes, p["layouts"], strict=True)
    ]
    make, learned = score_mods(n, Hq, max(*lengths, *kv_lengths), device)[p["score"]]
    mask_mod = mask_mods(n, device)[p["mask"]]
    cu_q = offsets(lengths, device, p["offsets"])
    cu_k = None if p["kv_lengths"] is None else offsets(kv_lengths, device, p["offsets"])
    out, lse = varlen_attention(
        *inputs, cu_q, cu_k, make(*learned), mask_mod, scale=p["scale"], return_lse=True, deterministic=p["deterministic"]
    )
    assert out.shape == (Tq, Hq, p["Dv"]) and lse.shape == (Tq, Hq) and out.dtype == p["dtype"] and lse.dtype == torch.float32

    def reference(precision):
        leaves = [
            t.detach().to(precision if i < 3 else torch.promote_types(precision, torch.float32)).requires_grad_()
            for i, t in enumerate((*inputs, *learned))
        ]
        return leaves, *by_sequence(*leaves[:3], lengths, kv_lengths, make(*leaves[3:]), mask_mod, p["scale"], precision)

    exact, plain = reference(torch.float64), reference(p["dtype"])
    error, allowed = (relative_error(t, exact[1]) for t in (out, plain[1]))
    assert error <= max(2 * allowed, FLOORS[p["dtype"]]), f"error {error:.2e}, a plain computation has {allowed:.2e}"
    seen = exact[2] > -math.inf
    assert torch.equal(lse > -math.inf, seen) and (out[~seen] == 0).all()
    # on Hopper, distances from the middle of a tile cancel in float32, up to 64 times a slope
    atol = 4e-5 if p["score"] == "alibi" and device == "cuda" else 2e-5
    torch.testing.assert_close(lse[seen].double(), exact[2][seen], rtol=2e-6, atol=atol)
    if not p["backward"]:
        return
    weights = torch.randn(out.shape, generator=generator, device=device).to(p["dtype"]), torch.randn(lse.shape, device=device)
    grads = torch.autograd.grad((out, lse), (*inputs, *learned), weights, allow_unused=True)

    def gradients(leaves, out, lse):
        loss = (out * weights[0].to(out.dtype)).sum() + (torch.where(seen, lse, 0.0) * weights[1].to(lse.dtype)).sum()
        found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

    def heads_first(found):
        return [g if i >= 3 or g is None else g.transpose(0, 1)[None] for i, g in enumerate(found)]

    assert_gradients(
        heads_first(grads),
        heads_first(gradients(*exact)),
        heads_first(gradients(*plain)),
        [p["dtype"]] * (3 + len(learned)),
        lse=lse.detach(),
    )


@settings(max_examples=25)
@given(problems("cpu"))
def test_any_problem(p):
    check_problem(p, "cpu")


@pytest.mark.gpu
@settings(max_examples=120)
@given(problems("cuda"))
def test_any_problem_on_gpu(p):
    check_problem(p, "cuda")


EXAMPLE = {
    "lengths": [40, 0, 65, 1],
    "kv_lengths": None,
    "Hkv": 1,
    "group": 2,
    "D": 16,
    "Dv": 16,
    "dtype": torch.float32,
    "offsets": torch.int32,
    "layouts": ["contiguous"] * 3,
    "score": "none",
    "mask": "causal",
    "backward": True,
    "scale": None,
    "deterministic": False,
    "seed": 0,
    "apart": False,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_lengths", [None, [30, 5, 80, 0]])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("score", SCORE_MODS)
def test_gradients(score, apart, kv_lengths, device):
    """Of captured tensors with every kind of index: sequence, head, positions and their distance."""
    check_problem(EXAMPLE | {"score": score, "kv_lengths": kv_lengths, "apart": apart}, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apart", [False, True])
def test_deterministic_gradients(apart, device):
    check_problem(EXAMPLE | {"score": "bias", "deterministic": True, "apart": apart}, device)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lengths", [None, [1000, 4096, 0, 333, 1500, 900]])
@pytest.mark.parametrize("score", ["none", "alibi", "sequence"])
@pytest.mark.parametrize("mask", ["causal", "prefix"])
def test_long_sequences(mask, score, kv_lengths):
    check_problem(
        EXAMPLE
        | {
            "lengths": [2000, 4001, 1, 0, 777, 1024],
            "kv_lengths": kv_lengths,
            "Hkv": 2,
            "group": 4,
            "D": 128,
            "Dv": 128,
            "dtype": torch.bfloat16,
            "score": score,
            "mask": mask,
        },
        "cuda",
    )


def made_by(call) -> tuple[int, int, int]:
    """Traces, prints and compiles that `call` costs."""
    before = cache_info()
    call()
    after = cache_info()
    return after.traces - before.traces, after.prints - before.prints, after.compiles - before.compiles


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "apart, form, cross",
    [
        (False, "distances", True),
        (False, "positions", False),
        (False, "plain", True),
        (True, "positions", True),
        (True, "distances", False),
    ],
)
def test_other_lengths_compile_nothing(apart, form, cross, device, monkeypatch):
    """Nor does another number of sequences, a fresh lambda with another number, other offsets' dtype or unaligned rows."""
    if apart:
        monkeypatch.setattr(varlen, "LONG", 0)

    def run(lengths, shift, dtype=torch.int32, D=16):
        slopes = torch.rand(2, device=device, requires_grad=True)
        sizes = torch.ones(len(lengths), device=device)
        score, mask = {
            "distances": (lambda s, b, h, m, n: s + (m - n - shift) * slopes[h] * sizes[b], lambda b, h, m, n: m + shift >= n),
            "positions": (lambda s, b, h, m, n: s + (m * shift - n) * slopes[h] * sizes[b], lambda b, h, m, n: m % shift >= n % 5),
            "plain": (None, None),
        }[form]
        kv_lengths = lengths[::-1] if cross else lengths
        q, k, v = (torch.randn(sum(t), 2, D, device=device, requires_grad=True) for t in (lengths, kv_lengths, kv_lengths))
        cu_q, cu_k = offsets(lengths, device, dtype), offsets(kv_lengths, device, dtype)
        out = varlen_attention(q, k, v, cu_q, cu_k if cross else None, score, mask)
        out.backward(torch.randn_like(out))

    cache_clear()
    assert made_by(lambda: run([30, 41], 3))[0]
    few = [18] if apart else [7]  # up to 16 queries have no blocks of their own
    for lengths, shift in (([30, 41], 3), ([64, 62], 5), (few, 2), ([0, 1, 33, 128, 2], 9), ([16, 16, 16, 16], 4)):
        assert made_by(lambda lengths=lengths, shift=shift: run(lengths, shift)) == (0, 0, 0), lengths
    traces, prints, compiles = made_by(lambda: run([64, 64], 3))  # whole blocks
    assert traces == 0 and prints <= 2 and compiles <= 2
    assert made_by(lambda: run([100, 28, 128], 5)) == (0, 0, 0)
    assert made_by(lambda: run([30, 5], 6, torch.int64)) == (0, 0, 0)
    run([30, 41], 3, D=5)
    assert made_by(lambda: run([16, 16], 3, D=5)) == (0, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_copied(device, monkeypatch):
    """The kernels get views of a packed qkv, and their output comes back as it lies."""
    calls = []

    def spy(call, *options):
        calls.append((*call[:3], *attend(call, *options)))
        return calls[-1][3:]

    monkeypatch.setattr(varlen, "attend", spy)
    qkv = torch.randn(75, 3, 4, 40, device=device, requires_grad=True)
    cu = offsets([33, 42], device)
    out, lse = varlen_attention(*qkv.unbind(1), cu, mask_mod=mods.causal, return_lse=True)
    ((*views, result, rows, _),) = calls
    for i, view in enumerate(views):
        assert view.data_ptr() == qkv[:, i].data_ptr() and view.shape == (1, 4, 75, 40) and view.stride()[1:] == (40, 480, 1)
    assert out.data_ptr() == result.data_ptr() and out.is_contiguous() and lse.data_ptr() == rows.data_ptr()
    (got,) = torch.autograd.grad(out.square().sum(), qkv)
    apart = [t.detach().clone().requires_grad_() for t in qkv.unbind(1)]
    want = torch.autograd.grad(varlen_attention(*apart, cu, mask_mod=mods.causal).square().sum(), apart)
    assert relative_error(got, torch.stack(want, 1)) < 1e-6


LONG, OTHER = [700, 0, 650, 130, 1, 300], [650, 50, 800, 60, 1, 320]
EXACT = {
    "none": None,
    "causal": mods.causal,
    "window": mods.sliding_window(300),
    "dilated": mods.dilated_window(4, 3),
    "bidirectional": mods.sliding_window_bidirectional(200, 300),
    "offset": mods.causal_offset(64),
}


def packed_mask(mask_mod, lengths, kv_lengths):
    packing = varlen._packing(
        offsets(lengths), None if kv_lengths is None else offsets(kv_lengths), sum(lengths), sum(kv_lengths or lengths)
    )
    return packing.mask_mod(mask_mod)


@pytest.mark.parametrize("kv_lengths", [None, OTHER])
@pytest.mark.parametrize("name", sorted(EXACT))
def test_bounds_decide_every_block_of_a_mask_of_distances(name, kv_lengths):
    found, truth = check_bounds(packed_mask(EXACT[name], LONG, kv_lengths), 1, 1, sum(LONG), sum(kv_lengths or LONG), (128, 128), "cpu")
    assert torch.equal(found, truth)
    assert (found == 2).any() or name == "dilated"


@pytest.mark.parametrize("kv_lengths", [None, OTHER])
@pytest.mark.parametrize("name", ["prefix", "first_tokens", "chunks", "sequence_window"])
def test_bounds_find_every_full_block(name, kv_lengths):
    """Where positions count, blocks that hold parts of several sequences may be called partial without need, but none that is full is."""
    mask_mod = {"chunks": lambda b, h, m, n: m // 300 == n // 300}.get(name, mask_mods(len(LONG), "cpu")[name])
    found, truth = check_bounds(packed_mask(mask_mod, LONG, kv_lengths), 1, 1, sum(LONG), sum(kv_lengths or LONG), (128, 128), "cpu")
    assert torch.equal(found == 2, truth == 2)
    assert (found == 1).sum() <= 2 * (truth == 1).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [LONG, [0, 0, 1000], [128, 256, 0], [1] * 300, [127, 129] * 70, [0, 40000]])
def test_where_blocks_begin(lengths, device):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    expected = [start for end, n in zip(ends, lengths, strict=True) for start in range(end - n, end, 128)]
    starts = block_starts(offsets(lengths, device), ends[-1], 128).tolist()
    assert starts[: len(expected)] == expected
    assert starts[len(expected) :] == [ends[-1]] * (ends[-1] // 128 + len(lengths) + 1 - len(expected))


@pytest.mark.parametrize("cu_seqlens", [[0, 500, 300, 1000], [0, 2000, 1000], [0, -5, 1000], [700, 900, 1000]])
def test_wrong_offsets_write_nothing_outside(cu_seqlens):
    starts = block_starts(torch.tensor(cu_seqlens, dtype=torch.int32), 1000, 128)
    assert ((starts >= 0) & (starts <= 1000)).all()


def own_lists(mask_mod, lengths, kv_lengths=None):
    """Where the blocks of sequences begin, and the lists of their mask, forward and transposed."""
    total_q, total_k = sum(lengths), sum(kv_lengths or lengths)
    packing = varlen._packing(offsets(lengths), None if kv_lengths is None else offsets(kv_lengths), total_q, total_k)
    starts = packing.starts_of(128, 128)
    assert len(starts) == 2
    bound, extents = bind(packing.mask_mod(mask_mod), "mask"), (1, 1, total_q, total_k)
    return starts, *(automatic_lists(bound, extents, torch.device("cpu"), (128, 128), starts=starts, transposed=t) for t in (False, True))


def visited(lists) -> list[tuple[set, set]]:
    """First positions of the partial and of the full blocks of every row that is not empty."""
    rows = []
    for row in range(int((lists.starts[1:] > lists.starts[:-1]).sum())):
        tables = (lists.kv_num_blocks, lists.kv_indices), (lists.full_kv_num_blocks, lists.full_kv_indices)
        rows.append(tuple(set(indices[0, 0, row, : count[0, 0, row]].tolist()) for count, indices in tables))
    return rows


def test_blocks_of_sequences_are_those_of_each_one_alone():
    """Under a causal mask: a row's own block is partial, those before it full. In the transposed lists, cut blocks are partial too."""
    lengths = [700, 0, 1300, 5, 2000, 900]
    _, lists, transposed = own_lists(mods.causal, lengths)
    rows = [(base + at, base, base + n) for base, n in zip(offsets(lengths).tolist(), lengths, strict=False) for at in range(0, n, 128)]
    assert visited(lists) == [({start}, set(range(base, start, 128))) for start, base, _ in rows]
    for (start, _, end), (partial, full) in zip(rows, visited(transposed), strict=True):
        later = set(range(start + 128, end - 127, 128))
        assert full == later and partial == set(range(start, end, 128)) - later


def test_undecided_blocks_of_sequences_are_evaluated():
    """The same lists by evaluation, but for a sequence's last row, where only a whole block is full."""
    lengths = [700, 1300, 600]
    _, *decided = own_lists(mods.causal, lengths)
    _, *evaluated = own_lists(lambda b, h, m, n: torch.tan((m - n) * 0.0) + m >= n, lengths)
    for a, b in zip(decided, evaluated, strict=True):
        for (partial, full), (partial_too, full_too) in zip(visited(a), visited(b), strict=True):
            assert partial | full == partial_too | full_too and full_too in (full, set())


def test_which_sequences_have_blocks_of_their_own():
    def starts(lengths):
        return varlen._packing(offsets(lengths), None, sum(lengths), sum(lengths)).starts_of(128, 128)

    assert starts([512] * 4) and starts([2000, 48]) and starts([0, 0, 2000])
    assert not starts([511] * 4) and not starts([4000] + [1] * 8)


TABLE = torch.zeros(100)
OF_DISTANCES = {
    "causal": (lambda b, h, m, n: m >= n, True),
    "offset": (lambda b, h, m, n: m + 3 - n.long() > TABLE[b].int(), True),
    "modulo": (lambda b, h, m, n: (m - n) % 4 == 0, True),
    "table": (lambda b, h, m, n: TABLE[m - n] > TABLE[h], True),
    "sums": (lambda b, h, m, n: (m + n) - (n + m) == 0, True),
    "constant": (lambda b, h, m, n: h > 2, True),
    "position": (lambda b, h, m, n: m > 3, False),
    "sum": (lambda b, h, m, n: m + n > 3, False),
    "chunks": (lambda b, h, m, n: m // 4 == n // 4, False),
    "twice": (lambda b, h, m, n: 2 * m >= 2 * n, False),
    "narrow": (lambda b, h, m, n: m.to(torch.int8) >= n.to(torch.int8), False),
    "floats": (lambda b, h, m, n: m.float() >= n.float(), False),
    "index": (lambda b, h, m, n: TABLE[m] > TABLE[n], False),
    "mixed": (lambda b, h, m, n: (m >= n) & (n < 4), False),
}


@pytest.mark.parametrize("name", OF_DISTANCES)
def test_which_mods_are_of_distances(name):
    mod, expected = OF_DISTANCES[name]
    assert varlen._of_distances(bind(mod, "mask")[0]) is expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths, device):
    q, k, v = (torch.randn(0, 2, 16, device=device, requires_grad=True) for _ in range(3))
    for mask_mod in (None, mods.causal, mods.prefix_lm(3)):
        out, lse = varlen_attention(q, k, v, offsets(lengths, device), mask_mod=mask_mod, return_lse=True)
        assert out.shape == (0, 2, 16) and lse.shape == (0, 2)
    k, v = (torch.randn(5, 2, 16, device=device) for _ in range(2))
    if lengths:
        assert varlen_attention(q, k, v, offsets(lengths, device), offsets([5] + lengths[1:], device)).shape == (0, 2, 16)
        k.requires_grad_()
        out = varlen_attention(k, q, q, offsets([5] + lengths[1:], device), offsets(lengths, device))
        assert out.shape == (5, 2, 16) and (out == 0).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (k, q)))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    q, k, v = torch.randn(20, 2, 16, device=device), *(torch.randn(20, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert varlen_attention(q, k, v, offsets([12, 8], device)).dtype == torch.bfloat16


@pytest.mark.parametrize("values", [[0, 5, 3, 9], [2, 4, 8, 9], [0, -5, 99, 9], [0, 2, 4, 6]])
def test_wrong_values_stay_inside(values):
    """On a GPU nobody checks cu_seqlens: whatever they say, no index made of them leaves a tensor."""
    packing = varlen._packing(torch.tensor(values), torch.tensor(values[::-1]), 9, 9)
    for tokens in (packing.sequence_q, packing.sequence_k):
        assert (tokens >= 0).all() and (tokens <= 3).all()
    assert packing.local_q.shape == packing.local_k.shape == packing.aligned_q.shape == (9,)


@pytest.mark.gpu
def test_the_host_does_not_wait():
    q, k, v = (torch.randn(900, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu, other = offsets([500, 0, 400], "cuda"), offsets([300, 400, 200], "cuda", torch.int64)

    def both():
        for cu_k in (None, other.to(cu.dtype)):
            for mask_mod in (mods.causal, mods.prefix_lm(7)):
                varlen_attention(q, k, v, cu, cu_k, mask_mod=mask_mod).sum().backward()

    both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_graphs_replay_other_lengths():
    q, k, v = (torch.randn(1000, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = offsets([300, 200, 500], "cuda")

    def run():
        return varlen_attention(q, k, v, cu, mask_mod=mods.causal)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in ([300, 200, 500], [1, 0, 999], [600, 399, 1]):
        cu.copy_(offsets(lengths, "cuda"))
        graph.replay()
        want, _ = by_sequence(q, k, v, lengths, lengths, None, mods.causal, None, torch.float64)
        assert relative_error(out, want) < 1e-2


X, CU = torch.zeros(20, 4, 16), offsets([12, 8])
K = torch.zeros(30, 2, 16)
BAD = {
    "list": (dict(q=[1.0]), TypeError, r"q must be a torch.Tensor of shape \(total_q, Hq, D\), got list"),
    "rank": (dict(k=K[None]), ValueError, r"k must have shape \(total_k, Hkv, D\), got \(1, 30, 2, 16\)"),
    "dtype": (dict(q=X.double()), TypeError, r"q has dtype torch.float64; supported are float16"),
    "dtypes": (dict(v=X.half()), TypeError, r"q and v must have the same dtype, got torch.float32 and torch.float16"),
    "device": (dict(k=X.to("meta")), ValueError, r"q is on cpu but k is on meta"),
    "k and v": (dict(v=X[1:]), ValueError, r"same tokens and heads, got k \(20, 4, 16\) and v \(19, 4, 16\)"),
    "head dim": (dict(k=X[..., :8]), ValueError, r"same head dim, got q \(20, 4, 16\) and k \(20, 4, 8\)"),
    "heads": (dict(q=X[:, :3]), ValueError, r"multiple of k's, got q \(20, 3, 16\) and k \(20, 4, 16\)"),
    "large head dim": (dict(v=torch.zeros(20, 4, 300)), NotImplementedError, r"v has head dim 300 .* supported are 1 to 256"),
    "tokens": (dict(k=K, v=K), ValueError, r"got q \(20, 4, 16\) and k \(30, 2, 16\); pass cu_seqlens_k"),
    "no tensor": (dict(cu_seqlens_q=[0, 12, 20]), TypeError, r"cu_seqlens_q must be a torch.Tensor of shape \(sequences \+ 1\), got list"),
    "cu rank": (dict(cu_seqlens_q=CU[None]), ValueError, r"cu_seqlens_q must have shape \(sequences \+ 1\), got \(1, 3\)"),
    "cu dtype": (dict(cu_seqlens_q=CU.float()), TypeError, r"cu_seqlens_q has dtype torch.float32, not int32 or int64; .*cumsum"),
    "cu device": (dict(cu_seqlens_k=CU.to("meta")), ValueError, r"k is on cpu but cu_seqlens_k is on meta"),
    "empty": (dict(cu_seqlens_q=CU[:0]), ValueError, r"shape \(0,\), but n sequences have n \+ 1 numbers"),
    "start": (dict(cu_seqlens_q=CU + 1), ValueError, r"cu_seqlens_q must be 0 and then .* 20 tokens of q \(20, 4, 16\), got \[1, 13, 21\]"),
    "end": (dict(cu_seqlens_q=offsets([12, 7])), ValueError, r"got \[0, 12, 19\]; torch.nn.functional.pad"),
    "falling": (dict(cu_seqlens_k=offsets([30, -10])), ValueError, r"cu_seqlens_k must be 0 and then .* got \[0, 30, 20\]"),
    "many": (dict(cu_seqlens_q=offsets(range(10))), ValueError, r"got \[0, 0, 1, 3, \.\.\., 45\]"),
    "sequences": (dict(cu_seqlens_k=offsets([20])), ValueError, r"as many sequences, got shapes \(3,\) and \(2,\)"),
    "option": (dict(kernel_options={"BLOK_M": 64}), ValueError, r"no 'BLOK_M'"),
    "scale": (dict(scale="big"), TypeError, r"scale must be a number, got str"),
    "no function": (dict(score_mod=3), TypeError, r"score_mod must be a function, got int"),
    "mask for score": (dict(score_mod=mods.causal), ModError, r"This looks like a mask_mod"),
    "own line": (dict(mask_mod=lambda b, h, m, n: m + n), ModError, r"(?s)returns torch.int32, not torch.bool.*test_varlen.py"),
    "captured device": (dict(score_mod=mods.alibi(torch.rand(4, device="meta"))), ValueError, r"captures slopes, .* on meta"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_arguments(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        varlen_attention(**{"q": X, "k": X, "v": X, "cu_seqlens_q": CU, **arguments})
    assert len(str(caught.value)) < 500
