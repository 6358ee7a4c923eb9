"""Random programs of vectors and small matrices: values and derivatives against eager torch, position by position, in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from support.derivatives import Derivatives
from support.vector_programs import LENGTH, captured, in_eager_torch, programs

VALUES = captured()
SCORES = torch.randn(2, 2, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@settings(max_examples=30)
@given(programs())
def test_programs_and_their_derivatives(text):
    exact, gradients = in_eager_torch(text, SCORES, VALUES)
    ours = Derivatives(text, SCORES, VALUES)
    found = {"score": ours.score, **ours.captured}
    torch.testing.assert_close(ours.value(ours.graph.result).expand(SCORES.shape), exact, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        other = torch.zeros_like(gradient) if found.get(name) is None else found[name]
        torch.testing.assert_close(other, gradient, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{text}: d {name}: {m}")
