"""Neighbours in space: who is not further away than a radius.

    within_radius:  |places[i] - places[j]| <= radius

The graph of atoms within a cutoff (Schütt et al. 2017, SchNet, arXiv 1706.08566) and the ball query of point clouds (Qi et al. 2017,
PointNet++, arXiv 1706.02413, section 3.2). Bounds of a block are boxes around its places: where places that follow one another lie together
(sort them along a curve that fills space), most blocks are empty and cost nothing.

    mask = create_block_mask(within_radius(places, 5.0), None, None, S, S)
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, float_tensor, positive_number, short
from ._made import picklable


@picklable
def within_radius(places: Tensor, radius: float) -> MaskMod:
    """Allows keys whose place is not further than `radius` from the query's.

    Args:
        places: floating-point tensor (S, 3), or (B, S, 3) for places of each batch entry, on the device of the query; any dimension up to
            64 for 3. Queries and keys are the same S. Captured, not copied.
        radius: finite and above 0, in the unit of places. Another radius needs no new kernel.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `places` is not a floating-point tensor, or `radius` no number.
        ValueError: `places` does not have 2 or 3 dimensions, or its last extent is not 1 to 64, or `radius` is not finite and above 0.
    """
    places = float_tensor("within_radius", "places", places, ("S", "3"), ("B", "S", "3"))
    short("within_radius", "places", places.shape[-1], "dimensions")
    radius = positive_number("within_radius", "radius", radius, "it is the largest distance that is seen")
    limit = radius * radius

    if places.dim() == 2:

        def within_radius(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            apart = places[q_idx].float() - places[kv_idx].float()  # half precision holds no squares above 65504
            return (apart * apart).sum(-1) <= limit

    else:

        def within_radius(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            apart = places[b, q_idx].float() - places[b, kv_idx].float()
            return (apart * apart).sum(-1) <= limit

    return within_radius
