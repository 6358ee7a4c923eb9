"""Distances in a graph: nodes attend to each other with a learned bias for how far apart they are.

    graph_bias:       score + weight[distances[i, j], h]
    graph_neighbors:  node i sees node j  if  0 <= distances[i, j] <= hops

Graphormer (Ying et al. 2021, arXiv 2106.05234, section 3.1.2) learns a number for each head and each length of a shortest path. The
matrix may hold any other whole numbers as well: kinds of edges, bins of distances in space.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import MaskMod, ScoreMod, float_tensor, has_values, integer_tensor, whole_number
from ._made import picklable


@picklable
def graph_bias(distances: Tensor, weight: Tensor) -> ScoreMod:
    """Adds ``weight[distances[q_idx, kv_idx], h]`` to the score.

    Args:
        distances: integer tensor (N, N), or (B, N, N) for a graph of each batch element; `graph_distances` makes it of edges. int8 is
            read fastest. One that `weight` has no row for adds nothing here; torch's own flex_attention wants none of that. Negative ones
            count from the end, as torch's indices do: -1 adds `weight[-1]`. Captured, not copied.
        weight: floating-point tensor (distances, Hq), the layout of an ``nn.Embedding``'s weight. May require grad. Captured, not copied.

    Returns:
        score_mod: (score, b, h, q_idx, kv_idx), 0-dim float and integers -> 0-dim float.

    Raises:
        TypeError: `distances` is not an integer tensor, or `weight` not a floating-point one.
        ValueError: `distances` has neither two nor three dimensions, or `weight` not two.

        flex_attention(q, k, v, score_mod=graph_bias(graph_distances(edges, N, 8), weight))  # weight: (9, Hq)
    """
    distances = integer_tensor("graph_bias", "distances", distances, ("N", "N"), ("B", "N", "N"))
    weight = float_tensor("graph_bias", "weight", weight, ("distances", "Hq"))
    if distances.dim() == 2:

        def graph_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + weight[distances[q_idx, kv_idx].to(torch.int32), h]
    else:

        def graph_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + weight[distances[b, q_idx, kv_idx].to(torch.int32), h]

    return graph_bias


@picklable
def graph_neighbors(distances: Tensor, hops: int) -> MaskMod:
    """Lets nodes see those that are at most `hops` edges away.

    Args:
        distances: as for `graph_bias`. Every position is looked at, in no order that bounds could tell.
        hops: the largest distance that is seen, at least 0.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `distances` is not an integer tensor, or `hops` not an int.
        ValueError: `distances` has neither two nor three dimensions, or `hops` is below 0.

        create_block_mask(graph_neighbors(distances, 2), B=None, H=None, Q_LEN=N, KV_LEN=N)
    """
    distances = integer_tensor("graph_neighbors", "distances", distances, ("N", "N"), ("B", "N", "N"))
    hops = whole_number("graph_neighbors", "hops", hops, "pass the largest distance that is seen", minimum=0)
    if distances.dim() == 2:

        def graph_neighbors(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (distances[q_idx, kv_idx] >= 0) & (distances[q_idx, kv_idx] <= hops)
    else:

        def graph_neighbors(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (distances[b, q_idx, kv_idx] >= 0) & (distances[b, q_idx, kv_idx] <= hops)

    return graph_neighbors


def graph_distances(edges: Tensor, num_nodes: int, max_distance: int) -> Tensor:
    """How many edges the shortest path from node i to node j has.

    Args:
        edges: integer tensor (2, E), from and to; an undirected edge is there twice.
        num_nodes: N.
        max_distance: 1 to 32767; nodes further apart than ``max_distance - 1``, and those without a path, have this distance.

    Returns:
        int8 tensor (N, N), int16 if `max_distance` is above 127; on the device of `edges`, by ``max_distance - 1`` products of N x N.

    Raises:
        TypeError: `edges` is not an integer tensor, or a number not an int.
        ValueError: `edges` does not have two rows, or has a node outside of 0 to N - 1, for which a device is waited; a number is below 1,
            or `max_distance` above 32767.

        graph_distances(torch.tensor([[0, 1], [1, 2]]), 3, 4)  # [[0, 1, 2], [4, 0, 1], [4, 4, 0]]
    """
    recipe = "graph_distances"
    edges = integer_tensor(recipe, "edges", edges, ("2", "E"))
    if edges.shape[0] != 2:
        raise ValueError(f"{recipe}(): edges must have shape (2, E), got {tuple(edges.shape)}; pass edges.T if each row is an edge")
    nodes = whole_number(recipe, "num_nodes", num_nodes, "pass the number of nodes", minimum=1)
    farthest = whole_number(recipe, "max_distance", max_distance, "pass the distance of nodes that are far apart", minimum=1)
    if farthest > 32767:
        raise ValueError(f"{recipe}(): max_distance must be at most 32767, which int16 holds, got {farthest}; pass a smaller one")
    edges = edges.long()
    outside = (edges < 0) | (edges >= nodes)
    if has_values(edges) and outside.any():
        first = edges[:, outside.any(0)][:, 0].tolist()
        raise ValueError(f"{recipe}(): edges must name nodes from 0 to {nodes - 1}, got the edge {first}; pass a larger num_nodes")
    step = torch.zeros(nodes, nodes, dtype=torch.float32, device=edges.device)
    step[edges[0], edges[1]] = 1.0
    near = torch.eye(nodes, dtype=torch.float32, device=edges.device)
    distances = torch.where(near > 0, 0, farthest).to(torch.int8 if farthest <= 127 else torch.int16)
    for distance in range(1, farthest):
        near = ((near @ step + near) > 0).float()  # reached in so many steps, or in fewer
        distances = torch.where((near > 0) & (distances == farthest), distance, distances)
    return distances
