"""Sliding windows: a query sees the keys near it.

    sliding_window(window):                     query i sees key j  if  0 <= i - j < window
    sliding_window_bidirectional(left, right):  query i sees key j  if  i - left <= j <= i + right

Conventions for the size differ from library to library. Here `window` counts the keys a query sees, itself
included: ``sliding_window(1)`` sees only itself, ``sliding_window(n)`` with n >= Q_LEN is plain causal. A
size that counts the keys *before* the query, ``i - j <= w``, is ``sliding_window(w + 1)``, and so is
``sliding_window_bidirectional(w, 0)``.

The symmetric window is that of Longformer (Beltagy, Peters and Cohan 2020, arXiv 2004.05150), which gives a
width w and looks w / 2 to each side: ``sliding_window_bidirectional(w // 2, w // 2)``. The causal one is that
of Mistral 7B (Jiang et al. 2023, arXiv 2310.06825), where L stacked layers carry information about L * window
tokens far.

Both take query 0 to sit at key 0, also where Q_LEN != KV_LEN.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, whole_number
from ._made import picklable


@picklable
def sliding_window(window: int) -> MaskMod:
    """A causal window of `window` keys: the query's own position and the ``window - 1`` before it.

    Args:
        window: number of keys seen, itself included, at least 1; the first queries have fewer to see.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `window` is not an int.
        ValueError: `window` is below 1.

        create_block_mask(sliding_window(1024), B=None, H=None, Q_LEN=32768, KV_LEN=32768)
    """
    window = whole_number("sliding_window", "window", window, "pass the number of keys a query sees, itself included", minimum=1)

    def sliding_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return sliding_window


@picklable
def sliding_window_bidirectional(left: int, right: int) -> MaskMod:
    """A window of ``left + 1 + right`` keys around the query.

    Args:
        left: number of keys seen before the query, at least 0.
        right: number of keys seen after the query, at least 0.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `left` or `right` is not an int.
        ValueError: `left` or `right` is below 0.

        create_block_mask(sliding_window_bidirectional(256, 256), B=None, H=None, Q_LEN=4096, KV_LEN=4096)
    """
    recipe = "sliding_window_bidirectional"
    left = whole_number(recipe, "left", left, "pass the number of keys seen before the query", minimum=0)
    right = whole_number(recipe, "right", right, "pass the number of keys seen after the query", minimum=0)

    def sliding_window_bidirectional(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)

    return sliding_window_bidirectional
