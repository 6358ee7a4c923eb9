"""Causal masks: no query sees a key that comes after it.

    causal:                 query i sees key j  if  j <= i
    causal_offset(offset):  query i sees key j  if  j <= i + offset

The two agree at offset 0. With Q_LEN == KV_LEN that is the mask of a decoder (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3). With
Q_LEN != KV_LEN, `causal` aligns the triangle to the top left corner: query 0 sits at key 0. A decoder that runs its newest Q_LEN tokens
against KV_LEN cached keys needs the bottom right corner, where the last query sees every key: ``causal_offset(KV_LEN - Q_LEN)``.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, whole_number
from ._made import picklable


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The mask_mod itself, not a factory: pass it as it is.

    Takes 0-dim integers (batch, query head, query position, key position), returns a 0-dim bool.

        create_block_mask(causal, B=None, H=None, Q_LEN=4096, KV_LEN=4096)
    """
    return q_idx >= kv_idx


@picklable
def causal_offset(offset: int) -> MaskMod:
    """A causal mask whose queries start at key position `offset`.

    Args:
        offset: position, among the keys, of query 0. ``KV_LEN - Q_LEN`` aligns the last query with the last
            key. Below zero, the first ``-offset`` queries see nothing and their output is 0.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool.

    Raises:
        TypeError: `offset` is not an int. One offset per batch element takes a mask_mod of one's own
            (``q_idx + offset[b] >= kv_idx``).

    Eight new tokens against a cache of 1024 keys:

        create_block_mask(causal_offset(1016), B=None, H=None, Q_LEN=8, KV_LEN=1024)
    """
    offset = whole_number("causal_offset", "offset", offset, "pass KV_LEN - Q_LEN to align the last query with the last key")

    def causal_offset(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + offset >= kv_idx

    return causal_offset
