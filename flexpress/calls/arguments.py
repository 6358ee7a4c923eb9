"""The tensors and masks of a call, as the user passes them: checked once for all that look alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flexpress.calls.packed_blocks import starts_of
from flexpress.inputs import checks
from flexpress.masks.block_lists import check_rows, leave_out_entries, transposed_lists
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.foreign_masks import adopt, is_foreign_mask
from flexpress.masks.mask_lists import ListedMask

from ..codegen.mod.captured.tensors import is_unseen
from ..codegen.plan.forward import Options
from ..codegen.plan.masks import Bound
from ..codegen.plan.tiles import BLOCK, NARROW_BLOCK
from ..codegen.registry import Table
from ..codegen.run.block_lists import BlockLists
from ..codegen.run.call import Inputs
from ..codegen.run.masks import automatic_lists, visits

_OURS = BlockMask, ListedMask
_inputs: dict[tuple, Inputs] = Table("checked inputs", 4096)
_latest: dict[str, Inputs] = Table("latest inputs", 1)


def as_before(query, key, value, enable_gqa: bool) -> Inputs | None:
    """The Inputs of the call before, if it was one of plain tensors that looked as these do, and nobody records this one."""
    latest = _latest.get("call")
    return latest if looks_as(latest, query, key, value, enable_gqa) else None


def looks_as(before: Inputs | None, query, key, value, enable_gqa: bool) -> bool:
    """Are these plain tensors that look as those of a call before did, and does nobody record this one?"""
    try:  # asking after the sizes of nested tensors would end the process
        if before is None or before.enable_gqa is not enable_gqa or query.is_nested or key.is_nested or value.is_nested:
            return False
    except AttributeError:  # no tensors
        return False
    return before.alike(query, key, value) and is_unseen()


def checked(query, key, value, enable_gqa: bool) -> Inputs | None:
    """Argument checks, skipped for shapes, strides, dtypes and devices that passed before. None for tensors of device "meta"."""
    try:
        seen = (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.device,
            key.device,
            value.device,
            enable_gqa,
        )
        found = _inputs.get(seen)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, or nested ones: the checks will say so
        seen = found = None
    if found is None:
        checks.check_tensors(query, key, value, enable_gqa)
        if query.is_meta:
            return None
        found = _inputs[seen] = Inputs(query, key, value, enable_gqa)
    if not found.alike(query, key, value):  # as they require grad, and those before did not
        found.look_like(query, key, value)
    _latest["call"] = found
    return found


def read_mask(block_mask, query, key, inputs: Inputs, options: Options) -> tuple[BlockLists, Callable[[tuple], BlockLists], Callable]:
    """The lists of a BlockMask, ours or torch's, what makes the transposed ones of the bound mask_mod, and the mask_mod; all checked."""
    if not isinstance(block_mask, _OURS) and is_foreign_mask(block_mask):
        block_mask = adopt(block_mask, (query.shape[2], key.shape[2]))
    if not isinstance(block_mask, _OURS):
        if callable(block_mask):
            raise TypeError(
                "block_mask is a function; pass it as mask_mod=, or make a BlockMask of it with create_block_mask(mask_mod, B, "
                "H, Q_LEN, KV_LEN)"
            )
        raise TypeError(f"block_mask must be a BlockMask (from create_block_mask), got {type(block_mask).__name__}")
    lists, mask_mod = block_mask.for_kernels()
    if block_mask.mask_mod is None:
        raise TypeError("block_mask.mask_mod is None; set it to a function, or to noop_mask, which hides nothing in the listed blocks")
    fitting, asked = lists.looks.fitting, (inputs, options, block_mask.seq_lengths)
    if asked not in fitting:
        checks.check_mask_fits(lists, block_mask.seq_lengths, query, key, block_mask.shape)
        check_rows(lists.kv_indices.shape[2], block_mask.seq_lengths, (lists.q_block, lists.kv_block))
        checks.check_tile_fits_mask(options, lists.q_block, lists.kv_block)
        if len(fitting) >= 1024:
            fitting.clear()
        fitting.add(asked)
    return lists, lambda _, begins=False: None if begins else transposed_lists(lists, inputs.extents[3]), mask_mod


def tells_entries_apart(mask: Bound, lists: BlockLists, inputs: Inputs, block_mask) -> bool:
    """Is this bound mask_mod another one for each batch entry or head, and its block mask made with B=None or H=None? Then the lists
    are those of the first entry, and mask_mod, which alone decides, makes lists for the call."""
    symbols = mask[0].symbols
    if "b" not in symbols and "h" not in symbols:
        return False
    return isinstance(block_mask, _OURS) and block_mask._decided and leave_out_entries(lists, symbols, inputs.extents[:2])


def block_size(options: Options) -> tuple[int, int]:
    """The blocks of a mask that is made for one call: whole tiles, also where the user asks for large ones."""
    tile = dict(options.tile)
    return tuple(max([BLOCK, *(n for name, n in tile.items() if name.endswith(f"BLOCK_{axis}"))]) for axis in "MN")


def lists_of_call(inputs: Inputs, options: Options, packed: tuple | None, narrow: bool, dropout: bool = False) -> Callable[..., BlockLists]:
    """What makes the lists of a bound mask_mod for one call, and with transposed=True those of its backward pass. `packed`: where packed
    sequences start, or nothing; `dropout`: their weights are dropped."""
    size = (NARROW_BLOCK, NARROW_BLOCK) if narrow else block_size(options)
    starts = starts_of(*packed, *inputs.extents[2:], *size, dropout=dropout, float8=inputs.is_float8) if packed else ()
    return partial(automatic_lists, extents=inputs.extents, device=inputs.device, size=size, starts=starts)


def is_as_made(block_mask, size: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """Would lists that are made of its mask_mod now, for such blocks and lengths, be the block mask's own?"""
    return isinstance(block_mask, _OURS) and block_mask._decided and (block_mask._size, block_mask.seq_lengths) == (size, lengths)


def is_narrow(mask: Bound, inputs: Inputs, options: Options, block_mask=None) -> bool:
    """Is a call faster with blocks of NARROW_BLOCK, and free to have them? A `block_mask` must be one of BLOCK that its mask_mod alone
    decides, and no tile or kernel may be named."""
    if not inputs.narrow_limit or options.tile or options.backend:
        return False
    lengths = inputs.extents[2:]
    if block_mask is not None and not is_as_made(block_mask, (BLOCK, BLOCK), lengths):
        return False
    found = visits(mask, lengths, BLOCK)
    return found is not None and 0 < found <= inputs.narrow_limit
