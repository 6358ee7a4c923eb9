"""From a mod to its traced graph: the identity of mods, and the cache of traces.

Mods with the same code share a bucket; a trace in it serves a mod if all its guards hold for what that mod captures now
(see capture.py). So the same lambda twice, a fresh lambda of the same code, another window size or another slope tensor
all find the trace that is there, and a changed global or another closed-over function does not.

A mod whose reads cannot be recorded is traced at every call, on the objects that it captures. That takes some tenths of a
millisecond and compiles nothing that is there already. The log (logger "flexpress.trace") says so once, `explain` always.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
import warnings
from dataclasses import dataclass, field

import torch

from ... import logs
from ...compiling import runs_uncompiled
from ...registry import INFO, Table
from ...turn import Turn
from ..captured.origins import Origin, Origins, origins_of
from ..captured.program import Untrackable
from ..captured.watched import is_watched, unwatched
from ..current import set_device
from ..errors import ModError
from ..expr import ModGraph
from ..graphs.graph_text import text_of
from ..symbolic.graph_mod import GraphMod
from .calls import MEMOIZED
from .capture import name_of, plain
from .trace import Traced, check_parameters, parts_of, replayable, traced_once

_PER_BUCKET = 64  # traces kept for one piece of code: more means numbers that Python itself consumes keep changing
_GRAPHS = 16  # kernels of the same functions of which nothing is said: a bias whose extents may be 1 has as many


@dataclass
class _Bucket:
    """The traces of one piece of code, newest first.

    every_call   why mods of this code are traced at every call; "" if they are not
    computes     does one of the traces compute tensors of what is captured?
    graphs       the kernels so far, by the functions that were run: of a mod made of others, as and_masks makes them, these differ
    """

    traces: tuple[Traced, ...] = ()
    every_call: str = ""
    computes: bool = False
    graphs: dict[frozenset, set[str]] = field(default_factory=dict)


_buckets: dict[tuple, _Bucket] = Table("mods", 1024)
_keeping = Turn()


def _code_of(mod):
    """What mods must have in common to share traces. No mod or class is kept alive by it."""
    if isinstance(mod, types.FunctionType):
        return mod.__code__
    if isinstance(mod, types.MethodType):
        return types.MethodType, _code_of(mod.__func__)
    if type(mod) is functools.partial:
        return functools.partial, _code_of(mod.func)
    if type(mod) is MEMOIZED:
        return MEMOIZED, _code_of(mod.__wrapped__)
    return type(mod).__module__, type(mod).__qualname__


@runs_uncompiled
def bind(mod, kind: str, device: torch.device | None = None) -> tuple[ModGraph, list]:
    """The graph of a score_mod or mask_mod and what it captures now: tensors, then numbers, in the graph's order. `device`: of the call.

    Traces the mod if no trace fits. Raises ModError for a mod that cannot be traced.
    """
    if type(mod) is not types.FunctionType:
        if type(mod) is GraphMod:
            return mod.graph, [*mod.values]
        if getattr(type(mod), "stands_for_its_function", False):  # `plain`, without the calls
            mod = mod.function
    set_device(device)
    key = (kind, mod.__code__ if type(mod) is types.FunctionType else _code_of(mod), torch.get_default_dtype())
    bucket = _buckets.get(key)
    if (bucket is None or bucket.computes) and is_watched():
        return _bound_in_sight(mod, kind, key, bucket)
    traced, values = _found(mod, kind, key, bucket)
    return traced.graph, values


def graph_of(mod, kind: str, device: torch.device | None = None) -> ModGraph:
    """The graph of `bind`. What a mod captures is none of the caller's business, so nobody sees it computed."""
    with unwatched():
        return bind(mod, kind, device)[0]


def _bound_in_sight(mod, kind: str, key: tuple, bucket: _Bucket | None) -> tuple[ModGraph, list]:
    """What is computed of captured tensors is computed once where others count it: not for traces that do not fit, nor while tracing."""
    with unwatched():
        traced, _ = _found(mod, kind, key, bucket)
    values = None if traced.program is None else traced.bind(mod)
    if values is None:  # it is traced at every call
        traced, values = traced_once(mod, kind)
    return traced.graph, values


def _found(mod, kind: str, key: tuple, bucket: _Bucket | None) -> tuple[Traced, list]:
    """A trace that fits a mod, made now if there is none, and what the mod captures."""
    if bucket is not None:
        for traced in bucket.traces:
            values = traced.bind(mod)
            if values is not None:
                return traced, values
    else:
        check_parameters(mod, kind)
        bucket = _Bucket()
    start = time.perf_counter()
    traced, values, reason = _trace(mod, kind, bucket)
    name = f"{kind}_mod {name_of(mod)}"
    logs.TRACE.debug("traced %s in %.1f ms", name, 1e3 * (time.perf_counter() - start))
    _keeping.run(_keep, key, bucket, traced, reason, name)
    return traced, values


def _keep(key: tuple, bucket: _Bucket, traced: Traced, reason: str, name: str) -> None:
    """Put a new trace, or that there can be none, into the bucket that all threads see."""
    INFO.traces += 1
    bucket = _buckets.setdefault(key, bucket)
    if traced.program is not None:
        bucket.traces = (traced, *bucket.traces[: _PER_BUCKET - 1])
        bucket.computes = bucket.computes or traced.program.computes
    elif not bucket.every_call:
        bucket.every_call = reason
        logs.TRACE.warning("%s is traced at every call, which takes some tenths of a millisecond: it %s", name, reason)
    _count(bucket, traced)


def _trace(mod, kind: str, bucket: _Bucket) -> tuple[Traced, list, str]:
    """A new trace, what the mod captures now, and why the trace serves this call alone (or "")."""
    reason = bucket.every_call
    if not reason:
        try:
            return *replayable(mod, kind), ""
        except Untrackable as refused:
            reason = str(refused)
        except Exception as error:  # on real objects it may be none; if it is, that error is the user's
            said = str(error).partition("\n")[0]
            reason = f"raises {type(error).__name__} with stand-ins for what it captures ({said})"
    try:
        return *traced_once(mod, kind), reason
    except ModError as error:
        problem = error
    for part in parts_of(plain(mod)):
        bind(part, kind)  # the error of a part shows its own line
    raise problem


def _count(bucket: _Bucket, traced: Traced) -> None:
    """Warn once of functions that get a kernel for each value of something."""
    if len(bucket.graphs) >= _PER_BUCKET:
        bucket.graphs.clear()
    graph, found = traced.graph, bucket.graphs.setdefault(traced.codes, set())
    text = text_of(graph)  # a mod of a compiler's graph has a line of its own each time, and one text
    if len(found) > _GRAPHS or text in found:
        return
    found.add(text)
    if len(found) > _GRAPHS:
        warnings.warn(
            f"{graph.kind}_mod {graph.name} has become {len(found)} different kernels: values that Python itself consumes "
            "(if, range, a list's index, the truth of a tensor) are part of a kernel. Let numbers and tensors meet the mod's "
            "symbols in arithmetic, and nothing is compiled again.",
            stacklevel=3,
        )


@runs_uncompiled
def bind_once(mod, kind: str, device: torch.device | None) -> tuple[ModGraph, list]:
    """As bind, for this call alone, by a trace on the objects that the mod captures: of tensors that torch follows."""
    set_device(device)
    traced, values = traced_once(mod, kind)
    return traced.graph, values


@runs_uncompiled
def bind_with_origins(mod, kind: str, device: torch.device | None = None) -> tuple[tuple[ModGraph, list], Origins]:
    """As bind, by a trace of its own; and where what the mod captures comes from, of this mod and no other of the same code."""
    bound = bind(mod, kind, device)
    if type(mod) is GraphMod:
        return bound, _unknown(bound)
    with contextlib.suppress(Exception):  # of mods that are traced at every call
        traced, values = replayable(plain(mod), kind)
        found, places, count = traced.program.run(plain(mod)), traced.places, len(traced.graph.tensors)
        if found is not None:
            return (traced.graph, values), origins_of(traced.program, found, places[:count], places[count:])
    return bound, _unknown(bound)


def _unknown(bound: tuple[ModGraph, list]) -> Origins:
    """Of values of which nothing but a name is known."""
    captures = zip((*bound[0].tensors, *bound[0].scalars), bound[1], strict=True)
    return Origins(tuple(Origin(capture.name, value) for capture, value in captures))


def why_every_call(mod, kind: str) -> str:
    """Why a mod is traced at every call; "" if it is not, or was not traced yet."""
    bucket = _buckets.get((kind, _code_of(plain(mod)), torch.get_default_dtype()))
    return bucket.every_call if bucket is not None else ""
