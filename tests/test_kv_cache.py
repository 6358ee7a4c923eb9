"""Writing to caches, and rotary position embedding, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch

from flexpress import cached_attention, rope_table, update_cache
from flexpress.codegen.run import update_cache as driver
from flexpress.flash_attn import flash_attn_with_kvcache
from support.caches import check_update, updates
from support.devices import DEVICES, for_any


@for_any(updates, cpu=40, cuda=100)
def test_any_update(p, device):
    check_update(p, device)


def test_the_grid_follows_the_tokens(monkeypatch):
    """Not the longest sequence: 200 tokens are 13 tiles, however they are spread."""
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")  # kernels in C++ have no grid
    for counts in ([1] * 39 + [161], [200], [0, 100, 0, 99, 1], [5] * 40):
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
        caches = [torch.zeros(len(counts), 200, 1, 8) for _ in range(2)]
        new = torch.arange(200.0)[:, None, None].expand(-1, 1, 8)
        update_cache(new, new, *caches, torch.tensor(counts, dtype=torch.int32), cu_seqlens_q=starts, max_q_len=max(counts))
        assert [*driver._ready.values()][-1].grid == (13, 1)
        assert torch.equal(torch.cat([cache[: counts[b], 0, 0] for b, cache in enumerate(caches[0])]), new[:, 0, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [2, 20, 200])
def test_tokens_may_move_in_a_cache(tokens, device):
    """Keys, values and queries that are parts of the caches which are written: as copies of them."""
    caches = torch.randn(2, 1, 320, 2, 8, device=device)
    before, lengths = caches.clone(), torch.tensor([tokens + 1], dtype=torch.int32, device=device)
    rope = rope_table(400, 8, device=device)
    moved = [cache[:, :tokens].transpose(1, 2) for cache in caches]
    update_cache(*moved, *caches, lengths)
    assert torch.equal(caches[:, :, 1 : tokens + 1], before[:, :, :tokens]) and torch.equal(
        caches[:, :, tokens + 1 :], before[:, :, tokens + 1 :]
    )
    caches.copy_(before)
    turned = update_cache(*moved, *caches, lengths, rope=rope, query=caches[1, :, :tokens].transpose(1, 2))
    parts = [cache[:, :tokens].transpose(1, 2) for cache in before]
    others = torch.zeros_like(before)
    wanted = update_cache(*parts, *others, lengths, rope=rope, query=parts[1])
    assert torch.equal(turned, wanted) and torch.equal(caches[:, :, 1 : tokens + 1], others[:, :, 1 : tokens + 1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_is_not_there_has_no_pages(device):
    """Unchecked, such a sequence is not written, and no other sequence is either."""
    int32 = dict(dtype=torch.int32, device=device)
    caches = [torch.zeros(4, 2, 1, 8, device=device) for _ in range(2)]
    new, lengths = torch.ones(4, 1, 2, 8, device=device), torch.tensor([2] * 4, **int32)
    where = {"page_table": torch.tensor([[2], [0]], **int32), "cache_loc": torch.tensor([1, -1, 2, 2**31 - 1], **int32)}
    update_cache(new, new, *caches, lengths, **where, check=False)
    assert all((cache[0] == 1).all() and not cache[1:].any() for cache in caches)
    out = cached_attention(new, *caches, lengths, **where, check=False)
    assert (out[0] == 1).all() and not out[1:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_autograd_notices_that_a_cache_was_written(device):
    """A graph that has saved it must not compute with what it holds now. Inference tensors are in no graph, and have no versions."""
    new = torch.ones(1, 1, 1, 8, device=device)
    lengths = torch.tensor([2], dtype=torch.int32, device=device)
    token = torch.ones(1, 1, 8, device=device)
    writes = {
        "update_cache": lambda *caches: update_cache(new, new, *caches, lengths),
        "flash_attn": lambda *caches: flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=1),
        "operator": lambda *caches: torch.ops.flexpress.mha_with_cache(token, token, token, lengths - 1, *caches),
    }
    for write in writes.values():
        for saved in range(2):
            caches = [torch.zeros(1, 4, 1, 8, device=device) for _ in range(2)]
            x = torch.ones((), device=device, requires_grad=True)
            product = (x * caches[saved]).sum()
            write(*caches)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        with torch.inference_mode():
            caches = [torch.zeros(1, 4, 1, 8, device=device) for _ in range(2)]
        with torch.inference_mode():
            write(*caches)
        assert all(cache.any() for cache in caches)


BAD = {
    "more pages than there are": (dict(kv_len=[40]), "positions go from 0 to 31"),
    "a page outside": (dict(page_table=[[0, 9]]), r"page_table\[0\] names pages from 0 to 9"),
    "heads": (dict(key=torch.zeros(1, 3, 4, 8)), "need 2 heads"),
    "dtype of value": (dict(value=torch.zeros(1, 2, 4, 8, dtype=torch.float16)), "all else alike"),
    "a short table": (dict(rope=rope_table(20, 8)), r"rope \(20, 4, 2\) has 20 positions, but a new token has position 29"),
    "a wide table": (dict(rope=rope_table(32, 16)), "rope_dim up to the 8 of key"),
    "query without table": (dict(query=torch.zeros(1, 2, 4, 8)), "pass rope="),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_leave_the_cache_as_it_was(name):
    caches = [torch.ones(4, 16, 2, 8) for _ in range(2)]
    arguments = {
        "key": torch.zeros(1, 2, 4, 8),
        "value": torch.zeros(1, 2, 4, 8),
        "kv_len": torch.tensor([30], dtype=torch.int32),
        "page_table": torch.tensor([[0, 1]], dtype=torch.int32),
    }
    changes, message = BAD[name]
    arguments |= {k: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        update_cache(arguments.pop("key"), arguments.pop("value"), *caches, **arguments)
    assert all((c == 1).all() for c in caches)
