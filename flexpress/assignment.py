"""Which rank gets which blocks of a sequence: equal work, equal length, and neighbours together where that costs nothing."""

from __future__ import annotations

import heapq

import numpy as np

NEAR = 1.02  # largest over mean work that is as good as equal


def assign(work: np.ndarray, ranks: int) -> list[np.ndarray]:
    """For each rank the numbers of its blocks, ascending. work: what each block costs, (blocks,).

    Runs of blocks are dealt out, as long as possible while work is nearly equal: one run a rank for a sliding window, two for a causal mask
    (the first with the last, the second with the last but one), single blocks for documents of many lengths. All ranks get as many
    runs, but for those that are missing at the end.
    """
    blocks, best = len(work), None
    for length in _lengths(blocks, ranks):
        starts = np.arange(0, blocks, length)
        owners = _dealt(np.add.reduceat(work, starts), ranks)
        owners = np.repeat(owners, length)[:blocks]
        balance = imbalance(work, owners, ranks)
        if best is None or balance < best[0]:
            best = balance, owners
        if balance <= NEAR:
            break
    owners = best[1] if best else np.zeros(0, dtype=np.int64)
    return [np.flatnonzero(owners == rank) for rank in range(ranks)]


def imbalance(work: np.ndarray, owners: np.ndarray, ranks: int) -> float:
    """Largest over mean work of a rank."""
    loads = np.bincount(owners, weights=work, minlength=ranks)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def _lengths(blocks: int, ranks: int) -> list[int]:
    """Lengths of runs to try, long ones first: those that give each rank as many blocks, or nearly where ranks do not divide them."""
    share = _ceil(blocks, ranks)
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= share]
    if share and blocks % ranks == 0:
        divisors = [n for n in range(share, 0, -1) if share % n == 0]
        return list(dict.fromkeys(next(d for d in divisors if d <= _ceil(share, n)) for n in counts))
    runs = dict.fromkeys(_ceil(share, n) for n in counts)
    return [n for n in runs if n == 1 or _ceil(_ceil(blocks, n), ranks) * n <= 1.05 * share] or [1] if blocks else []


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _dealt(work: np.ndarray, ranks: int) -> np.ndarray:
    """The owner of each run: the costliest first, to the rank with the least work that has room; then pairs change places."""
    room, owners = _ceil(len(work), ranks), np.empty(len(work), dtype=np.int64)
    waiting, taken = [(0.0, rank) for rank in range(ranks)], [0] * ranks
    for run in np.argsort(-work, kind="stable"):
        load, rank = heapq.heappop(waiting)
        owners[run] = rank
        taken[rank] += 1
        if taken[rank] < room:
            heapq.heappush(waiting, (load + float(work[run]), rank))
    return _exchanged(work, owners, ranks)


def _exchanged(work: np.ndarray, owners: np.ndarray, ranks: int) -> np.ndarray:
    """Owners after runs of the busiest rank changed places with smaller ones of the idlest, as long as that helps."""
    loads = np.bincount(owners, weights=work, minlength=ranks)
    for _ in range(4 * ranks):
        most, least = int(loads.argmax()), int(loads.argmin())
        if loads[most] <= NEAR * loads.mean() and loads[least] * NEAR >= loads.mean():
            break
        mine, theirs = (np.flatnonzero(owners == rank) for rank in (most, least))
        if not len(mine) or not len(theirs):
            break
        gain = work[mine][:, None] - work[theirs][None, :]
        after = np.maximum(loads[most] - gain, loads[least] + gain)
        i, j = np.unravel_index(after.argmin(), after.shape)
        if after[i, j] >= loads[most]:
            break
        owners[mine[i]], owners[theirs[j]] = least, most
        loads[most] -= gain[i, j]
        loads[least] += gain[i, j]
    return owners
