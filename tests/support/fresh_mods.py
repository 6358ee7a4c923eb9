"""Mods that no process has seen: code of its own for every number, so that each is traced, printed and compiled."""

from __future__ import annotations

import os
import sys

import torch


def score_mod(number: int):
    """score * c + (q_idx - kv_idx) * d, with literals of its own."""
    return eval(f"lambda score, b, h, q_idx, kv_idx: score * {1 + number / 2**20!r} + (q_idx - kv_idx) * {(number % 97) / 128!r}")


def score_of(number: int, scores: torch.Tensor) -> torch.Tensor:
    """What that makes of scores."""
    m, n = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])
    return scores * (1 + number / 2**20) + (m - n) * ((number % 97) / 128)


def mask_mod(number: int):
    """A window whose size is a literal."""
    return eval(f"lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < {number}) & (kv_idx - q_idx < {number + 1})")


def mask_of(number: int, length: int) -> torch.Tensor:
    """That mask."""
    m, n = torch.arange(length)[:, None], torch.arange(length)
    return (m - n < number) & (n - m < number + 1)


def language() -> list[tuple]:
    """All that the interpreter may switch, and what it is now."""
    import triton.language as tl
    from triton.runtime import interpreter

    owners = (
        tl,
        tl.core,
        tl.math,
        tl.standard,
        tl.tensor,
        tl.dtype,
        tl.core.tensor_descriptor_base,
        interpreter,
        interpreter.InterpreterBuilder,
    )
    module = type(os)
    return [
        (owner, name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if not isinstance(value, module) and name not in ("__annotations__", "__warningregistry__")
    ]


def same_language(before: list[tuple]) -> bool:
    """Is everything as `language` found it?"""
    now = language()
    return len(now) == len(before) and all(
        a is c and x == y and v is w for (a, x, v), (c, y, w) in zip(sorted(before, key=_place), sorted(now, key=_place), strict=True)
    )


def _place(entry: tuple) -> tuple:
    return entry[0].__name__, entry[1]


def say(text: str) -> None:
    print(text, flush=True, file=sys.stderr)
