"""Global tokens and a sliding window: a few tokens see all and are seen by all, others see their neighbours.

    query i sees key j  if  |i - j| < window  or  i < num_global  or  j < num_global

The first `num_global` positions are the global ones: a classification token, a question before its text.
Longformer (Beltagy, Peters and Cohan 2020, arXiv 2004.05150) and BigBird (Zaheer et al. 2020, arXiv
2007.14062) build on this pattern; BigBird adds random blocks, which are not here, and Longformer projects its
global tokens by weights of their own, which is outside attention.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, whole_number
from ._made import picklable


@picklable
def global_sliding(window: int, num_global: int) -> MaskMod:
    """A symmetric window plus the first `num_global` tokens as global ones.

    The window is counted as in `sliding_window`, to each side: its causal half is ``sliding_window(window)``.
    Apart from the global tokens a query thus sees ``2 * window - 1`` keys.

    Args:
        window: number of keys seen to one side, itself included, at least 1.
        num_global: number of global tokens, at least 0; 0 leaves the window alone.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `window` or `num_global` is not an int.
        ValueError: `window` is below 1 or `num_global` below 0.

        create_block_mask(global_sliding(256, 1), B=None, H=None, Q_LEN=4096, KV_LEN=4096)
    """
    window = whole_number(
        "global_sliding", "window", window, "pass the number of keys a query sees to one side, itself included", minimum=1
    )
    num_global = whole_number(
        "global_sliding", "num_global", num_global, "pass how many of the first tokens see all and are seen by all", minimum=0
    )

    def global_sliding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = (q_idx - kv_idx < window) & (kv_idx - q_idx < window)
        return near | (q_idx < num_global) | (kv_idx < num_global)

    return global_sliding
