"""Tokens, ids or rows of more, and integers as callers have them, lists or tensors, on any device: checked, in one tensor or list."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch


def flatten(sequences) -> tuple[list[int], torch.Tensor]:
    """Lengths, and all tokens in one tensor: ids [total], integers, int32 where they lie on the host; or rows [total, ...]."""
    if isinstance(sequences, torch.Tensor) and sequences.dim() < 2:
        raise ValueError(f"sequences must be [n, s] or [n, s, ...] as one tensor, got shape {tuple(sequences.shape)}")
    if not isinstance(sequences, (Sequence, torch.Tensor)) or isinstance(sequences, str):
        raise TypeError(f"sequences must be a list of sequences, or a tensor, got {type(sequences).__name__}")
    together = _one_list(sequences)
    if together is not None:
        parts, lengths = [together], [len(sequence) for sequence in sequences]
    else:
        parts = [_tokens(i, sequence) for i, sequence in enumerate(sequences)]
        lengths = [len(part) for part in parts]
        parts = _alike(parts)
    devices = {part.device for part in parts}
    if torch.device("meta") in devices:
        raise ValueError("sequences has a tensor on meta, where no values are; pass tensors with values, or lists")
    parts = parts or [torch.empty(0, dtype=torch.int64, device="cpu")]
    ids = torch.cat(parts if len(devices) <= 1 else [part.cpu() for part in parts])
    if (
        ids.device.type == "cpu"
        and ids.numel()
        and not ids.is_floating_point()
        and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31
    ):
        raise ValueError(f"sequences has an id that does not fit int32: ids go from {int(ids.min())} to {int(ids.max())}")
    return lengths, ids


def _alike(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have tokens, or one that has none. ValueError if a token of one is not what a token of another is."""
    found = [i for i, part in enumerate(parts) if len(part)]
    for i in found:
        one, other = ((p.shape[1:], p.dtype if p.is_floating_point() else None) for p in (parts[found[0]], parts[i]))
        if one != other:
            raise ValueError(
                f"tokens must all be ids, or rows of one shape and dtype: sequence {found[0]} is {parts[found[0]].dtype} "
                f"{tuple(parts[found[0]].shape)}, sequence {i} {parts[i].dtype} {tuple(parts[i].shape)}"
            )
    return [parts[i] for i in found] or parts[:1]


def _one_list(sequences) -> torch.Tensor | None:
    """Lists of ids, as they mostly are, in one tensor, several times as fast as one by one. None if they are anything else, or wrong."""
    if not all(type(sequence) is list for sequence in sequences):
        return None
    try:
        ids = torch.tensor([number for sequence in sequences for number in sequence], device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    return ids if ids.dim() == 1 and ids.dtype == torch.int64 else None


def _tokens(i: int, sequence) -> torch.Tensor:
    """A sequence's ids [s], or as a tensor rows [s, ...] of integers or floating-point numbers."""
    is_tensor = isinstance(sequence, torch.Tensor)
    if not is_tensor:
        try:
            sequence = torch.tensor(list(sequence), device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"sequence {i} must be a list of integers or a tensor, got {str(sequence)[:80]}") from None
    if sequence.dim() == 0 or sequence.dim() > 1 and not is_tensor:
        remedy = "pass a tensor [s, ...] for tokens that are no ids" if sequence.dim() else "a token alone is a list of one"
        raise ValueError(f"sequence {i} must have 1 dimension, got shape {tuple(sequence.shape)}; {remedy}")
    if sequence.dim() == 1 and not len(sequence):
        return sequence.to(torch.int32)
    if sequence.is_complex() or sequence.dtype == torch.bool or (sequence.is_floating_point() and sequence.dim() == 1):
        raise TypeError(f"sequence {i} must hold integers, or be [s, ...] for embeddings, got {sequence.dtype} {tuple(sequence.shape)}")
    return sequence.detach()


def integers(name: str, numbers, n: int | None = None) -> list[int]:
    """The ints of a list or tensor. With n: there must be n, and an int stands for n times the same."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if n is not None and isinstance(numbers, int) and not isinstance(numbers, bool):
        return [numbers] * n
    try:
        listed = list(numbers)
        if bool in map(type, listed):  # of which Python makes 0 and 1
            raise TypeError
        found = [operator.index(number) for number in listed]
    except TypeError:
        raise TypeError(f"{name} must hold integers, got {str(numbers)[:80]}") from None
    if n is not None and len(found) != n:
        raise ValueError(f"{name} has {len(found)} entries for {n} sequences")
    return found
