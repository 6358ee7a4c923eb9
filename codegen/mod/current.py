"""The run that operations on symbols and on captured values belong to: one a thread, and how it applies them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .errors import ModError, mod_error
from .expr import Expr, ExprTable, SourceLine

WEAK_DTYPE = {bool: torch.bool, int: torch.int64, float: torch.float32}


class Symbolic:
    """What is known only inside the kernel: symbols, and captured tensors indexed by some."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Operations:
    """How operations are applied; dispatch.py, which makes symbols of them, has the one there is.

    apply         (function, args, kwargs): one torch function or Python operator
    method        (symbol, name): a method of tensors, for a symbol
    is_operation  whether a function is one that may be applied to symbols
    """

    apply: Callable
    method: Callable
    is_operation: Callable


class _Thread(threading.local):
    """Each thread traces on its own."""

    run: Run | None = None
    device = torch.device("meta")


_thread = _Thread()


def set_device(device: torch.device | None) -> None:
    """Mods of this thread are bound for a call on this device; None: nobody knows on which."""
    _thread.device = device or _Thread.device


def device_of_call(*_) -> torch.device:
    """Where the tensors are that symbols stand for."""
    return _thread.device


class _RunType(type):
    @property
    def current(cls) -> Run | None:
        """The run of this thread."""
        return _thread.run


class Run(metaclass=_RunType):
    """What operations on symbols need while they become nodes: how they are applied, the table of nodes, and whom to blame for an error."""

    def __init__(self, kind: str, table: ExprTable, operations: Operations) -> None:
        self.kind, self.table, self.operations = kind, table, operations
        self.shared: list[tuple] = []  # pairs of symbols that share memory in torch
        self.numbers: list | None = None  # whose symbols stand for what the mod makes of them; None: a run takes symbols of others, too
        self.twins: dict[int, Expr] = {}  # what equals a node by q_idx, but by kv_idx (see long_dots.same_where_seen)

    @contextmanager
    def active(self):
        """Operations on symbols belong to this run."""
        previous, _thread.run = _thread.run, self
        try:
            yield self
        finally:
            _thread.run = previous

    def source(self) -> SourceLine | None:
        """The user's line that a new node comes from."""
        return None

    def device(self) -> torch.device:
        """Where symbols are, which a mod may ask."""
        return device_of_call()

    def simplified(self, op: str, operands: list[Expr]) -> Expr | None:
        """A shorter expression for a new node; None if there is none."""
        return None

    def number(self, value) -> Expr:
        """The expression of a Python number."""
        if type(value) is int and not -1 << 63 <= value < 1 << 63:
            raise self.error(
                f"an integer of {value.bit_length()} bits, which does not fit into 64 bits", "Write a float, or a smaller integer."
            )
        return self.table.make("literal", (), WEAK_DTYPE[type(value)], attr=value, weak=True)

    def made(self, node: Expr) -> Expr:
        """A new node, as operations go on with it."""
        return node

    def hides_gradients(self) -> bool:
        """Is this within torch.no_grad(), and gradients flow outside of it?"""
        return False

    def error(self, problem: str, remedy: str = "") -> ModError:
        return mod_error(problem, remedy, self.source(), self.kind)


def applied(function, args: tuple, kwargs: dict):
    """A torch function or Python operator, applied in the run of this thread."""
    return running().operations.apply(function, args, kwargs)


def running() -> Run:
    """The run of this thread, of which symbols are used."""
    if _thread.run is None:
        raise RuntimeError("a symbol of a traced mod was used after the trace had ended")
    return _thread.run
