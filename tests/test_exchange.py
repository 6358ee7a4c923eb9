"""What ranks of a context plan exchange, laid out by printed kernels: against plain indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress.codegen.run.exchange import add_blocks, copy_blocks
from support.devices import DEVICES

DTYPES = torch.float32, torch.bfloat16, torch.float16


@st.composite
def shapes(draw):
    """Batch, heads, positions, head dims, a dtype, a size of blocks, and whether tensors lie as a projection left them."""
    return (
        *(draw(st.integers(1, 3)) for _ in range(2)),
        draw(st.integers(1, 90)),
        *(draw(st.sampled_from([1, 8, 24, 64, 80])) for _ in range(2)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([16, 32])),
        draw(st.booleans()),
        draw(st.integers(0, 2**31 - 1)),
    )


def random(generator, shape, dtype, transposed: bool) -> torch.Tensor:
    """(Z, H, positions, D), contiguous or as (Z, positions, H, D)."""
    Z, H, N, D = shape
    found = torch.randn((Z, N, H, D) if transposed else shape, generator=generator).to(dtype)
    return found.transpose(1, 2) if transposed else found


def blocks_of(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """(blocks, block, Z, H, D) of (Z, H, positions, D); zeros past the end."""
    padded = torch.nn.functional.pad(tensor.float(), (0, 0, 0, -tensor.shape[2] % block))
    return padded.unflatten(2, (-1, block)).permute(2, 3, 0, 1, 4)


@pytest.mark.parametrize("device", DEVICES)
@given(shapes())
def test_blocks_are_copied(device, problem):
    Z, H, N, d_qk, d_v, dtype, block, transposed, seed = problem
    generator = torch.Generator().manual_seed(seed)
    k, v = (random(generator, (Z, H, N, d), dtype, transposed) for d in (d_qk, d_v))
    held = -(-N // block)
    sources = torch.randint(held, (held + 1,), generator=generator, dtype=torch.int32)
    targets = torch.randperm(held + 2, generator=generator)[: held + 1].int()
    out = torch.full(((held + 2) * block, Z, H, d_qk + d_v), float("nan"), dtype=dtype, device=device)
    copy_blocks(*(t.to(device) for t in (k, v)), *(t.to(device) for t in (sources, targets)), out, block)
    expected = torch.full((held + 2, block, *out.shape[1:]), float("nan"))
    expected[targets.long()] = torch.cat([blocks_of(t, block) for t in (k, v)], -1)[sources.long()]
    torch.testing.assert_close(out.cpu().float().view(expected.shape), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@given(shapes())
def test_blocks_are_added(device, problem):
    """In float32, rounded once; sums may be parts of larger tensors."""
    Z, H, N, d_qk, d_v, dtype, block, transposed, seed = problem
    generator = torch.Generator().manual_seed(seed)
    held, there, most = -(-N // block), 3, 2
    dk, dv = (random(generator, (Z, H, there * block, d), dtype, transposed) for d in (d_qk, d_v))
    returned = torch.randn((4 * block, Z, H, d_qk + d_v), generator=generator).to(dtype)
    own = torch.randint(-1, there, (held,), generator=generator, dtype=torch.int32)
    places = torch.randint(-1, 4, (held, most), generator=generator, dtype=torch.int32)
    whole = [torch.full((Z, H + 1, N, d), float("nan"), dtype=dtype, device=device) for d in (d_qk, d_v)]
    sums = tuple(t[:, 1:] for t in whole)
    add_blocks(*(t.to(device) for t in (dk, dv, returned, own, places)), sums, block)
    back = returned.float().unflatten(0, (-1, block))
    parts = [(torch.cat([blocks_of(t, block) for t in (dk, dv)], -1), own), *((back, column) for column in places.unbind(1))]
    total = sum(torch.where((which >= 0)[:, None, None, None, None], blocks[which.long().clamp(min=0)], 0.0) for blocks, which in parts)
    total = total.flatten(0, 1)[:N].permute(1, 2, 0, 3)
    for found, expected in zip(sums, total.split((d_qk, d_v), -1), strict=True):
        torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=0, atol=0)
    assert all(t[:, 0].isnan().all() for t in whole), "written outside"


def test_torch_does_the_same_on_a_cpu(monkeypatch):
    """Where the interpreter is not asked for."""
    for interpreted in (False, True):
        monkeypatch.setenv("FLEXPRESS_CPU", "interpreter" if interpreted else "cpp")
        test_blocks_are_copied.hypothesis.inner_test("cpu", (2, 3, 70, 24, 8, torch.bfloat16, 32, True, 0))
        test_blocks_are_added.hypothesis.inner_test("cpu", (2, 3, 70, 24, 8, torch.bfloat16, 32, True, 0))
