"""Jagged windows: every query has a window of its own.

    query i sees key j  if  starts[i] <= j < ends[i]

Any mask whose rows are one run of keys is one: windows that grow, or end where a sentence does; each document's own window; attention
spans that were measured. Masks as a few numbers a row or column instead of a table: FlashMask (Wang et al. 2024, arXiv 2410.01359).

Blocks are decided by the least and greatest of both tensors in a block of queries, so neighbours that have about the same window make
sparse masks.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, integer_tensor
from ._made import picklable


@picklable
def jagged_window(starts: Tensor, ends: Tensor) -> MaskMod:
    """The window of each query, by its first key and the one after its last.

    Args:
        starts: integer tensor (Q_LEN,), or (B, Q_LEN) for windows of each batch element. Captured, not copied.
        ends: the same, in the same shape. Windows are cut off at 0 and KV_LEN; where ``ends <= starts`` a query sees nothing.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool. With tensors (B, Q_LEN) it depends on `b`.

    Raises:
        TypeError: `starts` or `ends` is not an integer tensor.
        ValueError: they have neither one nor two dimensions, or differ in shape.

    Windows that grow with the position:

        position = torch.arange(4096, device="cuda")
        create_block_mask(jagged_window(position - position // 4, position + 1), None, None, 4096, 4096)
    """
    shapes = ("Q_LEN",), ("B", "Q_LEN")
    starts = integer_tensor("jagged_window", "starts", starts, *shapes)
    ends = integer_tensor("jagged_window", "ends", ends, *shapes)
    if starts.shape != ends.shape:
        raise ValueError(
            f"jagged_window(): ends must have the shape of starts, {tuple(starts.shape)}, got {tuple(ends.shape)}; expand it to that shape"
        )
    if starts.dim() == 1:

        def jagged_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx >= starts[q_idx]) & (kv_idx < ends[q_idx])
    else:

        def jagged_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx >= starts[b, q_idx]) & (kv_idx < ends[b, q_idx])

    return jagged_window
