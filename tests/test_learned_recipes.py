"""Scores of graphs, positions, gates and temperatures, and differential attention: each against plain torch, with its gradients."""

from __future__ import annotations

import math

import pytest
import torch

from flexpress import flex_attention, mods
from flexpress.mods import causal, differential, differential_lambda, disentangled, forget_gate, graph_bias, yarn_temperature
from support.dense import dense_attention
from support.devices import DEVICES
from support.recipes import assert_same_scores, values

# Rules


@pytest.mark.parametrize("shape", [(9, 11), (2, 9, 11)])
def test_graph_bias(shape):
    distances = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(0))
    weight = values(5, 4)
    rows, cells = weight.tolist(), distances.expand(2, 9, 11).tolist()
    for b in range(2):
        of_batch = distances if len(shape) == 2 else distances[b : b + 1]
        assert_same_scores(graph_bias(of_batch, weight), lambda score, h, i, j: score + rows[cells[b][i][j]][h], (1, 4, 9, 11))  # noqa: B023


def test_disentangled():
    c2p, p2c = values(1, 4, 9, 6), values(1, 4, 11, 6, seed=1)
    seek, worth = c2p[0].tolist(), p2c[0].tolist()

    def rule(score, h, i, j):
        return score + seek[h][i][min(max(i - j, -3), 2) + 3] + worth[h][j][min(max(j - i, -3), 2) + 3]

    assert_same_scores(disentangled(c2p, p2c), rule, (1, 4, 9, 11))


def test_forget_gate():
    gates = -values(1, 4, 11).abs()
    numbers = gates[0].tolist()

    def rule(score, h, i, j):
        return score + sum(numbers[h][j + 1 : i + 1]) - sum(numbers[h][i + 1 : j + 1])

    assert_same_scores(forget_gate(gates), rule, (1, 4, 9, 11))


def test_constant_forget_gates_are_alibi():
    gates, slopes = torch.full((1, 1, 11), -0.25), torch.tensor([0.25])
    where = torch.tensor(0), torch.tensor(0), torch.arange(11)[:, None], torch.arange(11)[None]
    torch.testing.assert_close(forget_gate(gates)(torch.zeros(()), *where), mods.alibi(slopes)(torch.zeros(()), *where))


def test_yarn_temperature():
    assert_same_scores(yarn_temperature(16.0), lambda score, h, i, j: score * (0.1 * math.log(16.0) + 1) ** 2)
    assert_same_scores(yarn_temperature(40, 0.707), lambda score, h, i, j: score * (0.0707 * math.log(40.0) + 1) ** 2)
    assert_same_scores(yarn_temperature(0.5), lambda score, h, i, j: score)


def test_differential_lambda_of_equal_vectors_is_the_papers_first():
    vectors = values(4, 8)
    assert math.isclose(differential_lambda(vectors[0], vectors[1], vectors[0], vectors[1], layer=0), 0.2, rel_tol=1e-6)
    lq1, lk1, lq2, lk2 = vectors.double()
    wanted = (lq1 * lk1).sum().exp() - (lq2 * lk2).sum().exp() + 0.8 - 0.6 * math.exp(-0.9)
    torch.testing.assert_close(differential_lambda(lq1, lk1, lq2, lk2, layer=3), wanted)


# Attention, as each paper writes it down, in plain torch

B, H, S, D = 2, 2, 40, 16
PAST = torch.ones(S, S, dtype=torch.bool).tril()


def graph(q, k, v, weight):
    distances = (torch.arange(S)[:, None] ^ torch.arange(S)).clamp_max(5).to(q.device)  # of no graph; any whole numbers will do
    bias = torch.nn.functional.one_hot(distances.long(), 6).to(weight.dtype) @ weight  # (S, S, H)
    return (q @ k.mT / math.sqrt(D) + bias.permute(2, 0, 1)).softmax(-1) @ v, lambda weight: (graph_bias(distances, weight), {})


def deberta(q, k, v, position_keys, position_queries):
    """Scores of content and of positions relative to the query, whose vectors are laid out for every pair."""
    span, scale = position_keys.shape[1] // 2, (3 * D) ** -0.5
    bucket = ((torch.arange(S)[:, None] - torch.arange(S)).clamp(-span, span - 1) + span).to(q.device)
    content_to_position = torch.einsum("bhid,hijd->bhij", q, position_keys[:, bucket])
    position_to_content = torch.einsum("hjid,bhjd->bhij", position_queries[:, bucket], k)
    scores = (q @ k.mT + content_to_position + position_to_content) * scale
    return scores.softmax(-1) @ v, lambda keys, queries: (
        lambda q, k: disentangled(scale * q @ keys.mT, scale * k @ queries.mT),
        {"scale": scale},
    )


def forgetting(q, k, v, logits):
    """Weights are multiplied by the gates between key and query, in numbers and not in logarithms."""
    gates = logits.sigmoid()
    kept = torch.stack([torch.stack([gates[..., j + 1 : i + 1].prod(-1) for j in range(S)], -1) for i in range(S)], -2)
    weights = (q @ k.mT / math.sqrt(D)).exp() * kept * PAST.to(q.device)
    return weights / weights.sum(-1, keepdim=True) @ v, lambda logits: (
        forget_gate(torch.nn.functional.logsigmoid(logits)),
        {"mask_mod": causal},
    )


def yarn(q, k, v):
    longer = 0.1 * math.log(32.0) + 1
    return ((q * longer) @ (k * longer).mT / math.sqrt(D)).softmax(-1) @ v, lambda: (yarn_temperature(32.0), {})


ATTENTION = {
    "graph": (graph, [(6, H)]),
    "disentangled": (deberta, [(H, 8, D), (H, 8, D)]),
    "forget gate": (forgetting, [(B, H, S)]),
    "yarn": (yarn, []),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, device):
    paper, shapes = ATTENTION[name]
    q, k, v = (t.to(device).requires_grad_() for t in values(3, B, H, S, D))
    learned = [values(*shape, seed=n + 1).to(device).requires_grad_() for n, shape in enumerate(shapes)]
    exact, recipe = paper(*(t.double() for t in (q, k, v, *learned)))
    mod, options = recipe(*learned)
    out = flex_attention(q, k, v, score_mod=mod(q, k) if name == "disentangled" else mod, **options)
    assert_close(out, exact, (q, k, v, *learned), device)


def assert_close(out, exact, inputs, device):
    close = dict(rtol=0, atol=5e-5 if device == "cpu" else 1e-2)
    torch.testing.assert_close(out.double(), exact, **close)
    d_out = values(*out.shape, seed=9).to(device)
    found, wanted = torch.autograd.grad(out, inputs, d_out), torch.autograd.grad(exact, inputs, d_out.double())
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, **close)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dense", [False, True])
def test_differential_attention(dense, device):
    """Grouped heads, values twice as wide, a lambda made of four vectors; by kernels, and by a dense function in their place."""
    q, k, v = values(B, 8, S, D), values(B, 4, S, D, seed=1), values(B, 2, S, 2 * D, seed=2)
    vectors = values(4, 8, seed=3) * 0.3
    inputs = [t.to(device).requires_grad_() for t in (q, k, v, *vectors)]

    def weights(q, k):
        scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(D)
        return scores.masked_fill(~PAST.to(device), -math.inf).softmax(-1)

    q, k, v, *vectors = (t.double() for t in inputs)
    lam = torch.exp(vectors[0] @ vectors[1]) - torch.exp(vectors[2] @ vectors[3]) + 0.8 - 0.6 * math.exp(-0.6)
    exact = (weights(q[:, :4], k[:, :2]) - lam * weights(q[:, 4:], k[:, 2:])) @ v.repeat_interleave(2, 1)

    q, k, v, *vectors = inputs
    lam = differential_lambda(*vectors, layer=2)
    if dense:
        out = differential(lambda *qkv, mask_mod: dense_attention(*qkv, mask_mod=mask_mod)[0], q, k, v, lam, mask_mod=causal).float()
    else:
        out = differential(flex_attention, q, k, v, lam, mask_mod=causal, enable_gqa=True)
    assert_close(out, exact, inputs, device)
