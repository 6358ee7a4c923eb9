"""Flexpress prints attention kernels: score_mod and mask_mod as Python functions, a readable Triton kernel for each, run at once.

from flexpress import create_block_mask, flex_attention
from flexpress.mods import alibi, sliding_window

mask = create_block_mask(sliding_window(1024), None, None, S, S, device="cuda")
out = flex_attention(q, k, v, score_mod=alibi(slopes), block_mask=mask)
"""

# The files of this folder:
#
# Attention
#     attention, call                  flex_attention, and a call of it from top to bottom
#     arguments, checks                tensors and masks as users pass them; one clear error for what is wrong
#     plain_arguments                  flags and devices as users pass them
#     scales, sinks, dropout, float8   what changes the softmax, or elements, beside mods
#     return_aux, probabilities        what is returned beside the output
#     autograd, derivatives            gradients; forward mode and second derivatives
#     problem, transformed, mapped     the same under transforms of torch.func
#     merge                            attention from its parts
#
# Masks
#     mask_mods, mask_creation            mask_mods, and masks made of them
#     block_mask, mask_attributes, plot   BlockMask, what users read of it, its picture
#     mask_lists, given_lists             what it is made of: lists that were made, or are a user's
#     block_lists, slices                 block lists made safe, turned and regridded; parts of a mask
#     foreign_masks, opened_masks         torch's masks; masks taken apart for torch's compiler
#
# Packed sequences
#     varlen, packed_call            varlen_attention, and its calls of flex_attention's kernels
#     packing                        where tokens belong, and mods on packed positions
#     packed_blocks, packed_checks   their blocks, their errors
#
# Caches and serving
#     cached, cached_arguments, cached_problem        cached_attention, its arguments, checked
#     cached_calls, cached_mods                       how kernels take it; mods of positions
#     cached_probabilities, cache_checks              what return_aux tells of it; errors
#     kv_cache, rope, rotation                        writing a cache, turning by positions
#     pages, splits                                   pages of sequences, keys in parts
#     shared_prefix, shared_attention                 sequences that begin with the same pages
#     sequences, step_view, step_tensors, token_ids   the batch of a serving step
#     serving, attention_info, layer_step             what a serving stack calls
#
# Several GPUs
#     dtensors, parts   DTensors over batch and heads; sequences over ranks are in distributed/
#
# As torch sees calls
#     operators, probability_operators, mask_operators          operators of torch.library
#     cache_operators, serving_ops                              those of caches
#     recorded, programs                                        calls that become operators, and what of them is text
#     in_graph, dynamo                                          public functions in what torch.compile traces
#     custom_ops                                                how operators are made: lists that may be empty, and fakes
#     pickling                                                  what torch.load must be told of
#
# Other libraries' functions
#     sdpa, flash   torch's scaled_dot_product_attention, flash_attn_triton
#
# Beside calls
#     explain, inspection                                   why a kernel serves; caches and prints
#     precompile, cached_prepare                            compiling ahead
#     export, export_cached, exported_files                 kernels in a file of their own
#     cli, __main__, demo, doctor, recipes, cache_command   the command line
#     versions                                              what this runs with

from pathlib import Path

if not Path(__file__).with_name("codegen").is_dir():
    # the sources, not an installed package: codegen, mods and templates lie beside this folder, not in it
    __path__.append(str(Path(__file__).parent.parent))

from flexpress.versions import check_versions

check_versions()

from torch.nn.attention.flex_attention import FlexKernelOptions

from flexpress import cache_operators as _cache_operators  # noqa: F401
from flexpress import flash, flash_attn
from flexpress import mask_operators as _mask_operators  # noqa: F401
from flexpress import operators as _operators  # noqa: F401
from flexpress import probability_operators as _probability_operators  # noqa: F401
from flexpress import serving_ops as _serving_ops  # noqa: F401
from flexpress.attention import flex_attention
from flexpress.block_mask import BlockMask
from flexpress.cached import cached_attention
from flexpress.dropout import dropout_mask
from flexpress.explain import explain
from flexpress.export import export
from flexpress.export_cached import export_cached
from flexpress.inspection import CacheInfo, cache_clear, cache_dir, cache_info, printed_kernels
from flexpress.kv_cache import update_cache
from flexpress.mask_creation import create_block_mask, create_mask
from flexpress.mask_mods import and_masks, noop_mask, or_masks
from flexpress.merge import merge_attention
from flexpress.mods import MaskMod, ScoreMod
from flexpress.pages import OutOfPages, PageAllocator
from flexpress.pickling import safe_globals
from flexpress.plot import plot_mask
from flexpress.precompile import Precompiled, precompile, precompile_cached, wait_for_kernels
from flexpress.return_aux import AuxOutput, AuxRequest, AuxStatistics
from flexpress.rope import Llama3Scaling, YarnScaling, rope_table
from flexpress.rotation import apply_rope
from flexpress.sdpa import scaled_dot_product_attention
from flexpress.shared_prefix import SharedPrefix, SharedTables
from flexpress.splits import split_attention
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
