"""How the gradients of captured tensors are gathered, by what the indices of their loads depend on, and the parameters that take them."""

from __future__ import annotations

from collections.abc import Iterable

from ..mod.expr import Expr, symbols_in
from ..mod.graphs.loads import read_in
from ..mod.table.dtypes import dtype_name
from ..text.gradient_text import CapturedGradient
from ..text.layouts import TensorLayout
from ..text.mod_text import ModText
from ..text.parameters import Parameter, pointer
from .forward import Mod, indices_of

Roles = tuple[tuple[str, Expr, Expr], ...]  # (role, load or dot product of rows, gradient)
Gathered = tuple[tuple[CapturedGradient, Expr], ...]  # what a kernel gathers, and from which load


def role_of(load: Expr, layout: TensorLayout, case) -> str:
    """How the gradient of a load is gathered (see CapturedGradient), in a BackwardCase or TangentCase; "slab" is the deterministic form of
    "atomic"."""
    indices = indices_of(load, layout)
    symbols = frozenset().union(*map(symbols_in, indices))
    if "score" in symbols or {"q_idx", "kv_idx"} <= symbols:
        plain = [a.attr for a in indices if a.op == "symbol"]
        distinct = len(plain) == len(set(plain)) and all(a.op in ("symbol", "literal", "scalar") for a in indices)
        covered = set(plain) | ({"b"} if case.one_batch else set()) | ({"h"} if case.one_head else set())
        if distinct and {"b", "h", "q_idx", "kv_idx"} <= covered:
            return "store"
        if case.deterministic and "score" in symbols:
            raise NotImplementedError(
                "deterministic=True: gradients of a captured tensor indexed by the score are added in any order; detach() it"
            )
        return "slab" if case.deterministic else "atomic"
    return "row" if "q_idx" in symbols else "column" if "kv_idx" in symbols else "head"


def roles_of(score: Mod, case, loads: Iterable[tuple[Expr, Expr]], dots: Iterable[tuple[Expr, Expr]] = ()) -> Roles:
    """Loads, and dot products of rows, with their gradients and roles. A dot product comes once for each of its two rows that belongs to a
    tensor that wants a gradient."""
    found = [(role_of(load, score[1][load.attr], case), load, gradient) for load, gradient in loads]
    found += [(role, dot, gradient) for dot, gradient in dots for role in ("row", "column") if read_in(dot, role).attr in case.captured]
    return tuple(found)


def gathered_in(text: ModText | None, roles: Roles) -> Gathered:
    """What a kernel gathers whose lowered derivative was made for these roles."""
    return tuple(zip(text.gradient.captured, (read_in(load, role) for role, load, _ in roles), strict=True)) if roles else ()


def buffers_of(score: Mod | None, gathered: Gathered) -> tuple[Parameter, ...]:
    """The parameters that take gradients of captured tensors."""
    found = []
    for captured, load in gathered:
        dtype = dtype_name(score[0].tensors[load.attr].dtype) if captured.role == "store" else "float32"
        meaning = captured.meaning.removeprefix("float32").removeprefix(":").strip()
        found.append(pointer(captured.buffer, dtype, f"gradient of {captured.name}, {meaning}"))
    return tuple(found)


def numbers_of_copies(gathered: Gathered) -> list[str]:
    """What kernels in C++ are told of gradients whose positions share elements, of which each task may have a copy of its own."""
    shared = [c for c, _ in gathered if c.role == "atomic"]
    return [*(["ONE_COPY"] if shared else []), *(f"span_{c.name}_{c.load}" for c in shared)]
