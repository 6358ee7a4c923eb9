"""Document masks: several documents packed into one sequence, none of which sees another.

    query i sees key j  if  ids[i] == ids[j]   [and the inner mask, if one is given, allows it]

Krell et al. 2021 (arXiv 2107.02027) pack short sequences this way so that no compute goes into padding, and
mask attention so that the result is that of the unpacked sequences.

Queries and keys share one packing, so Q_LEN == KV_LEN == S. Documents need not be contiguous, but block masks
are only sparse where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import MaskMod, function, integer_tensor, whole_number
from ._made import picklable


@picklable
def document(ids: Tensor, mask_mod: MaskMod | None = None) -> MaskMod:
    """Attention within documents.

    Args:
        ids: integer tensor, (S,) for one packing shared by the batch or (B, S) for one per batch element: the
            document of each token. Any values will do; padding is best given an id of its own. Captured, not
            copied.
        mask_mod: what else must hold, ``document(ids, causal)`` for example. It is called with positions in
            the packed sequence. Masks of the distance between query and key (`causal`, windows) mean the same
            there as in the document alone; one that counts from the start (`prefix_lm`, `global_sliding`)
            does not.

    Returns:
        mask_mod: (b, h, q_idx, kv_idx), 0-dim integers -> 0-dim bool. With (B, S) ids it depends on `b`.

    Raises:
        TypeError: `ids` is not an integer tensor, or `mask_mod` is not a function.
        ValueError: `ids` has neither one nor two dimensions.

        create_block_mask(document(ids, causal), B=None, H=None, Q_LEN=ids.shape[0], KV_LEN=ids.shape[0])
    """
    ids = integer_tensor("document", "ids", ids, ("S",), ("B", "S"))
    if ids.dim() == 1:

        def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ids[q_idx] == ids[kv_idx]
    else:

        def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return ids[b, q_idx] == ids[b, kv_idx]

    if mask_mod is None:
        return document
    inner = function("document", "mask_mod", mask_mod, "pass one (b, h, q_idx, kv_idx) -> bool, or None")

    def document_and_inner(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document(b, h, q_idx, kv_idx) & inner(b, h, q_idx, kv_idx)

    return document_and_inner


def document_from_offsets(offsets: Tensor, total: int | None = None, mask_mod: MaskMod | None = None) -> MaskMod:
    """`document` for a packing given by where its documents end, the cu_seqlens of variable-length kernels.

    Args:
        offsets: integer tensor (documents + 1,): 0, then the end of each document, never falling. Document n
            is the tokens ``offsets[n] <= position < offsets[n + 1]``; equal neighbours are an empty document.
        total: S, the length of the packed sequence; ``offsets[-1]`` when left out. Tokens from
            ``offsets[-1]`` on are padding and form one more document, apart from all others.
        mask_mod: as for `document`.

    Returns:
        mask_mod: that of ``document(ids, mask_mod)``. The ids, an int32 tensor (S,) on the device of
        `offsets`, are computed here and once: later writes to `offsets` change nothing.

    Raises:
        TypeError: `offsets` is not an integer tensor, `total` not an int or `mask_mod` not a function.
        ValueError: `offsets` is not one-dimensional, has no document, does not begin with 0 or falls
            somewhere, or `total` is below ``offsets[-1]`` or below 1. Checking reads the values, so on an
            accelerator the call waits for them.

        mask_mod = document_from_offsets(torch.tensor([0, 300, 812, 1024]), mask_mod=causal)
    """
    recipe = "document_from_offsets"
    ends = integer_tensor(recipe, "offsets", offsets, ("documents + 1",)).long()
    values = ends.tolist()
    if len(values) < 2 or values[0] != 0 or values != sorted(values):
        shown = str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
        raise ValueError(
            f"{recipe}(): offsets must be 0 and then the end of each document, never falling, "
            f"got {shown}; make torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        )
    length = values[-1] if total is None else total
    length = whole_number(recipe, "total", length, "pass the length of the packed sequence, padding included", minimum=max(1, values[-1]))
    positions = torch.arange(length, device=ends.device)
    ids = torch.searchsorted(ends[1:].contiguous(), positions, right=True, out_int32=True)
    return document(ids, mask_mod)
