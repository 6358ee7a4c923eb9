"""A program as a user writes it, for type checkers: tests/check_types.py has mypy read it with --strict. Nothing here is run.

Where a line is wrong on purpose it says which error a checker must give there; one that is not given is an error, too.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from typing_extensions import assert_type

import flexpress
from flexpress import (
    AuxOutput,
    AuxRequest,
    AuxStatistics,
    BlockMask,
    MaskMod,
    ScoreMod,
    create_block_mask,
    create_mask,
    distributed,
    flash,
    flash_attn,
    flex_attention,
    mods,
    sequences,
    serving,
)

q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))


def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + (kv_idx - q_idx)


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < 8


class Bias(torch.nn.Module):
    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * 2


def attention(flag: bool, theirs: torchs.BlockMask) -> None:
    mask = create_block_mask(near, None, None, 64, 64, "cpu", BLOCK_SIZE=(64, 32), capacity=4)
    assert_type(mask, BlockMask)
    assert_type(flex_attention(q, k, v), Tensor)
    assert_type(flex_attention(q, k, v, bias, mask, 0.5, True), Tensor)
    assert_type(flex_attention(q, k, v, q_scale=v, k_scale=v, v_scale=v, out_dtype=torch.float16), Tensor)
    assert_type(flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * 2, mask_mod=mods.causal), Tensor)
    assert_type(flex_attention(q, k, v, score_mod=Bias(), block_mask=theirs, scale=torch.tensor(0.1)), Tensor)
    assert_type(flex_attention(q, k, v, return_lse=False, deterministic=True), Tensor)
    assert_type(flex_attention(q, k, v, return_lse=True, kernel_options={"BLOCK_M": 64, "USE_TMA": False}), tuple[Tensor, Tensor])
    options: flexpress.FlexKernelOptions = {"BLOCK_M": 64}
    assert_type(flex_attention(q, k, v, kernel_options={**options}), Tensor)
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert_type(aux, AuxOutput | AuxStatistics)
    assert_type(aux.lse, Tensor | None)
    more = flex_attention(q, k, v, return_aux=AuxRequest(entropy=True, column_sums=True))[1]
    assert_type(more, AuxOutput | AuxStatistics)
    assert isinstance(more, AuxStatistics)
    assert_type(more.column_sums, Tensor | None)
    assert_type(flex_attention(q, k, v, return_aux=torchs.AuxRequest(max_scores=True))[1].max_scores, Tensor | None)
    assert_type(
        flex_attention(q, k, v, None, None, None, False, flag), Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput | AuxStatistics]
    )
    assert_type(flexpress.explain(q, k, v, bias, mask_mod=near), str)

    flex_attention(q, k)  # type: ignore[call-overload]  # value is missing
    flex_attention(q, k, v, near)  # type: ignore[arg-type]  # a mask_mod is no score_mod
    flex_attention(q, k, v, block_mask=near)  # type: ignore[call-overload]  # nor a block mask
    flex_attention(q, k, v, mask_mod=mask)  # type: ignore[call-overload]  # and the other way round
    flex_attention(q, k, v, causal=True)  # type: ignore[call-overload]  # flash_attn's argument
    print(flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))[1].lse)  # type: ignore[union-attr]  # one or the other
    print(flex_attention(q, k, v).lse)  # type: ignore[attr-defined]  # was not asked for


def masks(theirs: torchs.BlockMask) -> None:
    mask = create_block_mask(flexpress.and_masks(mods.causal, mods.sliding_window(8)), 2, None, 64, 64)
    assert_type(flexpress.or_masks(near, flexpress.noop_mask), MaskMod)
    assert_type(mask.shape, tuple[int, ...])
    assert_type(mask.BLOCK_SIZE, tuple[int, int])
    assert_type(mask.kv_indices, Tensor)
    assert_type(mask.full_kv_indices, Tensor | None)
    assert_type(mask.sparsity(), float)
    assert_type(mask[0], BlockMask)
    assert_type(mask[:, [0, 2], 1:], BlockMask)
    assert_type(mask.adjust(32, 32).to("cpu"), BlockMask)
    assert_type(mask.to_dense(), Tensor)
    mask.seq_lengths = 60, 60
    assert_type(BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=near), BlockMask)
    assert_type(create_mask(near, 1, 1, 8, 8), Tensor)
    assert_type(create_mask(bias, 1, 1, 8, 8, torch.device("cpu")), Tensor)
    assert_type(flexpress.evaluate_mod(bias, torch.zeros(1, 1, 3, 5)), Tensor)
    assert_type(flexpress.dropout_mask(torch.zeros(1, dtype=torch.int64), (1, 1, 3, 5), 0.1), Tensor)
    assert_type(flexpress.plot_mask(mask), Figure | str)
    assert_type(flexpress.plot_mask(theirs, path="mask.png"), str)
    assert_type(flexpress.plot_mask(near, Q_LEN=64, KV_LEN=64, path=Path("mask.png")), Path | str)

    create_block_mask(bias, None, None, 64, 64)  # type: ignore[arg-type]  # a score_mod
    create_block_mask(near, None, None, 64)  # type: ignore[call-arg]  # KV_LEN is missing
    mask["head"]  # type: ignore[index]
    mask.BLOCK_SIZE = 64, 64
    flexpress.and_masks(near, mask)  # type: ignore[arg-type]
    flexpress.plot_mask(q)  # type: ignore[call-overload]


def recipes(slopes: Tensor, ids: Tensor) -> None:
    assert_type(mods.alibi(mods.alibi_slopes(4, "cpu")), ScoreMod)
    assert_type(mods.compose_scores(mods.softcap(50.0), mods.alibi_symmetric(slopes), mods.t5_bias(slopes)), ScoreMod)
    assert_type(mods.document(ids, mods.prefix_lm(ids)), MaskMod)
    assert_type(mods.document_from_offsets(ids, 100, mods.causal_offset(3)), MaskMod)
    assert_type(mods.global_sliding(8, 1), MaskMod)
    assert_type(mods.sliding_window(8)(ids, ids, ids, ids), Tensor)

    assert_type(mods.relative_bias(slopes), ScoreMod)
    assert_type(mods.dilated_window(4, 2), MaskMod)
    assert_type(mods.sliding_window_bidirectional(4, 2), MaskMod)
    assert_type(mods.t5_bucket(ids, bidirectional=False), Tensor)
    assert_type(mods.neighborhood((8, 8), 3, causal=(True, False)), MaskMod)
    assert_type(flexpress.and_masks(mods.tree(ids, 3), mods.block_causal(8), mods.block_diffusion(32, 8)), MaskMod)
    assert_type(mods.jagged_window(ids, ids), MaskMod)
    assert_type(mods.graph_neighbors(mods.graph_distances(ids, 8, 4), 2), MaskMod)
    assert_type(mods.compose_scores(mods.graph_bias(ids, slopes), mods.disentangled(slopes, slopes)), ScoreMod)
    assert_type(mods.compose_scores(mods.forget_gate(slopes), mods.yarn_temperature(8)), ScoreMod)
    assert_type(mods.within_radius(slopes, 0.5), MaskMod)
    assert_type(mods.compose_scores(mods.gaussian_distances(*[slopes] * 4), mods.invariant_points(slopes, slopes, slopes)), ScoreMod)
    lam = mods.differential_lambda(slopes, slopes, slopes, slopes, layer=2)
    assert_type(mods.differential(flex_attention, slopes, slopes, slopes, lam, mask_mod=mods.causal), Tensor)

    mods.sliding_window(0.5)  # type: ignore[arg-type]
    mods.softcap(slopes)  # type: ignore[arg-type]
    mods.compose_scores([mods.softcap(50.0)])  # type: ignore[arg-type]
    mods.document(ids, mods.softcap(50.0))  # type: ignore[arg-type]
    mods.dilated_window(8)  # type: ignore[call-arg]


def packed(cu_seqlens: Tensor) -> None:
    assert_type(flexpress.varlen_attention(q, k, v, cu_seqlens, None, bias, near), Tensor)
    assert_type(flexpress.varlen_attention(q, k, v, cu_seqlens, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flexpress.varlen_attention(q, k, v, cu_seqlens, return_aux=AuxRequest()), tuple[Tensor, AuxOutput | AuxStatistics])
    flexpress.varlen_attention(q, k, v)  # type: ignore[call-overload]
    flexpress.varlen_attention(q, k, v, [0, 64])  # type: ignore[call-overload]  # a tensor

    assert_type(flash.flash_attn_func(q, k, v, causal=True), Tensor)
    assert_type(flash.flash_attn_kvpacked_func(q, k, softmax_scale=0.1), Tensor)
    assert_type(flash.flash_attn_qkvpacked_func(q, None, True), Tensor)
    flash.flash_attn_func(q, k, v, casual=True)  # type: ignore[call-overload]


def caches(kv_len: Tensor, query: Tensor | None) -> None:
    pool = flexpress.PageAllocator(num_pages=16, page_size=8)
    table = pool.page_table([pool.allocate(9)], device="cpu")
    rope = flexpress.rope_table(128, 32)
    assert_type(pool.extend(0, 3), list[tuple[int, int]])
    assert_type(flexpress.cached_attention(q, k, v, kv_len, page_table=table, score_mod=bias), Tensor)
    assert_type(flexpress.cached_attention(q, k, v, kv_len, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flexpress.cached_attention(q, k, v, kv_len, return_aux=AuxRequest()), tuple[Tensor, AuxOutput | AuxStatistics])
    shared = pool.shared_prefix([0, pool.fork(0)])
    assert_type(shared, flexpress.SharedPrefix | None)
    assert_type(flexpress.cached_attention(q, k, v, kv_len, page_table=table, shared_prefix=shared), Tensor)
    if shared is not None:
        tables = shared.tables(kv_len, table, queries=1)
        assert_type(tables, flexpress.SharedTables)
        assert_type(
            flexpress.cached_attention(q, k, v, kv_len, page_table=table, shared_prefix=tables, return_lse=True), tuple[Tensor, Tensor]
        )
    flexpress.update_cache(k, v, k, v, kv_len, page_table=table)
    assert_type(flexpress.update_cache(k, v, k, v, kv_len, query=q, rope=rope), Tensor)
    assert_type(flexpress.update_cache(k, v, k, v, kv_len, query=query, rope=rope), Tensor | None)
    try:
        pool.allocate(1000)
    except flexpress.OutOfPages as error:
        assert_type(error.wanted, int)

    assert_type(flexpress.merge_attention(*flexpress.split_attention(q, k, v, kv_len, 4, page_table=table)), tuple[Tensor, Tensor])
    flexpress.cached_attention(q, k, v, kv_len, table)  # type: ignore[call-overload]  # by name
    flexpress.cached_attention(q, k, v)  # type: ignore[call-overload]
    print(flexpress.update_cache(k, v, k, v, kv_len).shape)  # type: ignore[attr-defined]  # there is no query
    pool.fork("a")  # type: ignore[arg-type]


def serving_step(info: sequences.AttentionInfo) -> None:
    step = sequences.SequenceInfo(max_seq_len=64, max_batch_size=2, page_size=8, device="cpu")
    step.nest_sequences([[1, 2], torch.tensor([3])], input_pos=0, page_assignments=[[0], [1]])
    assert_type(step.args, tuple[Tensor, ...])
    assert_type(step.page_table, Tensor)
    assert_type(step.max_seq_len, int)
    assert_type(step.to("cpu"), sequences.SequenceInfo)
    assert_type(sequences.ARG_NAMES.index("input_ids"), int)
    attention = serving.AttentionRegistry.get("flexpress_paged")
    assert_type(attention, type[serving.AttentionDescriptor])
    assert_type([make(step) for make in attention.cache_initializers(info).values()], list[Tensor | None])
    rope = sequences.PositionalEmbeddingConfig("rope", rope_theta=5e5, rope_scaling=flexpress.Llama3Scaling(8.0, 8192))
    assert_type(flexpress.rope_table(64, 32, scaling=flexpress.YarnScaling(4.0, 4096)), Tensor)
    assert_type(flexpress.apply_rope(q, torch.zeros(64, 16, 2), torch.zeros(2, dtype=torch.int32), rope_tail=True), Tensor)
    cache = sequences.CacheConfig(torch.float8_e4m3fn, 0.5, (0.25, 0.5))
    sequences.AttentionInfo(8, 2, 64, torch.bfloat16, cache, rope, v_head_dim=32, scale=0.1, sliding_window=128, softcap=30.0)

    step.nest_sequences([1, 2])  # type: ignore[list-item]  # lists of ids
    step.page_size = 4  # type: ignore[misc]
    sequences.AttentionInfo(8, 2, 64)  # type: ignore[call-arg]  # dtype is missing


def ahead(directory: Path) -> None:
    assert_type(flexpress.export(q, k, v, bias, mask_mod=near, path=directory / "attention.py"), str)
    assert_type(flexpress.export_cached(q, k, v, torch.zeros(2, dtype=torch.int32), target="sm_90"), str)
    assert_type(flexpress.precompile((2, 4, 64, 32), (2, 4, 64, 32), (2, 4, 64, 32), dtype=torch.float16), list[flexpress.Precompiled])
    assert_type(
        flexpress.precompile_cached((2, 4, 1, 32), (2, 64, 4, 32), (2, 64, 4, 32), (2,), dtype=torch.float16), list[flexpress.Precompiled]
    )
    assert_type(flexpress.wait_for_kernels(2.5), bool)
    torch.serialization.add_safe_globals(flexpress.safe_globals())
    flexpress.export(q, k, v, bias, path=4)  # type: ignore[arg-type]


def other_names(lengths: Tensor) -> None:
    assert_type(flexpress.scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
    assert_type(flash.flash_attn_func(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    functions = flash_attn.flash_attn_func, flash_attn.flash_attn_kvpacked_func, flash_attn.flash_attn_qkvpacked_func
    packed = flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_varlen_kvpacked_func, flash_attn.flash_attn_varlen_qkvpacked_func
    print(functions, packed, flash_attn.flash_attn_with_kvcache, flash_attn.bert_padding, flash_attn.flash_attn_interface)
    flash_attn.flash_attn_func(q, k, v, casual=True)  # type: ignore[call-arg]


def split_over_ranks() -> None:
    plan = distributed.ContextPlan(None, 4096, mask_mod=mods.causal)
    assert_type(plan.shard(q, dim=2), Tensor)
    assert_type(plan.layout, distributed.Layout)
    assert_type(flex_attention(q, k, v, bias, context=plan), Tensor)
    flex_attention(q, k, v, context=4)  # type: ignore[call-overload]
    packed = distributed.ContextPlan.packed(torch.tensor([0, 4096]), mask_mod=mods.causal, head_groups=1)
    assert_type(flexpress.varlen_attention(q, k, v, score_mod=bias, context=packed, return_lse=True), tuple[Tensor, Tensor])
    assert_type(packed.positions_in_sequence, Tensor)
    lengths = torch.ones(2, dtype=torch.int32)
    assert_type(distributed.split_cached_attention(q, k, v, lengths, lengths, score_mod=bias), tuple[Tensor, Tensor])
    assert_type(flexpress.merge_attention([q, q], [q[..., 0], q[..., 0]]), tuple[Tensor, Tensor])


def looking() -> None:
    try:
        flex_attention(q, k, v, bias)
    except (flexpress.ModError, flexpress.RenderError) as error:
        print(error)
    assert_type(flexpress.cache_info(), flexpress.CacheInfo)
    assert_type(flexpress.cache_info().compiles, int)
    assert_type(flexpress.printed_kernels(), list[Path])
    assert_type(flexpress.cache_dir(), Path | None)
    assert_type(flexpress.__version__, str)
    flexpress.cache_clear()
    flexpress.cache_clear(1)  # type: ignore[call-arg]
