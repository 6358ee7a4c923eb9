"""Tree attention: tokens of a tree, each of which sees its ancestors and itself.

    query i sees key j  if  j is i, its parent, its parent's parent, ...;  or j comes before the tree

A drafted tree of tokens is verified in one pass of the model that way: SpecInfer (Miao et al. 2023, arXiv 2305.09781), Medusa (Cai et
al. 2024, arXiv 2401.10774). So are sequences that share prefixes trained on, each prefix computed once.

Ancestors need no table of T x T: if a walk through the tree meets node j as number ``enter[j]``, and its descendants right after it,
then j is an ancestor of i where ``enter[j] <= enter[i] < leave[j]``. Blocks of a mask are decided by the least and greatest of these
numbers in a block, so nodes in the order of such a walk (a node, its first child, that one's children, ...) make most blocks empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import MaskMod, has_values, integer_tensor, whole_number
from ._made import picklable


@picklable
def tree(parents: Tensor, start: int | Tensor = 0) -> MaskMod:
    """Attention to ancestors.

    Args:
        parents: integer tensor (T,), or (B, T) for a tree of each batch element: the parent of each node, by its number in the tree, -1
            for a root, of which there may be many. Parents may come before or after their children. Read here and once, without waiting
            for a device: later writes to it change nothing. On a GPU nobody looks whether it is a tree: a parent that is no node is none,
            and what a circle sees is not defined.
        start: the position of node 0, if q_idx and kv_idx count from a text before the tree, which all nodes see: an int, or an integer
            tensor (B,), captured. Queries must be nodes of the tree then, as in `cached_attention`, whose q_idx are positions.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool. With (B, T) parents or a tensor for `start` it depends on `b`.

    Raises:
        TypeError: `parents` is not an integer tensor, or `start` neither an int nor an integer tensor.
        ValueError: `parents` has neither one nor two dimensions, or `start` not one; on the CPU, also a parent that is no node, or a
            circle.

    A root with two children, of which the first has one:

        create_block_mask(tree(torch.tensor([-1, 0, 0, 1])), B=None, H=None, Q_LEN=4, KV_LEN=4)
    """
    parents = integer_tensor("tree", "parents", parents, ("T",), ("B", "T"))
    enter, leave = _walk(parents if parents.dim() == 2 else parents[None])
    if parents.dim() == 1:
        enter, leave = enter[0], leave[0]

        def among_nodes(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (enter[j] <= enter[i]) & (enter[i] < leave[j])
    else:

        def among_nodes(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (enter[b, j] <= enter[b, i]) & (enter[b, i] < leave[b, j])

    if type(start) is int and start == 0:

        def tree(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return among_nodes(b, q_idx, kv_idx)

    elif isinstance(start, Tensor):
        first = integer_tensor("tree", "start", start, ("B",))

        def tree(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < first[b]) | among_nodes(b, q_idx - first[b], (kv_idx - first[b]).clamp_min(0))
    else:
        before = whole_number("tree", "start", start, "pass the number of tokens before the tree", minimum=0)

        def tree(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < before) | among_nodes(b, q_idx - before, (kv_idx - before).clamp_min(0))

    return tree


def _walk(parents: Tensor) -> tuple[Tensor, Tensor]:
    """int32 (B, T) each: when a walk through the tree, parents first, enters each node, and when it leaves the last of its descendants.

    By pointer jumping: after step n, what a node knows is of 2**n generations. No value is read on the host but of tensors that lie there.
    """
    B, T = parents.shape
    parents, looks = parents.long(), parents.device.type == "cpu" and has_values(parents)
    if looks and (parents >= T).any():
        raise ValueError(f"tree(): parents must be below {T}, the number of nodes, got {int(parents.max())}; -1 is for a root")
    if looks and (parents < -1).any():
        raise ValueError(f"tree(): parents must be numbers of nodes, from 0 on, got {int(parents.min())}; -1 is for a root")
    parents = torch.where(parents < T, parents, -1)
    steps = T.bit_length()
    none = torch.full((B, 1), T, dtype=torch.int64, device=parents.device)  # the parent of roots, its own parent
    up = torch.cat([torch.where(parents < 0, T, parents), none], 1)
    size, jump = torch.ones_like(up), up
    for _ in range(steps):
        size, jump = size.scatter_add(1, jump, torch.where(jump == T, 0, size)), jump.gather(1, jump)
    if looks and (jump < T).any():
        node = int((jump < T).nonzero()[0, 1])
        raise ValueError(f"tree(): parents must lead to a root, -1, from each node; from node {node} they go round in a circle")
    # siblings are entered one after another: a node after its parent and all that its earlier siblings hold
    order = up[:, :T].argsort(stable=True)
    held = size.gather(1, order).cumsum(1) - size.gather(1, order)
    of_siblings = torch.zeros_like(up).scatter_reduce(1, up.gather(1, order), held, "amin", include_self=False)
    after = torch.empty_like(held).scatter(1, order, held - of_siblings.gather(1, up.gather(1, order)))
    enter = torch.cat([after + (parents >= 0), torch.zeros_like(none)], 1)
    jump = up
    for _ in range(steps):
        enter, jump = enter + enter.gather(1, jump), jump.gather(1, jump)
    return enter[:, :T].int(), (enter + size)[:, :T].int()
