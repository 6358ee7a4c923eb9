"""Dilated sliding window: a causal window with gaps.

    query i sees key j  if  0 <= i - j < window * dilation  and  (i - j) % dilation == 0

A query sees `window` keys, itself the first of them, `dilation` apart: as many as `sliding_window(window)`,
from `dilation` times as far. Longformer (Beltagy, Peters and Cohan 2020, arXiv 2004.05150) lets some heads of
its upper layers see further that way; this is the causal half of its pattern.

The gaps are finer than the blocks of a block mask: a kernel still visits all ``window * dilation`` keys.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, whole_number
from ._made import picklable


@picklable
def dilated_window(window: int, dilation: int) -> MaskMod:
    """A causal window of `window` keys, every `dilation`-th one back from the query.

    Args:
        window: number of keys seen, itself included, at least 1; the first queries have fewer to see.
        dilation: distance from one seen key to the next, at least 1; 1 is `sliding_window(window)`.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `window` or `dilation` is not an int.
        ValueError: `window` or `dilation` is below 1.

    Query 10 sees keys 10, 7, 4 and 1:

        create_block_mask(dilated_window(4, 3), B=None, H=None, Q_LEN=16, KV_LEN=16)
    """
    window = whole_number("dilated_window", "window", window, "pass the number of keys a query sees, itself included", minimum=1)
    dilation = whole_number("dilated_window", "dilation", dilation, "pass the distance from one seen key to the next", minimum=1)

    def dilated_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < window * dilation) & (distance % dilation == 0)

    return dilated_window
