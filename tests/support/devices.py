"""The devices of tests: the CPU, where kernels run in Triton's interpreter, and a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from flexpress.inputs import checks

PARTS = 4  # of the examples on a GPU, which several processes may share
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def hopper(test: Callable) -> Callable:
    """A test of kernels for Hopper on a GPU of that kind."""
    there = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    test = pytest.mark.skipif(checks.DEFAULT.backend == "PORTABLE", reason="--backend PORTABLE")(test)
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="needs a Hopper GPU")(test))


def for_any(problems: Callable, **examples: int) -> Callable:
    """A test of any problem on any device: so many examples of `problems(device)` on each of DEVICES.

    >>> @for_any(problems, cpu=40, cuda=100)
    ... def test_any_problem(p, device): ...
    """

    def on_devices(test: Callable) -> Callable:
        on_gpu = [pytest.param("cuda", part, marks=pytest.mark.gpu, id=f"cuda{part}") for part in range(PARTS)]

        @pytest.mark.parametrize("device, part", [pytest.param("cpu", None, id="cpu"), *on_gpu])
        def run(device, part):
            count, drawn = examples[device], given(problems(device), st.just(device))(test)
            if part is not None:
                count, drawn = -(-count // PARTS), seed(part)(drawn)
            settings(max_examples=count)(drawn)()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return on_devices
