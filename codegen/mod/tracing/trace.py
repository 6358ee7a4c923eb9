"""Tracing: run the user's mod once on symbols and record what it does to them.

`trace(mod, kind)` returns a `Traced`: the frozen graph, the captured values, and how to find them again. There are two ways to run a mod.
On stand-ins, its reads are recorded and can be repeated (`program`). Where that is not sound, it runs on the real objects, and is
traced anew at every call (`refused` says why). Equal graphs are one object, so neither way compiles a kernel twice.

Torch functions reach the tracer through `__torch_function__` and a TorchFunctionMode, Python's operators through the
methods of `Sym`; both end in `dispatch`, which looks the operation up in the op table.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from dataclasses import dataclass

import torch

from ..captured.program import NUMBERS, UNKNOWN_NUMBERS, HostProgram
from ..captured.randomness import Search, refused, title
from ..captured.stand_ins import is_stand_in
from ..current import Symbolic
from ..errors import ModError, mod_error
from ..expr import MASK_SYMBOLS, SCORE_SYMBOLS, Expr, ModGraph, SourceLine, walk
from ..graphs.decisions import with_rounded_products
from ..graphs.known import known_graph
from ..symbolic.dispatch import OPERATIONS, Mode
from ..symbolic.nodes import to_expr
from ..symbolic.symbols import Sym, TensorView, Vector
from ..symbolic.vectors import as_vector
from .capture import check_methods, name_of, plain
from .runs import EagerRun, ReplayedRun, TracingRun, is_machinery, line_of, run_mod

_SIGNATURES = {"score": f"score_mod({', '.join(SCORE_SYMBOLS)})", "mask": f"mask_mod({', '.join(MASK_SYMBOLS)})"}

_NO_FUNCTIONS = (
    (inspect.isclass, "a class"),
    (inspect.isgeneratorfunction, "a generator function: it has a `yield`"),
    (inspect.iscoroutinefunction, "a coroutine function: it is `async`"),
    (inspect.isasyncgenfunction, "an asynchronous generator function"),
)


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced mod.

    graph     its graph
    program   finds the captured values again; None if the mod must be traced at every call
    places    where among the program's values the captured tensors and numbers are
    codes     the functions that were run
    """

    graph: ModGraph
    program: HostProgram | None
    places: tuple[int, ...]
    codes: frozenset[types.CodeType]

    def bind(self, mod) -> list | None:
        """The values of graph.tensors followed by those of graph.scalars for `mod`; None if the trace does not fit it."""
        values = self.program.run(mod)
        if values is None:
            return None
        return [values[place] for place in self.places]


def check_wrapped(score_mod, mask_mod) -> None:
    """check_parameters of those that there are, before something is made of them that says nothing of their parameters."""
    for mod, kind in ((score_mod, "score"), (mask_mod, "mask")):
        if mod is not None:
            check_parameters(mod, kind)


def check_parameters(mod, kind: str) -> None:
    """Raises ModError, or TypeError, for what cannot be called with a mod's arguments."""
    if not callable(mod):
        raise TypeError(f"{kind}_mod must be a function, got {type(mod).__name__}")
    expected = SCORE_SYMBOLS if kind == "score" else MASK_SYMBOLS
    for is_one, what in _NO_FUNCTIONS:
        if is_one(mod):
            raise mod_error(
                f"{name_of(mod)} is {what}", f"Write a function that returns one scalar: {_SIGNATURES[kind]}.", definition_of(mod), kind
            )
    bound = isinstance(inspect.getattr_static(type(mod), "__call__", None), (staticmethod, classmethod))
    try:
        signature = inspect.signature(mod.__call__ if bound else mod)  # which takes the first parameter of such a __call__ for self
    except (TypeError, ValueError):
        return  # a builtin without a signature: calling it will tell
    try:
        signature.bind(*expected)
    except TypeError:
        name = name_of(mod)
        hint = ""
        other = "mask" if kind == "score" else "score"
        try:
            signature.bind(*(MASK_SYMBOLS if kind == "score" else SCORE_SYMBOLS))
            hint = f" This looks like a {other}_mod: " + (
                "pass it through block_mask=create_block_mask(...)." if other == "mask" else "pass it as score_mod=."
            )
        except TypeError:
            pass
        raise mod_error(
            f"{name}{signature} does not take {len(expected)} positional arguments",
            f"Write it as {_SIGNATURES[kind]}.{hint}",
            definition_of(mod),
            kind,
        ) from None


def replayable(mod, kind: str) -> tuple[Traced, list]:
    """Trace a mod on stand-ins: the trace, which serves later calls, and the captured values of this one.

    Raises Untrackable, or what the mod raises on stand-ins, if its reads cannot be recorded.
    """
    run = ReplayedRun(mod, kind, OPERATIONS)
    result = _result(run, run.reader.root())
    values = run.values()
    check_methods(run.program.attributes)
    return Traced(_graph_of(mod, run, result), run.program, (*run.tensors, *run.scalars), frozenset(run.codes)), values


def traced_once(mod, kind: str) -> tuple[Traced, list]:
    """Trace a mod on the objects that it captures: the trace, for this call alone, and the captured values.

    Raises ModError with the user's own line for what cannot be in a kernel.
    """
    mod = plain(mod)
    search = Search(mod)
    if search.drawn is not None:
        function, line = search.drawn
        raise refused(title(function), line, kind)
    run = EagerRun(kind, OPERATIONS, search.functions)
    result = _result(run, mod)
    return Traced(_graph_of(mod, run, result), None, (), frozenset(run.codes)), run.values()


def _warn_of_float64(run: TracingRun, result: Expr) -> None:
    """Elements of float64 that are computed with lose half of their digits."""
    tensors = list(run.tensors.values())
    for node in walk(result):
        loads = [a for a in node.args if a.op == "load" and tensors[a.attr].dtype == torch.float64]
        if loads and node.op not in ("cast", "load"):
            name, line = tensors[loads[0].attr].name, loads[0].source
            warnings.warn(
                f"{run.kind}_mod captures {name}, a tensor of float64, and mods compute in float32. Convert it before the call: "
                f"{name}.float(), or of large numbers that are near each other, such as times, the difference from one of them."
                f"{f' {line}' if line else ''}",
                stacklevel=2,
            )
            return


def _result(run: TracingRun, mod) -> Expr:
    """What the mod gives for symbols. They are 0-dim: score is float32, b, h, q_idx and kv_idx are int32."""
    names = SCORE_SYMBOLS if run.kind == "score" else MASK_SYMBOLS
    with run.active():
        symbols = [Sym(run.table.make("symbol", (), torch.float32 if n == "score" else torch.int32, attr=n)) for n in names]
        with Mode():
            try:
                result = run_mod(mod, symbols)
            except (TypeError, IndexError, KeyError) as error:  # Python's, NumPy's or torch's own words, with the user's line
                problem = str(error).strip()
                raise mod_error(problem, _remedy(problem), _line_of(error), run.kind) from error
        run.definition = definition_of(mod)
        return _checked_result(result, run, mod)


def _remedy(problem: str) -> str:
    if "does not support ufuncs" in problem:
        return "That is a function of NumPy, which needs values. Use torch's: torch.exp(score), not np.exp(score)."
    return "Capture torch.as_tensor(array, device=...) instead of a NumPy array." if "numpy." in problem else ""


def _graph_of(mod, run: TracingRun, result: Expr) -> ModGraph:
    """The graph of a traced mod."""
    code = getattr(mod, "__code__", None)
    origin = SourceLine(code.co_filename, code.co_firstlineno, "") if isinstance(code, types.CodeType) else None
    if any(t.dtype == torch.float64 for t in run.tensors.values()):
        _warn_of_float64(run, result)
    result = with_rounded_products(result, run.table)
    return known_graph(run.kind, name_of(mod), origin, result, tuple(run.tensors.values()), tuple(run.scalars.values()))


def _line_of(error: Exception) -> SourceLine | None:
    """The innermost line of the mod that an error has passed."""
    found, inside, step = None, False, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if inside and not is_machinery(code.co_filename):
            found = line_of(code.co_filename, step.tb_lineno)
        inside = inside or code is run_mod.__code__
        step = step.tb_next
    return found


def _checked_result(result, run: TracingRun, mod) -> Expr:
    where, result = run.kind + "_mod", _of_one_element(result)
    if not _may_be_scalar(result):
        got = "nothing (a `return` is missing)" if result is None else f"a {type(result).__name__}"
        raise _result_error(run, mod, f"returns {got}", f"Return one scalar from {where}.")
    if isinstance(result, torch.Tensor) and result.ndim:
        raise _result_error(run, mod, f"returns a tensor of shape {tuple(result.shape)}", f"{where} returns one scalar per position.")
    if type(result) is TensorView:
        raise _result_error(
            run,
            mod,
            f"returns a tensor of shape {tuple(result.shape)}: a captured tensor of shape "
            f"{tuple(result.tensor.shape)} indexed by {len(result.index)} of its dimensions",
            "Index every dimension.",
        )
    if type(result) is Vector:
        source = result.items[0].expr.source
        what = f"a vector of {len(result)} elements" if result.ndim == 1 else f"a tensor of shape {tuple(result.shape)}"
        raise _result_error(run, mod, f"returns {what}", "Index every dimension, or sum it.", source)
    expr = to_expr(result)
    if run.kind == "mask" and expr.dtype != torch.bool:
        raise _result_error(
            run,
            mod,
            f"returns {expr.dtype}, not torch.bool",
            "A mask_mod says which positions may attend: return a comparison, or add `!= 0`.",
            expr.source,
        )
    return expr


def _of_one_element(result):
    """The element of a tensor that has one, as a product with a parameter of shape (1,) does; other results as they are."""
    is_one = isinstance(result, (TensorView, Vector, torch.Tensor)) and result.ndim > 0 and result.numel() == 1
    return as_vector(result).items[0] if is_one else result


def _may_be_scalar(result) -> bool:
    """Is it a value that a kernel may have, or an array of them, of which more is said?"""
    if isinstance(result, (Symbolic, torch.Tensor, *NUMBERS, *UNKNOWN_NUMBERS)) or is_stand_in(result):
        return True
    return hasattr(result, "item") and getattr(result, "ndim", None) == 0


def _result_error(run: TracingRun, mod, problem: str, remedy: str, source: SourceLine | None = None) -> ModError:
    source = source or run.definition
    return mod_error(problem if source else f"{name_of(mod)} {problem}", remedy, source, run.kind)


def definition_of(mod) -> SourceLine | None:
    """The first line of a mod that is a function."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    code = getattr(plain(mod), "__code__", None)
    return line_of(code.co_filename, code.co_firstlineno) if isinstance(code, types.CodeType) else None


def parts_of(mod) -> list:
    """The mods that a library's function has made one of, as and_masks does."""
    if not isinstance(mod, types.FunctionType) or (mod.__module__ or "").partition(".")[0] not in ("flexpress", "torch"):
        return []
    held = [cell.cell_contents for cell in mod.__closure__ or ()]
    return [part for parts in held if isinstance(parts, (tuple, list)) for part in parts if callable(part)]
