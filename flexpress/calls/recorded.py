"""Calls that torch is to see as operators: under its compiler and exporter, counters and checkpointing, and on tensors without memory.

Mods are bound here, by a trace of their own where what they capture has no values; everything else is left to the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flexpress.graphs.bound_mods import bound_mod
from flexpress.graphs.programs import captures_of, mod_program
from flexpress.inputs import checks
from flexpress.inputs.dropout import Dropout
from flexpress.inputs.float8 import FLOAT8, Quantised, check_quantised, refuse_gradients
from flexpress.inputs.scales import read_scale
from flexpress.inputs.sinks import check_sinks
from flexpress.masks.block_lists import leave_out_entries, read_lists, walked_in_every_length
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.foreign_masks import foreign_lists, is_foreign_mask
from flexpress.masks.mask_attributes import KV_LISTS
from flexpress.masks.mask_mods import check_made_of

from ..codegen.mod.captured.levels import of_all_calls
from ..codegen.mod.captured.tensors import check_kind, check_surroundings, tracing
from ..codegen.mod.table.dtypes import dtype_name
from ..codegen.plan.forward import Options
from ..codegen.run.block_lists import BlockLists
from ..codegen.run.captured import all_apart
from ..codegen.run.statistics import Statistics, Wanted


class Recorded(NamedTuple):
    """The arguments of a call, checked as far as shapes and dtypes go, and its mods bound.

    score, mask     graphs and what they capture, or None
    lists           of a block mask, or None
    decided         the mask_mod of these alone says what attends
    packed          where packed sequences start, or nothing
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score: tuple | None
    mask: tuple | None
    lists: BlockLists | None
    decided: bool
    packed: tuple[torch.Tensor, ...]
    scale: float
    options: Options
    sinks: torch.Tensor | None = None
    dropout: Dropout | None = None
    quantised: Quantised | None = None

    def attend(self, output_max: bool, deterministic: bool) -> tuple:
        """out, lse and max_scores (None if they are not wanted)."""
        query, key, value, score, mask, lists = self[:6]
        if score is not None:
            score = all_apart(score)
        if mask is not None:  # a comparison has no gradient
            graph, values = mask
            count = len(graph.tensors)
            mask = graph, [*(t.detach() for t in values[:count]), *values[count:]]
        captures = captures_of(score, mask)
        learned = query, key, value, *captures.tensors, *(() if self.sinks is None else (self.sinks,))
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in learned)
        scales: tuple = (None, None, None)
        if self.query.dtype == FLOAT8:
            if torch.is_grad_enabled():
                refuse_gradients(*learned, *(self.quantised[:3] if self.quantised else ()))
            scales = self.quantised[:3] if self.quantised else scales
        tables = list(lists.tables) if lists else []
        transposed = wants_gradient and bool(tables) and walked_in_every_length((lists.q_block, lists.kv_block))
        transposed = transposed and not torch.compiler.is_exporting()  # what is exported is run for its output
        if transposed:  # here, where torch sees that all calls with a mask ask for the same
            size = [lists.q_block, lists.kv_block]
            tables += torch.ops.flexpress.transposed_lists(tables, key.shape[2], size, lists.interior)
        program = mod_program(
            score,
            mask,
            lists=lists and (lists.q_block, lists.kv_block, lists.interior, self.decided),
            options=self.options,
            deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
            max_scores=output_max,
            rows=wants_gradient,
            transposed=transposed,
            dropout_p=self.dropout.p if self.dropout else 0.0,
            out=dtype_name(self.quantised.out_dtype) if self.quantised and self.quantised.out_dtype else None,
        )
        starts = [self.packed[0]] if self.packed and self.packed[0] is self.packed[-1] else list(self.packed)
        others = self.sinks, self.dropout and self.dropout.seed, *scales
        out, lse, max_scores, _ = torch.ops.flexpress.flex_attention(
            query, key, value, *captures, tables, starts, self.scale, program.text(), *others
        )
        return out, lse, max_scores if output_max else None

    def look(self, wanted: Wanted, deterministic: bool) -> Statistics:
        """What is wanted of the probabilities."""
        score, mask, lists = self.score, self.mask, self.lists
        captures = captures_of(score, mask)
        program = mod_program(
            score,
            mask,
            lists=lists and (lists.q_block, lists.kv_block, lists.interior, self.decided),
            options=self.options,
            deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        )
        tables = list(lists.tables) if lists else []
        found = torch.ops.flexpress.probability_statistics(
            self.query, self.key, *captures, tables, self.scale, program.text(), *wanted, self.sinks
        )
        return Statistics(*(t if asked else None for t, asked in zip(found, wanted, strict=True)))


def recorded(
    query,
    key,
    value,
    score_mod,
    block_mask,
    scale,
    enable_gqa,
    kernel_options,
    mask_mod,
    packed,
    sinks=None,
    dropout=None,
    quantised=None,
    gather: Callable | None = None,
) -> Recorded:
    """The arguments of flex_attention; `packed` and `gather` as for call.bound."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "flex_attention was called inside a transform of torch.func (vmap, grad, jvp, ...) that is recorded, by torch.compile or a "
            "dispatch mode such as FlopCounterMode: operators follow no transform. Leave out fullgraph=True, so that it runs outside of "
            "the graph, or the mode"
        )
    check_surroundings("flex_attention")
    modes = [getattr(t, "fake_mode", None) for t in (query, key, value)]
    if None not in modes and not tracing():  # FakeTensors, outside the mode that they were made in
        with modes[0]:
            asked = score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, packed, sinks, dropout, quantised
            return recorded(query, key, value, *asked, gather)
    query, key, value = checks.autocast(query, key, value)
    checks.check_tensors(query, key, value, enable_gqa)
    options = checks.parse_options(kernel_options)
    lists, decided = None, True
    if block_mask is not None:
        lists, decided, mask_mod = lists_of_mask(block_mask, query, key, mask_mod)
    scale, score_mod = read_scale(scale, score_mod, query.shape[3], query.device)
    score, mask = bound_mod(score_mod, "score", query.device, gather), bound_mod(mask_mod, "mask", query.device, gather)
    if lists is not None and decided and leave_out_entries(lists, mask[0].symbols, query.shape[:2]):
        lists = None  # mask_mod makes them
    if lists is not None and decided and not walked_in_every_length((lists.q_block, lists.kv_block)):
        decided = block_mask._fixed  # as in MaskLists.for_kernels
    if sinks is not None:
        check_sinks(sinks, query.shape[1], query.device)
        check_kind("sinks", sinks)
    if quantised is not None:
        check_quantised(quantised, query, key)
    return Recorded(query, key, value, score, mask, lists, decided, tuple(packed or ()), scale, options, sinks, dropout, quantised)


def lists_of_mask(block_mask, query, key, mask_mod) -> tuple:
    """The lists of a block mask, does its mask_mod decide alone, and this mask_mod."""
    if not isinstance(block_mask, BlockMask) and not is_foreign_mask(block_mask):
        raise TypeError(f"block_mask must be a BlockMask (from create_block_mask), got {type(block_mask).__name__}")
    check_made_of(block_mask, mask_mod)
    lengths = block_mask.seq_lengths
    if isinstance(block_mask, BlockMask):
        lists, decided = block_mask.as_lists(), block_mask._decided
    else:
        lengths, tables = foreign_lists(block_mask, (query.shape[2], key.shape[2]))
        tables = map(of_all_calls, [f"block_mask.{name}" for name in KV_LISTS], tables)
        lists, decided = read_lists(*tables, checks.block_size(block_mask.BLOCK_SIZE), lengths), False
    checks.check_mask_fits(lists, tuple(lengths), query, key, (*lists.kv_indices.shape[:2], *lengths))
    return lists, decided, block_mask.mask_mod
