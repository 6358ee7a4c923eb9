"""Serving operators read pages once that the sequences of a SequenceInfo share."""

from __future__ import annotations

import pytest
import torch

from flexpress.caches import shared_attention, shared_prefix
from flexpress.sequences import SequenceInfo
from support.devices import DEVICES

PAGE, HKV, HQ, D = 4, 2, 4, 16


@pytest.fixture
def merged(monkeypatch):
    """However little need not be read again. Gives a list: 1 for each merge of two parts."""
    found, merge = [], shared_attention.merge_parts
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0)
    monkeypatch.setattr(shared_attention, "merge_parts", lambda *tensors: (found.append(1), merge(*tensors)))
    return found


def step(device: str, new: list[int]) -> tuple[SequenceInfo, tuple]:
    """Three sequences, of which the first and the last share three pages; and the operator's arguments behind q, k and v."""
    sequences = SequenceInfo(64, 3, PAGE, num_pages=40, device=device)
    pages = [[5, 6, 7, 1, 2], [9, 10, 11], [5, 6, 7, 3, 4]]
    sequences.nest_sequences([[0] * n for n in new], [13, 5, 12], pages)
    metadata = torch.ops.flexpress.prepare_metadata(*sequences.args)
    g = torch.Generator().manual_seed(0)
    caches = [torch.randn(40, PAGE, HKV, D, generator=g).to(device) for _ in range(2)]
    qkv = [torch.randn(1, sum(new), heads * D, generator=g).to(device) for heads in (HQ, HKV, HKV)]
    return sequences, (*qkv, *metadata, *caches)


def attended(arguments: tuple, **options) -> torch.Tensor:
    """By the operator, with caches of its own."""
    return torch.ops.flexpress.mha_with_paged_cache(*arguments[:6], *(cache.clone() for cache in arguments[6:]), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("new", [[1, 1, 1], [2, 0, 3]])
def test_the_same_as_without(device, new, merged):
    sequences, arguments = step(device, new)
    prefix = sequences.shared_prefix()
    assert prefix.groups == ((12, 2),) and prefix.prefix.tolist() == [12, 0, 12]
    found = attended(arguments, **prefix.options)
    assert merged == [1]
    torch.testing.assert_close(found, attended(arguments), rtol=1e-5, atol=1e-5)
    assert merged == [1]
    room = sequences.shared_prefix(groups=4, width=9)
    torch.testing.assert_close(attended(arguments, **room.options, sliding_window=7), attended(arguments, sliding_window=7))


def test_nothing_is_shared():
    sequences, _ = step("cpu", [1, 1, 1])
    sequences.assign_cache_loc([[5, 6, 7, 1, 2], [9, 10, 11], [6, 5, 7, 3, 4]])
    assert sequences.shared_prefix() is None


def test_under_torch_compile(merged):
    """The operator is opaque, so what is shared may change from call to call."""
    sequences, arguments = step("cpu", [1, 1, 1])

    def layer(q, k, v, *rest):
        return torch.ops.flexpress.mha_with_paged_cache(q * 2, k, v, *rest, **options)

    options = sequences.shared_prefix().options
    found = torch.compile(layer, fullgraph=True, backend="eager")(*arguments)
    assert merged == [1]
    torch.testing.assert_close(found, attended((arguments[0] * 2, *arguments[1:])), rtol=1e-5, atol=1e-5)


WRONG = {
    "a tensor too few": (lambda o: o.pop("shared_pages"), r"shared_pages must be torch.int32 \(n, n\)"),
    "an odd number": (lambda o: o.update(shared_groups=[1]), "and 1 shared_groups do not belong together"),
    "int64": (lambda o: o.update(shared_order=o["shared_order"].long()), "shared_order"),
    "another batch": (lambda o: o.update(shared_prefix=o["shared_prefix"][:2]), "do not belong together"),
    "fewer sequences": (
        lambda o: o.update({name: o[name][:2] for name in ("shared_prefix", "shared_order")}),
        "shared_prefix was made for 2 sequences",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_leaves_the_caches(name):
    change, message = WRONG[name]
    sequences, arguments = step("cpu", [1, 1, 1])
    before = [cache.clone() for cache in arguments[6:]]
    options = sequences.shared_prefix().options
    change(options)
    with pytest.raises((ValueError, TypeError), match=message):
        torch.ops.flexpress.mha_with_paged_cache(*arguments, **options)
    assert all(torch.equal(cache, kept) for cache, kept in zip(arguments[6:], before, strict=True))
