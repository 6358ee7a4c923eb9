"""Do all ranks mean the same? Asked at the first call of each kind, so that a rank that differs is an error, not a hang or a wrong sum."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

_FAILED = 0  # the number of a rank that has raised; digests are larger


class Agreement:
    """What the ranks of a plan have agreed on so far."""

    def __init__(self, groups: list[dist.ProcessGroup | None], device: torch.device) -> None:
        """groups   of ranks that must agree; two of them are the dimensions of a mesh"""
        self._groups, self._device = groups, device
        self._known: set[Hashable] = set()

    def check(self, kind: Hashable, facts: Callable[[], dict[str, object]]) -> None:
        """ValueError on every rank if one has other facts than most, or has failed, naming it. Asked once for a kind of calls, which on one
        rank all have the same facts."""
        if kind in self._known:
            return
        shown = tuple((name, str(fact)) for name, fact in facts().items())
        try:
            numbers = self._gathered_numbers(digest_of(shown))
            if _FAILED in numbers or len(set(numbers)) > 1:
                raise ValueError(_difference(self._gathered_objects((dist.get_rank(), "", shown))))
        except Exception as failure:
            vars(failure)["told"] = True  # all ranks have it, or there is no way to them
            raise
        self._known.add(kind)

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """What is raised here is told."""
        try:
            yield
        except Exception as failure:
            self.tell(failure)
            raise

    def tell(self, failure: Exception) -> None:
        """Other ranks that are in their first `check` learn of what is raised here. Later they are anywhere, and nobody is told."""
        if self._known or "told" in vars(failure):
            return
        with _disable_current_modes():  # under FakeTensorMode, which is refused, there would be no numbers to send
            self._gathered_numbers(_FAILED)
            self._gathered_objects((dist.get_rank(), f"{type(failure).__name__}: {failure}", ()))

    def _gathered_numbers(self, number: int) -> list[int]:
        found = torch.tensor([number], dtype=torch.int64, device=self._device)
        for group in self._groups:
            parts = [torch.empty_like(found) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, found, group=group)
            found = torch.cat(parts)
        return found.tolist()

    def _gathered_objects(self, item) -> list:
        found = [item]
        for group in self._groups:
            parts: list = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, found, group=group)
            found = [item for part in parts for item in part]
        return found


def digest_of(value: object) -> int:
    """A number of 7 bytes of what a value shows; at least 1."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big") or 1


def numbers_of(bound: tuple | None, where: str) -> dict[str, object]:
    """The numbers that a bound mod captures, by what they are called in errors."""
    if bound is None:
        return {}
    graph, values = bound
    return {f"{number.name} of {where}": value for number, value in zip(graph.scalars, values[len(graph.tensors) :], strict=True)}


def _difference(words: list[tuple]) -> str:
    """What is to be said of (rank, what it has raised or "", its facts) of all ranks."""
    raised = [f"rank {rank} has raised {failure}" for rank, failure, _ in words if failure]
    if raised:
        return "; ".join(raised)
    (usual, _), *_ = Counter(facts for *_, facts in words).most_common()
    first, expected, said = next(rank for rank, _, facts in words if facts == usual), dict(usual), []
    for rank, _, facts in words:
        mine = dict(facts)
        for name in {**expected, **mine}:
            if mine.get(name) != expected.get(name):
                said.append(f"rank {rank} has another {name} than rank {first}: {mine.get(name)}, not {expected.get(name)}")
    return "; ".join(said) + ". All ranks of a context plan must have the same"
