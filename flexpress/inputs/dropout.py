"""Dropout of attention weights: which are kept follows from a seed and from b, h, q_idx and kv_idx alone."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from flexpress.inputs.checks import extent

from ..codegen.mod.captured.tensors import check_kind, is_moving, readable
from ..codegen.plan.extras import DROPOUT_STEPS, dropout_numbers
from ..codegen.run.layouts import aligned

_ROUNDS = 7
_PRODUCTS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


class Dropout(NamedTuple):
    """p, and an int64 seed on the call's device, of shape (1,), or (3,) with the first batch entry and head of a part of the whole.

    given   by the user, or drawn
    """

    p: float
    seed: torch.Tensor
    given: bool = True


def read_dropout(p, seed: torch.Tensor | None, device: torch.device) -> Dropout | None:
    """What dropout_p and dropout_seed say, None for no dropout. Raises TypeError or ValueError."""
    if isinstance(p, torch.SymFloat):  # of torch's compiler, which compiles anew for another one
        p = float(p)
    if p is True or not isinstance(p, numbers.Real):  # False is what `self.training and p` gives
        raise TypeError(f"dropout_p must be a number from 0 to 1, got {type(p).__name__}")
    if not 0.0 <= p <= 1.0:  # NaN, too
        raise ValueError(f"dropout_p must be a number from 0 to 1, got {p}")
    if isinstance(seed, torch.Tensor) and not is_moving(seed):  # one of a transform is looked at there
        check_kind("dropout_seed", seed)
    if seed is not None and (not isinstance(seed, torch.Tensor) or seed.dtype != torch.int64 or seed.numel() != 1):
        shown = f"{seed.dtype} {tuple(seed.shape)}" if isinstance(seed, torch.Tensor) else type(seed).__name__
        raise TypeError(f"dropout_seed must be an int64 tensor of one element, got {shown}")
    if seed is not None and seed.device != device:
        raise ValueError(f"dropout_seed is on {seed.device}, but query is on {device}; move it: dropout_seed.to(query.device)")
    dropped = round(p * DROPOUT_STEPS)
    if dropped == 0:
        return None
    given = seed is not None
    if seed is None:
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device=device)
    return Dropout(dropped / DROPOUT_STEPS, seed.reshape(1), given)


def of_first_rank(dropout: Dropout, groups: Iterable[dist.ProcessGroup | None]) -> Dropout:
    """With one seed on all ranks: of seeds that were drawn, that of each group's first rank."""
    if dropout.given:
        return dropout
    seed = dropout.seed.clone()
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.broadcast(seed, group=group, group_src=0)
    return dropout._replace(seed=seed)


def of_part(dropout: Dropout, first_b: int, first_h: int) -> Dropout:
    """Dropout of the batch entries and heads from these on, which drops what it drops of all."""
    own = torch.empty(3, dtype=torch.int64, device=dropout.seed.device)
    own[:1] = dropout.seed
    own[1].fill_(first_b)
    own[2].fill_(first_h)
    return dropout._replace(seed=own)


def readable_seed(seed: torch.Tensor) -> torch.Tensor:
    """A seed as kernels read it, at a multiple of 16 bytes."""
    return aligned(readable("dropout_seed", seed))


def dropout_mask(seed: torch.Tensor, shape: tuple[int, int, int, int], dropout_p: float) -> torch.Tensor:
    """Which weights flex_attention(..., dropout_p=dropout_p, dropout_seed=seed) keeps: bool (B, Hq, Q_LEN, KV_LEN), on seed's device.

    seed    int64 (1,)          shape   (B, Hq, Q_LEN, KV_LEN); of packed sequences, b is the number of one

    The output is (weights * kept / (1 - p)) @ value, with the softmax's weights and dropout_p rounded to p, a multiple of 2**-14. This is
    for tests and for looking: a mask of the size that kernels never have in memory.

    Source: Philox-4x32-7 (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3). Counters are the places of a group of 64
    weights, b and h; the key is the seed. Of its 128 bits and of sums of these every weight has a number of 14 bits, and is dropped where
    it is less than p * 2**14. The 6 bits that say most are independent of those of any other weight.
    """
    if not isinstance(seed, torch.Tensor):
        raise TypeError(f"seed must be an int64 tensor of one element, got {type(seed).__name__}")
    dropout = read_dropout(dropout_p, seed, seed.device)
    if not isinstance(shape, (tuple, list)) or len(shape) != 4:
        raise TypeError(f"shape must be (B, Hq, Q_LEN, KV_LEN), got {shape!r}")
    extents = tuple(extent(name, n) for name, n in zip(("B", "Hq", "Q_LEN", "KV_LEN"), shape, strict=True))
    if dropout is None:
        return torch.ones(extents, dtype=torch.bool, device=seed.device)
    return random_numbers(dropout.seed, extents) >= dropout_numbers(dropout.p)["DROPPED"]


def random_numbers(seed: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """What says whether each weight is kept, as int64: numbers of 14 bits, those of the kernels."""
    groups = *shape[:2], 8 * -(-shape[2] // 16), 4 * -(-shape[3] // 128)
    b, h, group_m, group_n = (torch.arange(size, device=seed.device).view([-1, *[1] * (3 - i)]) for i, size in enumerate(groups))
    m, n = (torch.arange(size, device=seed.device) for size in shape[2:])
    w = philox(seed, *torch.broadcast_tensors(group_m, group_n, b, h))
    x = mixed(w, 12)
    y = mixed(x, 5)
    m, group_n = m[:, None], (n >> 7) * 4 + ((n & 7) >> 1)
    rows, place = (m >> 4) * 8 + (m & 7), (m >> 3 & 1) * 16 + (n & 1) * 8 + 7 - (n >> 3 & 7)
    number = torch.zeros(shape, dtype=torch.int64, device=seed.device)
    for one, other in zip((w[0], w[1], x[0], x[1], y[0], y[1]), (w[2], w[3], x[2], x[3], y[2], y[3]), strict=True):
        word = torch.where((n & 64) == 0, one[:, :, rows, group_n], other[:, :, rows, group_n])
        number = number << 1 | word >> place & 1
    for word in (y[1], y[3], y[0], y[2], x[1], x[3], x[0], x[2]):
        number = number << 1 | word[:, :, rows, group_n] >> (place ^ 16) & 1
    return number


def mixed(words: list[torch.Tensor], left: int) -> list[torch.Tensor]:
    """Four words of four: each the exclusive or of one, of the next one turned to the left, and of the one after that."""
    turned = [(word << left | word >> 32 - left) & _LOW for word in words]
    return [words[i] ^ turned[(i + 1) % 4] ^ words[(i + 2) % 4] for i in range(4)]


def philox(seed: torch.Tensor, *words: torch.Tensor) -> list[torch.Tensor]:
    """Philox-4x32-7 of four words of 32 bits, as int64."""
    keys = [seed.reshape(()) & _LOW, (seed.reshape(()) >> 32) & _LOW]
    for _ in range(_ROUNDS):
        low, high = zip(*(_product(words[i], factor) for i, factor in zip((0, 2), _PRODUCTS, strict=True)), strict=True)
        words = [high[1] ^ words[1] ^ keys[0], low[1], high[0] ^ words[3] ^ keys[1], low[0]]
        keys = [(key + step) & _LOW for key, step in zip(keys, _STEPS, strict=True)]
    return list(words)


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower and the upper 32 bits of a product of 32-bit numbers, which int64 does not hold."""
    low, high = (word & 0xFFFF) * factor, (word >> 16) * factor
    total = low + ((high & 0xFFFF) << 16)
    return total & _LOW, ((total >> 32) + (high >> 16)) & _LOW
