"""A call of attention without the tensors that transforms work on: what torch sees are functions of tensors, and a Problem beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from flexpress.calls.arguments import checked, is_narrow, lists_of_call
from flexpress.graphs.programs import on_device
from flexpress.inputs.dropout import readable_seed
from flexpress.masks.block_lists import transposed_lists

from ..codegen.mod.captured.levels import untransformed
from ..codegen.mod.captured.tensors import looks_ordinary, read_captured, readable
from ..codegen.mod.expr import ModGraph
from ..codegen.mod.graphs.folded import folded_graph
from ..codegen.mod.graphs.wide import in_wide_integers
from ..codegen.mod.tracing.trace import traced_once
from ..codegen.plan.forward import Options
from ..codegen.registry import remembered
from ..codegen.run.block_lists import BlockLists
from ..codegen.run.call import Bound, ExtraInputs, Inputs
from ..codegen.run.statistics import Wanted
from ..codegen.run.tangent import Direction


def dense(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient or a tangent that torch hands over, as ordinary memory."""
    if looks_ordinary(gradient):
        return gradient
    if gradient._is_zerotensor():  # torch's, which has no memory, where a derivative has nothing of another one
        return gradient.clone()
    return readable(name, gradient if gradient.layout is torch.strided else gradient.to_dense())


@dataclass(frozen=True, eq=False)
class Problem:
    """A call without q, k, v and what its mods capture: these are tensors of score_mod, then of mask_mod, and at last dropout's seed, if
    there is dropout.

    score, mask      graphs of the mods, with the numbers that they capture; or None
    lists            of a block mask, or None: then those of mask_mod are made of it
    transposed       what makes the transposed ones of the bound mask_mod, if that is known
    packed           where packed sequences start among the queries and among the keys
    dropout          what kernels need of it beside the seed, or None
    wanted           statistics of the probabilities
    """

    scale: float
    options: Options
    score: tuple[ModGraph, list] | None = None
    mask: tuple[ModGraph, list] | None = None
    lists: BlockLists | None = None
    packed: tuple[torch.Tensor, ...] = ()
    transposed: Callable[[tuple], BlockLists] | None = None
    dropout: ExtraInputs | None = None
    output_max: bool = False
    wanted: Wanted = Wanted()
    deterministic: bool = False

    @classmethod
    def of(cls, bound: Bound, deterministic: bool) -> Problem:
        """That of a call, without its sinks."""
        mask, transposed, extras = bound.mask, bound.transposed, bound.extras
        return cls(
            bound.scale,
            bound.options,
            *(mod and (mod[0], mod[1][len(mod[0].tensors) :]) for mod in (bound.score, mask)),
            bound.lists,
            transposed=transposed and (lambda _: transposed(mask)),
            dropout=extras._replace(sinks=None, seed=None) if extras and extras.seed is not None else None,
            deterministic=deterministic,
        )

    @property
    def of_score(self) -> int:
        """How many tensors score_mod captures."""
        return len(self.score[0].tensors) if self.score else 0

    def as_pushed(self) -> Problem:
        """This problem with scores as forward mode has them: scale before score_mod, which changes nothing where there is none, and query
        not rounded with scale."""
        score = self.score or (_unchanged_graph(), [])
        return replace(self, score=score, options=self.options._replace(prescale_qk=False))

    def bound(self, q, k, v, captured) -> Bound:
        """The call. Raises NotImplementedError for kinds of tensors that kernels cannot read."""
        q, k, v = (readable(name, t.detach()) for name, t in (("query", q), ("key", k), ("value", v)))
        inputs, extras = checked(q, k, v, True), self.dropout
        captured = on_device(q.device, [t.detach() for t in captured])
        if extras is not None:
            extras = extras._replace(seed=readable_seed(captured.pop()))
        score = self._bound(self.score, captured[: self.of_score], inputs, "score_mod")
        mask = self._bound(self.mask, captured[self.of_score :], inputs, "mask_mod")
        lists = transposed = None
        if self.lists is not None:
            lists, transposed = self.lists, self.transposed or (lambda _: transposed_lists(self.lists, k.shape[2]))
        elif mask is not None:
            make = lists_of_call(inputs, self.options, self.packed, is_narrow(mask, inputs, self.options), extras is not None)
            lists, transposed = make(mask), partial(make, transposed=True)
        return Bound(q, k, v, inputs, self.scale, score, mask, lists, transposed, self.options, extras)

    def _bound(self, mod: tuple[ModGraph, list] | None, tensors: list, inputs: Inputs, where: str) -> tuple[ModGraph, list] | None:
        if mod is None:
            return None
        graph, numbers = mod
        found = graph, [*tensors, *numbers]
        read_captured(found, inputs.device, where)
        return found if self.packed else in_wide_integers(found, inputs.extents)

    def direction(self, bound: Bound, tangents) -> Direction:
        """Tangents of q, k, v and captured tensors as kernels take them; those of what mask_mod captures mean nothing."""
        pairs = zip(tangents, (bound.q, bound.k, bound.v, *bound.captured), strict=False)
        q, k, v, *captured = (t if t is None else dense("tangent", t).detach().to(like.device, like.dtype) for t, like in pairs)
        return Direction(q, k, v, tuple(captured))

    def folded(self, size: int, own: frozenset[int]) -> Problem:
        """So many calls as one; every call has its `own` captured tensors, by their first dimension."""
        mods = []
        for mod, first in ((self.score, 0), (self.mask, self.of_score)):
            if mod is not None:
                graph, numbers = mod
                mapped = frozenset(i - first for i in own if 0 <= i - first < len(graph.tensors))
                mod = (folded_graph(graph, mapped), [*numbers, size]) if mapped or "b" in graph.symbols else mod
            mods.append(mod)
        lists, transposed = self.lists and _repeated(self.lists, size), self.transposed
        if transposed is not None:
            transposed = lambda mask: _repeated(self.transposed(mask), size)  # noqa: E731
        return replace(self, score=mods[0], mask=mods[1], lists=lists, transposed=transposed)


@remembered("graphs of no score_mod", 1)
def _unchanged_graph() -> ModGraph:
    return traced_once(_unchanged, "score")[0].graph


def _unchanged(score, b, h, q_idx, kv_idx):
    return score


def _repeated(lists: BlockLists, size: int) -> BlockLists:
    """The lists of so many calls; those that all batch entries share are shared by all."""
    if lists.kv_num_blocks.shape[0] == 1:
        return lists
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    with untransformed():
        tables = {name: t.repeat_interleave(size, 0) for name in names if (t := getattr(lists, name)) is not None}
    return replace(lists, **tables)
