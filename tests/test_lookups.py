"""torch's functions of captured tensors, in a kernel beside torch itself: lookups, functions of a row as a whole."""

from __future__ import annotations

import enum

import pytest
import torch
import torch.nn.functional as F

from flexpress import ModError, cache_info, create_mask, flex_attention
from support.devices import DEVICES

LENGTH = 40
FUNCTIONS = [
    "F.embedding(q_idx % 5, table)[kv_idx % 4]",
    "F.embedding(kv_idx % 5, table, padding_idx=-2).sum()",
    "embedding(q_idx % 5)[h]",
    "torch.take(table, q_idx % 20)",
    "row.take(kv_idx)",
    "torch.index_select(row, 0, q_idx.reshape(1)).sum()",
    "table.index_select(0, kv_idx % 5)[0, 2]",
    "row.gather(0, q_idx)",
    "torch.bucketize(score, bounds)",
    "torch.bucketize(kv_idx, starts, right=True)",
    "torch.searchsorted(starts, q_idx)",
    "torch.searchsorted(starts, q_idx, side='right', out_int32=True)",
    "torch.searchsorted(many[h], kv_idx, right=True)",
    "torch.searchsorted(bounds, table[q_idx % 5]).sum()",
    "torch.isin(kv_idx, starts) * 1.0",
    "torch.isin(q_idx, starts[1:3], invert=True) * 1.0",
    "table[q_idx % 5].softmax(0)[kv_idx % 4]",
    "F.softmax(table[q_idx % 5] * score, dim=-1)[2]",
    "torch.log_softmax(table[kv_idx % 5], 0)[1]",
    "torch.logsumexp(table[q_idx % 5] * score, 0)",
    "table.view(5, 2, 2)[q_idx % 5].logsumexp((0, 1))",
    "table[q_idx % 5].var()",
    "table[q_idx % 5].var(0, correction=0)",
    "torch.std(table.view(5, 2, 2)[kv_idx % 5], 1, unbiased=False).sum()",
    "table[q_idx % 5].argmax()",
    "torch.argmin(table.view(5, 2, 2)[kv_idx % 5], dim=1).sum()",
    "table[q_idx % 5].max(0).values + table[kv_idx % 5].min(-1)[1]",
    "torch.max(table.view(5, 2, 2)[kv_idx % 5], dim=0, keepdim=True).values.sum()",
    "table[q_idx % 5].cumsum(0)[2]",
    "(table[q_idx % 5] > 0)[kv_idx % 4] * 1.0 + table.view(5, 2, 2)[q_idx % 5].exp()[kv_idx % 2, -1]",
    "F.softmax(table[kv_idx % 5])[-h]",
    "table[q_idx % 5].count_nonzero() + torch.count_nonzero(table[kv_idx % 5] > 0)",
    "(F.normalize(table[q_idx % 5], dim=0) * F.normalize(table[kv_idx % 5], dim=-1)).sum()",
    "(F.layer_norm(table[q_idx % 5], (4,), row[:4], row[4:8]) * table[kv_idx % 5]).sum()",
    "F.rms_norm(table[q_idx % 5], [4], eps=1e-3)[1]",
    "torch.einsum('i,i->', table[q_idx % 5], table[kv_idx % 5])",
    "torch.einsum('ij, j -> i', table.view(5, 2, 2)[q_idx % 5], table[kv_idx % 5][:2])[1]",
    "torch.einsum('ab,bc', table.view(5, 2, 2)[q_idx % 5], table.view(5, 2, 2)[kv_idx % 5])[0, 1]",
    "torch.vdot(table[q_idx % 5], table[kv_idx % 5])",
    "score * Mode.SECOND + Size.HALF",
    "score if score.is_floating_point() else kv_idx",
]


class Mode(enum.IntEnum):
    FIRST = 1
    SECOND = 2


class Size(float, enum.Enum):
    HALF = 0.5


def captured(device: str, dtype=torch.float32) -> dict:
    generator = torch.Generator().manual_seed(1)
    table, row = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in ((5, 4), (LENGTH,)))
    bounds, many = torch.tensor([-1.0, -0.2, 0.3, 0.3, 2.0]), torch.tensor([[0, 3, 30], [7, 7, 50]])
    found = {"bounds": bounds.to(device, dtype), "starts": torch.tensor([0, 3, 3, 11, 25, 39], device=device), "many": many.to(device)}
    embedding = torch.nn.Embedding(5, 4, padding_idx=1, _weight=table.detach())
    embedding.weight.requires_grad_(False)
    return {"table": table, "row": row, "embedding": embedding, **found}


def mod_of(expression: str, names: dict):
    return eval(f"lambda score, b, h, q_idx, kv_idx: {expression}", {"torch": torch, "F": F, "Mode": Mode, "Size": Size, **names})


def in_torch(mod, scores: torch.Tensor) -> torch.Tensor:
    """The mod at every position, by vmap."""
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    for dim in (3, 2, 1, 0):
        mod = torch.vmap(mod, (0, *(0 if d == dim else None for d in range(4))))
    return mod(scores, *places)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("expression", FUNCTIONS)
def test_values_and_gradients(expression, device):
    """Of attention, with gradients of what is captured."""
    names, exact_names = captured(device), captured(device, torch.float64)
    q, k, v = (torch.randn(1, 2, LENGTH, 16, device=device, requires_grad=True) for _ in range(3))
    mod = mod_of(f"score * (0.5 + 0.1 * ({expression}))", names)
    out, traces = flex_attention(q, k, v, mod), cache_info().traces
    assert torch.equal(flex_attention(q, k, v, mod), out) and cache_info().traces == traces
    scores = (q @ k.mT).double() / 4
    exact = in_torch(mod_of(f"score * (0.5 + 0.1 * ({expression}))", exact_names), scores).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), exact, atol=2e-5, rtol=2e-5)
    learned = [n for n in ("table", "row") if exact_names[n].requires_grad and n in expression]
    direction = torch.randn_like(out)
    found = torch.autograd.grad(out, [q, *(names[n] for n in learned)], direction, allow_unused=True)
    wanted = torch.autograd.grad(exact, [q, *(exact_names[n] for n in learned)], direction.double(), allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        b = torch.zeros(()) if b is None else b
        a = torch.zeros_like(b) if a is None else a
        assert (a - b).norm() <= 1e-4 * max(b.norm(), 1e-3)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9])
def test_places_in_rows_of_any_length(count, right):
    row = torch.randint(0, 12, (count,), generator=torch.Generator().manual_seed(count)).sort().values
    found = create_mask(lambda b, h, q_idx, kv_idx: torch.searchsorted(row, q_idx, right=right) > kv_idx, 1, 1, 14, 10, "cpu")
    places = torch.searchsorted(row, torch.arange(14), right=right)
    assert torch.equal(found[0, 0].sum(-1), places)


def test_documents_whose_number_changes():
    """A graph serves all rows whose lengths have as many bits."""
    lines = cache_info().traces
    for starts in ([0, 5, 9, 30], [0, 8, 20, 21, 33], [0, 1, 2, 3, 4, 5]):
        offsets = torch.tensor(starts)

        def document(b, h, q_idx, kv_idx):
            return torch.bucketize(q_idx, offsets, right=True) == torch.bucketize(kv_idx, offsets, right=True)  # noqa: B023

        place = torch.bucketize(torch.arange(LENGTH), offsets, right=True)
        assert torch.equal(create_mask(document, 1, 1, LENGTH, LENGTH, "cpu")[0, 0], place[:, None] == place)
    assert cache_info().traces == lines + 1


def test_what_is_nan_comes_first():
    rows = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 5.0, 1.0], [2.0, float("nan"), float("nan")]])
    for name in ("argmax", "argmin"):
        mask = create_mask(lambda b, h, q_idx, kv_idx: getattr(rows[q_idx], name)() == kv_idx, 1, 1, 3, 3, "cpu")  # noqa: B023
        assert mask[0, 0].int().argmax(-1).tolist() == getattr(rows, name)(-1).tolist()


def test_an_enumeration_that_changes():
    mode = Mode.FIRST

    def mod(score, b, h, q_idx, kv_idx):
        return score + mode * kv_idx

    q, k, v = torch.randn(3, 1, 1, 20, 16)
    for mode in Mode:
        scores = q @ k.mT / 4 + mode.value * torch.arange(20)
        torch.testing.assert_close(flex_attention(q, k, v, mod), scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "expression, message",
    [
        ("F.embedding(h, table, max_norm=1.0)[0]", "an embedding with max_norm"),
        ("torch.searchsorted(table, q_idx)", "a search in what is no row"),
        ("torch.searchsorted(starts, q_idx, sorter=starts)", "searchsorted with a sorter"),
        ("table.gather(0, h)", r"gather of a tensor of shape \(5, 4\)"),
        ("F.layer_norm(table[h], (3,)).sum()", r"a norm of the last dimensions \(3,\) of shape \(4,\)"),
        ("torch.einsum('ii->i', table.view(5, 2, 2)[h])[0]", "another letter for every dimension"),
        ("torch.einsum('i,j->', table[h])", "einsum 'i,j->' of 1 operands"),
        ("table[h].softmax(3)[0]", "amax with dim=3"),
        ("F.softmax(table.view(5, 2, 2)[h]).sum()", r"a softmax of shape \(2, 2\) without dim"),
        ("torch.argmax(table[h], keepdim=True).sum()", "with keepdim, but without dim"),
        ("table[h].exp()[q_idx, kv_idx]", "indexed by symbols beside others than numbers"),
        ("torch.addcdiv(q_idx, kv_idx, h)", "addcdiv of integers"),
    ],
)
def test_what_is_refused(expression, message):
    q, k, v = torch.randn(3, 1, 1, 20, 16)
    with pytest.raises(ModError, match=message):
        flex_attention(q, k, v, mod_of(f"score + {expression}", captured("cpu")))
