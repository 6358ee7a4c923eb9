"""The serving interface: custom ops, descriptors, and steps of mixed batches against dense attention without a cache."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from flexpress import Llama3Scaling, PageAllocator, YarnScaling, mods, rope_table, scaled_dot_product_attention, serving_ops
from flexpress.caches import cached
from flexpress.sequences import AttentionInfo, CacheConfig, PositionalEmbeddingConfig, SequenceInfo
from flexpress.serving import AttentionDescriptor, AttentionRegistry
from support.caches import turned
from support.dense import dense_attention, relative_error
from support.devices import DEVICES

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
            new(1, HEADS, 3, D),
            new(1, KV_HEADS, 9, D),
            new(1, KV_HEADS, 9, 8),
            new(3, 9),
            0.0,
            False,
            None,
            True,
        ),
        "prepare_metadata": sequences.args,
        "prepare_flattened_metadata": sequences.args,
        "mha_with_cache": (*(t.expand(3, -1, -1).contiguous() for t in qkv), int32([0, 3, 20], device), *entries, rope),
        "flattened_mha_with_cache": (*qkv, cu, kv, int32([2, 0], device), *entries, None, False, 0.3, 2, 5.0),
        "mha_with_paged_cache": (*qkv, cu, kv, table, *caches, rope, True),
        "mha_with_paged_cache, one token each": (*single, int32([0, 1, 2], device), int32([3, 0], device), table, *caches, rope),
        "mha_with_paged_cache, float8": (
            *qkv,
            cu,
            kv,
            table,
            *(c.to(torch.float8_e4m3fn) for c in caches),
            rope,
            False,
            None,
            0,
            0.0,
            *(torch.full((KV_HEADS,), 0.5, device=device) for _ in "kv"),
        ),
        "flattened_mha_with_cache, half": (*(t.bfloat16() for t in qkv), cu, kv, int32([2, 0], device), *(c.half() for c in entries)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", samples("cpu"))
def test_ops_are_well_made(name, device):
    tests = ("test_autograd_registration", "test_faketensor") if "float8" in name else "ALL"  # torch cannot compare tensors of float8
    torch.library.opcheck(getattr(torch.ops.flexpress, name.partition(",")[0]).default, samples(device)[name], test_utils=tests)


def metadata(device):
    """Arguments of the metadata operators in dtypes and layouts that SequenceInfo makes, and others."""
    sequences = SequenceInfo(max_seq_len=32, max_batch_size=3, page_size=8, device=device)
    sequences.nest_sequences([[1, 2, 3], [], [5]], input_pos=[0, 4, 7], page_assignments=[[2], [0], [5, 6]])
    args = sequences.args
    sparse = [t.repeat_interleave(2, -1)[..., ::2] for t in args]
    return {
        "int32": args,
        "int64": [t.long() for t in args],
        "strided": sparse,
        "turned table": [*args[:6], args[6].t().contiguous().t()],
        "one": [t[:1] for t in args],
        "expanded": [*args[:2], args[2][:1].expand(3), *args[3:]],
        "int64 lengths": [*args[:1], args[1].long(), *args[2:]],
    }


def layers(device):
    """Arguments of the attention operators: dtypes, caches of other dtypes, strides, no tokens, no batch."""
    found = {}
    for name, args in samples(device).items():
        found[name] = args
        if "mha" in name:
            found[f"{name}; strided"] = (*(t.repeat_interleave(2, -1)[..., ::2] for t in args[:3]), *args[3:])
            found[f"{name}; turned"] = (*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in args[:3]), *args[3:])
            if not isinstance(args[-1], torch.Tensor) or args[-1].ndim != 1:
                kept = torch.float8_e4m3fn
                found[f"{name}; float8"] = tuple(t.to(kept) if isinstance(t, torch.Tensor) and t.ndim == 4 else t for t in args)
    q, k, v = samples(device)["scaled_dot_product_attention"][:3]
    sdpa = found["scaled_dot_product_attention"]
    found["scaled_dot_product_attention; (B, S, H, D)"] = (q.transpose(1, 2).contiguous().transpose(1, 2), *sdpa[1:])
    found["scaled_dot_product_attention; expanded"] = (q[:, :1].expand(-1, HEADS, -1, -1), *sdpa[1:])
    found["scaled_dot_product_attention; half"] = (*(t.half() for t in sdpa[:3]), None, 0.0, True, 0.3, True)
    found["scaled_dot_product_attention; no queries"] = (q[:, :, :0], k, v, None, 0.0, False, None, True)
    found["scaled_dot_product_attention; no batch"] = (q[:0], k[:0], v[:0], None, 0.0, False, None, True)
    names = "prepare_metadata", "prepare_flattened_metadata"
    return found | {f"{name}; {kind}": args for name in names for kind, args in metadata(device).items()}


@pytest.mark.parametrize("device", DEVICES)
def test_fakes_are_what_operators_return(device):
    """dtype, shape, strides and device, of every operator over many arguments, under autocast too."""

    def described(tensors):
        tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        return [(t.dtype, tuple(t.shape), t.stride(), t.device.type) for t in tensors]

    for name, args in layers(device).items():
        op = getattr(torch.ops.flexpress, name.partition(";")[0].partition(",")[0])
        for autocast in (False, True):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                with FakeTensorMode() as mode:
                    fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
                if autocast and "mha" in name:
                    continue  # the kernels are those of the call without
                assert described(op(*args)) == described(fake), f"{name}{', autocast' * autocast}"


@pytest.mark.parametrize("name", ["mha_with_paged_cache", "mha_with_cache", "flattened_mha_with_cache", "prepare_metadata"])
def test_no_value_comes_of_a_tensor_without_values(name):
    """torch asks the fake implementation as soon as one tensor is on "meta", and it makes memory that nobody writes."""
    args, op = layers("cpu")[name], getattr(torch.ops.flexpress, name)
    for i, argument in enumerate(args):
        if isinstance(argument, torch.Tensor):
            with pytest.raises(ValueError, match="is on meta, where no values are, but"):
                op(*args[:i], argument.to("meta"), *args[i + 1 :])


@pytest.mark.parametrize("device", DEVICES)
def test_operators_compute_in_the_dtype_they_are_given(device):
    """Under autocast, too: their fakes say so."""
    args = samples(device)["mha_with_paged_cache"]
    op = torch.ops.flexpress.mha_with_paged_cache
    with torch.autocast(device, torch.bfloat16):
        out = op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    assert out.dtype == torch.float32 and torch.equal(out, op(*args))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_counts_the_token_itself(window):
    """1 sees only itself: the output is its value."""
    _, _, v, *_ = args = [t.clone() for t in samples("cpu")["mha_with_cache"]]
    out = torch.ops.flexpress.mha_with_cache(*args, sliding_window=window)
    head = out[0, :, :8]  # of the first query head, positions 0 to 4
    values = v[0, :, :8]
    if window == 1:
        assert torch.allclose(head, values, atol=1e-6)
    assert torch.allclose(head[0], values[0], atol=1e-6)
    bounds = [values[max(0, i + 1 - window) : i + 1] for i in range(5)]
    assert all((b.amin(0) - 1e-5 <= o).all() and (o <= b.amax(0) + 1e-5).all() for b, o in zip(bounds, head, strict=True))


def test_importing_flexpress_registers_the_operators():
    """All of them, without importing the modules in which they are written."""
    names = [
        "mha_with_cache",
        "flattened_mha_with_cache",
        "mha_with_paged_cache",
        "prepare_metadata",
        "scaled_dot_product_attention",
        "update_cache",
    ]
    code = f"import torch, flexpress; assert all(hasattr(torch.ops.flexpress, name) for name in {names})"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in samples("cpu") if "mha" in name])
def test_heads_may_lie_apart(name, device):
    """q, k and v with 3 or 4 dimensions, in any mixture: the same results, in the form of q."""
    op = getattr(torch.ops.flexpress, name.partition(",")[0])
    expected, written, args = None, None, samples(device)[name]
    for apart in range(8):
        q, k, v, *rest = (t.clone() if isinstance(t, torch.Tensor) else t for t in args)
        caches = [t for t in rest if isinstance(t, torch.Tensor) and t.ndim == 4]
        widths = [caches[0].shape[-1], caches[0].shape[-1], caches[1].shape[-1]]
        q, k, v = (t.unflatten(2, (-1, d)) if apart >> i & 1 else t for i, (t, d) in enumerate(zip((q, k, v), widths, strict=True)))
        out = op(q, k, v, *rest)
        assert out.ndim == q.ndim and out.is_contiguous()
        expected, written = (out, caches) if expected is None else (expected, written)
        assert torch.equal(out.flatten(2), expected)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(caches, written, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_fewer_sequences_than_the_cache_has_entries(device):
    """Sequence i has entry i; entries behind them are neither read nor written."""
    args = samples("cpu")["mha_with_cache"]
    q, k, v, input_pos, *caches, rope = (t.to(device) for t in args)
    more = [torch.cat([cache, torch.full_like(cache, float("nan"))]) for cache in caches]
    out = torch.ops.flexpress.mha_with_cache(q, k, v, input_pos, *more, rope)
    assert torch.equal(out, torch.ops.flexpress.mha_with_cache(q, k, v, input_pos, *caches, rope))
    assert all(torch.equal(a[:3], b) and a[3:].isnan().all() for a, b in zip(more, caches, strict=True))


@pytest.mark.parametrize("name", [name for name in samples("cpu") if "mha" in name])
def test_outputs_are_not_copied(name, monkeypatch):
    """What attention wrote is what the operator returns."""
    written = []
    attend = cached._attend_all
    monkeypatch.setattr(cached, "_attend_all", lambda *args: written.append(attend(*args)) or written[-1])
    out = getattr(torch.ops.flexpress, name.partition(",")[0])(*samples("cpu")[name])
    assert out.data_ptr() == written[0][0].data_ptr() and out.numel() == written[0][0].numel()


@pytest.mark.parametrize("pages", [3, 5, 6])
def test_the_largest_batch_runs(pages):
    info = SequenceInfo(max_seq_len=8, max_batch_size=3, page_size=4, max_num_tokens=24, num_pages=pages)
    info.set_largest_batch()
    q, k, v = (torch.randn(1, info.num_tokens, heads * D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = [torch.zeros(pages, 4, KV_HEADS, D) for _ in range(2)]
    torch.ops.flexpress.mha_with_paged_cache(q, k, v, *torch.ops.flexpress.prepare_metadata(*info.args), *caches)
    assert info.num_tokens == 4 * pages and all(cache.all() for cache in caches), "and fills the cache"


BAD_OPERATORS = {  # operator, which arguments are others, and the words
    "q": ("mha_with_paged_cache", {0: lambda t: t[..., :60]}, r"q \(1, 5, 60\) must have heads \* 16"),
    "k": ("mha_with_paged_cache", {1: lambda t: t[..., :16]}, r"k \(1, 5, 16\) must have 2 \* 16"),
    "v": ("flattened_mha_with_cache", {2: lambda t: t.repeat(1, 1, 2)}, r"v \(1, 5, 32\) must have 2 \* 8"),
    "tokens": ("mha_with_cache", {1: lambda t: t[:, :4]}, "equal batch, tokens and dtype"),
    "dtypes": ("mha_with_cache", {2: torch.Tensor.half}, "equal batch, tokens and dtype"),
    "a flat cache": ("mha_with_cache", {4: torch.Tensor.flatten}, "k_cache must be"),
    "a position before the first": ("mha_with_cache", {3: lambda t: t - 1}, "input_pos has -1; each must be 0 or more"),
    "input_pos": ("mha_with_cache", {3: lambda t: t[:2]}, "input_pos must be int32 .b,., a number for each sequence"),
    "more sequences than entries": (
        "mha_with_cache",
        {4: lambda t: t[:2], 5: lambda t: t[:2]},
        r"has 3 sequences, but k_cache .2, 32, 2, 16. only 2",
    ),
    "heads apart": (
        "mha_with_cache",
        {1: lambda t: t.unflatten(2, (4, 8))},
        r"k \(3, 5, 4, 8\) must have 2 \* 16 as its last extent, or its last two",
    ),
    "dimensions": ("mha_with_cache", {0: lambda t: t[0]}, "or .batch, tokens, heads, head dim. with equal batch"),
    "cu_seqlens": ("mha_with_paged_cache", {3: lambda t: t[:2]}, "must be one longer than kv_len"),
    "a window": ("mha_with_paged_cache", {11: -1}, "window"),
    "a cap": ("mha_with_paged_cache", {12: -1.0}, "cap"),
    "query heads": ("mha_with_paged_cache", {0: lambda t: t[..., :48]}, "has 3 heads, no multiple of the 2 heads of k_cache"),
    "query heads of entries": ("mha_with_cache", {0: lambda t: t[..., :48]}, "has 3 heads, no multiple of the 2 heads of k_cache"),
    "query heads, ragged": ("flattened_mha_with_cache", {0: lambda t: t[..., :48]}, "has 3 heads, no multiple of the 2 heads of k_cache"),
    "no scale": ("mha_with_paged_cache", {10: float("nan")}, "scale must be finite in float32, got nan"),
    "a huge scale": ("mha_with_paged_cache", {10: float("inf")}, "scale must be finite in float32, got inf"),
    "a position past int32": ("mha_with_cache", {3: lambda t: t.long() + 2**32}, "positions go from 0 to 31"),
    "a position past int64": ("mha_with_cache", {3: lambda t: t.long() * 0 + (2**63 - 9)}, "positions go from 0 to 31"),
    "a position far before 0": ("mha_with_cache", {3: lambda t: t.long() - 2**32}, "input_pos has -"),
    "a small scale": ("mha_with_paged_cache, float8", {13: lambda t: t * 0}, "k_scale has 0.0"),
    "a mask": ("scaled_dot_product_attention", {3: lambda t: t[:2]}, "attn_mask .2, 9. does not broadcast"),
    "lengths": ("prepare_metadata", {2: lambda t: t[:1]}, r"input_pos \(1,\) is not for the 2 sequences"),
    "a table without pages": ("prepare_metadata", {6: lambda t: t[:, :0]}, "has no pages"),
}


def test_rows_of_one_token_are_sequences():
    """cu_seqlens must say so; of a sequence that is not there it may say anything."""
    name = "mha_with_paged_cache, one token each"
    for starts in ([0, 2, 1], [0, 0, 2], [0, 1, 3], [7, 7, 7]):
        args = [a.clone() for a in samples("cpu")[name]]
        args[3], args[4] = int32(starts, "cpu"), int32([3, 2], "cpu")
        before = [a.clone() for a in args]
        with pytest.raises(ValueError, match="q has a token for each sequence, but by cu_seqlens .* sequence [01] has"):
            torch.ops.flexpress.mha_with_paged_cache(*args)
        assert all(map(torch.equal, args, before))
    args = samples("cpu")[name]
    expected = torch.ops.flexpress.mha_with_paged_cache(*(a.clone() for a in args))
    args[3].copy_(int32([0, 1, 1], "cpu"))
    assert torch.equal(torch.ops.flexpress.mha_with_paged_cache(*args), expected)


@pytest.mark.parametrize("name", BAD_OPERATORS)
def test_operators_say_what_is_wrong_before_they_write(name):
    op, changes, words = BAD_OPERATORS[name]
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in samples("cpu")[op]]
    args += [False, None, 0, 0.0][len(args) - 13 :] if op == "mha_with_paged_cache" else []
    for i, change in changes.items():
        args[i] = change(args[i]) if callable(change) else change
    before = [a.clone() for a in args if isinstance(a, torch.Tensor)]
    with pytest.raises(ValueError, match=words):
        getattr(torch.ops.flexpress, op.partition(",")[0])(*args)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip((a for a in args if isinstance(a, torch.Tensor)), before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_past_int32_name_no_place(device):
    """Wrapped around they would be position 0, page 0 and entry 0."""
    op, far = torch.ops.flexpress, 2**31 - 1
    ones, huge, zeros = (torch.tensor([n, n], device=device) for n in (1, 2**32, 0))
    table = torch.tensor([[2**32, 1], [0, -(2**32)]], device=device)
    cu_seqlens, kv_len, pages = op.prepare_metadata(zeros, ones, huge, zeros, ones, zeros, table)
    assert cu_seqlens.tolist() == [0, 1, 2] and kv_len.tolist() == [far, far] and pages.tolist() == [[far, 1], [0, -far - 1]]
    assert op.prepare_flattened_metadata(zeros, ones, huge, zeros, ones, zeros, table)[2].tolist() == [far, 0]
    if device == "cuda":  # where nothing is checked, and nothing is written
        q, k, v, _, *caches, rope = (t.to(device) for t in samples("cpu")["mha_with_cache"])
        before = [cache.clone() for cache in caches]
        op.mha_with_cache(q, k, v, huge.new_tensor([2**32, 2**33 + 1, -(2**32)]), *caches, rope)
        assert all(map(torch.equal, caches, before))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
def test_rows_are_sequences_where_each_has_one_token(paged, device):
    """Also where the metadata is that of a larger batch, as a CUDA graph has it, and one of them has nothing."""

    def step(largest):
        seq_len = torch.zeros(largest, dtype=torch.int32, device=device)
        seq_len[[0, 2, 3]] = 1
        none, ids = torch.zeros_like(seq_len), torch.zeros(4, 1, dtype=torch.int32, device=device)
        table = torch.arange(largest, dtype=torch.int32, device=device)[:, None]
        op = torch.ops.flexpress
        prepare = op.prepare_metadata if paged else op.prepare_flattened_metadata
        numbers = prepare(ids, seq_len, none, none, none, none, table)
        caches = torch.zeros(2, largest, 8, 2, 16, device=device)
        k = torch.arange(1.0, 5.0, device=device).view(4, 1, 1).expand(4, 1, 32).contiguous()
        attend = op.mha_with_paged_cache if paged else op.flattened_mha_with_cache
        out = attend(torch.ones(4, 1, 64, device=device), k, k.clone(), *numbers, *caches.unbind())
        return out[:, 0, 0].round(decimals=4).tolist(), caches[0, :4, 0, 0, 0].tolist()

    assert step(4) == step(6) == ([1.0, 0.0, 3.0, 4.0],) * 2


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_dot_product_attention(device):
    q, k, v = (torch.randn(2, h, n, 16, device=device) for h, n in ((4, 9), (2, 13), (2, 13)))
    hidden = torch.rand(2, 1, 9, 13, device=device) < 0.5
    op = torch.ops.flexpress.scaled_dot_product_attention
    for arguments, score_mod, mask_mod in (
        ({"is_causal": True}, None, mods.causal),
        ({"scale": 0.1}, None, None),
        ({"attn_mask": ~hidden}, None, lambda b, h, m, n: ~hidden[b.long(), 0, m.long(), n.long()]),
        ({"attn_mask": hidden[0, 0] * 2.0}, lambda s, b, h, m, n: s + hidden[0, 0][m.long(), n.long()] * 2.0, None),
    ):
        expected = dense_attention(q, k, v, score_mod, mask_mod, arguments.get("scale"))[0]
        assert relative_error(op(q, k, v, enable_gqa=True, **arguments), expected) < 1e-6
    torch.manual_seed(3)
    dropped = op(q, k, v, dropout_p=0.5, enable_gqa=True)
    torch.manual_seed(3)
    assert torch.equal(dropped, scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True))
    assert not torch.equal(dropped, op(q, k, v, dropout_p=0.5, enable_gqa=True)), "the generator goes on"
    assert torch.Tag.nondeterministic_seeded in op.default.tags, "a compiler must not take two calls for one"
    with pytest.raises(ValueError, match="dropout_p must be a number from 0 to 1, got 1.5"):
        op(q, k, v, None, 1.5, enable_gqa=True)


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
    steps = (
        {"a": 5},
        {"a": 1, "b": 7, "c": 1},
        {"a": 1, "b": 1, "c": 1},
        {"a": 2, "b": 0, "c": 3},
        {"d": 9, "b": 1},
        {"d": 1, "b": 1},
        {"d": 1, "b": 0},
    )
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
        q, k, v = (torch.cat([tokens[s][i][done[s] : done[s] + n] for s, n in step.items()])[None] for i in range(3))
        if sequences.is_generate:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        out = attention.attention_op(q, k, v, *attention.metadata_op(*sequences.args), *caches, *buffers, *attention.constants(info))
        assert out.shape == q.shape
        for s, found in zip(step, sequences.unnest_sequences(out), strict=True):
            first, done[s] = done[s], done[s] + step[s]
            if not step[s]:
                continue
            whole = [t[: done[s]].unflatten(-1, (-1, D)).transpose(0, 1)[None] for t in tokens[s]]
            positions = torch.arange(done[s], device=device)
            whole = [turned(t, positions, buffers[0], interleaved) if i < 2 else t for i, t in enumerate(whole)]
            expected = dense_attention(*whole, None, mods.causal)[0][0, :, first:].transpose(0, 1).flatten(1)
            assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_layer_is_what_its_info_says(device, data):
    """Head dim of values, scale, window, cap, scales of float8 and of rotary embedding: a prompt, then a step, against float64."""
    D_V, window, softcap, scale = (data.draw(st.sampled_from(x)) for x in ([0, 8, 24], [0, 1, 3], [0.0, 2.0], [None, 0.7]))
    scaling = data.draw(st.sampled_from([None, Llama3Scaling(8.0, 16), YarnScaling(4.0, 8)]))
    rope = PositionalEmbeddingConfig(
        data.draw(st.sampled_from([None, "rope"])), rope_dim=8, rope_scaling=scaling, rope_tail=data.draw(st.booleans())
    )
    k_scale = data.draw(st.sampled_from([None, 0.25, (0.5, 2.0)]))
    cache = CacheConfig() if k_scale is None else CacheConfig(torch.float8_e4m3fn, k_scale, 0.125)
    info = AttentionInfo(
        HEADS, KV_HEADS, D, torch.float32, cache, rope, v_head_dim=D_V, scale=scale, sliding_window=window, softcap=softcap
    )
    attention = AttentionRegistry.get(data.draw(st.sampled_from(["flexpress_paged", "flexpress_flattened"])))
    sequences = SequenceInfo(max_seq_len=24, max_batch_size=2, page_size=4 if attention.is_paged else 0, device=device)
    caches = [make(sequences) for make in attention.cache_initializers(info).values()]
    (table,) = (make(sequences) for make in attention.buffer_initializers(info).values())
    options = {name: x(sequences) if callable(x) else x for name, x in attention.options(info).items()}
    scales = [options[name] for name in options if "scale" in name]
    assert list(options) == ["rope_tail"] * rope.rope_tail + ["k_scale", "v_scale"] * (k_scale is not None)
    q, k, v = (torch.randn(8, h * d, device=device) for h, d in ((HEADS, D), (KV_HEADS, D), (KV_HEADS, info.value_dim)))
    found = []
    for first, end in ((0, 5), (5, 8)):
        pages = [*range(sequences.max_pages_per_seq)]
        sequences.nest_sequences([[0] * (end - first)], [first], [pages])
        metadata = attention.metadata_op(*sequences.args)
        new = (t[first:end][None] for t in (q, k, v))
        found.append(attention.attention_op(*new, *metadata, *caches, table, *attention.constants(info), **options)[0])
    queries, keys, values = (t.unflatten(1, (h, -1)).transpose(0, 1)[None] for t, h in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS)))
    if table is not None:
        queries, keys = (turned(t, torch.arange(8, device=device), table, False, rope.rope_tail) for t in (queries, keys))
    kept = [c.flatten(0, 1)[:8].transpose(0, 1)[None].double() for c in caches]
    kept = [c * s[:, None, None] for c, s in zip(kept, scales, strict=True)] if scales else kept
    for held, wanted in zip(kept, (keys, values), strict=True):
        assert relative_error(held, wanted) < (0.05 if scales else 1e-6)
    mask_mod = mods.sliding_window(window) if window else mods.causal
    expected = dense_attention(queries, *kept, mods.softcap(softcap) if softcap else None, mask_mod, scale)[0]
    assert relative_error(torch.cat(found), expected[0].transpose(0, 1).flatten(1)) < 2e-6


BAD_INFO = {
    "v_head_dim": (dict(v_head_dim=-1), ValueError, "v_head_dim is -1"),
    "a scale": (dict(scale=float("inf")), ValueError, "scale must be finite in float32, got inf"),
    "a scale in words": (dict(scale="big"), TypeError, "scale must be a number, got str"),
    "a window": (dict(sliding_window=-2), ValueError, "sliding_window is -2"),
    "a cap": (dict(softcap=-1.0), ValueError, "softcap is -1.0; it must be positive and finite"),
    "scales of heads": (
        dict(cache_config=CacheConfig(torch.float8_e4m3fn, (1.0, 2.0, 3.0), 1.0)),
        ValueError,
        "k_scale of the cache has 3 numbers; it needs one, or 2: num_kv_heads",
    ),
}


@pytest.mark.parametrize("name", BAD_INFO)
def test_an_info_says_what_is_wrong(name):
    changes, error, words = BAD_INFO[name]
    with pytest.raises(error, match=words):
        AttentionInfo(HEADS, KV_HEADS, D, torch.float32, **changes)


def test_configs_say_what_is_wrong():
    with pytest.raises(ValueError, match="k_scale and v_scale go together; pass 1.0"):
        CacheConfig(torch.float8_e4m3fn, k_scale=1.0)
    with pytest.raises(ValueError, match="v_scale is 0; it must be positive and finite"):
        CacheConfig(torch.float8_e4m3fn, 1.0, (1.0, 0))
    with pytest.raises(TypeError, match="for caches of float8_e4m3fn, got dtype torch.float16; leave them out"):
        CacheConfig(torch.float16, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"rope_scaling and a scale of positions \(2.0\) exclude each other"):
        PositionalEmbeddingConfig("rope", rope_scale=2.0, rope_scaling=YarnScaling(4.0, 64))
    with pytest.raises(TypeError, match="rope_scaling must be a Llama3Scaling, a YarnScaling or None, got 4.0"):
        PositionalEmbeddingConfig("rope", rope_scaling=4.0)


def test_descriptors_make_what_the_ops_take():
    sequences = SequenceInfo(max_seq_len=100, max_batch_size=2, page_size=16)
    info = AttentionInfo(HEADS, KV_HEADS, D, torch.bfloat16, CacheConfig(torch.float16))
    paged, flattened = (AttentionRegistry.get(f"flexpress_{name}") for name in ("paged", "flattened"))
    cache = paged.cache_initializers(info)["k_cache"](sequences)
    assert (cache.shape, cache.dtype) == ((14, 16, KV_HEADS, D), torch.float16)
    assert [make(sequences) for make in paged.buffer_initializers(info).values()] == [None]
    with pytest.raises(ValueError, match="one entry of the cache, but page_size 16 is less than max_seq_len 100"):
        flattened.cache_initializers(info)["k_cache"](sequences)


class Server(torch.nn.Module):
    """A model of one layer as a serving stack exports it: caches and tables are buffers, metadata is made once a step."""

    def __init__(self, attention, info, sequences):
        super().__init__()
        self.attention, self.info, self.names_of_scales = attention, info, []
        self.embedding = torch.nn.Embedding(20, 8)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(8, h * D) for h in (HEADS, KV_HEADS, KV_HEADS))
        made = {**attention.cache_initializers(info), **attention.buffer_initializers(info)}
        self.names = list(made)
        for name, make in made.items():
            self.register_buffer(name, make(sequences))
        self.options = dict(attention.options(info))
        for name in [name for name, option in self.options.items() if callable(option)]:
            self.register_buffer(name, self.options.pop(name)(sequences))
            self.names_of_scales.append(name)

    def forward(self, *args):
        x = self.embedding(args[0])
        metadata = self.attention.metadata_op(*args)
        return self.attention.attention_op(
            *(layer(x) for layer in self.qkv),
            *metadata,
            *(getattr(self, name) for name in self.names),
            *self.attention.constants(self.info),
            **self.options,
            **{name: getattr(self, name) for name in self.names_of_scales},
        )


@pytest.mark.parametrize(
    "name, limits, dtype",
    [
        ("paged", (16, 1, 4), None),
        ("paged", (16, 3, 4), torch.float8_e4m3fn),
        ("flattened", (16, 2, 0), torch.float16),
        ("flattened", (16, 1, 0), torch.bfloat16),
        ("paged", (5, 2, 4, 3, 4), None),
    ],
)
@torch.no_grad()
def test_servers_can_be_exported(name, limits, dtype):
    """And run steps of every size, with caches of any dtype: outputs and caches are those of the model itself."""
    torch.manual_seed(0)
    cache = CacheConfig(dtype) if dtype != torch.float8_e4m3fn else CacheConfig(dtype, 0.5, (0.25, 2.0))
    rope = PositionalEmbeddingConfig("rope", rope_dim=8, rope_tail=True)
    sequences, info = SequenceInfo(*limits), AttentionInfo(HEADS, KV_HEADS, D, torch.float32, cache, rope, sliding_window=3, softcap=5.0)
    model = Server(AttentionRegistry.get(f"flexpress_{name}"), info, sequences)
    exported = torch.export.export(copy.deepcopy(model), sequences.example_args(), dynamic_shapes=(sequences.dynamic_shapes,)).module()
    n, pages = sequences.max_batch_size, sequences.max_pages_per_seq
    for lengths, position in (([3] + [0] * (n - 1), 0), ([1] * n, 3), ([2] + [1] * (n - 1), 0), ([1], 3), ([0] * (n - 1) + [2], 2)):
        sequences.nest_sequences(
            [[3] * length for length in lengths], position, [[*range(i * pages, i * pages + pages)] for i in range(len(lengths))]
        )
        assert torch.equal(model(*sequences.args), exported(*sequences.args))
    assert torch.equal(model.k_cache.float(), exported.k_cache.float()) and model.k_cache.float().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["flattened", "paged"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_attention_takes_the_caches_its_descriptor_makes(dtype, name, device):
    """Whatever dtype the layer has."""
    attention, sequences = AttentionRegistry.get(f"flexpress_{name}"), SequenceInfo(16, 2, 4 if name == "paged" else 0, device=device)
    sequences.nest_sequences([[1, 2, 3], [4]], 0, [[0], [1]])
    for layer in (torch.float16, torch.bfloat16, torch.float32):
        info = AttentionInfo(HEADS, KV_HEADS, D, layer, CacheConfig(dtype))
        caches = [make(sequences) for make in attention.cache_initializers(info).values()]
        q, k, v = (torch.randn(1, 4, h * D, device=device, dtype=layer) for h in (HEADS, KV_HEADS, KV_HEADS))
        out = attention.attention_op(q, k, v, *attention.metadata_op(*sequences.args), *caches, None, *attention.constants(info))
        assert out.dtype == layer and caches[0].dtype == dtype
        assert torch.equal(out[0, 0, :D].float(), v[0, 0, :D].to(dtype).to(layer).float()), "the first token sees its own value"


def test_layers_share_a_table_only_if_all_digits_agree():
    names = set()
    thetas = 1000000, 1000001, 1e6 + 2**-20, 10000.0, 1e16, 1e-5, 10.5, 1.0
    configs = [(theta, scale, None) for theta in thetas for scale in (1, 5.0, 1.05, 1e-5)]
    configs += [
        (1e4, 1, Llama3Scaling(8, 8192)),
        (1e4, 1, YarnScaling(8, 8192)),
        (1e4, 1, YarnScaling(8.5, 8192)),
        (1e4, 1, YarnScaling(8, 4096)),
    ]
    configs += [(1e4, 1, YarnScaling(8, 8192, attention_factor=1.0)), (1e4, 1, YarnScaling(8, 8192, truncate=False))]
    for theta, scale, scaling in configs:
        rope = PositionalEmbeddingConfig("rope", theta, scale, rope_scaling=scaling)
        info = AttentionInfo(4, 2, 16, torch.float32, pos_embd_config=rope)
        (name,) = AttentionRegistry.get("flexpress_paged").buffer_initializers(info)
        torch.nn.Module().register_buffer(name, None)
        assert name.isidentifier()
        names.add(name)
    assert len(names) == len(configs)
    same = [AttentionInfo(4, 2, 16, torch.float32, pos_embd_config=PositionalEmbeddingConfig("rope", t)) for t in (10000, 10000.0)]
    assert (
        len(
            {
                *AttentionRegistry.get("flexpress_paged").buffer_initializers(same[0]),
                *AttentionRegistry.get("flexpress_paged").buffer_initializers(same[1]),
            }
        )
        == 1
    )


def descriptor(**changes):
    """A class with every part but what is changed; None leaves a part out."""
    parts = {
        "attention_op": print,
        "metadata_op": print,
        "num_metadata": 1,
        "is_paged": False,
        "cache_initializers": classmethod(lambda cls, info: {}),
    } | changes
    return type("Mine", (AttentionDescriptor,), {name: part for name, part in parts.items() if part is not None})


@pytest.mark.parametrize(
    "wrong, words",
    [
        *(
            (descriptor(**{part: None}), f"Mine, to be registered as 'mine', has no {part}")
            for part in ("attention_op", "metadata_op", "num_metadata", "is_paged", "cache_initializers")
        ),
        (descriptor(attention_op="sdpa"), "Mine.attention_op must be an operator, got 'sdpa'"),
        (descriptor(num_metadata=-1), "Mine.num_metadata must be an int of 0 or more, got -1"),
        (descriptor(num_metadata=True), "Mine.num_metadata must be an int"),
        (descriptor(is_paged=lambda: True), "Mine.is_paged must be a bool"),
        (descriptor(cache_initializers=lambda info: {}), "Mine.cache_initializers must be a classmethod of info: write @classmethod"),
        (descriptor(options=lambda info: {}), "Mine.options must be a classmethod of info"),
        (descriptor(constants=[1]), "Mine.constants must be a classmethod of info"),
        (object, "'mine' must be a subclass of AttentionDescriptor"),
        (descriptor(), "'mine' must be a subclass of AttentionDescriptor"),
    ],
    ids=str,
)
def test_what_is_registered_is_complete(wrong, words):
    with pytest.raises(TypeError, match=words):
        AttentionRegistry.register("mine")(wrong() if words.startswith("'mine'") and wrong is not object else wrong)
    assert not AttentionRegistry.has("mine")


def test_registry():
    assert AttentionRegistry.names() == ["flexpress_flattened", "flexpress_paged"]
    assert AttentionRegistry.has("flexpress_paged") and not AttentionRegistry.has("paged")
    with pytest.raises(KeyError, match="no attention is named 'paged'; there are 'flexpress_flattened', 'flexpress_paged'"):
        AttentionRegistry.get("paged")
    with pytest.raises(ValueError, match="registered already: Paged"):
        AttentionRegistry.register("flexpress_paged")(descriptor())
    with pytest.raises(TypeError, match="is registered by a name"):
        AttentionRegistry.register(descriptor())
    try:
        mine = AttentionRegistry.register("mine")(descriptor())
        assert AttentionRegistry.get("mine") is mine
    finally:
        AttentionRegistry._known.pop("mine", None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["mha_with_cache", "flattened_mha_with_cache", "mha_with_paged_cache"])
def test_sinks_of_a_layer(name, device):
    """As cached_attention has them: the output of rows is less by what the sinks take."""
    args, op, sinks = samples(device)[name], getattr(torch.ops.flexpress, name), torch.randn(HEADS, device=device)
    copied = lambda: [t.clone() if isinstance(t, torch.Tensor) else t for t in args]  # noqa: E731
    plain, none = op(*copied()), op(*copied(), sinks=torch.full((HEADS,), -torch.inf, device=device))
    torch.testing.assert_close(none, plain)
    heads = plain.unflatten(-1, (HEADS, -1)) if plain.ndim == 3 else plain
    found = op(*copied(), sinks=sinks)
    share = (found.unflatten(-1, (HEADS, -1)) if found.ndim == 3 else found) / heads
    assert (share - share[..., :1]).abs().nan_to_num().max() < 1e-3 and ((share > 0) & (share < 1)).any()
    with pytest.raises(ValueError, match=rf"sinks must have shape \({HEADS},\)"):
        op(*copied(), sinks=sinks[:1])
