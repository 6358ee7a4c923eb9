"""Tracing: run the user's mod once on symbols and record what it does to them.

`trace(mod, kind)` returns a `Traced`: the frozen graph and the host program that finds the mod's captured values again.
Torch functions reach the tracer through `__torch_function__` and a TorchFunctionMode, Python's operators through the
methods of `Sym`; both end in `dispatch`, which looks the operation up in the op table.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import types
from dataclasses import dataclass

import torch

from .capture import HostProgram, name_of
from .dispatch import Mode, to_expr
from .errors import ModError
from .expr import MASK_SYMBOLS, SCORE_SYMBOLS, Expr, ModGraph, SourceLine, walk
from .symbols import Sym, TensorView, TracingRun, mod_error

_SIGNATURES = {"score": f"score_mod({', '.join(SCORE_SYMBOLS)})", "mask": f"mask_mod({', '.join(MASK_SYMBOLS)})"}


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced mod with the program that finds its captured values again at every call."""

    graph: ModGraph
    program: HostProgram

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Where among the program's values the captured tensors and numbers are."""
        return tuple(c.node + 1 for c in (*self.graph.tensors, *self.graph.scalars))

    def bind(self, mod) -> list | None:
        """The values of graph.tensors followed by those of graph.scalars for `mod`; None if the trace does not fit it."""
        values = self.program.run(mod)
        if values is None:
            return None
        return [values[place] for place in self.places]


def _check_parameters(mod, kind: str) -> None:
    expected = SCORE_SYMBOLS if kind == "score" else MASK_SYMBOLS
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return  # a builtin without a signature: calling it will tell
    try:
        signature.bind(*expected)
    except TypeError:
        code = getattr(mod, "__code__", None)
        where = SourceLine(code.co_filename, code.co_firstlineno,
                           linecache.getline(code.co_filename, code.co_firstlineno).strip()) if code else None
        name = name_of(mod)
        hint = ""
        other = "mask" if kind == "score" else "score"
        try:
            signature.bind(*(MASK_SYMBOLS if kind == "score" else SCORE_SYMBOLS))
            hint = f" This looks like a {other}_mod: " + (
                "pass it through block_mask=create_block_mask(...)." if other == "mask" else "pass it as score_mod=.")
        except TypeError:
            pass
        raise mod_error(f"{name}{signature} does not take {len(expected)} positional arguments",
                         f"Write it as {_SIGNATURES[kind]}.{hint}", where, kind) from None


def trace(mod, kind: str) -> Traced:
    """Trace a score_mod (`kind="score"`) or mask_mod (`kind="mask"`).

    Symbols are 0-dim: score is float32, b, h, q_idx and kv_idx are int32. Raises ModError with the user's own line.
    """
    if not callable(mod):
        raise TypeError(f"{kind}_mod must be a function, got {type(mod).__name__}")
    _check_parameters(mod, kind)
    run = TracingRun(mod, kind)
    names = SCORE_SYMBOLS if kind == "score" else MASK_SYMBOLS
    symbols = [Sym(run.table.make("symbol", (), torch.float32 if n == "score" else torch.int32, attr=n)) for n in names]
    with run.active():
        tracked = run.reader.root(mod)
        with Mode():
            try:
                result = tracked(*symbols)
            except TypeError as error:  # Python's or torch's own words, with the user's line
                raise mod_error(str(error).strip(), "", _line_of(error, run), kind) from error
        expr = _checked_result(result, run)
    nodes = walk(expr)
    code = next(iter(run.reader.codes), None) if not isinstance(mod, types.FunctionType) else mod.__code__
    origin = SourceLine(code.co_filename, code.co_firstlineno, "") if code else None
    name = getattr(mod, "__name__", None) or type(mod).__name__
    used = frozenset(n.attr for n in nodes if n.op == "symbol")
    graph = ModGraph(kind, name, expr, tuple(run.tensors.values()), tuple(run.scalars.values()), origin, used)
    run.program.values.clear()  # the trace outlives its first call; the captured values must not
    run.program.root = None
    return Traced(graph, run.program)


def _line_of(error: Exception, run: TracingRun) -> SourceLine | None:
    """The innermost line of the user's code that an error has passed."""
    found, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code in run.reader.codes:
            file, line = step.tb_frame.f_code.co_filename, step.tb_lineno
            found = SourceLine(file, line, linecache.getline(file, line).strip())
        step = step.tb_next
    return found


def _checked_result(result, run: TracingRun) -> Expr:
    where = run.kind + "_mod"
    if isinstance(result, (tuple, list, dict, str)) or result is None:
        got = "nothing (a `return` is missing)" if result is None else f"a {type(result).__name__}"
        raise _result_error(run, f"returns {got}", f"Return one scalar from {where}.")
    if isinstance(result, torch.Tensor) and result.ndim:
        raise _result_error(run, f"returns a tensor of shape {tuple(result.shape)}", f"{where} returns one scalar per position.")
    if type(result) is TensorView:
        raise _result_error(run, f"returns a tensor of shape {tuple(result.shape)}: a captured tensor of shape "
                                 f"{tuple(result.tensor.shape)} indexed by {len(result.index)} of its dimensions",
                            "Index every dimension.")
    expr = to_expr(result)
    if run.kind == "mask" and expr.dtype != torch.bool:
        raise _result_error(run, f"returns {expr.dtype}, not torch.bool",
                            "A mask_mod says which positions may attend: return a comparison, or add `!= 0`.", expr.source)
    return expr


def _result_error(run: TracingRun, problem: str, remedy: str, source: SourceLine | None = None) -> ModError:
    if source is None:
        code = getattr(run.program.root, "__code__", None)
        if code is not None:
            source = SourceLine(code.co_filename, code.co_firstlineno,
                                linecache.getline(code.co_filename, code.co_firstlineno).strip())
    return mod_error(problem, remedy, source, run.kind)
