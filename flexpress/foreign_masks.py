"""Block masks of torch's, and of its kind, as ours."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch

from flexpress.block_mask import BlockMask

from .codegen.compiling import runs_uncompiled


def is_foreign_mask(mask) -> bool:
    """Is this a BlockMask of torch's, or of its kind?"""
    return all(hasattr(mask, a) for a in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod", "seq_lengths"))


_WHOLE = 1 << 30  # torch's block size of a mask that stands for no mask, of lengths (1, 1)


def foreign_lists(mask, lengths: tuple[int, int]) -> tuple[tuple[int, int], tuple]:
    """The lengths and the lists of one of torch's, for a call of these lengths. Raises ValueError for a slice without mask_mod."""
    if getattr(mask.mask_mod, "__name__", None) == "_sliced_mask_mod_error":  # what torch puts there
        raise ValueError(
            "block_mask is a slice of torch's BlockMask, which has lost its mask_mod: set block_mask.mask_mod to that of the whole mask, "
            "with its offset, and seq_lengths; or slice a mask of flexpress.create_block_mask, which knows its offsets"
        )
    if mask.BLOCK_SIZE != (_WHOLE, _WHOLE):
        lengths = mask.seq_lengths
    tables = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return lengths, tables


@runs_uncompiled
def adopt(mask, lengths: tuple[int, int]) -> BlockMask:
    """The BlockMask of one of torch's, or of its kind, for a call of these lengths: made once, and again after its lists or lengths were
    changed; at every call if lists are tensors of inference mode, of which torch does not notice that. While a CUDA graph is captured
    it is made for the graph, whose replays read the lists anew."""
    lengths, tables = foreign_lists(mask, lengths)
    kept = isinstance(tables[1], torch.Tensor) and not (tables[1].is_cuda and torch.cuda.is_current_stream_capturing())
    try:
        state = [lengths, mask.BLOCK_SIZE, *(None if t is None else (id(t), t._version) for t in tables)]
        attributes, owner = vars(mask), weakref.ref(mask)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, of inference mode, or a mask that nothing can be kept on
        kept = False
    found = attributes.get(_ADOPTED) if kept else None
    if not isinstance(found, _Adopted) or found.owner() is not mask or found.state != state:
        made = BlockMask(lengths, *tables, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
        if not kept:
            return made
        made._lists.kept()
        found = attributes[_ADOPTED] = _Adopted(owner, state, tables, made)
    found.made.mask_mod = mask.mask_mod
    found.made._lists.ready()
    return found.made


@dataclass(frozen=True, eq=False)
class _Adopted:
    """What was read of a mask, and the BlockMask of it. The mask has it as an attribute: a table of masks would keep alive one that its
    mask_mod reaches. Copies and pickles of the mask have something empty in its place, which files are allowed to have."""

    owner: weakref.ref
    state: list
    tables: tuple  # held, so that no other tensor gets the id of one
    made: BlockMask

    def __reduce__(self) -> tuple:
        return OrderedDict, ()


_ADOPTED = "_flexpress_adopted"
