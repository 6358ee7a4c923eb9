"""Interval rules of the op table: the bounds of every row hold, for every value of 8 bits and for the ends of what is wider."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress.codegen.mod.table.ops import OPS
from support.evaluate import FLOATS, INTEGERS
from support.row_bounds import Row, check_every_value, spans
from support.rows import DIVISIONS, NUMBERS

WITHOUT_RULE = {"pow", "erfc", "tan", "hypot", "asin", "acos", "cosh", "acosh", "atanh"}


@pytest.mark.parametrize("name", OPS)
def test_every_row_has_a_rule_or_is_written_by_others(name):
    assert (OPS[name].interval is not None) + (OPS[name].expand is not None) + (name in WITHOUT_RULE) == 1


OPERANDS = ("interval", "unknown", "point", "number")
NEAR_ENDS = {True: (-128, -1, 0, 1, 3, 8, 127, 300), False: (0, 1, 3, 8, 128, 255, -1, 300)}  # signed or not


def integer_operands(name: str, dtypes: tuple) -> list[tuple]:
    """The kinds of operands from some dtypes that torch accepts: (dtypes,) * arity, a condition first."""
    found = []
    for kinds in itertools.product(*[(torch.bool,) if name == "where" and i == 0 else dtypes for i in range(OPS[name].arity)]):
        try:
            OPS[name].torch(*(torch.ones((), dtype=k) for k in kinds))
        except (TypeError, RuntimeError):
            continue
        found.append(kinds)
    return found


def ways(count: int) -> list[tuple]:
    """What may be known of operands, with a number for one of them at most, and an interval, or nothing known, among the others."""
    return [
        how for how in itertools.product(OPERANDS, repeat=count) if how.count("number") <= (count > 1) and {"interval", "unknown"} & {*how}
    ]


def accepts_number(name: str, dtypes: tuple, how: tuple) -> bool:
    try:
        OPS[name].torch(*(1 if known == "number" else torch.ones((), dtype=dtype) for known, dtype in zip(how, dtypes, strict=True)))
    except (TypeError, RuntimeError):
        return False
    return True


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", [name for name, row in OPS.items() if row.interval])
def test_every_interval_of_8_bits(name):
    """Bounds hold for all values in all intervals of a grid, wrapped around or not; nothing known, one value and numbers included."""
    for dtypes in integer_operands(name, (torch.int8, torch.uint8, torch.bool)):
        mixed = len(set(dtypes[name == "where" :])) > 1
        for how in ways(len(dtypes)):
            if "number" not in how:
                check_every_value(name, dtypes, how)
            elif not mixed and accepts_number(name, dtypes, how) and torch.bool not in dtypes[name == "where" :]:
                for number in NEAR_ENDS[dtypes[-1].is_signed]:
                    check_every_value(name, dtypes, how, number)


@pytest.mark.parametrize("name", [name for name, row in OPS.items() if row.interval])
def test_unknown_operands_of_every_width(name):
    """The same where operands are anything of wider dtypes, or one value of it, or a number at an end."""
    wide = (torch.int16, torch.int32, torch.int64)
    for dtypes in integer_operands(name, INTEGERS):
        if not {*dtypes} & {*wide} or len({*dtypes}) > 1 and not {torch.uint8, torch.bool} & {*dtypes}:
            continue
        for how in [how for how in ways(len(dtypes)) if "interval" not in how]:
            info = torch.iinfo(dtypes[-1])
            if "number" not in how:
                check_every_value(name, dtypes, how)
            elif accepts_number(name, dtypes, how):
                for number in (info.min, -1, 1, 3, info.max):
                    check_every_value(name, dtypes, how, number)


@pytest.mark.parametrize("source", (torch.bool, *INTEGERS), ids=str)
def test_casts_of_every_value(source):
    for target in (torch.bool, *INTEGERS, *FLOATS):
        for how in ("interval", "unknown", "point"):
            check_every_value(target, (source,), (how,))


def legal(name: str) -> list[tuple]:
    """Kinds of operands of a row: dtypes, int and float for literals."""
    found = []
    for kinds in itertools.product((*INTEGERS, torch.float32, torch.float16, torch.bool, int, float), repeat=OPS[name].arity):
        if all(k in NUMBERS for k in kinds) or (name == "where" and kinds[0] is not torch.bool):
            continue
        ones = [k(1) if k in NUMBERS else torch.ones((), dtype=k) for k in kinds]
        try:
            OPS[name].torch(*ones)
        except (TypeError, RuntimeError):
            continue
        found.append(kinds)
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", [name for name, row in OPS.items() if row.interval])
def test_row(name):
    """Operands of any dtypes with intervals of any kind, extremes, NaN and what overflows included."""
    choices = legal(name)
    alike = [c for c in choices if len(set(c[name == "where" :])) == 1 and c[-1] in (torch.bool, torch.float32)] or choices

    @st.composite
    def cases(draw):
        kinds = draw(st.one_of(st.sampled_from(choices), st.sampled_from(alike)))
        literals, ranges = {}, []
        for i, k in enumerate(kinds):
            dtype = {int: torch.int32, float: torch.float32}.get(k, k)
            ends = draw(spans(dtype))
            if name in DIVISIONS and dtype in (torch.int32, torch.int64):  # the smallest number / -1 ends the process
                ends = [max(end, torch.iinfo(dtype).min + 1) for end in ends]
            if k in NUMBERS or (i and draw(st.integers(0, 5)) == 0):
                literals[i] = ends[0]
                ends = [ends[0], ends[0]]
            ranges.append(ends)
        return kinds, literals, ranges

    @settings(max_examples=60)
    @given(cases(), st.integers(0, 99))
    def run(case, seed):
        kinds, literals, ranges = case
        row = Row(name, kinds, literals)
        if row.bounds is not None:
            row.check(ranges, seed)

    run()


@pytest.mark.parametrize("source", (torch.int64, *FLOATS), ids=str)
def test_casts(source):
    @settings(max_examples=60)
    @given(st.sampled_from((torch.bool, *INTEGERS, *FLOATS)), spans(source), st.integers(0, 99))
    def run(target, ends, seed):
        Row(target, (source,), {}).check([ends], seed)

    run()
