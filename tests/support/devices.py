"""The devices of tests: the CPU, where kernels run in Triton's interpreter, and a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def for_any(problems: Callable, **examples: int) -> Callable:
    """A test of any problem on any device: so many examples of `problems(device)` on each of DEVICES.

    >>> @for_any(problems, cpu=40, cuda=100)
    ... def test_any_problem(p, device): ...
    """

    def on_devices(test: Callable) -> Callable:
        @pytest.mark.parametrize("device", DEVICES)
        def run(device):
            drawn = given(problems(device), st.just(device))
            settings(max_examples=examples[device])(drawn(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return on_devices
