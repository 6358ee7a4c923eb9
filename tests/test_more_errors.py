"""Errors of arguments and of mods that are said in one place alone."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from flexpress import ModError, evaluate_mod, export, export_cached, mods

Q = torch.zeros(1, 2, 20, 16)
CACHE = torch.zeros(2, 8, 2, 16)


def int32(*shape):
    return torch.zeros(*shape, dtype=torch.int32)


CASES = {
    "no kind": (
        lambda: evaluate_mod(mods.causal, torch.zeros(1, 1, 2, 2), kind="row"),
        ValueError,
        "kind is 'row'; write 'score' or 'mask'",
    ),
    "no precision": (
        lambda: evaluate_mod(mods.softcap(3.0), torch.zeros(1, 1, 2, 2), precision="float64"),
        ValueError,
        "precision is 'float64'; write one of",
    ),
    "a tensor as export's scale": (lambda: export(Q, Q, Q, scale=torch.tensor(0.5)), TypeError, "export takes scale as a number"),
    "a tensor as scale": (
        lambda: export_cached(Q[:, :, :1], CACHE, CACHE, int32(1), page_table=int32(1, 1), scale=torch.tensor(0.5)),
        TypeError,
        "export_cached takes scale as a number",
    ),
    "an empty cache": (
        lambda: export_cached(Q[:, :, :1], *[CACHE[:1, :0]] * 2, int32(1)),
        ValueError,
        "k_cache (1, 0, 2, 16) holds nothing",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errors(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


TABLE = torch.ones(20, 16)
MODS = {
    "clamp": (lambda s, b, h, m, n: torch.clamp(s), "torch.clamp needs min, max or both"),
    "gelu": (lambda s, b, h, m, n: F.gelu(s, approximate="erf"), "approximate is 'erf'; write 'none' or 'tanh'"),
    "attribute": (lambda s, b, h, m, n: setattr(s, "x", 3) or s, "a symbol has no attribute 'x' to set"),
    "matrix": (lambda s, b, h, m, n: s + torch.linalg.norm(torch.stack([TABLE[m], TABLE[n]]), 1), "a matrix norm of order 1"),
    "norm": (lambda s, b, h, m, n: s + torch.linalg.vector_norm(TABLE[m].int()), "the norm of torch.int32"),
    "mean": (lambda s, b, h, m, n: s + TABLE[m].int().mean(), "the mean of torch.int32"),
    "softmax": (lambda s, b, h, m, n: s + torch.var(TABLE[m].int()), "torch.int32"),
    "argmax": (lambda s, b, h, m, n: s + (TABLE[m] > 0).argmax(), "argmax or argmin of bools"),
    "einsum": (lambda s, b, h, m, n: s + torch.einsum("i,i->", TABLE[m] > 0, TABLE[n] > 0), "an einsum of bools"),
}


@pytest.mark.parametrize("name", MODS)
def test_errors_of_mods(name):
    mod, message = MODS[name]
    with pytest.raises(ModError, match=re.escape(message)):
        evaluate_mod(mod, torch.zeros(1, 1, 2, 2))


def test_what_torchs_operators_are_refused():
    """Lengths of keys without those of queries: what lies behind a sequence's keys would be attended to."""
    from flexpress.integrations.torch import _forward

    q, used = torch.zeros(1, 8, 2, 16), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="does not take seqused_k without cu_seq_q"):
        _forward(q, q, q, None, None, 8, False, None, None, None, used, None, 0)
    with pytest.raises(ValueError, match="does not take a block_table without cu_seq_q and seqused_k"):
        _forward(q, q, q, None, None, 8, False, None, None, None, used, torch.zeros(1, 1, dtype=torch.int32), 0)
