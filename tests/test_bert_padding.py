"""flexpress.flash_attn.bert_padding: padded batches to packed tokens and back, with gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input, unpad_input_for_concatenated_sequences

S = 6
MASKS = st.lists(st.lists(st.sampled_from([0, 1]), min_size=S, max_size=S), min_size=1, max_size=4)


def hidden(batch):
    return torch.arange(batch * S * 6.0).reshape(batch, S, 2, 3).requires_grad_()


@given(MASKS, st.booleans())
def test_a_mask_selects_tokens_and_padding_brings_them_back(mask, as_bool):
    states, mask = hidden(len(mask)), torch.tensor(mask, dtype=torch.bool if as_bool else torch.int64)
    tokens, indices, cu_seqlens, longest, used = unpad_input(states, mask)
    counts = mask.sum(1).tolist()
    assert torch.equal(tokens, states[mask.bool()])
    assert indices.tolist() == [b * S + i for b in range(len(mask)) for i in range(S) if mask[b, i]]
    assert cu_seqlens.tolist() == [sum(counts[:n]) for n in range(len(counts) + 1)] and cu_seqlens.dtype == torch.int32
    assert longest == max(counts) and type(longest) is int
    assert used.tolist() == counts and used.dtype == torch.int32
    padded = pad_input(tokens, indices, len(mask), S)
    assert torch.equal(padded, states * mask[..., None, None])
    (gradient,) = torch.autograd.grad((padded * 2).sum(), states)
    assert torch.equal(gradient, (mask[..., None, None] * 2.0).expand_as(states))


@given(MASKS, st.data())
def test_unused_places_are_packed_but_not_counted_as_used(mask, data):
    mask = torch.tensor(mask)
    unused = torch.tensor([[data.draw(st.integers(0, 1)) * (1 - n) for n in row] for row in mask.tolist()])
    for kind in (torch.bool, torch.int32):
        tokens, indices, cu_seqlens, longest, used = unpad_input(hidden(len(mask)), mask.to(kind), unused.to(kind))
        packed = (mask + unused).bool()
        assert torch.equal(tokens, hidden(len(mask))[packed]) and torch.equal(indices, packed.flatten().nonzero().flatten())
        assert cu_seqlens.diff().tolist() == packed.sum(1).tolist() and longest == int(packed.sum(1).max())
        assert used.tolist() == mask.sum(1).tolist()


def test_rows_of_several_sequences():
    """The example of flash_attn's documentation: rows of 2 + 3, 3 + 2 and 6 tokens."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    states = hidden(3)
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(states, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert torch.equal(tokens, states.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and longest == 6
    assert pad_input(tokens, indices, 3, S)[0, 5].eq(0).all()


def test_no_tokens():
    tokens, indices, cu_seqlens, longest, used = unpad_input(hidden(2), torch.zeros(2, S, dtype=torch.bool))
    assert tokens.shape == (0, 2, 3) and indices.shape == (0,) and cu_seqlens.tolist() == [0, 0, 0] and longest == 0
    assert pad_input(tokens, indices, 2, S).eq(0).all()
    assert unpad_input_for_concatenated_sequences(hidden(2), torch.zeros(2, S, dtype=torch.int64))[2].tolist() == [0]


def test_rows_that_are_taken_twice_get_both_gradients():
    states = torch.randn(4, 3, requires_grad=True)
    taken = index_first_axis(states, torch.tensor([2, 0, 2]))
    assert torch.equal(taken, states[[2, 0, 2]])
    (gradient,) = torch.autograd.grad(taken.sum(), states)
    assert gradient[:, 0].tolist() == [1, 0, 2, 0]


def test_errors_show_the_shapes():
    with pytest.raises(ValueError, match=r"attention_mask \(B, S\), got shapes \(2, 6, 2, 3\) and \(2, 5\)"):
        unpad_input(hidden(2), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"unused_mask \(B, S\)"):
        unpad_input(hidden(2), torch.ones(2, 6), torch.ones(6))
    with pytest.raises(ValueError, match="attention_mask_in_length"):
        unpad_input_for_concatenated_sequences(hidden(2)[..., 0, 0], torch.ones(2, 6))
    with pytest.raises(ValueError, match="input must have 2 dimensions"):
        index_first_axis(torch.ones(3), torch.tensor([0]))
