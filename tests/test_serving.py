"""The serving interface: custom ops, descriptors, and steps of mixed batches against dense attention without a cache."""

from __future__ import annotations

import pytest
import torch
from dense import dense_attention, relative_error
from test_kv_cache import turned

from flexpress import PageAllocator, mods, rope_table, serving_ops
from flexpress.sequences import AttentionInfo, CacheConfig, PositionalEmbeddingConfig, SequenceInfo
from flexpress.serving import AttentionDescriptor, AttentionRegistry

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, KV_HEADS, D = 4, 2, 16


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def samples(device):
    """Every op with arguments."""
    def new(*shape):
        return torch.randn(*shape, device=device)

    rope = rope_table(32, D, device=device)
    qkv = [new(1, 5, HEADS * D), new(1, 5, KV_HEADS * D), new(1, 5, KV_HEADS * 8)]
    single = [t[0, :2, None] for t in qkv]
    caches = new(4, 8, KV_HEADS, D), new(4, 8, KV_HEADS, 8)
    entries = new(3, 32, KV_HEADS, D), new(3, 32, KV_HEADS, 8)
    sequences = SequenceInfo(max_seq_len=32, max_batch_size=2, page_size=8, num_pages=4, device=device)
    sequences.nest_sequences([[1, 2, 3], [4, 5]], input_pos=[0, 4], page_assignments=[[2], [0]])
    cu, kv, table = serving_ops.prepare_metadata(*sequences.args)
    return {
        "scaled_dot_product_attention": (
            new(1, HEADS, 3, D), new(1, KV_HEADS, 9, D), new(1, KV_HEADS, 9, 8), new(3, 9), 0.0, False, None, True),
        "prepare_metadata": sequences.args, "prepare_flattened_metadata": sequences.args,
        "mha_with_cache": (*(t.expand(3, -1, -1).contiguous() for t in qkv), int32([0, 3, 20], device), *entries, rope),
        "flattened_mha_with_cache": (*qkv, cu, kv, int32([2, 0], device), *entries, None, False, 0.3, 2, 5.0),
        "mha_with_paged_cache": (*qkv, cu, kv, table, *caches, rope, True),
        "mha_with_paged_cache, one token each": (*single, int32([0, 1, 2], device), int32([3, 0], device), table, *caches, rope),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", samples("cpu"))
def test_ops_are_well_made(name, device):
    torch.library.opcheck(getattr(torch.ops.flexpress, name.partition(",")[0]).default, samples(device)[name])


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_dot_product_attention(device):
    q, k, v = (torch.randn(2, h, n, 16, device=device) for h, n in ((4, 9), (2, 13), (2, 13)))
    hidden = torch.rand(2, 1, 9, 13, device=device) < 0.5
    op = torch.ops.flexpress.scaled_dot_product_attention
    for arguments, score_mod, mask_mod in (
            ({"is_causal": True}, None, mods.causal), ({"scale": 0.1}, None, None),
            ({"attn_mask": ~hidden}, None, lambda b, h, m, n: ~hidden[b.long(), 0, m.long(), n.long()]),
            ({"attn_mask": hidden[0, 0] * 2.0}, lambda s, b, h, m, n: s + hidden[0, 0][m.long(), n.long()] * 2.0, None)):
        expected = dense_attention(q, k, v, score_mod, mask_mod, arguments.get("scale"))[0]
        assert relative_error(op(q, k, v, enable_gqa=True, **arguments), expected) < 1e-6
    with pytest.raises(ValueError, match="dropout_p is 0.5"):
        op(q, k, v, None, 0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["flexpress_flattened", "flexpress_paged"])
def test_steps_of_mixed_batches(name, interleaved, device):
    """Sequences come, grow in steps of any size and go; every token's output is that of its sequence alone, without a cache."""
    torch.manual_seed(0)
    attention = AttentionRegistry.get(name)
    page_size = 4 if attention.is_paged else 0
    rope = PositionalEmbeddingConfig("rope", rope_dim=D // 2, rope_interleaved=interleaved)
    info = AttentionInfo(HEADS, KV_HEADS, D, torch.float32, pos_embd_config=rope)
    sequences = SequenceInfo(max_seq_len=24, max_batch_size=3, page_size=page_size, device=device)
    caches = [make(sequences) for make in attention.cache_initializers(info).values()]
    buffers = [make(sequences) for make in attention.buffer_initializers(info).values()]
    pages = PageAllocator(sequences.num_pages, sequences.page_size)
    tokens = {name: [torch.randn(24, h * D, device=device) for h in (HEADS, KV_HEADS, KV_HEADS)] for name in "abcd"}
    done, handles = dict.fromkeys("abcd", 0), {}
    steps = ({"a": 5}, {"a": 1, "b": 7, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 0, "c": 3}, {"d": 9, "b": 1}, {"d": 1, "b": 1},
             {"d": 1, "b": 0})
    for step in steps:
        for gone in set(handles) - set(step):
            pages.free(handles.pop(gone))
        for s, n in step.items():
            if s in handles:
                pages.extend(handles[s], n)
            else:
                handles[s] = pages.allocate(n)
        assigned = [pages.pages(handles[s]) for s in step]
        sequences.nest_sequences([[0] * n for n in step.values()], [done[s] for s in step], assigned)
        q, k, v = (torch.cat([tokens[s][i][done[s]:done[s] + n] for s, n in step.items()])[None] for i in range(3))
        if sequences.is_generate:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = attention.attention_op(q, k, v, *attention.metadata_op(*sequences.args), *caches, *buffers, *attention.constants(info))
        assert out.shape == q.shape
        for s, found in zip(step, sequences.unnest_sequences(out), strict=True):
            first, done[s] = done[s], done[s] + step[s]
            if not step[s]:
                continue
            whole = [t[:done[s]].unflatten(-1, (-1, D)).transpose(0, 1)[None] for t in tokens[s]]
            positions = torch.arange(done[s], device=device)
            whole = [turned(t, positions, buffers[0], interleaved) if i < 2 else t for i, t in enumerate(whole)]
            expected = dense_attention(*whole, None, mods.causal)[0][0, :, first:].transpose(0, 1).flatten(1)
            assert relative_error(found, expected) < 2e-6


def test_descriptors_make_what_the_ops_take():
    sequences = SequenceInfo(max_seq_len=100, max_batch_size=2, page_size=16)
    info = AttentionInfo(HEADS, KV_HEADS, D, torch.bfloat16, CacheConfig(torch.float16))
    paged, flattened = (AttentionRegistry.get(f"flexpress_{name}") for name in ("paged", "flattened"))
    cache = paged.cache_initializers(info)["k_cache"](sequences)
    assert (cache.shape, cache.dtype) == ((14, 16, KV_HEADS, D), torch.float16)
    assert [make(sequences) for make in paged.buffer_initializers(info).values()] == [None]
    with pytest.raises(ValueError, match="one entry of the cache, but page_size 16 is less than max_seq_len 100"):
        flattened.cache_initializers(info)["k_cache"](sequences)


def test_registry():
    assert AttentionRegistry.names() == ["flexpress_flattened", "flexpress_paged"]
    assert AttentionRegistry.has("flexpress_paged") and not AttentionRegistry.has("paged")
    with pytest.raises(KeyError, match="no attention is named 'paged'; there are 'flexpress_flattened', 'flexpress_paged'"):
        AttentionRegistry.get("paged")
    with pytest.raises(ValueError, match="registered already: Paged"):
        AttentionRegistry.register("flexpress_paged")(AttentionDescriptor)
