"""What of a call is no tensor, as one text: an operator's argument that torch's compiler, an exported program and a checkpoint can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch

from ..codegen.mod.expr import ModGraph
from ..codegen.mod.graphs.graph_text import read_graph, text_of
from ..codegen.mod.graphs.wide import with_fitting_numbers
from ..codegen.mod.symbolic.graph_mod import GraphMod
from ..codegen.plan.forward import Options
from ..codegen.registry import remembered


class Captures(NamedTuple):
    """What mods capture, score_mod's first, by the kinds that operators take."""

    tensors: list[torch.Tensor]
    ints: list[int]
    floats: list[float]


_TEXTS = {"score", "mask"}
_compact = partial(json.dumps, separators=(",", ":"))
_SPELT = ("~", "~0"), ("\\", "~1"), ("'", "~2"), ('"', "'")


def argument_of(text: str) -> str:
    """A JSON text as an operator takes it: torch's C++ wrapper writes arguments into C++ as they are, so without double quotes and
    backslashes."""
    for character, spelt in _SPELT:
        text = text.replace(character, spelt)
    return text


def json_of(argument: str) -> str:
    """The JSON text of an operator's argument, which files of earlier versions have as JSON."""
    if argument.startswith('{"'):
        return argument
    for character, spelt in reversed(_SPELT):
        argument = argument.replace(spelt, character)
    return argument


@dataclass(frozen=True)
class Program:
    """A call without its tensors and numbers.

    score, mask    texts of mods, or None
    lists          of a block mask: blocks of queries and of keys, may full blocks be checked for KV_LEN, does mask_mod alone decide
    rows           what a backward pass needs is wanted
    transposed     the transposed lists come behind the mask's own
    dropout_p      above 0: a seed comes with the call
    out            the output's dtype, where float8 has another than bfloat16
    """

    score: str | None = None
    mask: str | None = None
    lists: tuple[int, int, bool, bool] | None = None
    options: Options = Options()
    deterministic: bool = False
    max_scores: bool = False
    rows: bool = False
    transposed: bool = False
    dropout_p: float = 0.0
    out: str | None = None

    @property
    def out_dtype(self) -> torch.dtype | None:
        """`out` as a dtype."""
        return None if self.out is None else getattr(torch, self.out)

    def text(self) -> str:
        """Only what differs from the defaults."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return argument_of("{" + ",".join(f'"{k}":{v if k in _TEXTS else _compact(v)}' for k, v in parts.items()) + "}")

    def mods(self, captures: Captures, device: torch.device) -> tuple[GraphMod | None, GraphMod | None]:
        """score_mod and mask_mod, which capture these, for a call on a device."""
        if self.score is self.mask is None:
            return None, None
        found, left = [], (iter(on_device(device, captures.tensors)), iter(captures.ints), iter(captures.floats))
        for text in (self.score, self.mask):
            found.append(None if text is None else GraphMod(*bound_graph(read_graph_once(text), *left)))
        return tuple(found)


@remembered("programs of operators", 1024)
def read_program(text: str) -> Program:
    """The program of a text. Raises ValueError for one that is none."""
    try:
        parts = json.loads(json_of(text))
        parts |= {k: _compact(parts[k]) for k in _TEXTS & parts.keys()}
        if "options" in parts:
            options = Options(*parts["options"])
            parts["options"] = options._replace(tile=tuple((str(name), int(n)) for name, n in options.tile))
        parts["lists"] = tuple(parts["lists"]) if parts.get("lists") else None
        program = Program(**parts)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"this is no program of a flexpress operator: {error!r}") from None
    return program


@remembered("mods of operators", 1024)
def read_graph_once(text: str) -> ModGraph:
    """The graph of a mod's text, be it JSON or an operator's argument."""
    return read_graph(json_of(text))


def captures_of(*bound: tuple[ModGraph, Sequence] | None) -> Captures:
    """What bound mods capture."""
    found = Captures([], [], [])
    for graph, values in (b for b in bound if b is not None):
        found.tensors.extend(values[: len(graph.tensors)])
        for scalar, value in zip(graph.scalars, values[len(graph.tensors) :], strict=True):
            if scalar.kind is float:
                found.floats.append(value)
            else:  # a list that has symbols of torch's compiler must have no bool
                found.ints.append(int(value) if isinstance(value, (bool, torch.SymBool)) else value)
    return found


def mod_program(score: tuple | None, mask: tuple | None, **others) -> Program:
    """The program of a call with these bound mods."""
    return Program(score and text_of(score[0]), mask and text_of(mask[0]), **others)


def on_device(device: torch.device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Captured tensors on a call's device: those of no dimension may be on the CPU."""
    return [t.to(device) if t.ndim == 0 else t for t in tensors]


def bound_graph(graph: ModGraph, tensors, ints, floats) -> tuple[ModGraph, list]:
    """A graph with what of those is its own, in its order."""
    if not graph.tensors and not graph.scalars:
        return graph, []
    numbers = [next(floats) if s.kind is float else s.kind(next(ints)) for s in graph.scalars]
    return with_fitting_numbers(graph, [*(next(tensors) for _ in graph.tensors), *numbers])
