"""Which rank gets which blocks of a sequence: equal work, equal length, and neighbours together."""

from __future__ import annotations

import numpy as np

NEAR = 1.02  # largest over mean work that is as good as equal


def assign(work: np.ndarray, ranks: int) -> list[np.ndarray]:
    """For each rank the numbers of its blocks, ascending. work: what each block costs, (blocks,).

    All ranks get as many blocks, or one less. Consecutive ones if their work is nearly equal, as in a sliding window. Else about two runs a
    rank on average: under a causal mask the first with the last, the second with the last but one. N. Alon showed that 2 (ranks - 1) cuts
    are enough to share two things fairly ("Splitting necklaces", 1987); here these are blocks and work, but for what a block's size leaves.
    """
    shares = np.arange(ranks + 1) * len(work) // ranks
    consecutive = np.repeat(np.arange(ranks), np.diff(shares))
    found = [consecutive]
    if len(work) > ranks and imbalance(work, consecutive, ranks) > NEAR:
        found.append(_exchanged(work, _divided(work, ranks), ranks))
    owners = min(found, key=lambda owners: imbalance(work, owners, ranks))
    return [np.flatnonzero(owners == rank) for rank in range(ranks)]


def imbalance(work: np.ndarray, owners: np.ndarray, ranks: int) -> float:
    """Largest over mean work of a rank."""
    loads = np.bincount(owners, weights=work, minlength=ranks)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def _divided(work: np.ndarray, ranks: int) -> np.ndarray:
    """The owner of each block: the sequence is divided between two halves of the ranks, and each part again."""
    owners = np.zeros(len(work), dtype=np.int64)
    waiting = [(np.arange(len(work)), 0, ranks)]
    while waiting:
        blocks, first, count = waiting.pop()
        if count == 1 or not len(blocks):
            owners[blocks] = first
            continue
        half = count // 2
        chosen = _fair(work[blocks], -(-len(blocks) * half // count), half / count)
        if chosen[0]:  # who has the first block comes first
            waiting += (blocks[chosen], first, half), (blocks[~chosen], first + half, count - half)
        else:
            waiting += (blocks[~chosen], first, count - half), (blocks[chosen], first + count - half, half)
    return owners


def _fair(work: np.ndarray, size: int, share: float) -> np.ndarray:
    """Which of some blocks in a circle are the `size` neighbours whose work is closest to a share of all.

    Going around, their work is that share on average, so it passes it somewhere: what is missing is less than a step's difference.
    """
    ends = np.concatenate([[0.0], np.cumsum(np.concatenate([work, work[:size]]))])
    sums = ends[size : size + len(work)] - ends[: len(work)]
    first = int(np.abs(sums - share * work.sum()).argmin())
    chosen = np.zeros(len(work), dtype=bool)
    chosen[np.arange(first, first + size) % len(work)] = True
    return chosen


def _exchanged(work: np.ndarray, owners: np.ndarray, ranks: int) -> np.ndarray:
    """Owners after blocks of the busiest rank changed places with smaller ones of others, near ones if possible, as long as that helps."""
    loads = np.bincount(owners, weights=work, minlength=ranks)
    enough = NEAR * loads.mean()
    for _ in range(8 * ranks):
        most = int(loads.argmax())
        if loads[most] <= enough:
            break
        mine, theirs = (_some(np.flatnonzero(of), work, count) for of, count in ((owners == most, 64), (owners != most, 1024)))
        gain = work[mine][:, None] - work[theirs]
        after = np.maximum(loads[most] - gain, loads[owners[theirs]] + gain)
        distance = np.abs(mine[:, None] - theirs)
        i, j = np.unravel_index(np.where(after <= enough, distance, len(work) + after).argmin(), after.shape)
        if after[i, j] >= loads[most]:
            break
        other = owners[theirs[j]]
        owners[mine[i]], owners[theirs[j]] = other, most
        loads[most] -= gain[i, j]
        loads[other] += gain[i, j]
    return owners


def _some(blocks: np.ndarray, work: np.ndarray, count: int) -> np.ndarray:
    """At most so many of some blocks, of all sizes."""
    if len(blocks) <= count:
        return blocks
    return blocks[np.argsort(work[blocks], kind="stable")[np.linspace(0, len(blocks) - 1, count).astype(int)]]
