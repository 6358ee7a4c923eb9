"""What is known of integers without a call's values: the range of every operation, of every node, and the dtype that bounds need."""

from __future__ import annotations

import itertools
import math
import operator
import random

import pytest
import torch
from verdicts import SIZE, Judged, Writer

from flexpress import ModError
from flexpress.codegen.mod.expr import ExprTable, walk
from flexpress.codegen.mod.graphs.bounds import BoundsRun, TooLarge, constant
from flexpress.codegen.mod.graphs.index_range import value_range
from flexpress.codegen.mod.symbolic.dispatch import OPERATIONS
from flexpress.codegen.mod.symbolic.symbols import Sym
from flexpress.codegen.mod.table.op import kind
from flexpress.codegen.mod.table.ops import OPS
from flexpress.codegen.mod.tracing.bind import bind
from support.evaluate import make_mod


@pytest.mark.parametrize("name", sorted(name for name, row in OPS.items() if row.decided or (row.integers and not row.chooses)))
def test_ranges_of_integers_hold_every_value(name):
    """Of small ranges, exhaustively: what an operation may give lies in its range, and a comparison that is decided has that outcome."""
    ranges = [(low, high) for low in range(-4, 5) for high in range(low, 5)]
    count = 1 if name in ("neg", "abs", "sign", "invert") else 2
    compute = OPS[name].integers.compute if OPS[name].integers else getattr(operator, name)
    divides = name in ("floor_divide", "div_trunc", "remainder", "fmod")
    for operands in itertools.product(ranges, repeat=count):
        found = {
            compute(*values)
            for values in itertools.product(*(range(low, high + 1) for low, high in operands))
            if not (divides and values[1] == 0)
        }
        if OPS[name].decided:
            always, never = OPS[name].decided(*itertools.chain(*operands))
            assert (not always or found == {True}) and (not never or found == {False}), operands
        elif found:
            low, high = OPS[name].integers.range(*operands)
            assert low <= min(found) and max(found) <= high, operands


@pytest.mark.parametrize("seed", range(4))
def test_value_ranges_hold(seed):
    """What lowering knows of integers, from the largest indices of a call: every node of random expressions is inside."""
    known = 0
    for number in range(60):
        rng = random.Random(1000 * seed + number)
        writer = Writer(rng)
        expression = f"({writer.integer(3)}) > 0"
        try:
            judged = Judged.of(make_mod(expression, "mask", writer.captured))
        except (ModError, RuntimeError, TypeError):
            continue
        positions = {
            name: torch.arange(SIZE, dtype=torch.int32).reshape([-1 if i == axis else 1 for i in range(4)])
            for axis, name in enumerate(("b", "h", "q_idx", "kv_idx"))
        }
        run = BoundsRun("mask", ExprTable(), OPERATIONS)
        for node in walk(judged.graph.result):
            if not node.weak and kind(node.dtype) == "int":
                values, (low, high) = judged.value(node, positions).long(), run.range_of(node)
                assert low <= values.min() and values.max() <= high, (expression, writer.captured, node.op, low, high)
            low, high = value_range(node, dict.fromkeys(positions, (0, SIZE - 1)), tuple(judged.scalars))
            if not node.weak and kind(node.dtype) == "int" and -math.inf < low:
                known += node.op not in ("symbol", "literal")
                values = judged.value(node, positions).long()
                assert low <= values.min() and values.max() <= high, (expression, writer.captured, node.op, low, high)
    assert known > 20


def test_integer_bounds_are_as_wide_as_they_must_be():
    """int32 where that holds the operands, the result and the quotient of a remainder, else int64, else none."""
    run = BoundsRun("mask", ExprTable(), OPERATIONS)
    with run.active():
        q, x, wide = (
            Sym(run.table.make("symbol", (), dtype, attr=name))
            for name, dtype in (("q_idx", torch.int32), ("x", torch.int32), ("wide", torch.int64))
        )
        for made, dtype in (
            (q + 1, torch.int32),
            (q * 2, torch.int64),
            (q - q - 1, torch.int32),
            (x + 1, torch.int64),
            (-x, torch.int64),
            (~x, torch.int32),
            (abs(x), torch.int64),
            (x % (q - 1), torch.int64),
            (x % (q + 1), torch.int32),
            (torch.fmod(x, x), torch.int64),
            (x // (q + 1), torch.int32),
            (2**40 // (q % 1000 + 2**20), torch.int64),
        ):
            assert made.dtype == dtype, made.expr.op
        assert (constant(2**31 - 1) + 1).expr.attr == 2**31 and (-constant(-(2**31))).expr.attr == 2**31
        ends = constant(-(2**63)), constant(2**63 - 1)
        for beyond in (lambda: wide + 1, lambda: -wide, lambda: wide * wide, lambda: ends[1] + 1, lambda: abs(ends[0])):
            with pytest.raises(TooLarge):
                beyond()
        divided = run.table.make("floor_divide", (q.expr, (q - 1).expr), torch.int32)  # the mask's own, perhaps by 0
        assert run.range_of(divided) == (-(2**31), 2**31 - 1)


def test_value_range_of_shared_operands():
    """x * x * ... by squaring: every node is looked at once."""
    assert value_range(bind(make_mod("q_idx ** 2**40 > 0", "mask", {}), "mask")[0].result.args[0]) == (-math.inf, math.inf)


@pytest.mark.parametrize("n", [2**63, -(2**63) - 1, 10**400])
def test_an_int_beyond_64_bits_is_refused(n):
    with pytest.raises(ModError, match="does not fit into 64 bits"):
        bind(lambda b, h, q_idx, kv_idx: q_idx < n, "mask")
