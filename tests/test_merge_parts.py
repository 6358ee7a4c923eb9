"""The kernel that puts attention to two sets of keys together, and torch's operations in its place: against merge_attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress import merge_attention
from flexpress.codegen.run.merge_parts import merge_parts
from support.devices import DEVICES

INTERPRETED = "interpreter", "cpp"


@st.composite
def shapes(draw):
    """Sequences, heads, queries, a head dim, tokens of the part, a dtype, do queries lie as a projection left them, a seed."""
    return (
        *(draw(st.integers(1, 3)) for _ in range(3)),
        draw(st.sampled_from([1, 16, 24, 80, 512])),
        draw(st.integers(1, 9)),
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.booleans()),
        draw(st.integers(0, 2**31 - 1)),
    )


def check(device, problem):
    Z, Hq, Q_LEN, D_V, parts, dtype, transposed, seed = problem
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    def lse_of(*shape):
        return torch.where(torch.rand(shape, generator=generator) < 0.3, -torch.inf, 5 * random(*shape))

    place = torch.randint(-1, parts + 1, (Z * Q_LEN,), generator=generator, dtype=torch.int32)  # past the end, too
    part, part_lse = random(parts, Hq, D_V).to(dtype), lse_of(parts, Hq)
    out, lse = random(Z, Q_LEN, Hq, D_V).to(dtype), lse_of(Z, Q_LEN, Hq)
    out[torch.isneginf(lse)] = part[torch.isneginf(part_lse)] = 0
    there = ((place >= 0) & (place < parts)).view(Z, Q_LEN, 1)
    at = place.clamp(0, parts - 1).long()
    others = torch.where(there, part_lse[at].view(lse.shape), -torch.inf)
    exact, exact_lse = merge_attention((out.double(), part[at].view(out.shape).double()), (lse.double(), others.double()))

    given_out = out.to(device).transpose(1, 2)
    given_out, given_lse = given_out if transposed else given_out.contiguous(), lse.to(device).transpose(1, 2).contiguous()
    merge_parts(given_out, given_lse, *(t.to(device) for t in (part, part_lse, place)))
    found, found_lse = given_out.cpu().transpose(1, 2), given_lse.cpu().transpose(1, 2)
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close(found_lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    alone = torch.isneginf(others)
    assert torch.equal(found[alone], out[alone]), "a row without another part has changed"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", INTERPRETED)
@given(shapes())
def test_parts_are_merged(device, how, problem):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FLEXPRESS_CPU", how)
        check(device, problem)


def test_nothing_to_merge():
    out, lse = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3)
    merge_parts(out, lse, torch.empty(0, 2, 4), torch.empty(0, 2), torch.zeros(3, dtype=torch.int32))
    assert torch.equal(out, torch.ones(1, 2, 3, 4))
