"""KernelSpec: everything that changes the text of a kernel, and nothing that does not.

Lengths, strides, batch and head counts, window sizes and slopes are not here: they are arguments at launch.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import NamedTuple

import torch

from ..mod.distance import read_by_distance
from ..mod.expr import MASK_SYMBOLS, Expr, ModGraph, SourceLine, symbols_in, walk
from ..mod.index_range import value_range
from ..mod.ops import row_of
from ..mod.sums import as_sum
from ..registry import remembered
from .code import Code, Statement, Use, arguments, named, uses_of
from .languages import Triton
from .lines import one_line
from .lower import is_gather, loads_of, lower, lower_sum
from .parameters import Parameter
from .snippet import DistanceText, Snippet, SumText, Target, TensorLayout

_FIND = {
    "size": lambda tensor, dim: tensor.shape[dim],
    "stride": lambda tensor, dim: tensor.stride(dim),
    "vectors": lambda tensor, dim: tensor.stride(dim) * tensor.element_size() // 16,
}


@dataclass(frozen=True, slots=True)
class CapturedGradient:
    """How a kernel gathers the gradient of one load of a captured tensor.

    role      "row", "head": summed over the keys of a row, over a tile of one head (backward_dq); "column": summed over the queries of
              a key (backward_dkv); "store", "atomic": every position has a place in the gradient, of its own or shared (backward_dq);
              "slab": stored head by head and added up outside, without atomics
    load      which load of the mod it is (see lower.loads_of)
    text      the gradient of one position; `guard` if it may be NaN where p is 0
    offset    for "store" and "atomic": the place in the buffer, which has the tensor's own strides, and the `checks` that it lies inside
    """

    role: str
    load: int
    name: str
    text: Code
    guard: bool
    offset: Code | None = None
    checks: Code | None = None

    @property
    def buffer(self) -> str:
        """The kernel argument that takes it."""
        return f"grad_{self.name}_{self.load}"

    value = property(lambda self: f"d_{self.name}_{self.load}")
    sum = property(lambda self: f"sum_{self.name}_{self.load}")
    sums = property(lambda self: self.role in ("row", "head", "column"))

    @property
    def meaning(self) -> str:
        """For the glossary."""
        return {
            "row": "float32 [Z, Hq, Q_LEN]: summed over keys",
            "column": "float32 [Z, Hq, KV_LEN]: summed over queries",
            "head": "float32 [Z, Hq, tiles]: summed over a tile's positions",
            "store": "every position has its own element",
            "atomic": "float32: positions share elements and add up",
            "slab": "float32 [Q_LEN, KV_LEN]: one head's positions, added up on the host",
        }[self.role]


@dataclass(frozen=True, slots=True)
class GradientText:
    """A lowered derivative: statements, d loss / d score, what captured tensors get, and the names that all these mention."""

    lines: tuple[str, ...]
    score: Code
    guard: bool  # `score` may be NaN where p is 0
    captured: tuple[CapturedGradient, ...]
    names: frozenset[str]


class Stages(NamedTuple):
    """The lines of a mod by when a kernel can run them, and the names of what the first two stages leave for the rest."""

    once: tuple[str, ...]
    ahead: tuple[str, ...]
    rest: tuple[str, ...]
    once_names: tuple[str, ...]
    ahead_names: tuple[str, ...]
    ahead_dtypes: tuple[str, ...]
    apart: tuple[str, ...]  # `ahead`, for a warp that has not run `once`

    @property
    def handed(self) -> tuple[tuple[str, str], ...]:
        """What `ahead` leaves for the rest, with dtypes."""
        return tuple(zip(self.ahead_names, self.ahead_dtypes, strict=True))


@dataclass(frozen=True, slots=True)
class ModText:
    """A lowered mod as a template sees it. `recipe` says how to find each parameter's value at launch (see `ModText.values`)."""

    kind: str
    name: str
    language: Triton
    statements: tuple[Statement, ...]
    result: Code | None
    helpers: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    recipe: tuple[tuple, ...]
    gradient: GradientText | None = None
    sum: SumText | None = None  # instead of `result`, where a template asks for it
    distance: DistanceText | None = None  # what a template that asks for it computes apart
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
        return self.language.lines(self._ending(self.statements, name))

    def _ending(self, statements: Iterable[Statement], name: str) -> tuple[Statement, ...]:
        *before, last = statements or (None,)
        if last is None or last.name != self.result.text or (self.gradient and last.name in self.gradient.names):
            own = [] if self.result.text == name else [Statement(name, self.result, None, ())]
            return (*statements, *own)
        return (*before, replace(last, name=name))

    def staged(self, fixed: str, moving: str | None = None, to: str | None = None) -> Stages:
        """For a loop over blocks in which `fixed`, q_idx or kv_idx, stays the same and `moving` does not: what reads memory by `fixed` can
        do so `once`, before the loop, and what reads by `moving` `ahead` of a block's scores. (Triton moves such loads by itself, Gluon
        does not.) A stage that reads nothing is empty. The rest leaves the result under the name `to`, if there is one."""

        def take(symbols: set[str], among: list[Statement]) -> list[Statement]:
            found = [s for s in among if symbols.issuperset(s.varies)]
            return found if any(s.loads for s in found) else []

        once = take({"b", "h", fixed}, list(self.statements))
        ahead = take({"b", "h", moving}, [s for s in self.statements if s not in once]) if moving else []
        once += [s for s in ahead if moving not in s.varies]
        ahead = [s for s in ahead if moving in s.varies]
        rest = [s for s in self.statements if s not in once and s not in ahead]
        results = (self.sum.key, self.sum.rate) if self.sum else (self.result,)
        later = {use.name for use in uses_of((*(s.value for s in rest), *results))} | (self.gradient.names if self.gradient else set())
        names = [tuple(s.name for s in stage if s.name in later) for stage in (once, ahead)]
        dtypes = tuple(s.dtype for s in ahead if s.name in later)
        apart = [s for s in once if fixed not in s.varies] + ahead
        if to and not self.sum:
            rest = self._ending(rest, to)
        once, ahead, rest, apart = map(self.language.lines, (once, ahead, rest, apart))
        return Stages(once, ahead, rest, *names, dtypes, apart)

    def values(self, captured: list) -> list:
        """The kernel arguments, in the order of `parameters`, from the mod's captured values (tensors, then numbers)."""
        return [captured[index] if what == "value" else _FIND[what](captured[index], dim) for what, index, dim in self.recipe]

    def named(self, captured: list) -> dict[str, object]:
        """The same by name."""
        return dict(zip(self.args, self.values(captured), strict=True))


def mod_values(plan, score: list | None, mask: list | None) -> list:
    """The kernel arguments of a plan's (or a step's) score_mod and mask_mod, from what the two capture."""
    return (plan.score.values(score) if score is not None else []) + (plan.mask.values(mask) if mask is not None else [])


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: a template, the mods spliced into it, the structure flags that its Jinja reads, and what it takes, in order."""

    template: str
    mods: tuple[ModText, ...]
    flags: tuple[tuple[str, object], ...]
    backend: str  # "cuda", "hip" or "cpu"
    parameters: tuple[Parameter, ...] = ()

    @functools.cached_property
    def flag(self) -> dict:
        """The flags by name."""
        return dict(self.flags)

    def arguments(self, values: dict[str, object]) -> tuple:
        """What a launch takes, by name, in the order of the parameters; without constants."""
        return tuple([values[p.name] for p in self.parameters if p.type != "constexpr"])

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.template, self.mods, self.flags, self.backend))

    def __hash__(self) -> int:  # asked for at every launch, and long to compute
        return self._hash

    @property
    def name(self) -> str:
        """What the file is called: template, mods, then the flags that a reader would look for."""
        flags = self.flag
        parts = [self.template, *dict.fromkeys(_identifier(m.name) for m in self.mods if m)]
        if "D_QK" in flags:
            parts.append(f"d{flags['D_QK']}" + (f"x{flags['D_V']}" if flags["D_V"] != flags["D_QK"] else ""))
        if "DTYPE" in flags:
            parts.append({"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[flags["DTYPE"]])
        return "_".join(parts)


def _identifier(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_").lower() or "mod"


def layouts_of(graph: ModGraph, captured: list, extents: tuple[int, int, int, int]) -> tuple[TensorLayout, ...]:
    """What the text may know of the captured tensors: unit and zero strides, 64-bit offsets, indices that need no check.

    `extents` are the ranges of b, h, q_idx and kv_idx.
    """
    count = len(graph.tensors)
    if not count:
        return ()
    return _layouts(graph, tuple([(t.shape, t.stride()) for t in captured[:count]]), tuple(captured[count:]), extents)


LARGEST_BLOCK_N = 256


@remembered("layouts of captured tensors", 4096)
def _layouts(graph: ModGraph, tensors: tuple, scalars: tuple, extents: tuple) -> tuple[TensorLayout, ...]:
    largest = {symbol: n - 1 for symbol, n in zip(MASK_SYMBOLS, extents, strict=True)}
    largest["kv_idx"] = -(-extents[3] // LARGEST_BLOCK_N) * LARGEST_BLOCK_N - 1  # kernels do not clamp it in the tail block
    inside: list[set] = [set() for _ in tensors]
    by_rows = set()  # tensors read element by element: there checks cost, and alignment pays
    for number, load in enumerate(loads_of(graph)):
        spreads = is_gather(load)
        if spreads:
            by_rows.add(load.attr)
        for dim, index in enumerate(load.args):
            if not spreads and index.op == "symbol" and index.attr in ("q_idx", "kv_idx"):
                continue  # a vector's check is cheap, and a new length must not compile anything
            low, high = value_range(index, largest, scalars)
            if low >= 0 and high < tensors[load.attr][0][dim]:
                inside[load.attr].add((number, dim))
    layouts = []
    for i, ((shape, strides), known) in enumerate(zip(tensors, inside, strict=True)):
        vector = 16 // graph.tensors[i].dtype.itemsize if i in by_rows and strides[-1] == 1 else 1 << 62
        pattern = tuple("0" if s == 0 else "1" if s == 1 else "v" if s % vector == 0 else "n" for s in strides)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        layouts.append(TensorLayout(pattern, reach >= 1 << 31, frozenset(known)))
    return tuple(layouts)


@dataclass(frozen=True)
class Differential:
    """What a backward kernel asks of a score_mod: d loss / d score, and loads with their role and gradient."""

    score: Expr | None
    captured: tuple[tuple[str, Expr, Expr], ...] = ()  # (role, load, gradient)
    ordinary: bool = True  # captured numbers are, see are_ordinary


def mod_text(
    graph: ModGraph,
    layouts: tuple[TensorLayout, ...],
    names: dict[str, str],
    target: Target,
    *,
    tile: str,
    taken: frozenset[str] = frozenset(),
    differential: Differential | None = None,
    vectors: dict[str, str] | None = None,
    by_distance: bool = False,
) -> ModText:
    """Lower a mod and name its arguments; names in `taken` (another mod's) get a suffix. With `vectors`, other names, of which q_idx and
    kv_idx are vectors, a score_mod that is a sum is lowered as one, unless gradients of what it captures are asked for. With `by_distance`,
    what it reads by the distance between query and key is lowered apart."""
    graph = _renamed(graph, taken)
    terms = as_sum(graph) if vectors and not (differential and differential.captured) else None
    if terms:
        snippet = lower_sum(graph, terms, vectors, layouts, target, prefix=graph.kind)
        gradient = GradientText((), target.language.symbol(names["grad"]), False, (), frozenset()) if differential else None
        return _mod_text(graph, target.language, snippet, gradient)
    gradients = places = ()
    if differential:
        places = tuple(load for _, load, _ in differential.captured)
        gradients = tuple(g for g in (differential.score, *(g for _, _, g in differential.captured)) if g is not None)
    snippet: Snippet = lower(
        graph,
        names,
        layouts,
        target,
        prefix=graph.kind,
        tile=tile,
        gradients=gradients,
        places=places,
        distances=read_by_distance(graph) if by_distance else (),
    )
    gradient = _gradient_text(graph, layouts, differential, snippet, target.language) if differential else None
    return _mod_text(graph, target.language, snippet, gradient)


def _mod_text(graph: ModGraph, language: Triton, snippet: Snippet, gradient: GradientText | None) -> ModText:
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
    while result.op == "cast" or row_of(result).product is None:
        result = result.args[0]
    return result.op != "load" and row_of(result).product


_LARGEST = {torch.float16: 65504.0, torch.bfloat16: torch.finfo(torch.bfloat16).max}  # others: float32's
_ORDINARY = (1e-9, 1e9)  # sizes of captured numbers that are ordinary


def are_ordinary(numbers: list) -> bool:
    """Are captured numbers neither infinite nor NaN, and neither so large nor so small that a few products or quotients of them are?"""
    low, high = _ORDINARY
    return all(low < abs(n) < high for n in numbers if isinstance(n, float))


def may_be_nan(expr: Expr, ordinary: bool = True) -> bool:
    """Could the value be infinite or NaN where "grad" is 0? Elements of tensors may be, scores are finite, and captured numbers are
    `ordinary` or may be anything. Then 0 times what the gradient is multiplied by need not be 0."""
    return not math.isfinite(_size(expr, ordinary, {}))


def padding_may_be_nan(expr: Expr, ordinary: bool = True) -> bool:
    """Could a score_mod's result be NaN for a score of 0 where it is none for the scores of that row? Not if it only adds to the score."""
    sizes: dict[int, float] = {}
    for node in walk(expr):
        row = row_of(node)
        adds = row.signs or row.chooses or node.op in ("symbol", "cast")
        if node.dtype.is_floating_point and "score" in symbols_in(node) and not adds:
            operands = [_size(a, ordinary, sizes) for a in node.args if "score" not in symbols_in(a)]
            if not (row.size or _divides_by_constant(node)) or not all(map(math.isfinite, operands)):
                return True
    return False


def _size(node: Expr, ordinary: bool, sizes: dict[int, float]) -> float:
    """What a value is at most, signs aside, where "grad" is at most 1; inf if it may be infinite, NaN if it may be NaN."""
    found = sizes.get(id(node))
    if found is not None:
        return found
    most = _LARGEST.get(node.dtype, torch.finfo(torch.float32).max)
    if not node.dtype.is_floating_point:
        found = 2.0**64
    elif node.op == "symbol":
        found = 1.0 if node.attr == "grad" else most / 4
    elif node.op == "literal":
        found = abs(node.attr)
    elif node.op == "scalar":
        found = _ORDINARY[1] if ordinary else math.nan
    else:
        operands = [_size(a, ordinary, sizes) for a in node.args]
        row = row_of(node)
        rule = abs if node.op == "cast" else row.size
        if any(map(math.isnan, operands)) or any(map(math.isinf, operands)) and not (node.op == "cast" or row.of_infinity):
            found = math.nan
        elif _divides_by_constant(node):
            divisor = node.args[1]
            found = operands[0] / (abs(divisor.attr) if divisor.is_literal else _ORDINARY[0])
        else:
            found = rule(*operands) if rule else math.nan
    found = math.inf if found > most else found
    sizes[id(node)] = found
    return found


def _divides_by_constant(node: Expr) -> bool:
    if row_of(node).scales != (0,):
        return False
    divisor = node.args[1]
    return divisor.op == "scalar" or (divisor.is_literal and divisor.attr != 0)


def _gradient_text(
    graph: ModGraph, layouts: tuple[TensorLayout, ...], differential: Differential, snippet: Snippet, language: Triton
) -> GradientText:
    texts, loads = list(snippet.gradients), loads_of(graph)
    score = language.zeros_like(language.symbol("grad"))
    guard = False
    if differential.score is not None:
        score, guard = texts.pop(0), may_be_nan(differential.score, differential.ordinary)
    captured = []
    for (role, load, gradient), (offset, checks) in zip(differential.captured, snippet.places, strict=True):
        name, number = graph.tensors[load.attr].name, loads.index(load)
        found = CapturedGradient(role, number, name, texts.pop(0), may_be_nan(gradient, differential.ordinary))
        if role == "slab":
            found = replace(
                found,
                offset=language.write("{0}.to(tl.int64)[:, None] * KV_LEN + {1}[None, :]", *map(language.symbol, ("offs_m", "offs_n"))),
            )
        elif role in ("store", "atomic"):
            found = replace(found, offset=language.beside("+", offset), checks=checks and language.beside("&", checks))
        elif checks and "0" in layouts[load.attr].strides:  # whose indices nobody looks at later
            found = replace(found, text=language.where(checks, found.text, language.literal(0.0)))
        captured.append(found)
    codes = (*(s.value for s in snippet.gradient_statements), score, *(code for c in captured for code in (c.text, c.offset, c.checks)))
    names = frozenset(use.name for use in uses_of(codes))
    return GradientText(language.lines(snippet.gradient_statements), score, guard, tuple(captured), names)


def _renamed(graph: ModGraph, taken: frozenset[str]) -> ModGraph:
    if not taken & {c.name for c in (*graph.tensors, *graph.scalars)}:
        return graph
    tensors = tuple(replace(c, name=f"{c.name}_{graph.kind}") for c in graph.tensors)
    scalars = tuple(replace(c, name=f"{c.name}_{graph.kind}") for c in graph.scalars)
    return replace(graph, tensors=tensors, scalars=scalars)


def without_texts(value):
    """A spec, or a part of one, without the texts that come from the user: source lines and names, which a kernel shows in comments."""
    if isinstance(value, SourceLine):
        return None
    if isinstance(value, str):
        return "#" if value.startswith("#") else value
    if isinstance(value, tuple):
        parts = map(without_texts, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: without_texts(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **parts | ({"name": "mod"} if isinstance(value, ModText) else {}))
    return value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
