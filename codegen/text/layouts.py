"""How captured tensors lie in memory, as far as a kernel's text knows it."""

from __future__ import annotations

from typing import NamedTuple

from ..mod.expr import MASK_SYMBOLS, ModGraph
from ..mod.graphs.index_range import value_range
from ..mod.graphs.loads import is_gather, loads_of
from ..registry import remembered

LARGEST_BLOCK_N = 256


class TensorLayout(NamedTuple):
    """What the text knows of a captured tensor's layout; the rest is known at launch.

    strides   per dimension "0", "1", "n" (a kernel argument) or "v" (an argument in units of 16 bytes, so that the compiler
              knows rows are aligned)
    wide      offsets or sizes may pass 2**31 elements: compute them in int64
    inside    the indices that are known to lie inside, for these lengths: (load, dimension), loads numbered as in `loads_of`
    """

    strides: tuple[str, ...]
    wide: bool = False
    inside: frozenset[tuple[int, int]] = frozenset()


def layouts_of(
    graph: ModGraph, captured: list, extents: tuple[int | range, ...], whole: ModGraph | None = None
) -> tuple[TensorLayout, ...]:
    """What the text may know of the captured tensors: unit and zero strides, 64-bit offsets, indices that need no check.

    extents   the ranges of b, h, q_idx and kv_idx: a number n for 0 to n - 1, or a `range`
    whole     the mod that `graph` is a part of: texts of one kernel share arguments, so a stride has one unit in all of them
    """
    count = len(graph.tensors)
    if not count:
        return ()
    return _layouts(graph, whole or graph, tuple([(t.shape, t.stride()) for t in captured[:count]]), tuple(captured[count:]), extents)


@remembered("layouts of captured tensors", 4096)
def _layouts(graph: ModGraph, whole: ModGraph, tensors: tuple, scalars: tuple, extents: tuple) -> tuple[TensorLayout, ...]:
    known = (range(n) if isinstance(n, int) else n for n in extents)
    reached = {symbol: (r.start, r.stop - 1) for symbol, r in zip(MASK_SYMBOLS, known, strict=True)}
    reached["kv_idx"] = 0, -(-extents[3] // LARGEST_BLOCK_N) * LARGEST_BLOCK_N - 1  # kernels do not clamp it in the tail block
    inside: list[set] = [set() for _ in tensors]
    # tensors read element by element, where checks cost, or in rows: alignment pays
    by_rows = {load.attr for load in loads_of(whole) if is_gather(load) or load.op == "row"}
    for number, load in enumerate(loads_of(graph)):
        spreads = is_gather(load)
        for dim, index in enumerate(load.args):
            if not spreads and index.op == "symbol" and index.attr in ("q_idx", "kv_idx"):
                continue  # a vector's check is cheap, and a new length must not compile anything
            low, high = value_range(index, reached, scalars)
            if low >= 0 and high < tensors[load.attr][0][dim]:
                inside[load.attr].add((number, dim))
    layouts = []
    for i, ((shape, strides), known) in enumerate(zip(tensors, inside, strict=True)):
        vector = 16 // graph.tensors[i].dtype.itemsize if i in by_rows and strides[-1] == 1 else 1 << 62
        pattern = tuple("0" if s == 0 else "1" if s == 1 else "v" if s % vector == 0 else "n" for s in strides)
        layouts.append(TensorLayout(pattern, max((reach_of(shape, strides), *shape)) >= 1 << 31, frozenset(known)))
    return tuple(layouts)


def reach_of(shape, strides) -> int:
    """The offset of the last element in memory."""
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
