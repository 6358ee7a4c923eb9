"""Block masks taken apart, into tensors, numbers and a mask_mod, and put together again: what torch's compiler hands on."""

from __future__ import annotations

from types import SimpleNamespace

from flexpress.masks.block_mask import BlockMask

from ..codegen.run.block_lists import lists_of


def parts_of_mask(mask) -> tuple[tuple, tuple, object]:
    """The tables of a mask, ours or torch's, what else there is to know of it, and its mask_mod. torch's compiler traces this."""
    if isinstance(mask, BlockMask) and mask._given is None:  # lists of a user are as torch's
        whole = mask._whole
        made_for = mask._whole_lengths if mask._changed else None
        decided = mask._decided_as_made
        facts = mask._seq_lengths, *mask._size, whole.interior, decided, mask._cuts, mask._fixed, made_for
        return whole.counts_and_indices, facts, mask.mask_mod
    tables = (mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_indices is not None:
        tables = (*tables, mask.full_kv_num_blocks, mask.full_kv_indices)
    return tables, (mask.seq_lengths, *mask.BLOCK_SIZE), mask.mask_mod


def mask_of_parts(tables: tuple, facts: tuple, mask_mod):
    """The mask of these parts: a BlockMask, or of torch's and of lists that a user made what is read of them."""
    lengths, q_block, kv_block, *ours = facts
    q_block, kv_block = int(q_block), int(kv_block)  # under dynamic=True a symbol: another size is another kernel, so another graph
    full = tables[2:] or (None, None)
    if not ours:
        names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
        of = dict(zip(names, (*tables[:2], *full), strict=True))
        return SimpleNamespace(**of, seq_lengths=tuple(lengths), BLOCK_SIZE=(q_block, kv_block), mask_mod=mask_mod)
    interior, decided, cuts, fixed, made_for = ours
    lists = lists_of(tables, q_block, kv_block, interior)
    made = BlockMask._made(tuple(made_for or lengths), lists, mask_mod, agrees=decided, cuts=cuts, fixed=fixed)
    if made_for:
        made.seq_lengths = tuple(lengths)
    return made
