"""A call from top to bottom: arguments, mods, blocks, kernels.

q, k, v, options    checked, once for all that look alike            arguments.py, checks.py
score_mod, mask_mod traced once; what they capture is read anew      codegen/mod/bind.py
block lists         which blocks of a mask are computed              codegen/run/masks.py
forward             the first kernel that serves; what it needs      codegen/run/forward.py, forward_kernels.py
                      its text: mods lowered into a template         codegen/plan/, codegen/text/, templates/
                      compiled and launched                          codegen/device/, codegen/run/launch.py
backward            from what autograd kept                          autograd.py, codegen/run/backward.py
"""

from __future__ import annotations

from functools import partial

import torch

from flexpress import checks
from flexpress.arguments import block_size, checked, read_mask
from flexpress.autograd import differentiable
from flexpress.mask_mods import same_mod

from .codegen.mod.bind import bind
from .codegen.mod.capture import name_of
from .codegen.mod.tensors import check_inputs, check_kind, read_captured
from .codegen.run.call import Bound
from .codegen.run.forward import forward
from .codegen.run.masks import automatic_lists

_autocasts = torch._C._is_any_autocast_enabled
_bound = tuple.__new__  # Bound's own is a function in Python, which is a part of what a call takes


def bound(
    query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, starts_of=None, read=read_captured
) -> Bound:
    """The arguments of flex_attention, checked, its mods bound, and its block lists.

    starts_of   (a block's queries, a block's keys) -> where the blocks of a mask_mod that is passed begin (see BlockGrid)
    read        makes what a bound mod captures readable, in place
    """
    q, k, v = check_inputs(query, key, value)
    if _autocasts():
        q, k, v = checks.autocast(q, k, v)
    inputs = checked(q, k, v, enable_gqa)
    options = checks.DEFAULT if kernel_options is None else checks.parse_options(kernel_options)
    scale = inputs.scale if scale is None else checks.check_scale(scale, inputs.head_dim)
    score = mask = lists = transposed = None
    if score_mod is not None:
        score = bind(score_mod, "score")
        if score[1]:
            read(score, inputs.device, "score_mod")
    if block_mask is not None:
        if mask_mod is not None and not same_mod(block_mask.mask_mod, mask_mod, "mask"):
            raise ValueError(
                f"block_mask was made of {name_of(block_mask.mask_mod)}, not of the mask_mod {name_of(mask_mod)}; pass one of "
                "them, or and_masks(...) of both as mask_mod"
            )
        lists, transposed, mask_mod = read_mask(block_mask, q, k, inputs, options)
    if mask_mod is not None:
        mask = bind(mask_mod, "mask")
        if mask[1]:
            read(mask, inputs.device, "mask_mod")
    if mask is not None and lists is None:
        size = block_size(options)
        starts = starts_of(*size) if starts_of else ()
        make = partial(automatic_lists, extents=inputs.extents, device=inputs.device, size=size, starts=starts)
        lists, transposed = make(mask), partial(make, transposed=True)
    return _bound(Bound, (q, k, v, inputs, scale, score, mask, lists, transposed, options))


def attend(call: Bound, output_max: bool, deterministic: bool) -> tuple:
    """out, lse and max_scores (None if they are not wanted)."""
    try:
        if torch.is_grad_enabled():
            q, k, v, _, _, score, _, _, _, _ = call
            captured = score[1][: len(score[0].tensors)] if score else ()
            if q.requires_grad or k.requires_grad or v.requires_grad or any([t.requires_grad for t in captured]):
                return differentiable(call, captured, output_max, deterministic or torch.are_deterministic_algorithms_enabled())
        return forward(call, output_max=output_max)[:3]
    except RuntimeError:
        for name, tensor in (("query", call.q), ("key", call.k), ("value", call.v)):  # one whose looks passed, but without address?
            check_kind(name, tensor)
        raise
