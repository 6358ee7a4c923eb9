"""Masks of grids, trees, blocks, windows and graphs: their rules in plain Python, and attention under them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import cached_attention, create_block_mask, create_mask, flex_attention
from flexpress.mods import block_causal, block_diffusion, graph_distances, graph_neighbors, jagged_window, neighborhood, tree
from support.dense import dense_attention
from support.devices import DEVICES
from support.recipes import assert_same_mask

few = settings(max_examples=20, deadline=None)


# Neighbourhoods


def seen_on_an_axis(i, length, window, dilation, causal):
    """The elements that element i sees, each by its own step from the query: shifted until all of them exist, or cut off."""
    steps = range(-window + 1, 1) if causal else range(-(window // 2), window - window // 2)
    places = [i + step * dilation for step in steps]
    if causal:
        return {p for p in places if p >= 0}
    while min(places) < 0:
        places = [p + dilation for p in places]
    while max(places) >= length:
        places = [p - dilation for p in places]
    return set(places)


@st.composite
def neighborhoods(draw):
    """Grid, window, dilation and causality of each axis."""
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        window, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        axes.append((window * dilation + draw(st.integers(0, 4)), window, dilation, draw(st.booleans())))
    return axes


@few
@given(neighborhoods())
def test_neighborhood(axes):
    grid, window, dilation, causal = (tuple(part) for part in zip(*axes, strict=True))
    places = list(itertools.product(*map(range, grid)))
    seen = [[seen_on_an_axis(i, *axis) for i, axis in zip(place, axes, strict=True)] for place in places]
    expected = torch.tensor([[all(j in s for j, s in zip(key, of_axes, strict=True)) for key in places] for of_axes in seen])
    i = torch.arange(math.prod(grid))
    found = neighborhood(grid, window, dilation, causal)(None, None, i[:, None], i[None])
    assert torch.equal(found, expected)


def test_neighborhood_in_torch():
    assert_same_mask(neighborhood(13, 5), lambda b, i, j: j in seen_on_an_axis(i, 13, 5, 1, False), [(13, 13)])
    assert_same_mask(neighborhood(14, 3, 4), lambda b, i, j: j in seen_on_an_axis(i, 14, 3, 4, False), [(14, 14)])


def test_an_int_is_that_of_all_axes():
    i = torch.arange(12)
    where = None, None, i[:, None], i[None]
    assert torch.equal(neighborhood((3, 4), 2, 1, True)(*where), neighborhood((3, 4), (2, 2), (1, 1), (True, True))(*where))


# Trees


@st.composite
def forests(draw):
    """Parents of up to 40 nodes, which come in any order."""
    order = draw(st.permutations(range(draw(st.integers(1, 40)))))
    parents = [-1] * len(order)
    for n in range(1, len(order)):
        parents[order[n]] = draw(st.sampled_from([-1, *order[max(0, n - draw(st.integers(1, 5))) : n]]))
    return parents


def lineage(parents, i):
    return {i} if parents[i] < 0 else {i} | lineage(parents, parents[i])


@few
@given(forests(), st.sampled_from([torch.int32, torch.int64]))
def test_tree(parents, dtype):
    nodes = range(len(parents))
    expected = torch.tensor([[j in lineage(parents, i) for j in nodes] for i in nodes])
    i = torch.arange(len(parents))
    assert torch.equal(tree(torch.tensor(parents, dtype=dtype))(None, None, i[:, None], i[None]), expected)


def test_trees_of_a_batch_behind_texts():
    parents, before = [[-1, 0, 0, 1, 3], [2, 0, -1, -1, 3]], [3, 1]

    def rule(b, i, j):
        return i < before[b] or j < before[b] or j - before[b] in lineage(parents[b], i - before[b])

    found = tree(torch.tensor(parents), torch.tensor(before))
    for b in range(2):
        for i in range(before[b], before[b] + 5):
            for j in range(before[b] + 5):
                assert found(*map(torch.tensor, (b, 0, i, j))).item() == rule(b, i, j), (b, i, j)
    same = tree(torch.tensor(parents[0]), 3)
    assert [same(None, None, torch.tensor(7), torch.tensor(j)).item() for j in range(8)] == [rule(0, 7, j) for j in range(8)]


def test_a_tree_of_one_path_is_causal():
    i = torch.arange(300)
    assert torch.equal(tree(i - 1)(None, None, i[:, None], i[None]), i[:, None] >= i)


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_against_a_cache(device):
    """Speculative decoding: every path of the tree gets what it would get as a sequence of its own."""
    torch.manual_seed(0)
    parents, before, heads, dim = [-1, 0, 0, 1, 1, 2], 21, 2, 16
    total = before + len(parents)
    k, v = torch.randn(2, 1, 32, heads, dim, device=device).unbind()
    q = torch.randn(1, heads, len(parents), dim, device=device)
    mask = tree(torch.tensor(parents, device=device), torch.tensor([before], device=device))
    out = cached_attention(q, k, v, torch.tensor([total], dtype=torch.int32, device=device), mask_mod=mask)
    for i in range(len(parents)):
        path = [*range(before), *(before + j for j in sorted(lineage(parents, i)))]
        exact, *_ = dense_attention(q[:, :, i : i + 1], *(t[:, path].transpose(1, 2) for t in (k, v)))
        torch.testing.assert_close(out[:, :, i : i + 1].double(), exact, rtol=0, atol=1e-5 if device == "cpu" else 2e-3)


# Blocks, windows, graphs


@pytest.mark.parametrize("block", [1, 3, 20])
def test_block_causal(block):
    assert_same_mask(block_causal(block), lambda b, i, j: j < (i // block + 1) * block)


@pytest.mark.parametrize("length, block", [(8, 3), (6, 2), (5, 1), (4, 9)])
def test_block_diffusion(length, block):
    """What a noisy token sees: its own noisy block, and clean ones before it; a clean token: clean ones up to the end of its block."""

    def rule(b, i, j):
        first = i % length // block * block
        if i < length:
            return j in range(first, min(first + block, length)) or j in range(length, length + first)
        return j in range(length, length + min(first + block, length))

    assert_same_mask(block_diffusion(length, block), rule, [(2 * length, 2 * length)])


@pytest.mark.parametrize("shape", [(12,), (2, 12)])
def test_jagged_window(shape):
    starts = torch.randint(-3, 9, shape, generator=torch.Generator().manual_seed(0))
    ends = starts + torch.randint(-1, 7, shape, generator=torch.Generator().manual_seed(1))
    rows = [torch.stack([s, e], -1).tolist() for s, e in zip(starts.expand(2, 12), ends.expand(2, 12), strict=True)]
    assert_same_mask(jagged_window(starts, ends), lambda b, i, j: j in range(*rows[b][i]), [(12, 12), (12, 7)])


def steps_between(edges, nodes):
    """Lengths of shortest paths, by relaxing every edge until nothing changes."""
    found = [[0 if i == j else math.inf for j in range(nodes)] for i in range(nodes)]
    for _ in range(nodes):
        for i in range(nodes):
            for a, b in edges:
                found[i][b] = min(found[i][b], found[i][a] + 1)
    return found


@few
@given(st.integers(1, 9), st.integers(1, 6), st.data())
def test_graph_distances(nodes, farthest, data):
    edges = data.draw(st.lists(st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1)), max_size=14))
    found = graph_distances(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T, nodes, farthest)
    assert found.dtype == torch.int8
    assert found.tolist() == [[min(d, farthest) for d in row] for row in steps_between(edges, nodes)]


def test_graph_distances_of_a_long_path():
    assert graph_distances(torch.stack([torch.arange(199), torch.arange(1, 200)]), 200, 300)[0].tolist() == list(range(200))


@pytest.mark.parametrize("hops", [0, 2])
def test_graph_neighbors(hops):
    distances = torch.randint(-1, 4, (2, 9, 9), generator=torch.Generator().manual_seed(0))
    cells = distances.tolist()
    assert_same_mask(graph_neighbors(distances, hops), lambda b, i, j: cells[b][i][j] in range(hops + 1), [(9, 9)])
    assert_same_mask(graph_neighbors(distances[0], hops), lambda b, i, j: cells[0][i][j] in range(hops + 1), [(9, 9)])


# Blocks that bounds decide, and attention


def drafted(length):
    """A tree in the order of a walk, each node with a few children."""
    generator = torch.Generator().manual_seed(0)
    return [max(-1, i - 1 - int(torch.randint(0, 3, (), generator=generator)) * 5) for i in range(length)]


LENGTH = 96  # 8 x 12, 4 x 4 x 6
POSITIONS = torch.arange(LENGTH)
MASKS = {
    "1 axis": lambda device: neighborhood(LENGTH, 21),
    "1 axis, dilated": lambda device: neighborhood(LENGTH, 5, 4),
    "2 axes": lambda device: neighborhood((8, 12), (3, 5)),
    "2 axes, dilated": lambda device: neighborhood((8, 12), 3, (1, 2)),
    "3 axes": lambda device: neighborhood((4, 4, 6), (2, 3, 3), causal=(True, False, False)),
    "tree": lambda device: tree(torch.tensor(drafted(LENGTH), device=device)),
    "block causal": lambda device: block_causal(12),
    "block diffusion": lambda device: block_diffusion(LENGTH // 2, 10),
    "jagged": lambda device: jagged_window((POSITIONS - POSITIONS // 3).to(device), (POSITIONS + 3).to(device)),
}


@pytest.mark.parametrize("name", MASKS)
def test_no_block_is_visited_in_vain(name):
    """Each block that is empty or full is known to be: what is called partial is mixed."""
    mod = MASKS[name]("cpu")
    mask = create_block_mask(mod, None, None, LENGTH, LENGTH, "cpu", 16)
    tiles = create_mask(mod, None, None, LENGTH, LENGTH, "cpu")[0, 0].view(6, 16, 6, 16).transpose(1, 2)
    seen = tiles.any(-1).any(-1).int() + tiles.all(-1).all(-1).int()
    status = mask._status()[0, 0].int()
    assert (status == 0).any() and torch.equal(status, seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASKS)
def test_attention(name, device):
    torch.manual_seed(0)
    mod = MASKS[name](device)
    q, k, v = torch.randn(3, 1, 2, LENGTH, 16, device=device).unbind()
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out, exact = flex_attention(q, k, v, mask_mod=mod), dense_attention(q, k, v, mask_mod=mod)[0]
    close = dict(rtol=0, atol=2e-5 if device == "cpu" else 5e-3)
    torch.testing.assert_close(out.double(), exact, **close)
    d_out = torch.randn_like(out)
    found, wanted = torch.autograd.grad(out, (q, k, v), d_out), torch.autograd.grad(exact, (q, k, v), d_out.double())
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, **close)
