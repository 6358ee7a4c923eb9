"""A small run of every template, for compute-sanitizer (`make sanitize`): on a GPU, every kernel once, with lengths that are no multiples.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/every_template.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/every_template.py hopper

Parts of it may be named, as the whole takes many minutes there; `--names` prints their names.
"""

from __future__ import annotations

import functools
import sys

import torch

import flexpress
from flexpress import (
    AuxRequest,
    PageAllocator,
    cached_attention,
    create_block_mask,
    create_mask,
    evaluate_mod,
    flex_attention,
    mods,
    rope_table,
    update_cache,
    varlen_attention,
)
from flexpress.caches import shared_attention, shared_prefix
from flexpress.codegen.run.exchange import add_blocks, copy_blocks

LENGTH = 131


def main(*names: str) -> None:
    for name in names or PARTS:
        PARTS[name]()
        torch.cuda.synchronize()
    kinds = {path.stem.split("_")[0] + "_" + path.stem.split("_")[1] for path in flexpress.printed_kernels()}
    print(f"{len(flexpress.printed_kernels())} kernels of {len(kinds)} kinds ran")


EVERYTHING = AuxRequest(entropy=True, top_index=True, column_sums=True)


def portable() -> None:
    """Masks, forward and backward in Triton, gradients of captured tensors."""
    length, heads = LENGTH, 2
    scores = torch.randn(1, heads, length, length, device="cuda")
    evaluate_mod(mods.softcap(20.0), scores)
    create_mask(mods.causal, None, None, length, length, "cuda")
    learned = {
        "alibi": (mods.alibi, torch.rand(heads, device="cuda")),
        "table": (mods.relative_bias, torch.randn(heads, 2 * length - 1, device="cuda")),
        "bias": (lambda t: lambda s, b, h, m, n: s + t[b, h, m, n], torch.randn(1, heads, length, length, device="cuda")),
        "per_key": (lambda t: lambda s, b, h, m, n: torch.tanh(s) * t[n], torch.randn(length, device="cuda")),
        "per_query": (lambda t: lambda s, b, h, m, n: s * t[m], torch.randn(length, device="cuda")),
    }
    mask = create_block_mask(mods.causal, None, None, length, length, "cuda")
    ids = torch.arange(length, device="cuda") // 50
    weights = torch.randn(length, device="cuda")
    masks = [mods.document(ids, mods.causal), lambda b, h, m, n: (weights[m] * weights[n] < 1) & ((ids == 1)[m] | (m >= n))]
    for mask_mod in masks:
        create_block_mask(mask_mod, 2, 2, length, length + 60, "cuda", (64, 48)).as_transposed_lists()
    for mask_mod in masks:
        q = torch.randn(1, heads, length, 64, device="cuda", requires_grad=True)
        flex_attention(q, q, q, mask_mod=mask_mod).sum().backward()
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in (64, 80):
            q = torch.randn(1, heads, length, head_dim, device="cuda", dtype=dtype, requires_grad=True)
            k, v = (torch.randn(1, 1, length, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
            for options in ({}, {"USE_TMA": False}):
                for block_mask in (None, mask):
                    out, lse = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True, kernel_options=options)
                    torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), torch.randn_like(lse)))
                    flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, return_aux=EVERYTHING)
        for deterministic in (False, True):
            for make, tensor in learned.values():
                tensor.requires_grad_()
                out = flex_attention(q, k, v, make(tensor), mask, enable_gqa=True, deterministic=deterministic)
                torch.autograd.grad(out, (q, k, v, tensor), torch.randn_like(out))


def tangents() -> None:
    """Forward mode and second derivatives, with every way to gather gradients of captured tensors."""
    learned = torch.rand(2, device="cuda"), torch.randn(LENGTH, device="cuda"), torch.randn(2, 2 * LENGTH, device="cuda")
    mask = create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cuda", 64)
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.float16, 80), (torch.float32, 40)):
        x = [torch.randn(2, heads, LENGTH, head_dim, device="cuda", dtype=dtype) for heads in (2, 1, 1)]

        def of_learned(dropout_p, q, k, v, slopes, keys, table):
            def score_mod(s, b, h, m, n):
                return torch.tanh(s) * keys[n] + slopes[h] * table[h, m - n + LENGTH] * keys[m]

            return flex_attention(q, k, v, score_mod, mask, enable_gqa=True, dropout_p=dropout_p)

        for dropout_p in (0.0, 0.2):
            attend = functools.partial(of_learned, dropout_p)
            torch.func.jvp(attend, (*x, *learned), (*x, *learned))
            inputs = [t.clone().requires_grad_() for t in (*x, *learned)]
            out = attend(*inputs)
            first = torch.autograd.grad(out, inputs, torch.randn_like(out), create_graph=True)
            torch.autograd.grad(first, inputs, [torch.randn_like(g) for g in first])


def sequences() -> None:
    """Packed sequences whose blocks begin where they do, and packed ones."""
    for lengths in ([131, 1500, 0, 700], [131, 70, 1]):
        cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        for head_dim in (40, 64, 128):
            q, k, v = (
                torch.randn(sum(lengths), heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
            )
            for deterministic in (False, True):
                out = varlen_attention(q, k, v, cu_seqlens, mask_mod=mods.causal, deterministic=deterministic)
                torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def serving() -> None:
    """Decoding with split keys, and a step of a prompt beside a decoding sequence in contiguous and paged caches."""
    q, k, v = (torch.randn(2, heads, n, 64, device="cuda", dtype=torch.bfloat16) for heads, n in ((4, 3), (2, 900), (2, 900)))
    for mask_mod in (None, mods.sliding_window(300)):
        flex_attention(q, k, v, mods.softcap(5.0), enable_gqa=True, mask_mod=mask_mod, kernel_options={"BACKEND": "TRITON_DECODE"})
    int32 = dict(dtype=torch.int32, device="cuda")
    kv_len, cu_seqlens_q = (torch.tensor(values, **int32) for values in ([70, 600], [0, 70, 71]))
    table, rope = torch.arange(80, **int32).view(2, 40), rope_table(640, 48, device="cuda")
    query, key = (torch.randn(75, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    for where, shape in (({"page_table": table}, (80, 16)), ({}, (2, 640))):
        caches = [torch.zeros(*shape, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        turned = update_cache(key, key, *caches, kv_len, cu_seqlens_q=cu_seqlens_q, query=query, rope=rope, **where)
        cached_attention(turned, *caches, kv_len, cu_seqlens_q=cu_seqlens_q, max_q_len=70, **where)
    shared_prefix.LEAST_BYTES = 0  # small ones, too
    pool = PageAllocator(80, 16)
    first = pool.allocate(600)
    sequences = [first, pool.fork(first), pool.allocate(70), pool.fork(first)]
    for sequence in sequences:
        pool.extend(sequence, 1)
    lengths, caches = (
        torch.tensor([pool.length(s) for s in sequences], **int32),
        [torch.randn(80, 16, 2, 80, device="cuda") for _ in range(2)],
    )
    where = {"page_table": pool.page_table(sequences, device="cuda"), "shared_prefix": pool.shared_prefix(sequences, "cuda")}
    cached_attention(torch.randn(4, 4, 1, 80, device="cuda"), *caches, lengths, **where)
    starts = torch.tensor([0, 1, 3, 3, 4], **int32)
    cached_attention(torch.randn(5, 4, 80, device="cuda"), *caches, lengths, cu_seqlens_q=starts, q_offset=lengths - 2, **where)


def latent() -> None:
    """Values that are the first columns of the keys, in caches and without, whose last blocks end inside a page."""
    int32 = dict(dtype=torch.int32, device="cuda")
    kv_len, cu_seqlens_q = torch.tensor([700, 40, 3], **int32), torch.tensor([0, 3, 4, 6], **int32)
    slopes = torch.rand(16, device="cuda")
    for head_dim, head_dim_v in ((576, 512), (512, 512), (320, 256)):
        query = torch.randn(3, 16, 1, head_dim, device="cuda", dtype=torch.bfloat16)
        for size in (8, 64, 128, 1024):
            keys = torch.randn(3 * 1024 // size, size, 1, head_dim, device="cuda", dtype=torch.bfloat16)
            table = torch.randperm(len(keys), device="cuda").to(torch.int32).view(3, -1)
            where = {} if size == 1024 else {"page_table": table}
            cached_attention(query, keys, keys[..., :head_dim_v], kv_len, score_mod=mods.alibi(slopes), **where)
            rows = torch.randn(7, 16, head_dim, device="cuda", dtype=torch.bfloat16)
            cached_attention(rows, keys, keys[..., :head_dim_v], kv_len, cu_seqlens_q=cu_seqlens_q, mask_mod=mods.causal, **where)
        keys = torch.randn(3, 1, 700, head_dim, device="cuda", dtype=torch.bfloat16)
        flex_attention(query, keys, keys[..., :head_dim_v], enable_gqa=True, sinks=slopes)


def prompts() -> None:
    """Long ragged prompts whose last blocks end inside a page, a sequence without queries, and tokens after the last one."""
    int32 = dict(dtype=torch.int32, device="cuda")
    cu_seqlens_q, kv_len = (torch.tensor(values, **int32) for values in ([0, 1000, 1000, 1531], [1000, 40, 777]))
    for head_dim, head_dim_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
        query = torch.randn(1600, 16, head_dim, device="cuda", dtype=torch.bfloat16)
        for size in (8, 64, 128, 1024):
            count = 1024 // size
            caches = [torch.randn(3 * count, size, 2, d, device="cuda", dtype=torch.bfloat16) for d in (head_dim, head_dim_v)]
            table = torch.randperm(3 * count, device="cuda").to(torch.int32).view(3, count)
            where = {} if size == 1024 else {"page_table": table}
            cached_attention(query, *caches, kv_len, cu_seqlens_q=cu_seqlens_q, max_q_len=1000, **where)
        prefixes(head_dim, head_dim_v)


def prefixes(head_dim: int, head_dim_v: int) -> None:
    """Groups of sequences, the last of which reads all by itself, by tiles of their queries."""
    shared_prefix.LEAST_BYTES, shared_attention.LEAST_FILL = 0, 0.0
    pool, int32 = PageAllocator(80, 16), dict(dtype=torch.int32, device="cuda")
    first = pool.allocate(600)
    sequences = [first, pool.fork(first), pool.fork(first), pool.allocate(70)]
    for sequence in sequences[1:]:
        pool.extend(sequence, 3)
    lengths = torch.tensor([pool.length(s) for s in sequences], **int32)
    caches = [torch.randn(80, 16, 2, d, device="cuda", dtype=torch.bfloat16) for d in (head_dim, head_dim_v)]
    where = {"page_table": pool.page_table(sequences, device="cuda"), "shared_prefix": pool.shared_prefix(sequences, "cuda")}
    query = torch.randn(4, 4, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    for options in ({}, {"score_mod": mods.alibi(torch.rand(4, device="cuda"))}, {"mask_mod": mods.sliding_window(300)}):
        cached_attention(query, *caches, lengths, **where, **options)


def hopper() -> None:
    """The kernels in Gluon, of which every kind of tile is another text."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    mask = create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cuda")
    score_mods = None, mods.alibi(torch.rand(2, device="cuda")), mods.relative_bias(torch.randn(2, 2 * LENGTH - 1, device="cuda"))
    for head_dim, head_dim_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
        q, k, v = (
            torch.randn(2, heads, LENGTH, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads, d in ((2, head_dim), (1, head_dim), (1, head_dim_v))
        )
        for score_mod in score_mods:
            for block_mask in (None, mask):
                out = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, kernel_options={"BACKEND": "GLUON"})
                torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


def float8() -> None:
    """Products of 8 bits by both kinds of kernels, of values that are copied and of others, and elements that become bfloat16."""
    scale = torch.rand(2, device="cuda") + 0.5
    for head_dim, head_dim_v in ((64, 80), (128, 128), (256, 256)):
        q, k, v = (
            torch.randn(2, heads, LENGTH, d, device="cuda").to(torch.float8_e4m3fn)
            for heads, d in ((4, head_dim), (2, head_dim), (2, head_dim_v))
        )
        for options in ({"BACKEND": "PORTABLE"}, {"USE_TMA": False}, *([{"BACKEND": "HOPPER"}] if head_dim <= 128 else [])):
            for mask_mod in (None, mods.causal):
                scales = {"q_scale": scale, "k_scale": scale, "v_scale": scale}
                flex_attention(q, k, v, mask_mod=mask_mod, enable_gqa=True, kernel_options=options, **scales)


def extras() -> None:
    """Sinks and dropout, in both kinds of kernels, in packed sequences and in decoding."""
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    given = {"sinks": sinks, "dropout_p": 0.2, "dropout_seed": torch.tensor([7], device="cuda")}
    mask = create_block_mask(mods.causal, None, None, LENGTH, LENGTH, "cuda")
    for head_dim in (64, 128):
        q, k, v = (torch.randn(2, heads, LENGTH, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
        cu_seqlens = torch.tensor([0, 50, LENGTH], dtype=torch.int32, device="cuda")  # 64 tokens each, for Hopper
        packed = [t[0].transpose(0, 1) for t in (q, k, v)]
        for backend in ("PORTABLE", "HOPPER") if torch.cuda.get_device_capability() == (9, 0) else ("PORTABLE",):
            options = {"BACKEND": backend}
            for block_mask in (None, mask):
                out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, kernel_options=options, **given)
                torch.autograd.grad(out, (q, k, v, sinks), torch.randn_like(out))
            out = varlen_attention(*packed, cu_seqlens, mask_mod=mods.causal, kernel_options=options, **given)
            torch.autograd.grad(out, (q, k, v, sinks), torch.randn_like(out))
        flex_attention(q[:, :, :1], k, v, enable_gqa=True, sinks=sinks)


def exchange() -> None:
    """What ranks of a context plan exchange: last blocks that end early, blocks that nobody sent, head dims that are padded."""
    for dtype, d_qk, d_v in ((torch.bfloat16, 128, 128), (torch.float32, 40, 24), (torch.bfloat16, 576, 512)):
        k, v = (torch.randn(2, 300, 3, d, device="cuda", dtype=dtype).transpose(1, 2) for d in (d_qk, d_v))
        out = torch.empty(4 * 128, 2, 3, d_qk + d_v, device="cuda", dtype=dtype)
        some, others = (torch.tensor(blocks, dtype=torch.int32, device="cuda") for blocks in ([2, 0, 1], [0, 3, 1]))
        copy_blocks(k, v, some, others, out, 128)
        sums = tuple(torch.empty_like(t) for t in (k, v))
        add_blocks(k, v, out, some.new_tensor([1, -1, 0]), some.new_tensor([[0, 3], [1, -1], [-1, -1]]), sums, 128)


PARTS = {part.__name__: part for part in (portable, tangents, sequences, serving, latent, prompts, hopper, float8, extras, exchange)}

if __name__ == "__main__":
    if sys.argv[1:] == ["--names"]:
        print(*PARTS)
    else:
        main(*sys.argv[1:])
