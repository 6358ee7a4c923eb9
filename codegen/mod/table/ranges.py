"""Rules of the op table's columns `range`, `integers` and `decided`: what comes of numbers of which only the least and the greatest are
known.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

UNKNOWN = (-inf, inf)


def same(a: tuple) -> tuple:
    return a


def sums(a: tuple, b: tuple) -> tuple:
    return a[0] + b[0], a[1] + b[1]


def differences(a: tuple, b: tuple) -> tuple:
    return a[0] - b[1], a[1] - b[0]


def negatives(a: tuple) -> tuple:
    return -a[1], -a[0]


def sizes(a: tuple) -> tuple:
    return max(a[0], -a[1], 0), max(abs(a[0]), abs(a[1]))


def products(a: tuple, b: tuple) -> tuple:
    if inf in (*map(abs, a), *map(abs, b)):
        return (0, inf) if a[0] >= 0 and b[0] >= 0 else UNKNOWN
    return _every(lambda x, y: x * y, a, b)


def least(a: tuple, b: tuple) -> tuple:
    return min(a[0], b[0]), min(a[1], b[1])


def greatest(a: tuple, b: tuple) -> tuple:
    return max(a[0], b[0]), max(a[1], b[1])


def either(a: tuple, b: tuple) -> tuple:
    return min(a[0], b[0]), max(a[1], b[1])


def rounded(a: tuple) -> tuple:
    return a[0] - 1, a[1] + 1


def quotients_of_indices(a: tuple, b: tuple) -> tuple:
    """Of what is known to be no negative number, by what is known to be a positive one."""
    if a[0] < 0 or b[0] < 1:
        return UNKNOWN
    return (0, a[1]) if inf in (a[1], b[1]) else (a[0] // b[1], a[1] // b[0])


def remainders_of_indices(a: tuple, b: tuple) -> tuple:
    return (0, b[1] - 1) if b[0] >= 1 else UNKNOWN


# of integers in finite ranges


def _every(operation: Callable, a: tuple, b: tuple) -> tuple:
    values = [operation(x, y) for x in a for y in b]
    return min(values), max(values)


def towards_zero(a: int, b: int) -> int:
    """The quotient of integers without its fraction."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def quotients(divide: Callable) -> Callable:
    """Of divisors that are not 0, though their range may be around it."""

    def rule(a: tuple, b: tuple) -> tuple:
        most = max(map(abs, a))
        return _every(divide, a, b) if b[0] > 0 else (-most, most)

    return rule


def remainders(a: tuple, b: tuple) -> tuple:
    return (0, b[1] - 1) if b[0] > 0 else (min(b[0] + 1, 0), max(b[1] - 1, 0))


def between_zero_and(a: tuple, b: tuple) -> tuple:
    """Of what is no farther from 0 than the first operand, on its side."""
    return min(a[0], 0), max(a[1], 0)
