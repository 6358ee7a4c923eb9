"""flash_attn.bert_padding: between padded batches (B, S, ...) and packed tokens (total, ...).

The numbers of tokens are only known on the device, so the functions that take a mask wait for it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows `indices` (n,) of input (N, ...), at least 2-D: (n, ...). Differentiable. ValueError for another rank."""
    if input.ndim < 2:
        raise ValueError(f"input must have 2 dimensions or more, got shape {tuple(input.shape)}")
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of a padded batch that a mask selects, one after another.

    hidden_states    (B, S, ...)
    attention_mask   (B, S), bool or integers: 1 for tokens, 0 for padding
    unused_mask      (B, S) likewise: 1 for places that are packed as well, although no token is in them

    Returns the rows (total, ...), the places where they were in the flattened (B * S, ...) as int64 (total,), cu_seqlens int32 (B + 1,),
    the largest number of rows in a sequence as an int, and the numbers of tokens, unused places not counted, as int32 (B,).
    Differentiable with respect to hidden_states. ValueError for masks of another shape.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    tokens = attention_mask.sum(dim=-1, dtype=torch.int32)
    if unused_mask is None:
        packed, lengths = attention_mask, tokens
    else:
        _check_mask("unused_mask", unused_mask, hidden_states)
        packed = attention_mask + unused_mask
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
    (n + 1,), and the largest length as an int. Differentiable with respect to hidden_states. ValueError for another shape.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    S = attention_mask_in_length.shape[1]
    used = torch.arange(S, device=attention_mask_in_length.device) < attention_mask_in_length.sum(dim=-1, keepdim=True)
    indices = used.flatten().nonzero().flatten()
    flat = attention_mask_in_length.flatten()
    lengths = flat[flat.nonzero().flatten()]
    return _rows(hidden_states, indices), indices, _ends(lengths), _largest(lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Packed tokens (total, ...) at their places `indices` (total,) in a batch (batch, seqlen, ...) of zeros. Differentiable."""
    places = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return places.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _check_mask(name: str, mask: torch.Tensor, hidden_states: torch.Tensor) -> None:
    if hidden_states.ndim < 3 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"hidden_states must be (B, S, ...) and {name} (B, S), got shapes {tuple(hidden_states.shape)} and {tuple(mask.shape)}"
        )


def _rows(hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return index_first_axis(hidden_states.flatten(0, 1), indices)


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _largest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
