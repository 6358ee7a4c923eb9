"""flash_attn.bert_padding: between padded batches (B, S, ...) and packed tokens (total, ...).

The numbers of tokens are only known on the device, so the functions that take a mask wait for it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flexpress.codegen.mod.captured.tensors import is_moving, tracing
from flexpress.inputs.cache_checks import check_still_there
from flexpress.inputs.checks import check_are_tensors, whole


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows `indices` (n,) of input (N, ...), at least 2-D: (n, ...). Differentiable. ValueError for another rank."""
    _check_there(input=input)
    if input.ndim < 2:
        raise ValueError(f"input must have 2 dimensions or more, got shape {tuple(input.shape)}")
    _check_indices(indices, input.shape[0], "rows of input")
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of a padded batch that a mask selects, one after another.

    hidden_states    (B, S, ...)
    attention_mask   (B, S), bool or numbers: 0 for padding, anything else for tokens
    unused_mask      (B, S) likewise: not 0 for places that are packed as well, although no token is in them

    Returns the rows (total, ...), the places where they were in the flattened (B * S, ...) as int64 (total,), cu_seqlens int32 (B + 1,),
    the largest number of rows in a sequence as an int, and the numbers of tokens, unused places not counted, as int32 (B,).
    Differentiable with respect to hidden_states. ValueError for masks of another shape.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    packed = attention_mask != 0
    lengths = tokens = packed.sum(dim=-1, dtype=torch.int32)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        packed = packed | (unused_mask != 0)
        lengths = packed.sum(dim=-1, dtype=torch.int32)
    indices = packed.flatten().nonzero().flatten()
    return _rows(hidden_states, indices), indices, _ends(lengths), _largest(lengths), tokens


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The tokens of a padded batch whose rows each hold several short sequences, one after another, and then padding.

    hidden_states              (B, S, ...)
    attention_mask_in_length   (B, S) integers: in each row the lengths of its sequences, and 0 elsewhere. [[2, 3, 0, 0, 0, 0]] is a row of
                               6 places with a sequence of 2 tokens, one of 3, and 1 place of padding

    Returns the tokens (total, ...), their places in the flattened (B * S, ...) as int64 (total,), cu_seqlens int32 of all n sequences
    (n + 1,), and the largest length as an int. Differentiable with respect to hidden_states. ValueError for another shape, and for lengths
    that are no whole numbers of 0 or more, or in a row longer than S together.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    S = attention_mask_in_length.shape[1]
    ends = attention_mask_in_length.sum(dim=-1, keepdim=True)
    if not (torch.compiler.is_compiling() or tracing()):
        _check_lengths(attention_mask_in_length, ends)
    used = torch.arange(S, device=attention_mask_in_length.device) < ends
    indices = used.flatten().nonzero().flatten()
    flat = attention_mask_in_length.flatten()
    lengths = flat[flat.nonzero().flatten()]
    return _rows(hidden_states, indices), indices, _ends(lengths), _largest(lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Packed tokens (total, ...) at their places `indices` (total,) in a batch (batch, seqlen, ...) of zeros. Differentiable.

    ValueError or TypeError for indices that are no (total,) integers; on the CPU, where nobody waits, for those outside of the batch or
    there twice, too.
    """
    _check_there(hidden_states=hidden_states)
    places = whole("batch", batch) * whole("seqlen", seqlen)
    looks = _check_indices(indices, places, f"places of a batch ({batch}, {seqlen})")
    if hidden_states.ndim == 0 or indices.shape[0] != hidden_states.shape[0]:
        raise ValueError(f"indices must have one place for each token, got {tuple(indices.shape)} for {tuple(hidden_states.shape)}")
    if looks and indices.unique().shape[0] != indices.shape[0]:
        raise ValueError("indices has a place twice; pass those that unpad_input returns")
    padded = hidden_states.new_zeros(places, *hidden_states.shape[1:])
    return padded.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))


def _check_there(**named: torch.Tensor) -> None:
    """They are tensors, and have memory, where that can be asked."""
    check_are_tensors(**named)
    if not (torch.compiler.is_compiling() or tracing()):
        for name, tensor in named.items():
            if not is_moving(tensor):
                check_still_there(name, tensor)


def _check_lengths(attention_mask_in_length: torch.Tensor, ends: torch.Tensor) -> None:
    S = attention_mask_in_length.shape[1]
    lengths = attention_mask_in_length
    wrong = (lengths < 0) | (lengths > S) | (lengths != lengths.long()) | (ends > S)  # of larger ones the sum may wrap around
    if rows := wrong.any(dim=-1).nonzero().flatten().tolist():
        raise ValueError(
            f"attention_mask_in_length must hold lengths, whole numbers of 0 or more that are {S} at most in a row, got "
            f"{lengths[rows[0]].tolist()!s:.80} in row {rows[0]}"
        )


def _check_indices(indices: torch.Tensor, count: int, what: str) -> bool:
    """Integers (n,), which on the CPU are below `count`. Were their values looked at?"""
    _check_there(indices=indices)
    if indices.ndim != 1:
        raise ValueError(f"indices must have shape (n,), got {tuple(indices.shape)}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int64, got {indices.dtype}; convert them with .long()")
    if torch.compiler.is_compiling() or indices.device.type != "cpu" or tracing() or is_moving(indices):
        return False
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < count:
        raise ValueError(f"indices are from {int(indices.min())} to {int(indices.max())}; there are {count} {what}")
    return True


def _check_mask(name: str, mask: torch.Tensor, hidden_states: torch.Tensor) -> None:
    _check_there(hidden_states=hidden_states, **{name: mask})
    if hidden_states.ndim < 3 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"hidden_states must be (B, S, ...) and {name} (B, S), got shapes {tuple(hidden_states.shape)} and {tuple(mask.shape)}"
        )
    if mask.device != hidden_states.device:
        raise ValueError(f"{name} is on {mask.device} but hidden_states is on {hidden_states.device}; move it with .to(...)")


def _rows(hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return index_first_axis(hidden_states.flatten(0, 1), indices)


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _largest(lengths: torch.Tensor) -> int:
    return int(pad(lengths, (0, 1)).max())  # 0 if there are none, which a compiler cannot ask
