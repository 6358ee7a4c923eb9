"""What a score_mod reads by the distance between query and key: a table of relative positions, T5's buckets.

A tile has fewer distances than pairs. A thread of Hopper's matrix units has rows r and r + 8 of its warp's 16, and two of every 8 keys: a
key is as far from the lower row as the key 8 to its left from the upper one. So half of what is read serves both rows.
"""

from __future__ import annotations

import torch

from ...registry import remembered
from ..expr import Expr, ModGraph, symbols_in, walk
from ..table.ops import row_of


def sign_of_difference(node: Expr) -> int:
    """1 for kv_idx - q_idx, -1 for q_idx - kv_idx, 0 for all else."""
    if row_of(node).signs != (1, -1) or any(a.op != "symbol" for a in node.args):
        return 0
    return {("kv_idx", "q_idx"): 1, ("q_idx", "kv_idx"): -1}.get(tuple(a.attr for a in node.args), 0)


def sign_of_distance(node: Expr) -> int:
    """1 or -1 if a node is kv_idx - q_idx or q_idx - kv_idx and a number that depends on neither, 0 for all else."""
    if sign_of_difference(node) or not row_of(node).signs:
        return sign_of_difference(node)
    signs = [sign_of_distance(a) for a in node.args]
    others = frozenset().union(*(symbols_in(a) for a, sign in zip(node.args, signs, strict=True) if not sign))
    if sum(map(bool, signs)) != 1 or {"q_idx", "kv_idx"} & others:
        return 0
    return sum(own * sign for own, sign in zip(row_of(node).signs, signs, strict=True))


@remembered("what mods read by distance", 1024)
def read_by_distance(graph: ModGraph) -> tuple[Expr, ...]:
    """The largest expressions of a score_mod that read memory by q_idx and kv_idx and depend on these by their difference alone."""
    nodes = walk(graph.result)
    symbols: dict[int, frozenset[str]] = {}
    reads: dict[int, bool] = {}
    for node in nodes:
        own = {node.attr} if node.op == "symbol" else ()
        symbols[id(node)] = (
            frozenset({"distance"}) if sign_of_difference(node) else (frozenset(own).union(*(symbols[id(a)] for a in node.args)))
        )
        reads[id(node)] = node.op == "load" and "distance" in symbols[id(node)] or any(reads[id(a)] for a in node.args)
    found, seen, stack = [], set(), [graph.result]
    while stack:
        node = stack.pop()
        if id(node) in seen or not reads[id(node)]:
            continue
        seen.add(id(node))
        if symbols[id(node)] <= {"b", "h", "distance"} and node.dtype != torch.bool:
            found.append(node)
        else:
            stack.extend(node.args)
    return tuple(sorted(found, key=nodes.index))
