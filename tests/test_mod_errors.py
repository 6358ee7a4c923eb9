"""A mod that cannot be a kernel gets one error: what is wrong, the user's own line, and what to write instead."""

from __future__ import annotations

import math

import pytest
import torch

from flexpress import ModError, create_block_mask, flex_attention

TABLE = torch.rand(2, 8)
Q = torch.randn(1, 2, 8, 16)


def chained(b, h, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 4


def with_and(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx and kv_idx > 2


def with_if(b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return kv_idx == 0
    return q_idx == 0


def with_not(b, h, q_idx, kv_idx):
    return not q_idx > kv_idx


def with_max(b, h, q_idx, kv_idx):
    return max(q_idx, kv_idx) > 2


def with_math(b, h, q_idx, kv_idx):
    return math.exp(q_idx) > kv_idx


def with_range(b, h, q_idx, kv_idx):
    return sum(kv_idx == i for i in range(q_idx)) > 0


def with_item(b, h, q_idx, kv_idx):
    return q_idx.item() > 3


def unsupported(b, h, q_idx, kv_idx):
    return torch.cumsum(q_idx, 0) > kv_idx


def row_of_a_table(b, h, q_idx, kv_idx):
    return TABLE[h] > 0


def whole_table(b, h, q_idx, kv_idx):
    return TABLE * q_idx > 0


def float_index(b, h, q_idx, kv_idx):
    return TABLE[h, q_idx / 2] > 0


def slice_index(b, h, q_idx, kv_idx):
    return TABLE[h, q_idx:] > 0


def too_many_indices(b, h, q_idx, kv_idx):
    return TABLE[b, h, q_idx] > 0


def integer_mask(b, h, q_idx, kv_idx):
    return q_idx - kv_idx


def forgets_to_return(b, h, q_idx, kv_idx):
    q_idx >= kv_idx  # noqa: B015


def returns_two(b, h, q_idx, kv_idx):
    return q_idx > kv_idx, kv_idx


def three_parameters(b, h, q_idx):
    return q_idx > 0


def looks_like_a_score_mod(score, b, h, q_idx, kv_idx):
    return score


CASES = [
    (chained, "chained comparison", "0 <= q_idx - kv_idx < 4", "(a <= x) & (x < b)"),
    (with_and, "`and`", "q_idx >= kv_idx and kv_idx > 2", "`&`"),
    (with_if, "`if`", "if q_idx > kv_idx:", "torch.where"),
    (with_not, "`not`", "return not q_idx > kv_idx", "`~`"),
    (with_max, "max()", "return max(q_idx, kv_idx) > 2", "torch.maximum"),
    (with_math, "Python float", "math.exp(q_idx)", "torch.exp"),
    (with_range, "range()", "range(q_idx)", "Capture a tensor"),
    (with_item, ".item()", "q_idx.item() > 3", "Use the symbol itself"),
    (unsupported, "cumsum is not a supported operation", "torch.cumsum(q_idx, 0)", "Supported are"),
    (row_of_a_table, "1-dimensional", "TABLE[h] > 0", "Index every dimension"),
    (whole_table, "shape (2, 8) is used where a scalar is needed", "TABLE * q_idx", "Index it"),
    (float_index, "an index of torch.float32", "q_idx / 2", ".int()"),
    (slice_index, "a slice", "TABLE[h, q_idx:]", "index every dimension"),
    (too_many_indices, "3 indices for a captured tensor of shape (2, 8)", "TABLE[b, h, q_idx]", "at most 2"),
    (integer_mask, "returns torch.int32, not torch.bool", "return q_idx - kv_idx", "!= 0"),
    (forgets_to_return, "returns nothing", "def forgets_to_return", "Return one scalar"),
    (returns_two, "returns a tuple", "def returns_two", "Return one scalar"),
    (three_parameters, "does not take 4 positional arguments", "def three_parameters", "mask_mod(b, h, q_idx, kv_idx)"),
    (looks_like_a_score_mod, "does not take 4 positional arguments", "def looks_like", "looks like a score_mod"),
]


@pytest.mark.parametrize("mod, problem, line, remedy", CASES, ids=[c[0].__name__ for c in CASES])
def test_masks(mod, problem, line, remedy):
    with pytest.raises(ModError) as caught:
        create_block_mask(mod, None, 2, 8, 8, "cpu")
    message = str(caught.value)
    assert message.startswith("mask_mod: ") and problem in message.splitlines()[0]
    assert line in message and "test_mod_errors.py" in message and remedy in message


def test_a_mask_passed_as_a_score_mod():
    with pytest.raises(ModError, match=r"looks like a mask_mod: pass it through block_mask=create_block_mask"):
        flex_attention(Q, Q, Q, score_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


def test_scores_that_are_no_scalars():
    with pytest.raises(ModError, match=r"score_mod: returns a tensor of shape \(8,\)"):
        flex_attention(Q, Q, Q, score_mod=lambda score, b, h, q_idx, kv_idx: TABLE[h])


def test_an_error_leaves_nothing_behind():
    """After a refused mod the next call works, and the refused one is refused again."""
    for _ in range(2):
        with pytest.raises(ModError):
            create_block_mask(with_if, None, None, 8, 8, "cpu")
        assert create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8, 8, "cpu").kv_num_blocks.sum() == 1
