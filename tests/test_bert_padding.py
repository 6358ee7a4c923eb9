"""flexpress.flash_attn.bert_padding: padded batches to packed tokens and back, with gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input, unpad_input_for_concatenated_sequences

S = 6
MASKS = st.lists(st.lists(st.sampled_from([0, 1]), min_size=S, max_size=S), min_size=1, max_size=4)
NUMBERS = st.lists(st.lists(st.sampled_from([0, 0.5, -1, 2]), min_size=S, max_size=S), min_size=1, max_size=4)


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


@given(NUMBERS, st.booleans())
def test_whatever_is_not_0_is_a_token(mask, unused_too):
    mask = torch.tensor(mask)
    tokens, indices, cu_seqlens, longest, used = unpad_input(hidden(len(mask)), mask, mask if unused_too else None)
    assert torch.equal(tokens, hidden(len(mask))[mask != 0]) and len(indices) == len(tokens) == cu_seqlens[-1]
    assert cu_seqlens.diff().tolist() == used.tolist() == (mask != 0).sum(1).tolist() and longest == int(used.max())


def test_rows_of_several_sequences():
    """The example of flash_attn's documentation: rows of 2 + 3, 3 + 2 and 6 tokens."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    states = hidden(3)
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(states, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert torch.equal(tokens, states.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and longest == 6
    assert pad_input(tokens, indices, 3, S)[0, 5].eq(0).all()


def test_padding_inside_compiled_functions():
    padded = torch.compile(lambda tokens, indices: pad_input(tokens, indices, 2, S), backend="eager", fullgraph=True)
    tokens, indices = torch.randn(3, 2), torch.tensor([0, 1, 7], dtype=torch.int32)
    assert torch.equal(padded(tokens, indices), pad_input(tokens, indices, 2, S))


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


TOKENS = torch.zeros(2, 3)


def of_lengths(*rows):
    return unpad_input_for_concatenated_sequences(hidden(len(rows)), torch.tensor(rows))


BAD = {
    "a length of -1": (lambda: of_lengths([3, -1, 0, 0, 0, 0]), ValueError, "in row 0"),
    "half a token": (lambda: of_lengths([0.5] + [0] * 5), ValueError, "whole numbers"),
    "7 of 6": (lambda: of_lengths([6, 0, 0, 0, 0, 0], [4, 3, 0, 0, 0, 0]), ValueError, r"6 at most in a row, got \[4, 3, .* in row 1"),
    "a mask elsewhere": (
        lambda: unpad_input(hidden(1), torch.ones(1, S, device="meta")),
        ValueError,
        "attention_mask is on meta but hidden_states is on cpu",
    ),
    "a list as mask": (lambda: unpad_input(hidden(1), [[1] * 6]), TypeError, "attention_mask must be a torch.Tensor, got list"),
    "a place twice": (lambda: pad_input(TOKENS, torch.tensor([1, 1]), 1, 4), ValueError, "indices has a place twice"),
    "a place outside": (lambda: pad_input(TOKENS, torch.tensor([1, 4]), 1, 4), ValueError, "indices are from 1 to 4; there are 4 places"),
    "a place before": (lambda: pad_input(TOKENS, torch.tensor([-1, 0]), 1, 4), ValueError, "indices are from -1 to 0"),
    "few places": (lambda: pad_input(TOKENS, torch.tensor([1]), 1, 4), ValueError, r"one place for each token, got \(1,\) for \(2, 3\)"),
    "floats as places": (lambda: pad_input(TOKENS, torch.tensor([1.0, 2.0]), 1, 4), TypeError, "indices must be int64, got torch.float32"),
    "a grid of places": (lambda: pad_input(TOKENS, torch.tensor([[1, 2]]), 1, 4), ValueError, r"indices must have shape \(n,\)"),
    "no places": (lambda: pad_input(TOKENS, None, 1, 4), TypeError, "indices must be a torch.Tensor, got NoneType"),
    "half a batch": (lambda: pad_input(TOKENS, torch.tensor([1, 2]), 1.5, 4), TypeError, "batch must be an integer, got 1.5"),
    "a negative length": (lambda: pad_input(TOKENS, torch.tensor([1, 2]), 1, -4), ValueError, "seqlen is -4; it must be at least 0"),
    "a row outside": (lambda: index_first_axis(TOKENS, torch.tensor([2])), ValueError, "from 2 to 2; there are 2 rows of input"),
}


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda freed: unpad_input(hidden(2), freed), "attention_mask"),
        (lambda freed: unpad_input(hidden(2), torch.ones(2, S), freed), "unused_mask"),
        (lambda freed: unpad_input_for_concatenated_sequences(hidden(2), freed), "attention_mask_in_length"),
        (lambda freed: pad_input(freed, torch.tensor([1, 2]), 1, 4), "hidden_states"),
        (lambda freed: pad_input(TOKENS, freed, 1, 4), "indices"),
        (lambda freed: index_first_axis(freed, torch.tensor([0])), "input"),
    ],
)
def test_freed_memory_is_not_read(call, name):
    """As FSDP leaves it; torch's own functions read it, and end the process."""
    freed = torch.tensor([1, 2]) if name == "indices" else torch.ones(2, S)
    freed.untyped_storage().resize_(0)
    with pytest.raises(NotImplementedError, match=f"{name} is a tensor whose memory was freed"):
        call(freed)


def test_lengths_whose_sum_wraps_around():
    for length in (2**32, 2**61, 2**62, 2**63 - 1):
        lengths = torch.tensor([[length] * 4 + [0, 0], [3, 0, 0, 0, 0, 0]])
        with pytest.raises(ValueError, match="must hold lengths, whole numbers of 0 or more that are 6 at most in a row"):
            unpad_input_for_concatenated_sequences(hidden(2), lengths)


@pytest.mark.parametrize("case", BAD)
def test_bad_masks_and_places(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_errors_show_the_shapes():
    with pytest.raises(ValueError, match=r"attention_mask \(B, S\), got shapes \(2, 6, 2, 3\) and \(2, 5\)"):
        unpad_input(hidden(2), torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"unused_mask \(B, S\)"):
        unpad_input(hidden(2), torch.ones(2, 6), torch.ones(6))
    with pytest.raises(ValueError, match="attention_mask_in_length"):
        unpad_input_for_concatenated_sequences(hidden(2)[..., 0, 0], torch.ones(2, 6))
    with pytest.raises(ValueError, match="input must have 2 dimensions"):
        index_first_axis(torch.ones(3), torch.tensor([0]))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_packing_inside_compiled_functions():
    """How many tokens there are is in no graph."""
    torch._dynamo.reset()
    hidden = torch.randn(2, 6, 3)
    for pack, masks in (
        (unpad_input, ([[1, 1, 1, 0, 0, 0], [1] * 6], [[1] * 6, [0] * 6], [[0] * 6] * 2)),
        (unpad_input_for_concatenated_sequences, ([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], [[1] * 6, [4, 0, 0, 0, 0, 0]])),
    ):
        compiled = torch.compile(pack, backend="eager", fullgraph=True)
        for mask in masks:
            for got, want in zip(compiled(hidden, torch.tensor(mask)), pack(hidden, torch.tensor(mask)), strict=True):
                torch.testing.assert_close(got, want)
    torch._dynamo.reset()
