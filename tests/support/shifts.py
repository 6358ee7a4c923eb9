"""Attention of blocks of a longer sequence, in any order, and dense attention of the same positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from flexpress import dropout_mask, mods
from flexpress.calls.call import attend, bound
from flexpress.codegen.run import masks
from flexpress.codegen.run.block_lists import BlockLists, Shifts, lists_of
from flexpress.inputs.dropout import Dropout
from flexpress.masks.block_mask import BlockMask
from support.dense import dense_attention, factors_of, relative_error
from support.gradients import assert_gradients, error_times, gradients_of
from support.varlen import FLOORS, MASK_MODS, SCORE_MODS, score_mods
from support.varlen import mask_mods as narrow_mods

WIDE = ["wide window", "both sides", "documents", "keys and rows"]
HEAD_DIMS = {"cpu": [8, 16, 40], "cuda": [16, 64, 80, 128, 192, 256]}
MOST = {"cpu": 3, "cuda": 9}  # blocks of queries, and of keys
FAR = {"cpu": 12, "cuda": 12}  # and of the longer sequence


def mask_mods(n: int, device: str) -> dict:
    """Those of packed sequences, and some that show several blocks."""
    ids = (torch.arange(1 << 12, device=device) * 7) // 2000
    return narrow_mods(n, device) | {
        "wide window": mods.sliding_window(300),
        "both sides": mods.sliding_window_bidirectional(200, 250),
        "documents": mods.document(ids, mods.causal),
        "keys and rows": lambda b, h, m, k: (m % 300 > 40) & (k % 200 != 3),
    }


@dataclass(kw_only=True)
class Problem:
    """Blocks of `size` (queries, keys) positions with numbers `rows` and `columns` in sequences of q_len and kv_len.

    padded   the last block of the sequence, if it is among the keys, has all its rows: those past kv_len are to be hidden
    """

    rows: list[int]
    columns: list[int]
    q_len: int
    kv_len: int
    size: tuple[int, int] = (128, 128)
    padded: bool = True
    B: int = 1
    Hkv: int = 1
    group: int = 2
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = torch.float32
    score: str = "alibi"
    mask: str = "causal"
    deterministic: bool = False
    separate_full: bool = True
    dropout_p: float = 0.0
    seed: int = 0

    @property
    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries and of keys."""
        q, kv = (
            torch.cat([torch.arange(n * size, n * size + size) for n in blocks])
            for blocks, size in ((self.rows, self.size[0]), (self.columns, self.size[1]))
        )
        return q[q < self.q_len], kv if self.padded else kv[kv < self.kv_len]


def drawn_blocks(draw, blocks: int, most: int, *, last_is_short: bool) -> list[int]:
    """Some blocks in any order; a short one at the end."""
    found = draw(st.permutations(range(blocks)))[: draw(st.integers(1, most))]
    return sorted(found, key=lambda n: last_is_short and n == blocks - 1)


@st.composite
def problems(draw, device):
    q_len, kv_len = (draw(st.integers(1, 128 * FAR[device])) for _ in "qk")
    padded = draw(st.booleans())
    D = draw(st.sampled_from(HEAD_DIMS[device]))
    rows, columns = (
        drawn_blocks(draw, -(-length // 128), MOST[device], last_is_short=short) for length, short in ((q_len, True), (kv_len, not padded))
    )
    return Problem(
        rows=rows,
        columns=columns,
        q_len=q_len,
        kv_len=kv_len,
        padded=padded,
        B=draw(st.sampled_from([1, 2])),
        Hkv=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2])),
        D=D,
        Dv=draw(st.one_of(st.just(D), st.sampled_from(HEAD_DIMS[device]))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        score=draw(st.sampled_from(SCORE_MODS)),
        mask=draw(st.sampled_from([*MASK_MODS, *WIDE * 2])),
        deterministic=draw(st.booleans()),
        separate_full=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
        seed=draw(st.integers(0, 99)),
    )


def in_whole(p: Problem, mask_mod):
    """A mask_mod that hides what is past the end of the keys."""
    if mask_mod is None:
        return lambda b, h, m, n: n < p.kv_len
    return lambda b, h, m, n: (n < p.kv_len) & mask_mod(b, h, m, n)


def at_positions(mod, q, kv, *, score: bool):
    """A mod that looks its positions up in tables, as one would without shifts."""
    if mod is None:
        return None
    if score:
        return lambda s, b, h, m, n: mod(s, b, h, q[m], kv[n])
    return lambda b, h, m, n: mod(b, h, q[m], kv[n])


def shifted_lists(p: Problem, mask_mod, device) -> BlockLists:
    """The block lists of a problem, of what mask_mod shows at the positions."""
    q, kv = (t.to(device) for t in p.positions)
    views = (torch.arange(p.B, device=device)[:, None, None, None], torch.arange(p.Hkv * p.group, device=device)[:, None, None])
    seen = mask_mod(*views, q[:, None], kv).expand(p.B, p.Hkv * p.group, len(q), len(kv)).float()
    low, high = (
        torch.nn.functional.max_pool2d(
            torch.nn.functional.pad(sign * seen, (0, -len(kv) % p.size[1], 0, -len(q) % p.size[0]), value=-math.inf if sign < 0 else 0.0),
            p.size,
            ceil_mode=True,
        )
        for sign in (-1.0, 1.0)
    )
    status = torch.where(high == 0, 0, torch.where(low == -1, 2, 1)).to(torch.int8)
    if len(kv) % p.size[1]:  # a full block has all its positions
        status[..., -1].clamp_(max=1)
    lists = lists_of(masks.block_lists(status.contiguous(), p.separate_full), *p.size, interior=True)
    moved = (torch.tensor(blocks, dtype=torch.int32) - torch.arange(len(blocks), dtype=torch.int32) for blocks in (p.rows, p.columns))
    shifts = Shifts(*(t.to(device) for t in moved), p.q_len, p.kv_len)
    return replace(lists, shifts=shifts)


def dropout_of(p: Problem, q_at: torch.Tensor, kv_at: torch.Tensor) -> tuple[Dropout | None, torch.Tensor | None]:
    """What `bound` takes, and by what it multiplies weights at these positions."""
    if not p.dropout_p:
        return None, None
    dropout = Dropout(p.dropout_p, torch.tensor([p.seed << 33 | 5], device=q_at.device))
    kept = dropout_mask(dropout.seed, (p.B, p.Hkv * p.group, p.q_len, int(kv_at.max()) + 1), p.dropout_p)
    return dropout, factors_of(kept[:, :, q_at][..., kv_at], p.dropout_p)


def check_problem(p: Problem, device: str, *, backward: bool = True) -> None:
    """out, lse and all gradients are those of dense attention."""
    q_at, kv_at = (t.to(device) for t in p.positions)
    generator = torch.Generator(device=device).manual_seed(p.seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=device)

    Hq, Q_LEN, KV_LEN = p.Hkv * p.group, len(q_at), len(kv_at)
    shapes = (p.B, Hq, Q_LEN, p.D), (p.B, p.Hkv, KV_LEN, p.D), (p.B, p.Hkv, KV_LEN, p.Dv)
    inputs = [random(*shape).to(p.dtype).requires_grad_() for shape in shapes]
    make, learned = score_mods(p.B, Hq, max(p.q_len, -(-p.kv_len // p.size[1]) * p.size[1]), device)[p.score]
    mask_mod = in_whole(p, mask_mods(p.B, device)[p.mask])
    mask = BlockMask._made((Q_LEN, KV_LEN), shifted_lists(p, mask_mod, device), mask_mod)
    dropout, factors = dropout_of(p, q_at, kv_at)
    out, lse, _ = attend(bound(*inputs, make(*learned), mask, None, True, None, None, dropout=dropout), False, p.deterministic)

    def reference(precision):
        leaves = [
            t.detach().to(precision if i < 3 else torch.promote_types(precision, torch.float32)).requires_grad_()
            for i, t in enumerate((*inputs, *learned))
        ]
        score, mask = at_positions(make(*leaves[3:]), q_at, kv_at, score=True), at_positions(mask_mod, q_at, kv_at, score=False)
        return leaves, *dense_attention(*leaves[:3], score, mask, precision=precision, factors=factors)[:2]

    exact, plain = reference(torch.float64), reference(p.dtype)
    error, allowed = (relative_error(t, exact[1]) for t in (out, plain[1]))
    assert error <= max(2 * allowed, FLOORS[p.dtype]), f"error {error:.2e}, a plain computation has {allowed:.2e}"
    seen = exact[2] > -math.inf
    assert torch.equal(lse > -math.inf, seen) and (out[~seen] == 0).all()
    torch.testing.assert_close(lse[seen].double(), exact[2][seen], rtol=2e-6, atol=4e-5 if device == "cuda" else 2e-5)
    if not backward:
        return
    weights = random(*out.shape).to(p.dtype), random(*lse.shape)
    grads = torch.autograd.grad((out, lse), (*inputs, *learned), weights, allow_unused=True)

    fused = gradients_of(*exact, seen, weights, error_times(weights[0], out, exact[1]))
    wanted = [gradients_of(*one, seen, weights) for one in (exact, plain)]
    assert_gradients(grads, *wanted, [p.dtype] * (3 + len(learned)), lse=lse.detach(), fused=fused)
