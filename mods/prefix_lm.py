"""Prefix language model: the prefix is read in both directions, the rest is causal.

    query i sees key j  if  j < prefix_length  or  j <= i

Raffel et al. 2019 (arXiv 1910.10683, section 3.2.1) compare this mask with the fully visible and the causal
one; the prefix is the input of the task and the rest the answer. Dong et al. 2019 (UniLM, arXiv 1905.03197)
train with it as their sequence-to-sequence mask.
"""

from __future__ import annotations

from torch import Tensor

from ._arguments import MaskMod, integer_tensor, whole_number
from ._made import picklable


@picklable
def prefix_lm(prefix_length: int | Tensor) -> MaskMod:
    """A causal mask under which everyone also sees the first `prefix_length` keys.

    Args:
        prefix_length: either one int, at least 0, for the whole batch (0 is plain causal), or an integer
            tensor (B,) with the length of each batch element. The tensor is captured, not copied: writing new
            lengths into it changes the mask, and a block mask made before that must be made again. Values
            below 0 act as 0.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool. With a tensor it depends on `b`, so its
        block mask needs ``B=prefix_length.shape[0]``.

    Raises:
        TypeError: `prefix_length` is neither an int nor an integer tensor.
        ValueError: an int below 0, or a tensor that is not one-dimensional.

        create_block_mask(prefix_lm(torch.tensor([17, 40])), B=2, H=None, Q_LEN=512, KV_LEN=512)
    """
    if isinstance(prefix_length, Tensor):
        prefix_lengths = integer_tensor("prefix_lm", "prefix_length", prefix_length, ("B",))

        def prefix_lm(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < prefix_lengths[b]) | (q_idx >= kv_idx)
    else:
        prefix_length = whole_number(
            "prefix_lm", "prefix_length", prefix_length, "pass one length, or an integer tensor (B,) of lengths", minimum=0
        )

        def prefix_lm(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx < prefix_length) | (q_idx >= kv_idx)

    return prefix_lm
