"""flex_attention: the front door."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from flexpress import checks
from flexpress.block_lists import transposed_lists
from flexpress.block_mask import DEFAULT_BLOCK_SIZE, BlockMask
from flexpress.foreign_masks import adopt, is_foreign_mask
from flexpress.mask_mods import same_mod

from .codegen.compiling import runs_uncompiled
from .codegen.mod.bind import bind
from .codegen.mod.capture import name_of
from .codegen.mod.tensors import check_inputs, check_kind, check_surroundings, read_captured, readable
from .codegen.plan.forward import Options
from .codegen.registry import Table
from .codegen.run.backward import backward
from .codegen.run.block_lists import BlockLists
from .codegen.run.forward import Inputs, Rows, forward
from .codegen.run.masks import automatic_lists


class AuxRequest(NamedTuple):
    """Which statistics flex_attention is to return beside the output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """lse and max_scores, float32 (B, Hq, Q_LEN), or None where not asked for."""

    lse: torch.Tensor | None = None
    max_scores: torch.Tensor | None = None


@runs_uncompiled
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable | None = None,
    block_mask=None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict | None = None,
    *,
    mask_mod: Callable | None = None,
    return_aux: AuxRequest | None = None,
    deterministic: bool = False,
):
    """Attention with the user's own score and mask, by a kernel printed for them. No torch.compile, no dense scores.

        out[b, h, i] = sum_j softmax_j(score_mod(query[b, h, i] . key[b, h', j] * scale, b, h, i, j)) value[b, h', j]

    over the positions j that block_mask or mask_mod allows, with h' = h // (Hq / Hkv).

    query           (B, Hq, Q_LEN, D_QK), float16, bfloat16 or float32, any strides
    key, value      (B or 1, Hkv, KV_LEN, D_QK) and (B or 1, Hkv, KV_LEN, D_V); head dims up to 256
    score_mod       score_mod(score, b, h, q_idx, kv_idx) -> score, on scalars: score is float32, the others int32. It may index
                    captured tensors; an index outside a tensor reads zero
    block_mask      from create_block_mask, flexpress's or torch's
    mask_mod        mask_mod(b, h, q_idx, kv_idx) -> bool, instead of a block mask: which blocks are empty or full follows from bounds of
                    mask_mod, on the device and in microseconds, so the mask may be another one at every call. With both, block_mask
                    must have been made of this mask_mod
    scale           a number, 1 / sqrt(D_QK) by default
    enable_gqa      allows Hq to be a multiple of Hkv
    return_lse      also return lse; return_aux=AuxRequest(lse=True) is the newer form
    kernel_options  BLOCK_M, BLOCK_N, num_warps, num_stages, PRESCALE_QK, ROWS_GUARANTEED_SAFE, USE_TMA, with or without the prefix fwd_;
                    FLOAT32_PRECISION ("ieee" or "tf32"), BACKEND ("AUTO"; "PORTABLE" for the portable kernels; "HOPPER" for the
                    forward kernel for Hopper, or an error; "DECODE" for that of up to 16 queries, which splits keys among programs;
                    "TRITON", "GLUON" and "TRITON_DECODE" mean the same); for the backward pass BLOCK_M1, BLOCK_N1 (of dK and dV),
                    BLOCK_M2, BLOCK_N2 (of dQ), with or without bwd_, bwd_num_warps, bwd_num_stages. ROWS_GUARANTEED_SAFE promises that
                    every row sees a key; it is taken at its word. Torch's BLOCKS_ARE_CONTIGUOUS, FORCE_USE_FLEX_ATTENTION,
                    IS_DIVISIBLE, WRITE_DQ and ROCm's hints change nothing: block lists are always read. Others are refused
    return_aux      AuxRequest(lse, max_scores)
    deterministic   gradients are bitwise equal on every run (also under torch.use_deterministic_algorithms); only gradients of captured
                    tensors whose elements are shared by many positions cost more for it

    Returns the output (B, Hq, Q_LEN, D_V), in query's dtype and order of dimensions; (out, lse) with return_lse; (out,
    AuxOutput) with return_aux. lse is the natural logarithm of the softmax's denominator, max_scores its largest score, both
    float32 (B, Hq, Q_LEN). A row with nothing to attend to gives output 0 and lse -inf.

    Raises ValueError, TypeError or NotImplementedError for arguments, ModError for a mod that cannot be traced.
    Differentiable once, with respect to query, key, value and every floating-point tensor that score_mod captures, through the output
    and lse; not through max_scores.

    Meaning: torch.nn.attention.flex_attention (Dong et al. 2024, arXiv 2412.05496). Method: FlashAttention-2 (Dao 2023, arXiv
    2307.08691) with block lists.
    """
    want_max = return_aux is not None and _checked_request(return_aux, return_lse).max_scores
    call = prepared(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod)
    out, lse, max_scores = attend(call, want_max, deterministic)
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, max_scores)
    return (out, lse) if return_lse else out


def _checked_request(return_aux, return_lse: bool) -> AuxRequest:
    if return_lse:
        raise ValueError("return_lse and return_aux exclude each other: write return_aux=AuxRequest(lse=True)")
    if not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):  # torch's will do
        raise TypeError(f"return_aux must be AuxRequest(lse=..., max_scores=...), got {return_aux!r}")
    return return_aux


def attend(call: tuple, want_max: bool, deterministic: bool) -> tuple:
    """out, lse and max_scores (None if they are not wanted) of what `prepared` returned."""
    query, key, value, inputs, scale, score, mask, lists, transposed, options = call
    try:
        if torch.is_grad_enabled():
            captured = score[1][: len(score[0].tensors)] if score else []
            if query.requires_grad or key.requires_grad or value.requires_grad or any([t.requires_grad for t in captured]):
                captured = [_apart(t) for t in captured]
                score = score and (score[0], [*captured, *score[1][len(captured) :]])
                call = _Call(
                    inputs,
                    scale,
                    score,
                    mask,
                    lists,
                    transposed,
                    options,
                    want_max,
                    deterministic or torch.are_deterministic_algorithms_enabled(),
                )
                return _Attention.apply(call, query, key, value, *captured)
        return forward(query, key, value, inputs, scale, score, mask, lists, options, output_max=want_max)[:3]
    except RuntimeError:
        for name, tensor in (("query", query), ("key", key), ("value", value)):  # one whose looks passed, but that has no address?
            check_kind(name, tensor)
        raise


def prepared(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, starts_of=None) -> tuple:
    """The arguments of flex_attention, checked, as the drivers of kernels take them: query, key, value, their Inputs, scale, the bound
    score_mod and mask_mod, the block lists, what makes the transposed ones of the bound mask_mod, and Options.

    starts_of   (a block's queries, a block's keys) -> where the blocks of a mask_mod that is passed begin (see BlockGrid)
    """
    query, key, value = check_inputs(query, key, value)
    if torch._C._is_any_autocast_enabled():
        query, key, value = checks.autocast(query, key, value)
    inputs = _checked(query, key, value, enable_gqa)
    options = checks.DEFAULT if kernel_options is None else checks.parse_options(kernel_options)
    scale = inputs.scale if scale is None else checks.check_scale(scale, inputs.head_dim)
    score = mask = lists = transposed = None
    if score_mod is not None:
        score = bind(score_mod, "score")
        read_captured(score, inputs.device, "score_mod")
    if block_mask is not None:
        if mask_mod is not None and not same_mod(block_mask.mask_mod, mask_mod, "mask"):
            raise ValueError(
                f"block_mask was made of {name_of(block_mask.mask_mod)}, not of the mask_mod {name_of(mask_mod)}; pass one of "
                "them, or and_masks(...) of both as mask_mod"
            )
        lists, transposed, mask_mod = _read_mask(block_mask, query, key, inputs, options)
    if mask_mod is not None:
        mask = bind(mask_mod, "mask")
        read_captured(mask, inputs.device, "mask_mod")
    if mask is not None and lists is None:
        size = _block_size(options)
        starts = starts_of(*size) if starts_of else ()
        make = partial(automatic_lists, extents=inputs.extents, device=inputs.device, size=size, starts=starts)
        lists, transposed = make(mask), partial(make, transposed=True)
    return query, key, value, inputs, scale, score, mask, lists, transposed, options


def _block_size(options: Options) -> tuple[int, int]:
    """The blocks of a mask that is made for one call: whole tiles, also where the user asks for large ones."""
    tile = dict(options.tile)
    return tuple(max([DEFAULT_BLOCK_SIZE, *(n for name, n in tile.items() if name.endswith(f"BLOCK_{axis}"))]) for axis in "MN")


_inputs: dict[tuple, Inputs] = Table("checked inputs", 4096)


def _checked(query, key, value, enable_gqa: bool) -> Inputs:
    """Argument checks, skipped for shapes, strides, dtypes and devices that passed before."""
    try:
        seen = (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.device,
            key.device,
            value.device,
            enable_gqa,
        )
        found = _inputs.get(seen)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, or nested ones: the checks will say so
        seen = found = None
    if found is None:
        checks.check_tensors(query, key, value, enable_gqa)
        found = _inputs[seen] = Inputs(query, key)
    return found


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A captured tensor that wants a gradient has an element of its own in memory for every index. Dimensions of stride 0 are left alone
    where autograd sums over them, in the backward pass of what expanded the tensor."""
    if not tensor.requires_grad:
        return tensor
    if tensor.is_leaf and 0 in tensor.stride():
        return tensor.contiguous()
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if s and n > 1)
    reach = 1
    for stride, size in dims:
        if stride < reach:
            return tensor.contiguous()
        reach = stride * size
    return tensor


def _read_mask(block_mask, query, key, inputs: Inputs, options: Options):
    """The lists of a BlockMask, ours or torch's, what makes the transposed ones of the bound mask_mod, and the mask_mod; all checked."""
    if not isinstance(block_mask, BlockMask) and is_foreign_mask(block_mask):
        block_mask = adopt(block_mask)
    if not isinstance(block_mask, BlockMask):
        if callable(block_mask):
            raise TypeError(
                "block_mask is a function; pass it as mask_mod=, or make a BlockMask of it with create_block_mask(mask_mod, B, "
                "H, Q_LEN, KV_LEN)"
            )
        raise TypeError(f"block_mask must be a BlockMask (from create_block_mask), got {type(block_mask).__name__}")
    lists, mask_mod = block_mask.for_kernels()
    if (inputs, options) not in lists.fitting:  # lists of other lengths are others
        checks.check_mask_fits(lists, block_mask.seq_lengths, query, key, block_mask.shape)
        checks.check_tile_fits_mask(options, lists.q_block, lists.kv_block)
        if len(lists.fitting) >= 1024:
            lists.fitting.clear()
        lists.fitting.add((inputs, options))
    return lists, lambda _: transposed_lists(lists, inputs.extents[3]), mask_mod


class _Call(NamedTuple):
    """What the kernels of one call take beside tensors that may want gradients."""

    inputs: Inputs
    scale: float
    score: tuple | None  # (graph, captured values)
    mask: tuple | None
    lists: BlockLists | None
    transposed: Callable[[tuple], BlockLists] | None  # of the bound mask_mod
    options: Options
    output_max: bool
    deterministic: bool


@runs_uncompiled
class _Attention(torch.autograd.Function):
    """The forward pass, and a backward pass that recomputes the weights from Rows."""

    @staticmethod
    def forward(ctx, call: _Call, q, k, v, *captured):
        out, lse, max_scores, rows = forward(
            q, k, v, call.inputs, call.scale, call.score, call.mask, call.lists, call.options, output_max=call.output_max, output_rows=True
        )
        mask_tensors = call.mask[1][: len(call.mask[0].tensors)] if call.mask else []
        # tensors are saved by autograd, which notices if they are overwritten before the backward pass
        ctx.call = call._replace(
            score=call.score and (call.score[0], call.score[1][len(captured) :]),
            mask=call.mask and (call.mask[0], call.mask[1][len(mask_tensors) :]),
        )
        ctx.raw_rows = rows.raw
        ctx.save_for_backward(q, k, v, out, rows.values, *captured, *mask_tensors)
        ctx.count = len(captured)
        ctx.set_materialize_grads(False)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        return out, lse, max_scores

    @staticmethod
    def backward(ctx, d_out, d_lse, _):
        if d_out is None and d_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        check_surroundings("the backward pass of flex_attention")
        d_out, d_lse = (g if g is None else _dense("gradient of flex_attention's output", g) for g in (d_out, d_lse))
        q, k, v, out, values, *others = ctx.saved_tensors
        rows = Rows(values, ctx.raw_rows)
        captured, mask_tensors = others[: ctx.count], others[ctx.count :]
        call = ctx.call
        score = (call.score[0], [*captured, *call.score[1]]) if call.score else None
        mask = (call.mask[0], [*mask_tensors, *call.mask[1]]) if call.mask else None
        wanted = frozenset(i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed)
        with torch.no_grad():
            dq, dk, dv, gradients = backward(
                q,
                k,
                v,
                out,
                rows,
                torch.zeros_like(out) if d_out is None else d_out,
                d_lse,
                call.scale,
                score,
                mask,
                call.lists,
                call.transposed(mask) if call.transposed else None,
                call.options,
                wanted=wanted,
                deterministic=call.deterministic,
            )
        found = [
            *(g if needed else None for g, needed in zip((dq, dk, dv), ctx.needs_input_grad[1:4], strict=True)),
            *(gradients.get(i) for i in range(ctx.count)),
        ]
        if torch.is_grad_enabled():  # create_graph=True: what is made of these gradients must not pass for differentiable
            anchor = next(t for t in (q, k, v, *captured) if t.requires_grad)
            found = [g if g is None else _Once.apply(anchor, g) for g in found]
        return None, *found


def _dense(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that autograd hands over, as ordinary memory."""
    return readable(name, gradient if gradient.layout is torch.strided else gradient.to_dense())


@runs_uncompiled
class _Once(torch.autograd.Function):
    """A gradient as it is, attached to an input that it depends on."""

    @staticmethod
    def forward(ctx, anchor, gradient):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise NotImplementedError(
            "flex_attention is differentiable once: its gradients have no derivative. Use dense attention for a "
            "second derivative, or detach the first"
        )
