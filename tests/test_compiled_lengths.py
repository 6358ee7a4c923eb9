"""Functions that torch.compile has compiled for one length, called with others: one further graph at most, and what eager mode computes.

A length that some line makes a number of is part of a graph: then every further one compiles anew, until torch gives up at the eighth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flexpress import (
    AuxRequest,
    apply_rope,
    cached_attention,
    create_block_mask,
    flash_attn,
    flex_attention,
    merge_attention,
    mods,
    rope_table,
    scaled_dot_product_attention,
    split_attention,
    varlen_attention,
)

dynamo, testing = pytest.importorskip("torch._dynamo"), pytest.importorskip("torch._dynamo.testing")
SLOPES, ROPE = torch.tensor([0.5, 0.25, 0.125, 1.0]), rope_table(100, 8, device="cpu")


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense(n: int, keys: int | None = None, batch: int = 2) -> tuple:
    keys = n if keys is None else keys
    return rand(batch, 4, n, 8), rand(batch, 2, keys, 8), rand(batch, 2, keys, 8)


def packed(n: int) -> tuple:
    return rand(n, 4, 8), rand(n, 4, 8), rand(n, 4, 8), int32(0, 9, n)


def cache(n: int, queries: int = 3) -> tuple:
    return rand(2, 4, queries, 8), rand(2, n, 2, 8), rand(2, n, 2, 8), int32(30, 17)


def in_blocks(q, k, v):
    mask = create_block_mask(mods.sliding_window(7), None, None, q.shape[2], k.shape[2], device="cpu")
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def statistics(q, k, v):
    wanted = AuxRequest(lse=True, entropy=True, column_sums=True)
    out, aux = flex_attention(q, k, v, mask_mod=mods.causal, enable_gqa=True, return_aux=wanted)
    return out, aux.lse, aux.entropy, aux.column_sums


# what is compiled, and its arguments at a length
CASES: dict[str, tuple[Callable, Callable[[int], tuple]]] = {
    "attention": (lambda q, k, v: flex_attention(q, k, v, mods.alibi(SLOPES), enable_gqa=True, mask_mod=mods.causal), dense),
    "queries": (lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, mask_mod=mods.causal), lambda n: dense(n, 40)),
    "batches": (lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, mask_mod=mods.causal), lambda n: dense(20, 20, n - 15)),
    "a block mask": (in_blocks, dense),
    "statistics": (statistics, dense),
    "sinks": (lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, sinks=SLOPES), dense),
    "dropout": (
        lambda q, k, v, seed: flex_attention(q, k, v, enable_gqa=True, dropout_p=0.3, dropout_seed=seed),
        lambda n: (*dense(n), torch.tensor([n])),
    ),
    "sdpa": (lambda q, k, v, bias: scaled_dot_product_attention(q, k, v, bias, enable_gqa=True), lambda n: (*dense(n), rand(2, 1, n, n))),
    "packed": (lambda q, k, v, cu: varlen_attention(q, k, v, cu, score_mod=mods.alibi(SLOPES)), packed),
    "packed, masked": (lambda q, k, v, cu: varlen_attention(q, k, v, cu, mask_mod=mods.causal, sinks=SLOPES), packed),
    "packed, other keys": (
        lambda q, k, v, cu, cu_k: varlen_attention(q, k, v, cu, cu_k, mask_mod=mods.causal),
        lambda n: (rand(n, 4, 8), rand(n + 5, 4, 8), rand(n + 5, 4, 8), int32(0, 9, n), int32(0, 4, n + 5)),
    ),
    "number of packed sequences": (
        lambda q, k, v, cu: varlen_attention(q, k, v, cu, mask_mod=mods.causal),
        lambda n: (*packed(40)[:3], int32(0, *range(1, n - 17), 40)),
    ),
    "flash_attn": (
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, 0), softcap=3.0),
        lambda n: (rand(2, n, 4, 8), rand(2, n, 2, 8), rand(2, n, 2, 8)),
    ),
    "flash_attn, packed": (
        lambda q, k, v, cu, longest: flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True),
        lambda n: (*packed(n), n - 9),
    ),
    "flash_attn, pages": (
        lambda q, k, v, cu, cu_k, longest, table: flash_attn.flash_attn_varlen_func(
            q, k, v, cu, cu_k, longest, 30, causal=True, block_table=table
        ),
        lambda n: (
            rand(n, 4, 8),
            rand(20, 4, 2, 8),
            rand(20, 4, 2, 8),
            int32(0, 9, n),
            int32(0, 30, 60),
            n - 9,
            int32(*range(20)).view(2, 10),
        ),
    ),
    "flash_attn, left padding": (
        lambda q, k, v, lengths, pad: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=pad, causal=True),
        lambda n: (rand(2, 3, 4, 8), rand(2, n + 20, 2, 8), rand(2, n + 20, 2, 8), int32(30, 17), int32(3, 0)),
    ),
    "a cache": (lambda q, k, v, lengths: cached_attention(q, k, v, lengths, mask_mod=mods.sliding_window(9)), lambda n: cache(n + 20)),
    "queries of a cache": (lambda q, k, v, lengths: cached_attention(q, k, v, lengths), lambda n: cache(60, n - 15)),
    "ragged queries of a cache": (
        lambda q, k, v, lengths, cu, longest, table: cached_attention(
            q, k, v, lengths, page_table=table, cu_seqlens_q=cu, max_q_len=longest
        ),
        lambda n: (
            rand(n, 4, 8),
            rand(20, 4, 2, 8),
            rand(20, 4, 2, 8),
            int32(38, 38),
            int32(0, 3, n),
            n - 3,
            int32(*range(20)).view(2, 10),
        ),
    ),
    "splits": (lambda q, k, v, lengths: merge_attention(*split_attention(q, k, v, lengths, 3)), lambda n: cache(n + 20)),
    "a table for rope": (
        lambda x, positions: apply_rope(x, rope_table(x.shape[2] + 5, 8, device="cpu"), positions),
        lambda n: (rand(2, 4, n, 8), int32(3, 4)),
    ),
    "rope": (lambda x, positions: apply_rope(x, ROPE, positions), lambda n: (rand(2, 4, n, 8), int32(3, 4))),
}


@pytest.mark.parametrize("name", CASES)
def test_any_further_length(name):
    run, arguments = CASES[name]
    dynamo.reset()
    graphs = testing.CompileCounter()
    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    for n in (24, 25, 29, 30):
        given = arguments(n)
        for got, want in zip(compiled(*given), run(*given), strict=True):
            torch.testing.assert_close(got, want)
    assert graphs.frame_count <= 2
    dynamo.reset()


class Masked(torch.nn.Module):
    def forward(self, q, mask):
        return scaled_dot_product_attention(q, q, q, mask)


class Causal(torch.nn.Module):
    def forward(self, q, k):
        return flash_attn.flash_attn_func(q, k, k, causal=True)


class Statistics(torch.nn.Module):
    def __init__(self, **wanted: bool) -> None:
        super().__init__()
        self.wanted = AuxRequest(**wanted)

    def forward(self, q):
        return flex_attention(q, q, q, return_aux=self.wanted)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("boolean", [True, False])
def test_exported_with_a_mask_whose_extents_become_1(boolean, strict):
    """They broadcast then, as where the program was made some others did."""
    batch, length = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "length"))
    extents = {0: batch, 2: length}, {0: batch, 2: length, 3: length}

    def given(b, n):
        bias = rand(b, 1, n, n)
        return rand(b, 4, n, 8), bias > -1 if boolean else bias

    program = torch.export.export(Masked(), given(2, 20), dynamic_shapes=extents, strict=strict).module()
    for b, n in ((1, 9), (2, 1), (1, 1), (3, 30)):
        inputs = given(b, n)
        torch.testing.assert_close(program(*inputs), Masked()(*inputs))


@pytest.mark.parametrize("strict", [True, False])
def test_exported_for_other_keys_than_queries_and_as_many(strict):
    extents = ({1: torch.export.Dim("queries", min=2, max=64)}, {1: torch.export.Dim("keys", min=2, max=64)})
    program = torch.export.export(Causal(), (rand(2, 20, 4, 8), rand(2, 30, 4, 8)), dynamic_shapes=extents, strict=strict).module()
    for queries, keys in ((9, 9), (5, 30), (30, 5)):
        inputs = rand(2, queries, 4, 8), rand(2, keys, 4, 8)
        torch.testing.assert_close(program(*inputs), Causal()(*inputs))


@pytest.mark.parametrize("wanted", ["lse", "entropy"])
def test_exported_statistics_are_saved(wanted, tmp_path):
    program = torch.export.export(Statistics(**{wanted: True}), (rand(1, 2, 8, 16),))
    torch.export.save(program, tmp_path / "program.pt2")
    q = rand(1, 2, 8, 16)
    _, aux = torch.export.load(tmp_path / "program.pt2").module()(q)
    torch.testing.assert_close(getattr(aux, wanted), getattr(Statistics(**{wanted: True})(q)[1], wanted))
