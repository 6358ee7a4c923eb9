"""A mod of each kind that the kernels for Hopper treat in a way of its own; None is no mod."""

from __future__ import annotations

import torch

from flexpress import mods

_NUMBERS = torch.randn(1024, generator=torch.Generator().manual_seed(1))
SCORES = [
    None,
    mods.alibi(torch.tensor([0.5, 0.1, 0.2, 0.3])),
    mods.softcap(2.0),
    lambda s, b, h, m, n: s + _NUMBERS[n] * 0.5,
    lambda s, b, h, m, n: s + _NUMBERS[(m - n).abs()],
    lambda s, b, h, m, n: s + _NUMBERS[m] * _NUMBERS[n],
]
MASKS = [None, mods.causal, mods.sliding_window(70), lambda b, h, m, n: (m // 60) == (n // 60)]
