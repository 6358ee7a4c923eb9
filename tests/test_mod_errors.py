"""A mod that cannot be a kernel gets one error: what is wrong, the user's own line, and what to write instead."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks as torch_and_masks

from flexpress import ModError, and_masks, create_block_mask, create_mask, evaluate_mod, flex_attention, or_masks
from flexpress.mods import compose_scores

TABLE = torch.rand(2, 8)
SILU = torch.nn.SiLU(inplace=True)
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


def with_numpy(b, h, q_idx, kv_idx):
    return np.exp(q_idx) > kv_idx


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
    (with_numpy, "ufuncs", "np.exp(q_idx)", "torch.exp"),
    (with_range, "range()", "range(q_idx)", "Capture a tensor"),
    (with_item, ".item()", "q_idx.item() > 3", "Use the symbol itself"),
    (unsupported, "cumsum is not a supported operation", "torch.cumsum(q_idx, 0)", "Supported are"),
    (row_of_a_table, "returns a vector of 8 elements", "TABLE[h] > 0", "Index every dimension"),
    (whole_table, "returns a tensor of shape (2, 8)", "TABLE * q_idx", "Index every dimension"),
    (float_index, "an index of torch.float32", "q_idx / 2", ".int()"),
    (slice_index, "a slice that ends at a symbol", "TABLE[h, q_idx:]", "index every dimension"),
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


def later(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def half_of_it(b, h, q_idx, kv_idx):
    return q_idx / 2


def makes_one_later(b, h, q_idx, kv_idx):
    yield q_idx >= kv_idx


async def awaited(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class AClass:
    """No function of positions."""

    def __init__(self, b, h, q_idx, kv_idx):
        pass


class MakesOneLater:
    """A generator by its call."""

    def __call__(self, b, h, q_idx, kv_idx):
        yield q_idx >= kv_idx


JOINED = [and_masks, or_masks, torch_and_masks]
PARTS = [c for c in CASES if c[0] is not looks_like_a_score_mod] + [
    (half_of_it, "returns torch.float32, not torch.bool", "return q_idx / 2", "!= 0"),
    (makes_one_later, "makes_one_later is a generator function", "def makes_one_later", "Write a function"),
    (awaited, "awaited is a coroutine function", "async def awaited", "Write a function"),
]


@pytest.mark.parametrize("join", JOINED, ids=["and", "or", "torch's and"])
@pytest.mark.parametrize("mod, problem, line, remedy", PARTS, ids=[c[0].__name__ for c in PARTS])
def test_parts_of_masks(mod, problem, line, remedy, join):
    """The error of a part shows its own line."""
    for whole in (join(later, mod), join(later, and_masks(later, mod)), functools.partial(mod)):
        with pytest.raises(ModError) as caught:
            create_block_mask(whole, None, 2, 8, 8, "cpu")
        message = str(caught.value)
        assert problem.removeprefix(f"{mod.__name__} ") in message.splitlines()[0] and line in message and remedy in message, message


@pytest.mark.parametrize(
    "mod, problem",
    [
        (makes_one_later, "def makes_one_later"),
        (awaited, "async def awaited"),
        (AClass, "AClass is a class"),
        (MakesOneLater(), "MakesOneLater"),
    ],
)
def test_what_is_no_function(mod, problem):
    with pytest.raises(ModError, match=problem) as caught:
        flex_attention(Q, Q, Q, mask_mod=mod)
    assert "call.py" not in str(caught.value)


def test_parts_of_scores():
    with pytest.raises(ModError, match=r"returns a tuple(?s:.*)def returns_a_pair"):
        flex_attention(Q, Q, Q, compose_scores(lambda score, *_: score, returns_a_pair))


def returns_a_pair(score, b, h, q_idx, kv_idx):
    return score, score


def with_or(score, b, h, q_idx, kv_idx):
    return score or 3


def with_min(score, b, h, q_idx, kv_idx):
    return min(score, 3)


def with_while(score, b, h, q_idx, kv_idx):
    while score > 0:
        score = score - 1
    return score


def with_int(score, b, h, q_idx, kv_idx):
    return score + int(h)


def with_float(score, b, h, q_idx, kv_idx):
    return score + float(h)


def index_of_a_list(score, b, h, q_idx, kv_idx):
    return score + [1.0, 2.0][h]


def key_of_a_dict(score, b, h, q_idx, kv_idx):
    return score + {0: 1.0, 1: 2.0}[h]


def bool_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx > 2]


def none_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, None]


def ellipsis_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[..., h]


def tensor_index(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, torch.tensor([0, 1])]


def median_of_a_row(score, b, h, q_idx, kv_idx):
    return score + TABLE[h].median()


def unsupported_method(score, b, h, q_idx, kv_idx):
    return score.lgamma()


def unsupported_function(score, b, h, q_idx, kv_idx):
    return torch.special.bessel_j0(score)


def in_place(score, b, h, q_idx, kv_idx):
    return score.add_(1)


def changed_elsewhere(score, b, h, q_idx, kv_idx):
    other = score
    score += 1
    return other * 2


def changed_vector(score, b, h, q_idx, kv_idx):
    row = TABLE[q_idx]
    half = row
    half /= 2
    return score + half.sum() + row.sum()


def changed_by_an_activation(score, b, h, q_idx, kv_idx):
    torch.nn.functional.relu(score, inplace=True)
    return score + 1


def changed_by_a_module(score, b, h, q_idx, kv_idx):
    row = TABLE[q_idx] * 1
    return score + SILU(row).sum() + row.sum()


def changed_where_it_is_detached(score, b, h, q_idx, kv_idx):
    other = score.detach()
    score *= 2
    return score + other


def changed_under_a_view(score, b, h, q_idx, kv_idx):
    row = TABLE[q_idx] * 1
    first = row[0]
    row *= 3
    return score + first


def changed_by_a_view(score, b, h, q_idx, kv_idx):
    row = TABLE[q_idx] * 1
    half = row.view(2, -1)
    half += 1
    return score + row.sum()


def changed_to_a_float(score, b, h, q_idx, kv_idx):
    q_idx *= 1.5
    return score + q_idx


def with_out(score, b, h, q_idx, kv_idx):
    return torch.add(score, 1, out=score)


def torch_refuses(score, b, h, q_idx, kv_idx):
    return ~score


def difference_of_bools(score, b, h, q_idx, kv_idx):
    return score + ((q_idx > 1) - (kv_idx > 1))


def negative_power(score, b, h, q_idx, kv_idx):
    return score + q_idx**-1


def number_for_a_tensor(score, b, h, q_idx, kv_idx):
    return torch.minimum(score, 3)


def missing_operands(score, b, h, q_idx, kv_idx):
    return torch.where(score > 0)


def decimals(score, b, h, q_idx, kv_idx):
    return score + torch.round(q_idx, decimals=2)


def rounding_mode(score, b, h, q_idx, kv_idx):
    return torch.div(score, 2, rounding_mode="up")


def a_vector(score, b, h, q_idx, kv_idx):
    return score.new_zeros(5)


def reinterpreted(score, b, h, q_idx, kv_idx):
    return score.view(torch.int32)


def complex_cast(score, b, h, q_idx, kv_idx):
    return score.to(torch.complex64)


def float8_cast(score, b, h, q_idx, kv_idx):
    return score.to(torch.float8_e4m3fn).float()


def unsigned_cast(score, b, h, q_idx, kv_idx):
    return score + q_idx.to(torch.uint64)


def a_string(score, b, h, q_idx, kv_idx):
    return score + "1"


def a_list(score, b, h, q_idx, kv_idx):
    return [score]


def stores_into_the_table(score, b, h, q_idx, kv_idx):
    TABLE[0, 0] = score
    return score


def helper(score):
    return score if score > 0 else 0.0


def calls_a_helper(score, b, h, q_idx, kv_idx):
    return helper(score) + 1


class Rounded(torch.autograd.Function):
    """Rounds, and passes the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, g):
        return g


def with_a_function_of_its_own(score, b, h, q_idx, kv_idx):
    return Rounded.apply(score)


COMPLEX = torch.zeros(2, dtype=torch.complex64)
SPARSE = torch.eye(2).to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
ARRAY = np.arange(3.0)
HUGE = 10**400


def complex_table(score, b, h, q_idx, kv_idx):
    return score * COMPLEX[h]


def sparse_table(score, b, h, q_idx, kv_idx):
    return score * SPARSE[h, h]


def nested_table(score, b, h, q_idx, kv_idx):
    return score * NESTED[h, h]


def outside_an_array(score, b, h, q_idx, kv_idx):
    return score * ARRAY[5]


def huge_number(score, b, h, q_idx, kv_idx):
    return score * HUGE


def complex_number(score, b, h, q_idx, kv_idx):
    return score * 2j


# fmt: off
def four_lines(score, b, h, q_idx, kv_idx):  # Python names the line on which an expression begins
    return (score
            + 1
            + TABLE[h]
            + 2)
# fmt: on


SCORE_CASES = [
    (with_or, "`or`", "return score or 3", "`|`"),
    (with_min, "min()", "return min(score, 3)", "torch.minimum"),
    (with_while, "`if`", "while score > 0:", "torch.where"),
    (with_int, "Python int", "int(h)", ".int()"),
    (with_float, "Python float", "float(h)", ".float()"),
    (index_of_a_list, "an index into a Python list", "[1.0, 2.0][h]", "Capture a tensor instead"),
    (key_of_a_dict, "a key of a dict", "{0: 1.0, 1: 2.0}[h]", "Capture a tensor instead"),
    (bool_index, "an index of torch.bool", "TABLE[h, q_idx > 2]", ".int()"),
    (none_index, "returns a tensor of shape (1, 8)", "TABLE[h, None]", "Index every dimension"),
    (ellipsis_index, "returns a vector of 2 elements", "TABLE[..., h]", "Index every dimension"),
    (tensor_index, "returns a vector of 2 elements", "TABLE[h, torch.tensor([0, 1])]", "Index every dimension"),
    (median_of_a_row, "Tensor.median is not a supported operation", "TABLE[h].median()", "Call it before attention"),
    (unsupported_method, "Tensor.lgamma is not a supported operation", "score.lgamma()", "Supported are"),
    (unsupported_function, "bessel_j0 is not a supported operation", "special.bessel_j0(score)", "Supported are"),
    (in_place, "Tensor.add_ is not a supported operation", "score.add_(1)", "Supported are"),
    (changed_elsewhere, "used after it was changed in place", "return other * 2", "use the changed name alone"),
    (changed_vector, "used after it was changed in place", "row.sum()", "use the changed name alone"),
    (changed_by_an_activation, "used after it was changed in place", "return score + 1", "use the changed name alone"),
    (changed_by_a_module, "used after it was changed in place", "row.sum()", "use the changed name alone"),
    (changed_where_it_is_detached, "used after it was changed in place", "return score + other", "use the changed name alone"),
    (changed_under_a_view, "or as a part of another value", "return score + first", "use the changed name alone"),
    (changed_by_a_view, "or as a part of another value", "row.sum()", "use the changed name alone"),
    (changed_to_a_float, "torch.float32 is assigned in place", "q_idx *= 1.5", "another dtype"),
    (with_out, "torch.add with out=", "out=score", "drop out="),
    (torch_refuses, "torch refuses invert on (float32)", "return ~score", "integer and Boolean"),
    (difference_of_bools, "torch refuses sub on (bool, bool)", "(q_idx > 1) - (kv_idx > 1)", "logical_xor"),
    (negative_power, "an integer to a negative power", "q_idx**-1", ".float()"),
    (number_for_a_tensor, "must be Tensor, not int", "torch.minimum(score, 3)", "must be Tensor"),
    (missing_operands, "where with 1 of its 3 operands", "torch.where(score > 0)", "Give it 3"),
    (decimals, "round of torch.int32 with decimals", "decimals=2", ".float()"),
    (rounding_mode, "rounding_mode is 'up'", 'rounding_mode="up"', "'floor' or 'trunc'"),
    (a_vector, "a value of shape 5", "score.new_zeros(5)", "the shape is ()"),
    (reinterpreted, "Tensor.view(dtype) is not a supported operation", "score.view(torch.int32)", ".to(dtype)"),
    (complex_cast, "a cast to torch.complex64", "score.to(torch.complex64)", "real-valued"),
    (float8_cast, "a cast to torch.float8_e4m3fn", "score.to(torch.float8_e4m3fn)", "Cast to one of bfloat16, bool"),
    (unsigned_cast, "a cast to torch.uint64", "q_idx.to(torch.uint64)", "Cast to one of bfloat16, bool"),
    (a_string, "'1' (str) is used where a number is needed", 'score + "1"', "Python numbers"),
    (a_list, "returns a list", "def a_list", "Return one scalar"),
    (stores_into_the_table, "__setitem__ is not a supported operation", "TABLE[0, 0] = score", "Supported are"),
    (calls_a_helper, "`if`", "return score if score > 0 else 0.0", "torch.where"),
    (with_a_function_of_its_own, "an autograd.Function", "Rounded.apply(score)", "(f(x) - x).detach()"),
    (complex_table, "a captured tensor of torch.complex64", "COMPLEX[h]", "convert it"),
    (sparse_table, "sparse", "SPARSE[h, h]", ".to_dense()"),
    (nested_table, "nested", "NESTED[h, h]", "varlen_attention"),
    (outside_an_array, "index 5 is out of bounds", "ARRAY[5]", ""),
    (huge_number, "an integer of 1329 bits", "score * HUGE", "smaller integer"),
    (complex_number, "2j (complex) is used where a number is needed", "score * 2j", "Python numbers"),
    (four_lines, "returns a vector of 8 elements", "return (score", "Index every dimension"),
]


@pytest.mark.parametrize("mod, problem, line, remedy", SCORE_CASES, ids=[c[0].__name__ for c in SCORE_CASES])
def test_scores(mod, problem, line, remedy):
    with pytest.raises(ModError) as caught:
        evaluate_mod(mod, torch.zeros(1, 2, 8, 8))
    message = str(caught.value)
    assert message.startswith("score_mod: ") and problem in message.splitlines()[0]
    assert line in message and remedy in message
    found = re.search(r'File "(.*)", line (\d+)\n    (.*)', message)
    assert found[1] == __file__ and found[3] == Path(__file__).read_text().splitlines()[int(found[2]) - 1].strip()


@pytest.mark.parametrize("returned", [True, 1, 0.5, math.inf], ids=str)
def test_a_number_is_a_scalar(returned):
    """A score_mod may return a number; a mask_mod a bool, and nothing else."""
    assert (evaluate_mod(lambda score, b, h, q_idx, kv_idx: returned, torch.zeros(1, 2, 8, 8)) == float(returned)).all()
    if returned is True:
        assert create_mask(lambda b, h, q_idx, kv_idx: returned, None, None, 8, 8, "cpu").all()
    else:
        with pytest.raises(ModError, match="not torch.bool"):
            create_mask(lambda b, h, q_idx, kv_idx: returned, None, None, 8, 8, "cpu")


def test_an_error_of_the_mods_own_is_left_alone():
    """What Python raises in the mod for reasons of its own comes out as it is."""
    with pytest.raises(ZeroDivisionError):
        evaluate_mod(lambda score, b, h, q_idx, kv_idx: score + 1 // 0, torch.zeros(1, 2, 8, 8))
    with pytest.raises(NameError, match="no_such_name"):
        evaluate_mod(lambda score, b, h, q_idx, kv_idx: score + no_such_name, torch.zeros(1, 2, 8, 8))  # noqa: F821


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
