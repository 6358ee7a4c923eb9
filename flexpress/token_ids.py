"""Token ids and other integers as callers have them, lists or tensors, on any device: checked, in one tensor or list."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch


def flatten(sequences) -> tuple[list[int], torch.Tensor]:
    """Lengths, and all ids in one integer tensor [total]; int32 where it lies on the host."""
    if isinstance(sequences, torch.Tensor) and sequences.dim() != 2:
        raise ValueError(f"sequences must be [n, s] as one tensor, got shape {tuple(sequences.shape)}")
    if not isinstance(sequences, (Sequence, torch.Tensor)) or isinstance(sequences, str):
        raise TypeError(f"sequences must be a list of sequences, or a tensor, got {type(sequences).__name__}")
    together = _one_list(sequences)
    if together is not None:
        parts, lengths = [together], [len(sequence) for sequence in sequences]
    else:
        parts = [_ids(i, sequence) for i, sequence in enumerate(sequences)]
        lengths = [len(part) for part in parts]
    devices = {part.device for part in parts}
    ids = torch.cat(parts if len(devices) == 1 else [part.cpu() for part in parts]) if parts else torch.empty(0)
    if ids.device.type == "cpu" and ids.numel() and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ValueError("sequences has an id that does not fit int32")
    return lengths, ids


def _one_list(sequences) -> torch.Tensor | None:
    """Lists of ids, as they mostly are, in one tensor, several times as fast as one by one. None if they are anything else, or wrong."""
    if not all(type(sequence) is list for sequence in sequences):
        return None
    try:
        ids = torch.tensor([number for sequence in sequences for number in sequence])
    except (TypeError, ValueError, RuntimeError):
        return None
    return ids if ids.dim() == 1 and ids.dtype == torch.int64 else None


def _ids(i: int, sequence) -> torch.Tensor:
    if not isinstance(sequence, torch.Tensor):
        try:
            sequence = torch.tensor(list(sequence))
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"sequence {i} must be a list of integers or an integer tensor, got {str(sequence)[:80]}") from None
    if sequence.dim() != 1:
        raise ValueError(f"sequence {i} must have 1 dimension, got shape {tuple(sequence.shape)}")
    if not len(sequence):
        return sequence.to(torch.int32)
    if sequence.is_floating_point() or sequence.is_complex() or sequence.dtype == torch.bool:
        raise TypeError(f"sequence {i} must hold integers, got {sequence.dtype}")
    return sequence


def integers(name: str, numbers, n: int | None = None) -> list[int]:
    """The ints of a list or tensor. With n: there must be n, and an int stands for n times the same."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if n is not None and isinstance(numbers, int):
        return [numbers] * n
    try:
        numbers = [operator.index(number) for number in numbers]
    except TypeError:
        raise TypeError(f"{name} must hold integers, got {str(numbers)[:80]}") from None
    if n is not None and len(numbers) != n:
        raise ValueError(f"{name} has {len(numbers)} entries for {n} sequences")
    return numbers
