"""ModText: a lowered mod as templates and launches see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..mod.expr import Expr, ModGraph, symbols_in
from ..mod.graphs.distance import read_by_distance
from ..mod.graphs.position_runs import POSITIONS_END
from ..mod.graphs.sums import as_sum
from ..mod.table.dtypes import dtype_name
from ..mod.table.ops import last_step, row_of
from .code import Code, Statement, Use, arguments, named
from .gradient_text import Differential, GradientText, gradient_text
from .language import Language
from .layouts import TensorLayout
from .lines import one_line
from .lower import lower, lower_sum
from .parameters import Parameter
from .snippet import Copied, CopiedText, DistanceText, Snippet, SumText, Target
from .stages import Stages, ending, stages_of

_FIND = {  # what a recipe asks of a captured tensor
    "size": lambda tensor, dim: tensor.shape[dim],
    "stride": lambda tensor, dim: tensor.stride(dim),
    "vectors": lambda tensor, dim: tensor.stride(dim) * tensor.element_size() // 16,
}


@dataclass(frozen=True, slots=True)
class ModText:
    """A lowered mod as a template sees it. `recipe` says how to find each parameter's value at launch (see `ModText.values`)."""

    kind: str
    name: str
    language: Language
    statements: tuple[Statement, ...]
    result: Code | None
    helpers: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    recipe: tuple[tuple, ...]
    gradient: GradientText | None = None
    sum: SumText | None = None  # instead of `result`, where a template asks for it
    distance: DistanceText | None = None  # what a template that asks for it computes apart
    copied: CopiedText | None = None  # where what a template copies lies
    tangent: Code | None = None  # of the result, if it was asked for and there is one
    ends: bool = False  # a mask that hides positions past the end itself (see position_runs.py)
    is_product: bool = False  # the compiler could put the result, before it is rounded, into a sum

    @property
    def args(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(p.name for p in self.parameters)

    @property
    def libdevice(self) -> bool:
        return "libdevice" in self.modules

    @property
    def lines(self) -> tuple[str, ...]:
        return self.language.lines(self.statements)

    def lines_to(self, name: str) -> tuple[str, ...]:
        """The lines, which leave the result under a name of the template's."""
        return self.language.lines(ending(self.statements, self.result, name, self._later))

    def staged(self, fixed: str, moving: str | None = None, to: str | None = None) -> Stages:
        """The lines by when a loop over blocks can run them (see `stages_of`). `to`: the name that the result gets, if it is one value."""
        results, to = ((self.sum.key, self.sum.rate), None) if self.sum else ((self.result,), to)
        return stages_of(self.language, self.statements, results, self._later, fixed, moving, to)

    @property
    def _later(self) -> frozenset[str]:
        """Names that are used after the result is known."""
        names = frozenset(self.gradient.names if self.gradient else ())
        return names | {use.name for use in self.tangent.uses} if self.tangent else names

    def values(self, captured: list) -> list:
        """The kernel arguments, in the order of `parameters`, from the mod's captured values (tensors, then numbers)."""
        return values_of(self.recipe, captured)

    def named(self, captured: list) -> dict[str, object]:
        """The kernel arguments by name, from the mod's captured values."""
        return dict(zip(self.args, self.values(captured), strict=True))


def values_of(recipe: Iterable[tuple], captured: list) -> list:
    """What the steps of a recipe find in a mod's captured values."""
    return [captured[index] if what == "value" else _FIND[what](captured[index], dim) for what, index, dim in recipe]


def mod_values(plan, score: list | None, mask: list | None) -> list:
    """The kernel arguments of a plan's (or a step's) score_mod and mask_mod, from what the two capture."""
    found = []
    if score and plan.score:  # a kernel may have all of a score_mod in itself
        found += values_of(plan.score.recipe, score)
    if mask:
        found += values_of(plan.mask.recipe, mask)
    return found


def mod_text(
    graph: ModGraph,
    layouts: tuple[TensorLayout, ...],
    names: dict[str, str],
    target: Target,
    *,
    tile: str,
    beside: tuple[ModGraph, tuple[TensorLayout, ...]] | None = None,
    differential: Differential | None = None,
    tangent: Expr | None = None,
    vectors: dict[str, str] | None = None,
    by_distance: bool = False,
    copied: Copied | None = None,
) -> ModText:
    """Lower a mod and name its arguments; names that the mod `beside` it has get a suffix. With `vectors`, other names, of which q_idx and
    kv_idx are vectors, a score_mod that is a sum is lowered as one, unless gradients of what it captures are asked for. With `by_distance`,
    what it reads by the distance between query and key is lowered apart. `tangent`: of the result (tangent.py). `copied`: a load
    that the template does."""
    graph = _renamed(graph, beside[0]) if beside else graph
    terms = as_sum(graph) if vectors and not (differential and differential.captured) else None
    if terms and target.packed_sequences and any("b" in symbols_in(part) for part in terms.parts):
        terms = None  # a number for every key would be one for every row, too
    if terms:
        snippet = lower_sum(graph, terms, vectors, layouts, target, prefix=graph.kind)
        gradient = GradientText((), target.language.symbol(names["grad"]), (), frozenset()) if differential else None
        return _mod_text(graph, target.language, snippet, gradient)
    gradients = places = ()
    if differential:
        places = tuple((role, load) for role, load, _ in differential.captured)
        gradients = tuple(g for g in (differential.score, differential.tangent, *(g for _, _, g in differential.captured)) if g is not None)
    snippet: Snippet = lower(
        graph,
        names,
        layouts,
        target,
        prefix=graph.kind,
        tile=tile,
        gradients=gradients,
        places=places,
        tangent=tangent,
        distances=read_by_distance(graph) if by_distance else (),
        copied=copied,
    )
    gradient = gradient_text(graph, layouts, differential, snippet, target.language, names["grad"]) if differential else None
    return _mod_text(graph, target.language, snippet, gradient)


def _mod_text(graph: ModGraph, language: Language, snippet: Snippet, gradient: GradientText | None) -> ModText:
    args = arguments(snippet.uses)
    captor = "score_mod" if graph.kind == "score" else "mask_mod"  # a mask_mod's zones and its verdict, too
    return ModText(
        graph.kind,
        one_line(graph.name),
        language,
        snippet.statements,
        snippet.result,
        named(snippet.uses, "helper"),
        named(snippet.uses, "module"),
        tuple(Parameter(a.name, _type_of(graph, a), of=captor) for a in args),
        tuple((a.kind, a.index, a.dim) for a in args),
        gradient,
        snippet.sum,
        snippet.distance,
        snippet.copied,
        snippet.tangent,
        POSITIONS_END in graph.symbols,
        _is_product(graph.result, snippet.sum),
    )


def _type_of(graph: ModGraph, use: Use) -> str:
    """The type of a kernel argument."""
    if use.kind != "value":
        return "int"
    if use.index < len(graph.tensors):
        return f"*{dtype_name(graph.tensors[use.index].dtype)}"
    return "float" if graph.scalars[use.index - len(graph.tensors)].kind is float else "int"


def _is_product(result: Expr, terms: SumText | None) -> bool:
    """Is a score_mod's result a product, or may it be one, as the score itself is?"""
    if terms:
        return not (terms.key or terms.rate)
    result = last_step(result)
    return result.op != "load" and row_of(result).product


def _renamed(graph: ModGraph, beside: ModGraph) -> ModGraph:
    if not _names_in(beside) & _names_in(graph):
        return graph
    tensors = tuple(replace(c, name=f"{c.name}_{graph.kind}") for c in graph.tensors)
    scalars = tuple(replace(c, name=f"{c.name}_{graph.kind}") for c in graph.scalars)
    return replace(graph, tensors=tensors, scalars=scalars)


def _names_in(graph: ModGraph) -> set[str]:
    return {c.name for c in (*graph.tensors, *graph.scalars)}
