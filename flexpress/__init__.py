"""Flexpress prints attention kernels: score_mod and mask_mod as Python functions, a readable Triton kernel for each, run at once.

from flexpress import create_block_mask, flex_attention
from flexpress.mods import alibi, sliding_window

mask = create_block_mask(sliding_window(1024), None, None, S, S, device="cuda")
out = flex_attention(q, k, v, score_mod=alibi(slopes), block_mask=mask)
"""

# The files of this folder are what users import or run, its folders what these are made of. Each imports what stands above it
# (tests/test_house.py).
#
#     inputs/        what users pass, read and checked
#     graphs/        public functions in graphs of torch
#     masks/         masks, and their lists of blocks
#     calls/         a call of attention, from its arguments to kernels and gradients
#     caches/        attention over caches, and what writes them
#     distributed/   DTensors, and sequences over several GPUs
#     steps/         the batch of a serving step
#     operators/     operators of torch.library
#     exporting/     kernels in a file of their own
#
#     attention, varlen                 flex_attention and varlen_attention
#     sdpa, flash                       torch's scaled_dot_product_attention, flash_attn_triton
#     sequences, serving, serving_ops   what a serving stack calls
#     plot, pickling                    pictures of masks; what torch.load must be told of
#     explain, inspection               why a kernel serves; caches and prints
#     precompile                        compiling ahead
#     versions                          what this runs with
#     __main__                          python -m flexpress
#
#     flash_attn/    the functions of flash_attn
#     commands/      the command line
#     integrations/  Hugging Face's transformers, torch's own flex_attention

from pathlib import Path

if not Path(__file__).with_name("codegen").is_dir():
    # the sources, not an installed package: codegen, mods and templates lie beside this folder, not in it
    __path__.append(str(Path(__file__).parent.parent))

from flexpress.versions import check_versions

check_versions()

from torch.nn.attention.flex_attention import FlexKernelOptions

from flexpress import flash, flash_attn
from flexpress import serving_ops as _serving_ops  # noqa: F401
from flexpress.attention import flex_attention
from flexpress.caches.cached import cached_attention
from flexpress.caches.kv_cache import update_cache
from flexpress.caches.pages import OutOfPages, PageAllocator
from flexpress.caches.rope import Llama3Scaling, YarnScaling, rope_table
from flexpress.caches.rotation import apply_rope
from flexpress.caches.shared_prefix import SharedPrefix, SharedTables
from flexpress.caches.splits import split_attention
from flexpress.calls.merge import merge_attention
from flexpress.calls.return_aux import AuxOutput, AuxRequest, AuxStatistics
from flexpress.explain import explain
from flexpress.exporting.export import export
from flexpress.exporting.export_cached import export_cached
from flexpress.inputs.dropout import dropout_mask
from flexpress.inspection import CacheInfo, cache_clear, cache_dir, cache_info, printed_kernels
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.mask_creation import create_block_mask, create_mask
from flexpress.masks.mask_mods import and_masks, noop_mask, or_masks
from flexpress.mods import MaskMod, ScoreMod
from flexpress.operators import attention_operators as _operators  # noqa: F401
from flexpress.operators import cache_operators as _cache_operators  # noqa: F401
from flexpress.operators import mask_operators as _mask_operators  # noqa: F401
from flexpress.operators import probability_operators as _probability_operators  # noqa: F401
from flexpress.pickling import safe_globals
from flexpress.plot import plot_mask
from flexpress.precompile import Precompiled, precompile, precompile_cached, wait_for_kernels
from flexpress.sdpa import scaled_dot_product_attention
from flexpress.varlen import varlen_attention

from .codegen.mod.errors import ModError, RenderError
from .codegen.run.evaluate import evaluate_mod
from .codegen.version import VERSION as __version__

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "AuxStatistics",
    "BlockMask",
    "CacheInfo",
    "FlexKernelOptions",
    "Llama3Scaling",
    "MaskMod",
    "ModError",
    "OutOfPages",
    "PageAllocator",
    "Precompiled",
    "RenderError",
    "ScoreMod",
    "SharedPrefix",
    "SharedTables",
    "YarnScaling",
    "__version__",
    "and_masks",
    "apply_rope",
    "cache_clear",
    "cache_dir",
    "cache_info",
    "cached_attention",
    "create_block_mask",
    "create_mask",
    "dropout_mask",
    "evaluate_mod",
    "explain",
    "export",
    "export_cached",
    "flash",
    "flash_attn",
    "flex_attention",
    "merge_attention",
    "noop_mask",
    "or_masks",
    "plot_mask",
    "precompile",
    "precompile_cached",
    "printed_kernels",
    "rope_table",
    "safe_globals",
    "scaled_dot_product_attention",
    "split_attention",
    "update_cache",
    "varlen_attention",
    "wait_for_kernels",
]
