"""Trees of drafted tokens in cached_attention: each sees the text before the tree and its own ancestors, as if it had come alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from flexpress import apply_rope, cached_attention, mods, rope_table, update_cache
from flexpress.caches import shared_attention, shared_prefix
from support.batches import score_mods
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any
from support.prefixes import Forked, batches, made


@pytest.fixture(autouse=True)
def always_shared(monkeypatch):
    """However little need not be read again."""
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0)


@st.composite
def drafts(draw, device):
    """A batch, whose queries are the nodes of a tree for each sequence, by their parents."""
    p = draw(batches(device))
    p.moved, p.sinks, p.score = None, False, draw(st.sampled_from(["none", "softcap"]))
    return p, [[draw(st.integers(-1, i - 1)) for i in range(n)] for n in p.q_lens]


def path_to(node: int, parents: list[int]) -> list[int]:
    """A node's ancestors, the root first, and itself."""
    return [*(path_to(parents[node], parents) if parents[node] >= 0 else []), node]


@for_any(drafts, cpu=30, cuda=100)
def test_each_node_sees_its_path(problem, device):
    p, parents = problem
    arguments, sequences, _ = made(p, device)
    most, kv_len = max(p.q_lens, default=0), arguments["kv_len"]
    padded = torch.tensor([row + [-1] * (max(most, 1) - len(row)) for row in parents], device=device)
    start = kv_len - torch.tensor(p.q_lens, dtype=torch.int32, device=device)
    score_mod = score_mods(device)[p.score]
    mods_of = {"score_mod": score_mod, "mask_mod": mods.tree(padded, start)}
    first = 0
    shared, plain = cached_attention(**arguments, **mods_of), cached_attention(**{**arguments, "shared_prefix": None}, **mods_of)
    for b, (q, k, v) in enumerate(sequences):
        count, before = p.q_lens[b], k.shape[2] - p.q_lens[b]
        expected, dense = [], []
        for node in range(count):
            seen = [*range(before), *(before + i for i in path_to(node, parents[b]))]
            alone = q[:, :, node : node + 1], k[:, :, seen], v[:, :, seen], score_mod
            expected.append(dense_attention(*alone)[0])
            dense.append(dense_attention(*alone, precision=p.dtype)[0])
        if not count:
            continue
        exact, dense = torch.cat(expected, 2), torch.cat(dense, 2)
        for out in (shared, plain):
            found = out[first : first + count].transpose(0, 1) if p.ragged else out[b]
            assert relative_error(found, exact[0]) <= 2 * relative_error(dense, exact) + 1e-6
        first += count


PARENTS = [-1, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", [[0], [0, 2, 5], [0, 1, 4]])
def test_what_is_accepted_is_as_if_it_had_been_decoded(device, path):
    """The recipe of docs/serving.md: rotary embedding by depth, a tree in one step, then the accepted keys move together."""
    g = torch.Generator().manual_seed(0)
    nodes, D, size, before = len(PARENTS), 16, 4, 10
    q, k, v = (torch.randn(nodes, H, D, generator=g).to(device) for H in (4, 2, 2))
    rope, int32 = rope_table(32, D, device=device), dict(dtype=torch.int32, device=device)
    caches = [torch.randn(8, size, 2, D, generator=g).to(device) for _ in range(2)]
    plain = [c.clone() for c in caches]
    table, depth = torch.tensor([[5, 0, 3, 6, 1]], **int32), [len(path_to(i, PARENTS)) - 1 for i in range(nodes)]
    where = {"page_table": table, "cu_seqlens_q": torch.tensor([0, nodes], **int32)}
    start, kv_len = torch.tensor([before], **int32), torch.tensor([before + nodes], **int32)
    at = before + torch.tensor(depth, **int32)
    turned, keys = (apply_rope(t, rope, at) for t in (q, k))
    update_cache(keys, v, *caches, kv_len, **where)
    out = cached_attention(turned, *caches, kv_len, mask_mod=mods.tree(torch.tensor(PARENTS, device=device), start), **where)

    def places(numbers):
        position = before + torch.tensor(numbers, device=device)
        return table[0, position // size].long(), position % size

    for cache in caches:
        cache[places([*range(len(path))])] = cache[places(path)]
    for i, node in enumerate(path):
        one = {"page_table": table, "cu_seqlens_q": torch.tensor([0, 1], **int32)}
        token = slice(node, node + 1)
        length = torch.tensor([before + i + 1], **int32)
        query = update_cache(k[token], v[token], *plain, length, query=q[token], rope=rope, **one)
        torch.testing.assert_close(out[token], cached_attention(query, *plain, length, **one), rtol=1e-5, atol=1e-5)
    written = places([*range(-before, len(path))])
    for cache, expected in zip(caches, plain, strict=True):
        torch.testing.assert_close(cache[written], expected[written], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_of_forks_share_their_prompt(device, monkeypatch):
    """It is read once: two parts are merged."""
    merged, merge = [], shared_attention.merge_parts
    monkeypatch.setattr(shared_attention, "merge_parts", lambda *tensors: (merged.append(1), merge(*tensors)))
    p = Forked(forks=[(-1, 0, 32), (0, 32, 7), (0, 32, 8)], order=[2, 1], q_lens=[6, 6])
    arguments, _, _ = made(p, device)
    start = arguments["kv_len"] - 6
    cached_attention(**arguments, mask_mod=mods.tree(torch.tensor(PARENTS, device=device), start))
    assert merged == [1]
