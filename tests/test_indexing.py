"""Indexing captured tensors against torch: any shape, strides and dtype, negative indices, and zero for those outside.

Each property runs on the CPU in Triton's interpreter, and with `-m gpu` compiled.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import ModError, flex_attention
from flexpress.codegen.run.evaluate import evaluate_mod
from support.devices import DEVICES
from support.evaluate import FLOATS, INTEGERS, check, make_mod, placed, values

POISON = 77  # what lies around a captured tensor; NaN in floating point


@st.composite
def tables(draw):
    """A tensor of rank 0 to 4 and any strides inside a larger, poisoned buffer."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    dtype = draw(st.sampled_from((*FLOATS, *INTEGERS, torch.bool)))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    poison = math.nan if dtype.is_floating_point else True if dtype == torch.bool else POISON
    buffer = torch.full([n * step + 3 for n, step in zip(shape, steps, strict=True)] or [3], poison).to(dtype)
    inside = tuple(slice(1, 1 + n * step, step) for n, step in zip(shape, steps, strict=True))
    view = buffer[inside or 1]
    view.copy_(values(dtype, view.numel(), draw(st.integers(0, 99))).reshape(view.shape))
    order = draw(st.permutations(range(len(shape))))
    view = view.permute(order)
    for dim in range(view.ndim):
        if draw(st.integers(0, 4)) == 0:  # one stored value for the whole dimension
            view = view.narrow(dim, 0, 1).expand(view.shape)
    return view


INDICES = (
    "q_idx",
    "kv_idx",
    "h",
    "b",
    "kv_idx - q_idx",
    "q_idx // 3",
    "kv_idx - 2",
    "q_idx * 2 - 5",
    "ids[q_idx % 8]",
    "kv_idx % 3",
    "ids[kv_idx % 8] + h",
    "n + h",
    "n - q_idx",
    "(score * 2).int()",
    "q_idx.long() - 3",
    "small[kv_idx % 8]",
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60)
@given(table=tables(), data=st.data())
def test_indexing(table, data, device):
    """Negative indices wrap once, as in torch; an index outside reads zero, never what lies around."""
    scores = torch.randn(2, 2, 9, 11, generator=torch.Generator().manual_seed(5)).to(device) * 3
    index = [data.draw(st.sampled_from((*INDICES, str(-n), str(n - 1)))) for n in table.shape]
    captured = {
        "n": data.draw(st.integers(-3, 5)),
        "ids": torch.tensor([0, -1, 5, 2, -6, 3, 1, -2]),
        "small": torch.tensor([0, 1, -1, 2, 3, -2, 9, 1], dtype=torch.int8),
    }
    split = data.draw(st.integers(0, len(index)))
    read = "".join(f"[{', '.join(part)}]" for part in (index[:split], index[split:]) if part)
    mod = make_mod(f"table{read} * 1.0", "score", placed({**captured, "table": table}, device))
    out = evaluate_mod(mod, scores).cpu()
    expected = looked_up(table, index, scores.cpu(), captured)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def looked_up(table: torch.Tensor, index: list[str], scores: torch.Tensor, captured: dict) -> torch.Tensor:
    """float32 table[index] at every position, zero outside."""
    b, h, q_idx, kv_idx = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    names = {"score": scores, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, **captured}
    inside = torch.ones(scores.shape, dtype=torch.bool)
    places = []
    for text, size in zip(index, table.shape, strict=True):
        place = torch.as_tensor(eval(text, names)).long().expand(scores.shape)
        place = torch.where(place < 0, place + size, place)
        inside &= (place >= 0) & (place < size)
        places.append(place.clamp(0, size - 1))
    found = table[tuple(places)] if places else table.expand(scores.shape)
    return torch.where(inside, found.float(), 0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_tensors_read_zero(device):
    mod = make_mod("table[kv_idx, h] + 1", "score", {"table": torch.empty(0, 3, device=device)})
    out = evaluate_mod(mod, torch.zeros(1, 2, 5, 7, device=device))
    assert (out == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("read", ["table[q_idx, 0]", "table[b, kv_idx]", "table[q_idx, kv_idx]", "table[h, kv_idx] - table[q_idx, 1]"])
@pytest.mark.parametrize("shape", [(5, 0), (0, 7), (0, 0)])
def test_empty_tensors_have_empty_gradients(device, read, shape):
    table = torch.empty(shape, device=device, requires_grad=True)
    q, k, v = (torch.ones(1, 2, n, 16, device=device) for n in (5, 7, 7))
    out = flex_attention(q, k, v, make_mod(f"score + {read}", "score", {"table": table}))
    assert (out == 1).all()
    assert torch.autograd.grad(out.sum(), table)[0].shape == shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_index_beyond_int32_reads_zero(dtype, device):
    """2**31 and beyond become negative in int32; no bound may be concluded from q_idx * 2**30 >= 0 there."""
    buffer = torch.full((100,), math.nan, device=device)
    table = buffer[40:60].fill_(2.0)
    scores = torch.zeros(1, 1, 9, 5, device=device)
    out = evaluate_mod(make_mod(f"table[(q_idx * 1073741824 - 1).to(torch.{dtype})]", "score", {"table": table}), scores)
    place = (torch.arange(9) * 1073741824 - 1).to(getattr(torch, dtype))
    expected = torch.where((place >= -20) & (place < 20), 2.0, 0.0)
    assert (out.cpu() == expected[:, None]).all()


@pytest.mark.parametrize(
    "expression",
    [
        "table[-1]",
        "table[2, ...]",
        "table[..., q_idx % 3, 1]",
        "nested[h][q_idx]",
        "table[0][kv_idx]",
        "table[h, ids[kv_idx]]",
        "(table * 2)[h, 1]",
        "table.T[q_idx, h]",
        "table[:, 1][h]",
        "table.sum(0)[q_idx]",
        "table[torch.tensor(1), q_idx]",
    ],
)
def test_indexing_mixed_with_torch(expression):
    """Views and sums of captured tensors are torch's own work; symbols index what comes of it."""
    captured = {"table": torch.randn(3, 4), "nested": [torch.randn(4), torch.randn(4)], "ids": torch.tensor([3, 0, 1, 2])}
    if expression in ("table[-1]", "table[2, ...]"):
        with pytest.raises(ModError, match=r"shape \(4,\)"):
            evaluate_mod(make_mod(expression, "score", captured), torch.zeros(1, 2, 4, 4))
        return
    if expression == "nested[h][q_idx]":
        with pytest.raises(ModError, match="Capture a tensor instead of a list"):
            evaluate_mod(make_mod(expression, "score", captured), torch.zeros(1, 2, 4, 4))
        return
    check(expression, torch.zeros(1, 2, 4, 4), captured)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["AUTO", "PORTABLE"])
@pytest.mark.parametrize(
    "index",
    [
        lambda i, j: (i % 50).to(torch.uint8) + 205 - (j % 200).to(torch.uint8),
        lambda i, j: i.to(torch.uint8) + 100 - j.to(torch.uint8),
        lambda i, j: i.to(torch.int8) + 100 - (j % 100).to(torch.int8),
        lambda i, j: (i * 200).to(torch.int16) + 100 - (j * 200).to(torch.int16),
    ],
    ids=["uint8", "uint8 that wraps", "int8 that wraps", "int16 that wraps"],
)
def test_indices_that_are_differences_of_narrow_integers(index, backend, device):
    """They wrap around, and what a kernel adds to an address does not."""
    q, k, v = (torch.randn(1, 1, n, 16, device=device) for n in (60, 256, 256))
    i, j = torch.arange(60, device=device)[:, None], torch.arange(256, device=device)[None, :]
    size = 1 << 16 if index(i, j).dtype == torch.int16 else 256
    table = torch.randn(size, device=device).requires_grad_()
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[index(i, j)], kernel_options={"BACKEND": backend})
    leaf = table.detach().double().requires_grad_()
    expected = (q.double() @ k.double().mT / 4 + leaf[index(i, j).long() % size]).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    found, wanted = torch.autograd.grad(out.square().sum(), table)[0], torch.autograd.grad(expected.square().sum(), leaf)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
