"""From a mod to its traced graph: the identity of mods, and the cache of traces.

Mods with the same code share a bucket; a trace in it serves a mod if all its guards hold for what that mod captures now
(see capture.py). So the same lambda twice, a fresh lambda of the same code, another window size or another slope tensor
all find the trace that is there, and a changed global or another closed-over function does not.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections import OrderedDict

from .cache import INFO
from .expr import ModGraph
from .trace import Traced, trace

_PER_BUCKET = 64  # traces kept for one piece of code: more means numbers that Python itself consumes keep changing
_BUCKETS = 1024

_traces: OrderedDict[tuple, list[Traced]] = OrderedDict()
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # another thread may have been tracing


def _code_of(mod):
    if isinstance(mod, types.FunctionType):
        return mod.__code__
    if isinstance(mod, types.MethodType):
        return mod.__func__, type(mod.__self__)
    if isinstance(mod, functools.partial):
        return functools.partial, _code_of(mod.func)
    return type(mod)


def bind(mod, kind: str) -> tuple[ModGraph, list]:
    """The graph of a score_mod or mask_mod and what it captures now: tensors, then numbers, in the graph's order.

    Traces the mod if no trace fits. Raises ModError for a mod that cannot be traced.
    """
    key = (kind, _code_of(mod))
    for traced in _traces.get(key, ()):
        values = traced.bind(mod)
        if values is not None:
            return traced.graph, values
    with _lock:
        traced = trace(mod, kind)
        INFO.traces += 1
        values = traced.bind(mod)
        if values is None:
            raise RuntimeError(f"{kind}_mod changes what it captures each time it is read; capture plain values instead")
        bucket = _traces.setdefault(key, [])
        _traces.move_to_end(key)
        bucket.insert(0, traced)
        del bucket[_PER_BUCKET:]
        while len(_traces) > _BUCKETS:
            _traces.popitem(last=False)
    return traced.graph, values


def clear() -> None:
    """Forget every trace."""
    with _lock:
        _traces.clear()
