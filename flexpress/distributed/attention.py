"""Attention over a sequence that is split over ranks: keys and values come to the queries, in groups of heads.

While one group of heads is computed, the keys of the next are on their way. Heads do not depend on each other, so nothing is merged, and a
row's result is that of one process. The backward pass sends the gradients of keys back. Where most keys are others' it gets them a second
time, which spares memory (Exchange.keeps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from flexpress.calls.arguments import checked, looks_as
from flexpress.calls.autograd import once
from flexpress.calls.call import bound
from flexpress.calls.problem import dense
from flexpress.distributed.agreement import digest_of, numbers_of
from flexpress.distributed.exchange import Arriving, Exchange
from flexpress.distributed.parts import Heads, Part, score_of_part
from flexpress.distributed.plan import ContextPlan
from flexpress.inputs.checks import autocast, parse_options
from flexpress.inputs.dropout import Dropout, of_first_rank, of_part
from flexpress.inputs.scales import read_scale
from flexpress.inputs.sinks import fold_sinks, read_sinks

from ..codegen.compiling import runs_uncompiled
from ..codegen.mod.captured.tensors import LOWEST, check_values, is_unseen, read_captured, readable_inputs, savable
from ..codegen.mod.captured.watched import are_saved_elsewhere
from ..codegen.mod.graphs.graph_text import text_of
from ..codegen.mod.tracing.bind import bind, graph_of
from ..codegen.run.backward import backward
from ..codegen.run.call import Bound, Rows
from ..codegen.run.captured import apart
from ..codegen.run.forward import forward

ALL = Part(None, 0)


class Share(NamedTuple):
    """What of a call this rank has.

    batch, heads  which batch entries and heads of the mask's and of score_mod's
    gather        as for `bound`
    gather_sinks  makes of sinks that are checked and spread over ranks those of this one's heads
    groups        whose ranks have others, beside the plan's
    """

    batch: Part = ALL
    heads: Part = ALL
    gather: Callable | None = None
    gather_sinks: Callable | None = None
    groups: Sequence[dist.ProcessGroup] = ()


WHOLE = Share()


class Arguments(NamedTuple):
    """What a call says beside query, key, value and score_mod."""

    scale: float | torch.Tensor | None = None
    enable_gqa: bool = False
    kernel_options: dict | None = None
    deterministic: bool = False
    max_scores: bool = False
    sinks: torch.Tensor | None = None  # of this rank's heads
    dropout: Dropout | None = None


def heads_in_groups(Hq: int, Hkv: int, groups: int) -> list[Heads]:
    """At most so many groups of heads, alike as far as may be; query heads with their key heads. Of no heads one group that has none."""
    size = -(-Hkv // max(groups, 1))
    shared = Hq // Hkv if Hkv else 1
    parts = [(first, min(first + size, Hkv)) for first in range(0, Hkv, max(size, 1))]
    return [Heads(slice(a * shared, b * shared), slice(a, b)) for a, b in parts or [(0, 0)]]


def attend_in_context(
    plan: ContextPlan, tensors: tuple, score_mod, arguments: Arguments, share: Share = WHOLE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out, lse and max_scores, if asked for, of the queries that this rank holds. tensors: its parts of query, key and value."""
    batch, heads, gather, gather_sinks, groups = share
    tensors, arguments, score_mod = _checked(plan, tensors, score_mod, arguments, batch, heads, gather_sinks is None)
    score = None if score_mod is None else bind(score_of_part(score_mod, batch, heads, plan.device), "score", plan.device)
    split = plan.head_split
    of_ranks = split.heads(tensors[0].shape[1], tensors[1].shape[1]) if split else []
    if split:
        mine = of_ranks[split.rank].q
        heads = Part((heads.first or 0) + mine.start, mine.stop - mine.start)
    score_mod, part = score_of_part(score_mod, batch, heads, plan.device), plan.of_part(batch, heads)
    first_b, first_h = batch.first or 0, heads.first or 0
    exchange = part.exchange = part.exchange or Exchange(part)
    arguments = _agreed(plan, tensors, score, arguments, gather_sinks)
    dropout = arguments.dropout and of_first_rank(arguments.dropout, (*plan.groups, *groups))
    if split:
        tensors = split.all_to_heads(tensors, of_ranks, len(part.position_ids), len(part.kv_position_ids))
    query, key, value = tensors
    captured = []
    if score is not None:
        graph, values = score = bind(exchange.score_mod(score_mod, 0), "score", query.device)
        read_captured(score, query.device, "score_mod", gather)
        captured = [apart(t) for t in values[: len(graph.tensors)]]

    def given(bound_mod: tuple, where: str) -> None:
        """What score_mod captures is read already."""
        if where == "score_mod":
            bound_mod[1][: len(captured)] = captured

    def bound_to(group: Heads, q, k, v) -> Bound | None:
        mask = exchange.mask_of(group.q)
        if mask is None:
            return None
        score = exchange.score_mod(score_mod, group.q.start)
        # modes of counters and checkpoints: a part of a call is no operator of theirs
        with nullcontext() if is_unseen() else _disable_current_modes():
            asked = arguments.scale, arguments.enable_gqa, arguments.kernel_options
            dropped = dropout and of_part(dropout, first_b, first_h + group.q.start)
            call = bound(q, k, v, score, mask, *asked, None, gather=given, dropout=dropped)
        return call._replace(extras=call.extras._replace(places=exchange.places)) if dropped and plan.packing else call

    deterministic = arguments.deterministic or torch.are_deterministic_algorithms_enabled()
    of_heads = heads_in_groups(query.shape[1], key.shape[1], plan.head_groups)
    found = _InContext.apply(exchange, of_heads, bound_to, deterministic, arguments.max_scores, query, key, value, *captured)
    if split:
        out, *of_rows = found
        of_rows = [None if t is None else split.to_positions(t.unsqueeze(-1)).squeeze(-1) for t in of_rows]
        found = split.to_positions(out), *of_rows
    return found if arguments.sinks is None else _with_sinks(plan, *found, arguments.sinks)


def attend_packed_in_context(plan, tensors: tuple, score_mod, arguments: Arguments, share: Share = WHOLE) -> tuple:
    """out, lse and max_scores, if asked for, of packed sequences, (local tokens, H, D) each, with a score_mod on packed positions."""
    tensors = tuple(t.unsqueeze(0).transpose(1, 2) for t in tensors)
    found = attend_in_context(plan, tensors, score_mod, arguments, share)
    return tuple(t if t is None else t.squeeze(0).transpose(0, 1) for t in found)


def _checked(plan: ContextPlan, tensors: tuple, score_mod, arguments: Arguments, batch: Part, heads: Part, has_sinks: bool) -> tuple:
    """The tensors as autocast wants them, arguments with the scale as a number and, if they are this rank's, with sinks to read, and the
    score_mod for that scale. Raises what flex_attention does."""
    kind = arguments.enable_gqa, batch, heads
    passed = not torch._C._is_any_autocast_enabled() and looks_as(plan.passed.get(kind), *tensors, arguments.enable_gqa)
    if not passed or any([t.data_ptr() < LOWEST for t in tensors]):
        tensors = readable_inputs(*tensors)
        check_values("flex_attention with context=", **dict(zip(("query", "key", "value"), tensors, strict=True)))
        query, key, value = tensors = autocast(*tensors)
        plan.check_lengths(query, key, value)
        inputs = checked(query, key, value, arguments.enable_gqa)
        _check_entries(plan, query, batch, heads)
        plan.passed[kind] = inputs
    parse_options(arguments.kernel_options)
    query = tensors[0]
    scale, score_mod = read_scale(arguments.scale, score_mod, query.shape[3], query.device)
    if has_sinks and arguments.sinks is not None:
        arguments = arguments._replace(sinks=read_sinks(arguments.sinks, query.shape[1], query.device))
    return tensors, arguments._replace(scale=scale), score_mod


def _agreed(plan: ContextPlan, tensors: tuple, score: tuple | None, arguments: Arguments, gather_sinks: Callable | None) -> Arguments:
    """Arguments with this rank's sinks, once all ranks have said that they mean the same call."""
    facts, scale = _facts(tensors, score, arguments), arguments.scale
    plan.agreement.check(facts, lambda: {**plan.facts(), **_shown(score, *facts), "scale": scale, **numbers_of(score, "score_mod")})
    if gather_sinks is None:
        return arguments
    query = tensors[0]
    return arguments._replace(sinks=read_sinks(gather_sinks(arguments.sinks), query.shape[1], query.device))


def _check_entries(plan: ContextPlan, query: torch.Tensor, batch: Part, heads: Part) -> None:
    """ValueError for a plan of other batch entries or heads, or of one where mask_mod tells them apart."""
    symbols = graph_of(plan.mask_mod, "mask", plan.device).symbols
    for name, size, part, extent in zip("BH", plan.status.shape, (batch, heads), query.shape, strict=False):
        several = extent > 1 or bool(part.first)
        if (part.first is None and size not in (1, extent)) or (several and size == 1 and name.lower() in symbols):
            raise ValueError(
                f"the plan was made with {name}={size}, but query has shape {tuple(query.shape)}; pass ContextPlan(..., {name}=) of all of "
                f"query where mask_mod reads {name.lower()}"
            )


def _facts(tensors: tuple, score: tuple | None, arguments: Arguments) -> tuple:
    """What makes a kind of call, which must be the same on all ranks: of query, key and value, of the tensors that score_mod captures, its
    graph, of sinks, and what is wanted. Numbers make none: one may be another at every call."""
    learns = torch.is_grad_enabled()

    def looks(tensor: torch.Tensor) -> tuple:
        return tensor.dtype, learns and tensor.requires_grad

    graph, values = score or (None, [])
    captured = values[: len(graph.tensors)] if graph else []
    return (
        tuple(((t.shape[0], t.shape[1], t.shape[3]), *looks(t)) for t in tensors),
        tuple((tuple(t.shape), *looks(t)) for t in captured),
        graph and text_of(graph),  # not the graph: a rank that traces many mods makes another of the same mod
        None if arguments.sinks is None else ((len(arguments.sinks),), *looks(arguments.sinks)),
        arguments.max_scores,
        arguments.dropout and (arguments.dropout.p, arguments.dropout.given),
    )


def _shown(
    score: tuple | None, tensors: tuple, captured: tuple, text: str | None, sinks: tuple | None, max_scores: bool, dropout: tuple | None
) -> dict[str, object]:
    """What `_facts` gives, in words, by name."""

    def words(shape: tuple, dtype: torch.dtype, learns: bool) -> str:
        return f"{shape} {dtype}{', requires_grad' if learns else ''}"

    names = (f"{name} (B, H, D)" for name in ("query", "key", "value"))
    found: dict[str, object] = {name: words(*looks) for name, looks in zip(names, tensors, strict=True)}
    found["sinks"], found["max_scores"] = sinks and words(*sinks), max_scores
    found["dropout_p"], given = dropout or (0.0, None)
    found["dropout_seed"] = given if given is None else "given" if given else "drawn"
    if score is None:
        return {**found, "score_mod": None}
    graph = score[0]
    found["score_mod"] = f"{graph.name} ({digest_of(text):x})"
    return {**found, **{t.name: words(*looks) for t, looks in zip(graph.tensors, captured, strict=True)}}


def _with_sinks(plan: ContextPlan, out, lse, maxima, sinks: torch.Tensor) -> tuple:
    """out, lse and max_scores with sinks, which get the gradient that captured tensors get."""
    sinks = sinks.float()  # sums of half precision would be rounded at each rank
    if plan.sum_gradients:
        sinks = _SummedBack.apply(sinks, plan.groups)
    return *fold_sinks(out, lse, sinks), maxima


@runs_uncompiled
class _SummedBack(torch.autograd.Function):
    """A tensor that all ranks have alike, as it is; its gradient is summed over them."""

    @staticmethod
    def forward(ctx, tensor, groups):
        ctx.groups = groups
        ctx.save_for_backward(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        found = gradient.detach().clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(found, group=group)
        return *once([found], ctx.saved_tensors), None


@runs_uncompiled
class _InContext(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, exchange: Exchange, groups: list[Heads], bound_to: Callable, deterministic: bool, max_scores: bool, q, k, v, *captured
    ):
        calls, results, kept = [], [], []
        for heads, own, came in _in_turn(exchange, groups, q, k, v):
            call = bound_to(heads, own, *came.pair())
            if call is None:
                lse = torch.full(own.shape[:3], -torch.inf, dtype=torch.float32, device=own.device)
                found, maxima, rows = own.new_zeros((*own.shape[:3], v.shape[3])), lse.clone() if max_scores else None, None
            else:
                found, lse, maxima, rows = forward(call, output_max=max_scores, output_rows=True)
                rows = rows.scaled(call.scale) if are_saved_elsewhere() else rows
            calls.append(call and call._replace(q=None, k=None, v=None))
            results.append((found, lse, maxima, rows))
            if exchange.keeps:
                kept.append(came.packed)
        out, lse, maxima = (_joined([result[i] for result in results]) for i in range(3))
        ctx.exchange, ctx.groups, ctx.calls, ctx.deterministic = exchange, groups, calls, deterministic
        ctx.raw, ctx.shapes = [rows is not None and rows.raw for *_, rows in results], (k.shape, v.shape)
        keys_and_values, of_rows = kept if exchange.keeps else (k, v), [lse if rows is None else rows.values for _, lse, _, rows in results]
        # those of mask_mod, too: autograd notices if they are overwritten before the backward pass
        of_masks = {id(t): t for call in calls if call and call.mask for t in call.mask[1][: len(call.mask[0].tensors)]}
        of_masks = [t for t in of_masks.values() if not t.is_inference()]
        ctx.save_for_backward(q, out, *of_rows, *keys_and_values, *map(savable, captured), *of_masks)
        ctx.captured = len(captured)
        ctx.set_materialize_grads(False)
        if maxima is not None:
            ctx.mark_non_differentiable(maxima)
        return out, lse, maxima

    @staticmethod
    def backward(ctx, d_out, d_lse, _):
        q, out, *others = ctx.saved_tensors
        count = len(ctx.groups)
        rows, others = others[:count], others[count:]
        count = count if ctx.exchange.keeps else 2
        captured = others[count : count + ctx.captured]
        with torch.no_grad():
            found = _InContext.gradients(ctx, q, out, rows, others[:count], captured, d_out, d_lse)
        return None, None, None, None, None, *once(found, (out,))

    @staticmethod
    def gradients(ctx, q, out, rows: list, keys_and_values: list, captured: list, d_out, d_lse) -> list[torch.Tensor | None]:
        """Of q, k, v and what score_mod captures. keys_and_values: k and v, or what came for each group of heads."""
        exchange, groups = ctx.exchange, ctx.groups
        k_shape, v_shape = ctx.shapes
        if exchange.keeps:
            turns = zip(groups, (q[:, heads.q] for heads in groups), (Arriving(t, k_shape[3]) for t in keys_and_values), strict=True)
        else:
            turns = _in_turn(exchange, groups, q, *keys_and_values)
        wanted = frozenset(i for i, needed in enumerate(ctx.needs_input_grad[8:]) if needed)
        d_out = torch.zeros_like(out) if d_out is None else dense("gradient of flex_attention's output", d_out)
        d_lse = None if d_lse is None else dense("gradient of flex_attention's lse", d_lse)
        # contiguous on every rank, as they are summed as they lie in memory
        of_captured = {i: torch.zeros(captured[i].shape, dtype=torch.float32, device=q.device) for i in sorted(wanted)}
        dq, returning = [], []
        for n, (heads, own, came) in enumerate(turns):
            call, (keys, values) = ctx.calls[n], came.pair()
            if call is None:
                found = torch.zeros_like(own), torch.zeros_like(keys), torch.zeros_like(values), {}
            else:
                call = call._replace(q=own, k=keys, v=values)
                out_own, d_own, d_lse_own = (t if t is None else t[:, heads.q] for t in (out, d_out, d_lse))
                of_rows = Rows(rows[n], ctx.raw[n])
                found = backward(call, out_own, of_rows, d_own, d_lse_own, wanted=wanted, deterministic=ctx.deterministic)
            dq.append(found[0])
            for i, gradient in found[3].items():
                of_captured[i] += gradient
            returning.append((found[1], found[2], exchange.give_back(found[1], found[2])))
        dk, dv = q.new_empty(k_shape), q.new_empty(v_shape)
        for heads, found in zip(groups, returning, strict=True):
            exchange.add_up(*found, (dk[:, heads.kv], dv[:, heads.kv]))
        for gradient in of_captured.values():
            for group in exchange.plan.groups if exchange.plan.sum_gradients else ():
                dist.all_reduce(gradient, group=group)
        captured = (of_captured[i].to(t.dtype) if i in wanted else None for i, t in enumerate(captured))
        return [_joined(dq), dk, dv, *captured]


def _joined(parts: Sequence) -> torch.Tensor | None:
    """What groups of heads have, in one; None if they have none."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, 1)


def _in_turn(exchange: Exchange, groups: list[Heads], q, k, v) -> Iterator[tuple[Heads, torch.Tensor, Arriving]]:
    """Each group of heads, with its part of q and the keys and values that it attends to; those of the next are on their way."""
    arriving: Arriving | None = None
    for heads, following in zip((None, *groups), (*groups, None), strict=True):
        came, arriving = arriving, following and exchange.gather(k[:, following.kv], v[:, following.kv])
        if heads is not None:
            yield heads, q[:, heads.q], came
