"""Block masks of torch's, and of its kind, as ours."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

from flexpress.masks.block_mask import BlockMask

from ..codegen.compiling import runs_uncompiled


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
    """The BlockMask of one of torch's, or of its kind, for a call of these lengths: made once, and again after it got other lists or
    lengths. What is written to its lists, the BlockMask follows (given_lists.py)."""
    lengths, tables = foreign_lists(mask, lengths)
    try:
        attributes, owner = vars(mask), weakref.ref(mask)
    except TypeError:  # a mask that nothing can be kept on
        return BlockMask(lengths, *tables, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
    state = lengths, mask.BLOCK_SIZE, *map(id, tables)
    found = attributes.get(_ADOPTED)
    if not isinstance(found, _Adopted) or found.owner() is not mask or found.state != state:
        made = BlockMask(lengths, *tables, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
        found = attributes[_ADOPTED] = _Adopted(owner, state, made)
    found.made.mask_mod = mask.mask_mod
    return found.made


@dataclass(frozen=True, eq=False)
class _Adopted:
    """What was read of a mask, and the BlockMask of it, which holds its tables: no other tensor gets the id of one. The mask has it as an
    attribute: a table of masks would keep alive one that its mask_mod reaches. Copies and pickles of the mask have something empty in its
    place, which files are allowed to have."""

    owner: weakref.ref
    state: tuple
    made: BlockMask

    def __reduce__(self) -> tuple:
        return OrderedDict, ()


_ADOPTED = "_flexpress_adopted"
