"""Ten thousand random steps of a serving stack against a plain Python model: pages, writes to the cache and attention."""

from __future__ import annotations

import random

import pytest
import torch

from flexpress import OutOfPages, PageAllocator, cached_attention, mods, update_cache
from support.dense import dense_attention, relative_error
from support.devices import DEVICES

STEPS, HEADS, D, PAGE_SIZE, PAGES = 5_000, 2, 16, 4, 40


class Model:
    """What sequences hold: a number for each token, from which its key and value follow."""

    def __init__(self, device) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.vectors = torch.randn(2, 4096, D, generator=torch.Generator().manual_seed(0)).to(device)
        self.made = 0

    def new(self, n: int) -> list[int]:
        self.made += n
        return [i % 4096 for i in range(self.made - n, self.made)]


@pytest.mark.parametrize("device", DEVICES)
def test_random_steps(device):
    """Sequences come, fork, are cut back, grow and go; after every few steps the new tokens are written and attend, all in one batch."""
    rng, model, pages = random.Random(0), Model(device), PageAllocator(PAGES, PAGE_SIZE)
    caches = [torch.full((PAGES, PAGE_SIZE, 1, D), float("nan"), device=device) for _ in range(2)]
    refused = forked = 0
    for _ in range(STEPS // 25):
        grown: dict[int, int] = {}  # sequences with new tokens
        for _ in range(25):
            action = rng.choice(["new", "grow", "grow", "grow", "fork", "cut", "free"])
            handle = rng.choice(list(model.tokens)) if model.tokens else None
            before = pages.free_pages
            try:
                if action == "new" or handle is None:
                    n = rng.randrange(12)
                    handle = pages.allocate(n)
                    model.tokens[handle], grown[handle] = model.new(n), n
                elif handle in grown:
                    continue
                elif action == "grow":
                    n = rng.randrange(1, 7)
                    for source, target in pages.extend(handle, n):
                        for cache in caches:
                            cache[target] = cache[source]
                    model.tokens[handle] += model.new(n)
                    grown[handle] = n
                elif action == "fork":
                    model.tokens[pages.fork(handle)] = list(model.tokens[handle])
                    forked += 1
                elif action == "cut":
                    n = rng.randrange(len(model.tokens[handle]) + 1)
                    pages.truncate(handle, n)
                    del model.tokens[handle][n:]
                else:
                    pages.free(handle)
                    del model.tokens[handle]
            except OutOfPages:
                refused += 1
                assert pages.free_pages == before
        step(pages, model, caches, {h: n for h, n in grown.items() if h in model.tokens}, device)
        used = {page for handle in model.tokens for page in pages.pages(handle)}
        assert len(used) + pages.free_pages == PAGES
        assert all(pages.length(handle) == len(tokens) for handle, tokens in model.tokens.items())
    assert refused > 50 and forked > 50
    for handle in list(model.tokens):
        pages.free(handle)
    assert pages.free_pages == PAGES


def step(pages: PageAllocator, model: Model, caches: list, grown: dict[int, int], device) -> None:
    """Write the new tokens, let them attend, and compare each with its own sequence's tokens."""
    if not sum(grown.values()):
        return
    table = pages.page_table(list(grown), device=device)
    kv_len = torch.tensor([len(model.tokens[h]) for h in grown], dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor([0, *torch.tensor(list(grown.values())).cumsum(0)], dtype=torch.int32, device=device)
    new = [i for h, n in grown.items() for i in model.tokens[h][len(model.tokens[h]) - n :]]
    keys, values = (v[new][:, None] for v in model.vectors)
    where = {"page_table": table, "cu_seqlens_q": cu_seqlens, "max_q_len": min(12, len(new))}
    update_cache(keys, values, *caches, kv_len, **where)
    query = keys.expand(-1, HEADS, -1) * torch.tensor([1.0, -0.5], device=device)[:, None]
    out = cached_attention(query, *caches, kv_len, **where)
    start = 0
    for h, n in grown.items():
        if n:
            k, v = (t[model.tokens[h]][None, None] for t in model.vectors)
            q = query[start : start + n].transpose(0, 1)[None]
            expected = dense_attention(q, k, v, None, lambda b, h, i, j, more=k.shape[2] - n: mods.causal(b, h, i + more, j))[0]
            assert relative_error(out[start : start + n].transpose(0, 1)[None], expected) < 1e-5
        start += n
