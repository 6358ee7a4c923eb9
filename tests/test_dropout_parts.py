"""Dropout of a part of a batch and of its heads, as a rank has it: the weights that the whole drops there, in every kernel."""

from __future__ import annotations

import pytest
import torch

from flexpress import create_block_mask, dropout_mask, mods
from flexpress.calls.call import attend, bound
from flexpress.calls.packed_call import attend_packed
from flexpress.codegen import registry
from flexpress.inputs.dropout import Dropout
from support.dense import dropped_attention, relative_error
from support.devices import DEVICES
from support.fake_hopper import forward_on_cpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")

P, SEED, FIRST = 0.3, 1 << 40 | 12345, (1, 2)  # the part's batch entries and heads: from 1 and 2 on


def kept(shape, device) -> torch.Tensor:
    """What the part keeps of weights."""
    whole = dropout_mask(torch.tensor([SEED], device=device), (FIRST[0] + shape[0], FIRST[1] + shape[1], *shape[2:]), P)
    return whole[FIRST[0] :, FIRST[1] :]


def dropout_of_part(device, first=FIRST) -> Dropout:
    return Dropout(P, torch.tensor([SEED, *first], device=device))


def tensors(device, dtype=torch.float32, D=16, length=70):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((2, 3, n, D), generator=generator).to(device, dtype).requires_grad_() for n in (length, length + 20, length + 20)]


def compared(q, k, v, tolerance: float, twice: bool = False, **options) -> None:
    """Output and gradients, and perhaps a second derivative, beside dense attention."""
    call = bound(q, k, v, None, None, None, False, options or None, mods.causal, dropout=dropout_of_part(q.device))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    outs = attend(call, False, True)[0], dropped_attention(*exact, kept((2, 3, q.shape[2], k.shape[2]), q.device), P, None, mods.causal)
    assert relative_error(*outs) <= tolerance
    weights = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1)).to(q.device)
    first = [
        torch.autograd.grad((out * weights.to(out.dtype)).sum(), x, create_graph=twice)
        for out, x in zip(outs, ((q, k, v), exact), strict=True)
    ]
    for mine, right in zip(*first, strict=True):
        assert relative_error(mine, right) <= tolerance
    if twice:
        of_keys = [torch.autograd.grad(found[0].sin().sum(), x[1]) for found, x in zip(first, ((q, k, v), exact), strict=True)]
        assert relative_error(*of_keys[0], *of_keys[1]) <= tolerance


@pytest.mark.parametrize("device", DEVICES)
def test_portable_kernels(device):
    compared(*tensors(device), 1e-4, twice=True, BACKEND="PORTABLE")


def test_in_cpp(in_cpp):
    compared(*tensors("cpu"), 1e-4, twice=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_on_hopper(monkeypatch, head_dim):
    """In the stand-in; test_hopper_backward.py has the other pass."""
    mask = create_block_mask(mods.causal, None, None, 130, 150, "cpu")
    launched = forward_on_cpu(monkeypatch)
    q, k, v = (t.detach() for t in tensors("cpu", torch.bfloat16, head_dim, 130))
    out = attend(bound(q, k, v, None, mask, None, False, None, None, dropout=dropout_of_part("cpu")), False, False)[0]
    assert len(launched) == 1 and launched[0].spec.flag["DROPOUT_PART"]
    exact = dropped_attention(q, k, v, kept((2, 3, 130, 150), "cpu"), P, None, mods.causal)
    assert relative_error(out, exact) <= 1e-2
    registry.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_at_real_lengths(head_dim):
    """By whichever kernels serve; one of the gradients of wide heads is not the kernel for Hopper's."""
    compared(*tensors("cuda", torch.bfloat16, head_dim, 1000), 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device):
    """Ranks have heads of all sequences."""
    q = torch.randn(30, 3, 16, generator=torch.Generator().manual_seed(0)).to(device)
    ends = torch.tensor([0, 9, 30], dtype=torch.int32, device=device)
    dropout = dropout_of_part(device, (0, FIRST[1]))
    out = attend_packed(q, q, q, ends, None, None, mods.causal, None, None, False, dropout=dropout)[0]
    whole = dropout_mask(torch.tensor([SEED], device=device), (2, FIRST[1] + 3, 21, 21), P)[:, FIRST[1] :]
    for b, (start, end) in enumerate(((0, 9), (9, 30))):
        x = q[start:end].transpose(0, 1)[None]
        n = end - start
        exact = dropped_attention(x, x, x, whole[b : b + 1, :, :n, :n], P, None, mods.causal)
        assert relative_error(out[start:end].transpose(0, 1)[None], exact) <= 1e-4
