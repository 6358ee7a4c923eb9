"""What a score_mod reads by the distance between query and key: which expressions, and what the kernel for Hopper makes of them."""

from __future__ import annotations

import pytest
import torch

from flexpress import flex_attention, mods
from flexpress.codegen import registry
from flexpress.codegen.mod.expr import walk
from flexpress.codegen.mod.graphs.distance import read_by_distance
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.plan.forward import Cache
from flexpress.codegen.run.preview import hopper_compilation
from flexpress.codegen.text.render import render
from flexpress.commands.recipes import make
from support.dense import dense_attention, relative_error
from support.fake_hopper import forward_on_cpu

G = torch.Generator().manual_seed(3)
Q_LEN, KV_LEN = 200, 300
TABLE = torch.randn(4, 1023, generator=G)
SHORT = torch.randn(4, 41, generator=G)
EXACT = torch.randn(4, Q_LEN + 512, generator=G)  # from 1 - Q_LEN to the last key of the last block, which has 256 at most
NARROW = torch.randn(4, Q_LEN + KV_LEN - 1, generator=G)  # the last block has more keys
LINE = torch.randn(1023, generator=G)
BUCKETS = torch.randint(-4, 5, (1023,), generator=G)
KEPT = torch.rand(1023, generator=G) > 0.2
ROWS, PER_HEAD = torch.randn(512, generator=G), torch.randn(4, generator=G)
MIDDLE, FIRST = 511, Q_LEN - 1

MODS = {  # and how many expressions are read by distance
    "table": (lambda s, b, h, m, n: s + TABLE[h, n - m + MIDDLE], 1),
    "table, the other way": (lambda s, b, h, m, n: s + TABLE[h, MIDDLE - (m - n)] + TABLE[h, m - n + MIDDLE], 2),
    "no index outside": (lambda s, b, h, m, n: s + EXACT[h, n - m + FIRST], 1),
    "no index outside, but none knows": (lambda s, b, h, m, n: s + NARROW[h, n - m + FIRST] - NARROW[h, FIRST - (m - n)], 2),
    "outside is zero": (lambda s, b, h, m, n: s + SHORT[h, (n - m).abs()], 1),
    "clipped": (lambda s, b, h, m, n: s + SHORT[h, (n - m).clamp(-20, 20) + 20], 1),
    "scaled by head": (lambda s, b, h, m, n: s + TABLE[h, n - m + MIDDLE] * PER_HEAD[h], 1),
    "distance used again": (lambda s, b, h, m, n: s + LINE[n - m + MIDDLE] * (n - m), 1),
    "tables in turn": (lambda s, b, h, m, n: torch.where(m > n, s + LINE[n - m + MIDDLE], s * LINE[m - n + MIDDLE]), 2),
    "of integers": (lambda s, b, h, m, n: s + BUCKETS[n - m + MIDDLE], 1),
    "of booleans": (lambda s, b, h, m, n: torch.where(KEPT[n - m + MIDDLE], s, -1.0), 0),
    "one value for all": (lambda s, b, h, m, n: s + PER_HEAD[:1].expand(1023)[n - m + MIDDLE], 1),
    "by distance and row": (lambda s, b, h, m, n: s + LINE[n - m + MIDDLE] * ROWS[m], 1),
    "two reads, one value": (lambda s, b, h, m, n: s + LINE[n - m + MIDDLE] * SHORT[h, (m - n).clamp(0, 40)], 1),
    "by the sum": (lambda s, b, h, m, n: s + LINE[n + m], 0),
    "t5": (mods.t5_bias(torch.randn(32, 4, generator=G), 32, 128), 1),
}
REFERENCES = {"outside is zero": lambda s, b, h, m, n: s + torch.where((n - m).abs() < 41, SHORT[h, (n - m).abs().clamp(max=40)], 0.0)}


@pytest.mark.parametrize("name", MODS)
def test_what_is_read_by_distance(name):
    mod, count = MODS[name]
    graph, _ = bind(mod, "score")
    found = read_by_distance(graph)
    assert len(found) == count
    for part in found:
        assert {n.attr for n in walk(part) if n.op == "symbol"} <= {"h", "q_idx", "kv_idx"}
        assert any(n.op == "load" for n in walk(part))


@pytest.fixture
def launched(monkeypatch):
    registry.clear()
    yield forward_on_cpu(monkeypatch)
    registry.clear()


def check(mod, reference, dims, causal, lengths=(Q_LEN, KV_LEN), device="cpu"):
    q, k, v = (
        torch.randn(1, 4, n, d, generator=G).to(device, torch.bfloat16)
        for n, d in ((lengths[0], dims[0]), (lengths[1], dims[0]), (lengths[1], dims[1]))
    )
    mask = mods.causal if causal else None
    reference = reference or mod
    out, lse = flex_attention(q, k, v, mod, return_lse=True, mask_mod=mask)
    exact, exact_lse, _ = dense_attention(q, k, v, reference, mask)
    plain, plain_lse, _ = dense_attention(q, k, v, reference, mask, precision=torch.bfloat16)
    assert relative_error(out, exact) <= 1.2 * relative_error(plain, exact)
    assert (lse - exact_lse).abs().max() <= 2 * (plain_lse - exact_lse).abs().max() + 1e-5


CASES = [
    *((name, (64, 64), False) for name in MODS),
    ("table", (128, 128), True),
    ("no index outside", (128, 128), False),
    ("no index outside", (192, 128), True),
    ("clipped", (256, 256), False),
]


@pytest.mark.parametrize("name, dims, causal", CASES, ids=str)
def test_against_dense_attention(name, dims, causal, launched):
    """Lengths end inside tiles, so that lower rows past the last one, keys past the end and their addresses are met."""
    mod, count = MODS[name]
    check(mod, REFERENCES.get(name), dims, causal)
    assert render(launched[0].spec).count("spread(") == count + bool(count)


def test_nothing_is_read_by_distance_from_a_cache():
    """There positions may be negative, and are then cut off: the distances in a tile are not those of its upper rows."""
    plan = hopper_compilation("sm_90", *make("relative_bias"), starts=True, cache=Cache(16))
    assert "spread(" not in render(plan.spec)


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(dims, causal):
    """A table for exactly these lengths; what T5 computes; an index that leaves its tensor."""
    table, line, weight = (
        torch.randn(size, device="cuda", generator=torch.Generator("cuda").manual_seed(i))
        for i, size in enumerate(((4, 1500 + 1700), 100, (32, 4)))
    )
    for Q, KV in ((1500, 1700), (1536, 1024), (300, 1700)):
        check(lambda s, b, h, m, n: s + table[h, n - m + 1499], None, dims, causal, (Q, KV), "cuda")
        check(mods.t5_bias(weight), None, dims, causal, (Q, KV), "cuda")
        check(
            lambda s, b, h, m, n: s + line[(m - n).abs()],
            lambda s, b, h, m, n: s + torch.where((m - n).abs() < 100, line[(m - n).abs().clamp(max=99)], 0.0),
            dims,
            causal,
            (Q, KV),
            "cuda",
        )
