"""Mods bound where torch records a call: by a trace of their own where what they capture has no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch

from ..codegen.mod.captured.tensors import check_kind, is_transformed, tracing
from ..codegen.mod.tracing.bind import bind, bind_once


@overload
def bound_mod(mod: Callable, kind: str, device: torch.device | None = None, gather: Callable | None = None) -> tuple: ...
@overload
def bound_mod(mod: None, kind: str, device: torch.device | None = None, gather: Callable | None = None) -> None: ...
def bound_mod(mod, kind, device=None, gather=None):
    """A mod's graph and what it captures, with or without values. Raises NotImplementedError for kinds of tensors that kernels cannot
    read."""
    if mod is None:
        return None
    graph, values = graph_and_values(mod, kind, device)
    if gather is not None:
        gather((graph, values), f"{kind}_mod")
    for capture, tensor in zip(graph.tensors, values, strict=False):
        check_kind(f"{kind}_mod {graph.name} captures {capture.name}, which", tensor)
    return graph, values


def graph_and_values(mod, kind: str, device: torch.device | None = None) -> tuple:
    """The same of any mod, unchecked."""
    if not (tracing() or is_transformed()):
        return bind(mod, kind, device)
    return bind_once(mod, kind, device)
