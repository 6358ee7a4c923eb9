"""Every template compiles for GPUs that are not here, fits their shared memory and spills no registers.

A case of every kernel compiles for all of them, the others for one each and where they spill. Two other Tritons compile for Hopper alone
(support.tritons).
compile_sweep.py draws any number of others.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch
import triton
from compile_sweep import failures
from triton.backends.nvidia.compiler import ptx_get_version

from flexpress import create_block_mask, flex_attention, mods, printed_kernels, templates
from flexpress.codegen.device import offline
from flexpress.codegen.device.compiler import newer_assembler
from flexpress.codegen.gpus import SHARED_MEMORY, architecture
from flexpress.codegen.mod.symbolic.long_dots import same_where_seen
from flexpress.codegen.plan.extras import Extras
from flexpress.codegen.plan.forward import Options
from flexpress.codegen.run.imagined import architecture_for
from flexpress.codegen.run.preview import (
    Compilation,
    as_bfloat16_compilation,
    backward_compilations,
    cached_statistics_compilations,
    compilation,
    decode_compilations,
    exchange_compilations,
    hopper_backward_compilations,
    hopper_compilation,
    merge_parts_compilation,
    preview,
    shared_tables_compilation,
    shared_tiles_compilation,
    statistics_compilations,
    tangent_compilations,
    update_cache_compilation,
    values_by_keys_compilation,
)
from flexpress.codegen.run.preview_masks import (
    block_lists_compilation,
    block_starts_compilation,
    dense_mask_compilation,
    evaluate_compilation,
    mask_compilations,
)
from flexpress.codegen.text.parsing import without_comments
from flexpress.codegen.text.render import render
from flexpress.commands.recipes import RECIPES, make
from support.assembly import assert_packed_as_read
from support.tritons import NEWER, OLDER, PINNED, by_pinned, chosen, further, last_stage
from support.varlen import score_mods

FLOAT8 = Extras(scales="qkv", out="bfloat16")
FORWARD = {  # every branch of the template and every row of the tile tables, not their product
    "plain d64 bf16": ("plain", dict(head_dim=64)),
    "plain d128 fp16": ("plain", dict(dtype="float16")),
    "plain d64 fp32": ("plain", dict(head_dim=64, dtype="float32")),
    "plain d256 fp32": ("plain", dict(head_dim=256, dtype="float32")),
    "causal d128 bf16": ("causal", {}),
    "causal d128 bf16 by pointers": ("causal", dict(use_tma=False)),
    "causal d128 fp32": ("causal", dict(dtype="float32")),
    "causal d128 fp16, full blocks past the end": ("causal", dict(dtype="float16", interior=False)),
    "causal d256 bf16": ("causal", dict(head_dim=256)),
    "causal d192x128 bf16": ("causal", dict(head_dim=192, head_dim_v=128)),
    "alibi causal d128 bf16": ("alibi causal", {}),
    "alibi causal d80 fp16": ("alibi causal", dict(head_dim=80, dtype="float16", output_rows=True)),
    "softcap d64 bf16": ("softcap", dict(head_dim=64)),
    "softcap sliding_window d128 bf16": ("softcap sliding_window", {}),
    "relative_bias d64 fp16": ("relative_bias", dict(head_dim=64, dtype="float16")),
    "document d128 bf16": ("document", {}),
    "document d128 bf16, blocks with starts": ("document", dict(starts=True)),
    "alibi causal d128 bf16, blocks elsewhere": ("alibi causal", dict(shifted=True)),
    "alibi causal d64 tf32, other options": (
        "alibi causal",
        dict(
            head_dim=64,
            dtype="float32",
            output_max=True,
            separate_full=False,
            transposed=True,
            options=Options(prescale_qk=True, float32_precision="tf32"),
        ),
    ),
    "plain d128 fp8": ("plain", dict(dtype="float8_e4m3fn", extras=FLOAT8)),
    "alibi causal d128 fp8": ("alibi causal", dict(dtype="float8_e4m3fn", extras=FLOAT8._replace(sinks="bfloat16"), output_max=True)),
    "softcap document d80x64 fp8": (
        "softcap document",
        dict(dtype="float8_e4m3fn", head_dim=80, head_dim_v=64, extras=FLOAT8._replace(scales="v")),
    ),
    "causal d64 fp8 by pointers": (
        "causal",
        dict(dtype="float8_e4m3fn", head_dim=64, use_tma=False, extras=FLOAT8._replace(out="float32")),
    ),
}


def everything(b, h, q_idx, kv_idx):
    """Zones of every kind, floats, rounding, quotients and remainders by numbers that a kernel is told, and choices between numbers."""
    near = torch.where(FLAGS[q_idx], 3, 7) * (q_idx // WIDTH) >= kv_idx % WIDTH
    far = torch.exp2(WEIGHTS[h, kv_idx] * 0.5) + torch.sin(q_idx * 0.1) < q_idx.float() / 100
    return torch.where(h < 2, near, far & (OFFSETS[b, q_idx] - kv_idx <= WIDTH))


FLAGS, WEIGHTS, OFFSETS, WIDTH = torch.ones(4096, dtype=torch.bool), torch.ones(16, 4096), torch.ones(4, 4096, dtype=torch.int32), 5

OTHERS = {
    "block_status causal": lambda t: mask_compilations(t, make("causal")[1])["status"],
    "block_status document, ragged": lambda t: mask_compilations(t, make("document")[1], (48, 80))["status"],
    "block_status of a mask with everything": lambda t: mask_compilations(t, everything)["status"],
    "block_status document, starts": lambda t: mask_compilations(t, make("document")[1], starts=True)["status"],
    "block_zones document, starts": lambda t: mask_compilations(t, make("document")[1], starts=True)["zones"],
    "block_zones document": lambda t: mask_compilations(t, make("document")[1], (64, 256))["zones"],
    "block_zones of a mask with everything": lambda t: mask_compilations(t, everything)["zones"],
    "block_lists prefix_lm": lambda t: mask_compilations(t, make("prefix_lm")[1])["lists"],
    "block_lists document, transposed": lambda t: mask_compilations(t, make("document")[1])["transposed_lists"],
    "block_lists of a mask with everything": lambda t: mask_compilations(t, everything)["lists"],
    "block_lists document, starts": lambda t: mask_compilations(t, make("document")[1], starts=True)["lists"],
    "block_starts": lambda t: block_starts_compilation(t),
    "block_starts sequences": lambda t: block_starts_compilation(t, True),
    "block_lists": lambda t: block_lists_compilation(t),
    "block_lists, one list": lambda t: block_lists_compilation(t, separate_full=False),
    "dense_mask global_sliding": lambda t: dense_mask_compilation(t, make("global_sliding")[1]),
    "dense_mask of a score_mod": lambda t: dense_mask_compilation(t, make("t5_bias")[0], "score"),
    "evaluate softcap": lambda t: evaluate_compilation(t, make("softcap")[0], precision="bfloat16"),
    "evaluate prefix_lm": lambda t: evaluate_compilation(t, make("prefix_lm")[1], "mask"),
    "merge_parts": lambda t: merge_parts_compilation(t),
    "merge_parts d80 fp32": lambda t: merge_parts_compilation(t, "float32", 80),
    "as_bfloat16": as_bfloat16_compilation,
    "values_by_keys": lambda t: values_by_keys_compilation(t),
    "values_by_keys d64": lambda t: values_by_keys_compilation(t, 64),
    "values_by_keys d256": lambda t: values_by_keys_compilation(t, 256),
    "values_by_keys d80, any strides": lambda t: values_by_keys_compilation(t, 80, unit=False, aligned=()),
    "shared_tiles": lambda t: shared_tiles_compilation(t),
    "shared_tables": lambda t: shared_tables_compilation(t),
    "shared_tables, ragged": lambda t: shared_tables_compilation(t, ragged=True, offsets=True),
    "update_cache": lambda t: update_cache_compilation(t, located=True),
    "update_cache, turned, ragged, in pages": lambda t: update_cache_compilation(t, ragged=True, page_size=16, rope_dim=128),
    "update_cache, fp8, pairs beside each other": lambda t: update_cache_compilation(
        t, cache_dtype="float8_e4m3fn", rope_dim=96, interleaved=True, offsets=True
    ),
    "copy_blocks": lambda t: exchange_compilations(t)["copy_blocks"],
    "copy_blocks d192x128 fp32, any strides": lambda t: exchange_compilations(t, "float32", 192, aligned=False)["copy_blocks"],
    "add_blocks": lambda t: exchange_compilations(t)["add_blocks"],
    "add_blocks d576x512": lambda t: exchange_compilations(t, "bfloat16", 576, 512)["add_blocks"],
}

BACKWARD = {  # each is three kernels
    "plain d64 bf16": ("plain", dict(head_dim=64, whole=False)),
    "causal d128 bf16": ("causal", {}),
    "causal d128 bf16 by pointers": ("causal", dict(use_tma=False, whole=False, interior=False)),
    "causal d256 bf16": ("causal", dict(head_dim=256, lse_gradient=True, whole=False)),
    "causal d192x128 bf16": ("causal", dict(head_dim=192, head_dim_v=128)),
    "causal d128 fp32": ("causal", dict(dtype="float32", separate_full=False)),
    "document d128 bf16, blocks with starts": ("document", dict(starts=True)),
    "alibi causal d128 bf16, blocks elsewhere": ("alibi causal", dict(shifted=True)),
    "plain d256 fp32": ("plain", dict(dtype="float32", head_dim=256)),
    "softcap causal d128 bf16": ("softcap causal", {}),
    "learned alibi causal d80 fp16": ("alibi causal", dict(head_dim=80, dtype="float16", captured=True)),
    "learned relative_bias d64 bf16": ("relative_bias", dict(head_dim=64, captured=True, whole=False)),
    "learned relative_bias d64 bf16, deterministic": ("relative_bias", dict(head_dim=64, captured=True, deterministic=True)),
}

TANGENTS = {  # each is three kernels
    "plain d64 bf16": ("plain", dict(head_dim=64)),
    "causal d128 bf16": ("causal", {}),
    "learned alibi causal d128 fp16, any lse": (
        "alibi causal",
        dict(dtype="float16", captured=True, lse_gradient=True, separate_full=False),
    ),
    "learned relative_bias d64 bf16, deterministic": ("relative_bias", dict(head_dim=64, captured=True, deterministic=True)),
    "softcap document d64 bf16, blocks with starts": ("softcap document", dict(head_dim=64, starts=True)),
    "alibi causal d80 fp32, blocks elsewhere": ("alibi causal", dict(head_dim=80, dtype="float32", shifted=True)),
    "causal d192x128 bf16": ("causal", dict(head_dim=192, head_dim_v=128)),
}

DECODE = {  # recipes, and what differs
    "plain d128 bf16": ("plain", {}),
    "plain d64 fp16": ("plain", dict(dtype="float16", head_dim=64)),
    "plain d256 bf16": ("plain", dict(head_dim=256)),
    "plain d128 fp32": ("plain", dict(dtype="float32")),
    "plain d192x128 bf16, no parts": ("plain", dict(head_dim=192, head_dim_v=128, split=False, lengths=True)),
    "alibi causal d128 bf16, pages of 16": ("alibi causal", dict(page_size=16, lengths=True, ragged=True, by_tokens=True, q_len=64)),
    "alibi d128 bf16, pages of 128": ("alibi", dict(page_size=128, lengths=True, balanced=True)),
    "softcap sliding_window d128 bf16, groups of 12": ("softcap sliding_window", dict(group=12, q_len=4, output_max=True)),
    "plain d128 bf16, fp8 in pages of 64": ("plain", dict(kv_dtype="float8_e4m3fn", page_size=64, lengths=True, balanced=True)),
    "relative_bias d80 bf16, located": ("relative_bias", dict(head_dim=80, located=True, lengths=True)),
}

STATISTICS = {  # each is two kernels
    "plain d64 fp32": ("plain", dict(dtype="float32", head_dim=64)),
    "alibi causal d128 bf16": ("alibi causal", {}),
    "softcap document d80 fp16": ("softcap document", dict(dtype="float16", head_dim=80, separate_full=False)),
    "causal d128 bf16, other options": ("causal", dict(transposed=True, options=Options(prescale_qk=True))),
}

CACHED_STATISTICS = {  # each is two kernels
    "plain d128 bf16": ("plain", {}),
    "alibi causal d128 bf16, pages of 16": ("alibi causal", dict(page_size=16, ragged=True, by_tokens=True, q_len=64)),
    "softcap sliding_window d128 bf16, fp8 in pages of 64": (
        "softcap sliding_window",
        dict(kv_dtype="float8_e4m3fn", page_size=64, group=12, q_len=4),
    ),
    "relative_bias d80 bf16, located": ("relative_bias", dict(head_dim=80, located=True)),
    "causal d576 bf16": ("causal", dict(head_dim=576, head_dim_v=512, group=16, q_len=40)),
}

# Default tiles that spill, and how many bytes at most, under any Triton that is tested. No other may.
SPILLED = {
    ("sm_80", "plain d64 bf16"): 40,
    ("sm_80", "causal d256 bf16"): 16,
    ("sm_80", "softcap d64 bf16"): 16,
    ("sm_80", "relative_bias d64 fp16"): 96,
    ("sm_80", "alibi causal d64 tf32, other options"): 8,
    ("sm_80", "alibi causal d128 bf16, pages of 16: decode"): 12,
    ("sm_80", "update_cache"): 40,
    ("sm_80", "plain d128 bf16: combine"): 8,
    ("sm_80", "softcap sliding_window d128 bf16, groups of 12: combine"): 8,
    ("sm_80", "causal d128 bf16: tangent dkv"): 8,
    ("sm_80", "learned alibi causal d128 fp16, any lse: tangent"): 376,
    ("sm_80", "learned relative_bias d64 bf16: dq"): 544,  # lengths that are no whole blocks: an address for each of 32 positions
    ("sm_90", "alibi causal d128 bf16, blocks elsewhere: dkv"): 520,
    ("sm_90", "causal d128 bf16: tangent"): 440,
    ("sm_90", "causal d128 bf16 by pointers: dkv"): 552,
    ("sm_90", "learned alibi causal d128 fp16, any lse: tangent"): 436,
    ("sm_90", "plain d128 fp32: decode"): 360 if NEWER else 8,  # the same instructions in an order that takes all registers, not half
    ("sm_100", "causal d192x128 bf16: dkv"): 704,
    ("sm_100", "plain d128 fp32: decode"): 296 if NEWER else 8,
    ("sm_100", "causal d128 fp32"): 8,
    ("sm_100", "block_status document, ragged"): 16,
    ("sm_100", "block_status of a mask with everything"): 16,
}

# The same for the backward kernels, which hold up to two accumulators: on the H100 these tiles are faster than any that do not spill.
BACKWARD_SPILLED = {"sm_80": 340, "sm_90": 424, "sm_100": 568}


@functools.cache
def kernel_of(target: str, case: str) -> Compilation:
    name, _, kernel = case.rpartition(": ")
    if kernel in ("delta", "dkv", "dq"):
        recipes, details = BACKWARD[name]
        return backward_compilations(target, *make(*recipes.split()), **details)[kernel]
    if kernel.startswith("tangent"):
        recipes, details = TANGENTS[name]
        return tangent_compilations(target, *make(*recipes.split()), **details)[
            kernel.removeprefix("tangent ") if " " in kernel else kernel
        ]
    if kernel in ("decode", "combine"):
        recipes, details = DECODE[name]
        return decode_compilations(target, *make(*recipes.split()), **details)[kernel]
    if case in OTHERS:
        return OTHERS[case](target)
    if kernel in ("cached rows", "cached columns"):
        recipes, details = CACHED_STATISTICS[name]
        return cached_statistics_compilations(target, *make(*recipes.split()), **details)[kernel.split()[1]]
    if kernel in ("rows", "columns"):
        recipes, details = STATISTICS[name]
        return statistics_compilations(target, *make(*recipes.split()), **details)[kernel]
    recipes, details = FORWARD[case]
    return compilation(target, *make(*recipes.split()), **details)


CASES = [
    *FORWARD,
    *OTHERS,
    *(f"{case}: {kernel}" for case in BACKWARD for kernel in ("delta", "dkv", "dq")),
    *(f"{case}: decode" for case in DECODE),
    *(f"{case}: {kernel}" for case in TANGENTS for kernel in ("tangent", "tangent dkv", "tangent dq")),
    "plain d128 bf16: combine",
    "softcap sliding_window d128 bf16, groups of 12: combine",
    *(f"{case}: {kernel}" for case in STATISTICS for kernel in ("rows", "columns")),
    *(f"{case}: {kernel}" for case in CACHED_STATISTICS for kernel in ("cached rows", "cached columns")),
]


@functools.cache
def compiled(target: str, case: str) -> offline.Compiled:
    return kernel_of(target, case).compile()


FP8_TARGETS = ("sm_90", "sm_100")
EVERYWHERE = {
    "causal d128 bf16",
    "plain d128 bf16: decode",
    "plain d128 bf16: combine",
    "evaluate softcap",
    "block_lists",
    "block_starts",
    "update_cache",
    "copy_blocks",
    "add_blocks",
    "merge_parts",
    "as_bfloat16",
    "values_by_keys",
    "shared_tables, ragged",
    "shared_tiles",
    "dense_mask global_sliding",
    "block_zones document",
    "block_status document, ragged",
    "causal d128 bf16: delta",
    "causal d128 bf16: dkv",
    "causal d128 bf16: dq",
    "alibi causal d128 bf16: rows",
    "alibi causal d128 bf16, pages of 16: cached rows",
    "alibi causal d128 bf16, pages of 16: cached columns",
    "alibi causal d128 bf16: columns",
    "causal d128 bf16: tangent",
    "causal d128 bf16: tangent dkv",
    "causal d128 bf16: tangent dq",
}
ELSEWHERE = {f"alibi causal d128 bf16, blocks elsewhere{kernel}" for kernel in ("", ": dkv", ": dq")}
ON_HOPPER = {
    "causal d128 fp16, full blocks past the end",
    "softcap causal d128 bf16: dq",
    "block_lists document, transposed",
    "alibi causal d128 fp8",
    "causal d64 fp8 by pointers",
}


def targets_of(case: str) -> list[str]:
    if case in ON_HOPPER:
        return ["sm_90"]
    if "fp8" in case:
        return list(FP8_TARGETS)
    number = CASES.index(case)
    on_hopper = case in ELSEWHERE  # test_blocks_elsewhere_pass_triton has more targets
    return [
        t
        for i, t in enumerate(offline.TARGETS)
        if case in EVERYWHERE or number % 4 == i or (t, case) in SPILLED or on_hopper and t == "sm_90"
    ]


@pytest.mark.parametrize("case", ["plain d128 fp8", "softcap document d80x64 fp8"])
def test_hopper_multiplies_8_bits_twice(case):
    """Scores, and weights by values, which lie as the instructions want them: no byte of V moves through shared memory."""
    ptx = compiled("sm_90", case).assembly["ptx"]
    products = re.findall(r"wgmma\.mma_async\S+", ptx)
    assert len(products) >= 6 and all(p.endswith(".f32.e4m3.e4m3") for p in products)
    assert "st.shared.b8" not in ptx


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"] if PINNED else ["sm_90"])
def test_kernels_that_begin_early_wait_first_of_all(target):
    """For the end of the kernel before, whose results they may read. Only then may the next one begin."""
    for case in ("plain d128 bf16: combine", "causal d128 bf16"):
        ptx = compiled(target, case).assembly["ptx"]
        first = [line.strip() for line in re.search(r"\.visible \.entry [^{]*\{(.*)", ptx, re.DOTALL)[1].splitlines()][1:3]
        early = case.endswith("combine") and target != "sm_80"
        assert (first == ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"]) == early
        assert ptx.count("griddepcontrol") == 2 * early


BY_ALL = {"causal d128 bf16", "causal d128 bf16: dkv", "causal d128 bf16: dq", "plain d128 bf16: decode", *ON_HOPPER}
FEW = chosen({case: [kernel_of("sm_90", case).spec] for case in CASES}, sorted(EVERYWHERE | ELSEWHERE | ON_HOPPER))
PAIRS = [(t, c) for t in offline.TARGETS for c in CASES if t in targets_of(c)]


def test_every_template_is_compiled_for_every_target():
    compiled = {(kernel_of(t, case).spec.template, t) for case in CASES for t in targets_of(case)}
    named = {template for template, _ in compiled}
    printed = {path.name.removesuffix(".py.jinja") for path in Path(templates.__file__).parent.glob("*.py.jinja")}
    assert named == {name for name in printed if not name.startswith("hopper_")}
    assert compiled == {(template, t) for template in named for t in offline.TARGETS}


@pytest.mark.parametrize("target, case", PAIRS)
def test_compiles_and_fits(target, case, every_kernel):
    if not (every_kernel or PINNED or target == "sm_90"):  # for Hopper, until its own passes have run
        if target != targets_of(case)[0] or "sm_90" in targets_of(case):
            pytest.skip("this Triton compiles it for Hopper")
        if case not in FEW:
            pytest.skip("its features are those of other kernels, which this Triton compiles")
        kernel_of("sm_90", case).compile("ttgir")
        return
    if PINNED and target != "sm_90":
        to_the_end = [case] if further(target, CASES.index(case)) and case in EVERYWHERE or (target, case) in SPILLED else []
    else:
        to_the_end = EVERYWHERE | ELSEWHERE | ON_HOPPER if PINNED else BY_ALL
    if last := last_stage(case, FEW, to_the_end, every_kernel):
        kernel_of(target, case).compile(last)
        return
    made = compiled(target, case)
    assert made.shared <= SHARED_MEMORY[architecture_for(target)]
    if made.spilled is not None:
        allowed = SPILLED.get((target, case), BACKWARD_SPILLED[target] if case.endswith((": dkv", ": dq")) else 0)
        assert made.spilled <= allowed, f"{made.spilled} bytes spilled with {kernel_of(target, case).constants}"
        assert_packed_as_read(made)


STRUCTURES = [  # of the forward kernel: what stands between the two products, which Triton overlaps
    dict(recipes=recipes, use_tma=use_tma, scale_is_positive=positive, **lists)
    for recipes, positive in (("plain", True), ("causal", True), ("causal", False), ("softcap causal", True))
    for use_tma in (None, False)
    for lists in (
        [dict(separate_full=full, interior=interior) for full, interior in itertools.product((True, False), repeat=2)] + [dict(starts=True)]
        if recipes != "plain"
        else [{}]
    )
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_every_structure_of_the_forward_kernel_passes_triton(structure):
    details = {"head_dim": 64, **structure}
    compilation("sm_90", *make(*details.pop("recipes").split()), **details).compile("ttgir")


@pytest.mark.parametrize("number", range(8 if PINNED else 4))
def test_kernels_drawn_at_random_pass_triton(number):
    _, failed = failures(int(OLDER), number)
    assert not failed


@pytest.mark.parametrize(
    "separate_full, target", [(False, "sm_90"), *((True, t) for t in (["sm_80", "sm_90", "gfx942"] if PINNED else ["sm_90"]))]
)
@pytest.mark.parametrize("score", ["rows", "columns", "bias"])
def test_blocks_elsewhere_pass_triton(score, target, separate_full):
    """Loads of what mods capture, by positions that a load gave: Triton pipelines one of them, not both in one step."""
    make_mod, learned = score_mods(1, 2, 1024, "cpu")[score]
    call, details = (make_mod(*learned), mods.causal), dict(head_dim=64, shifted=True, separate_full=separate_full)
    compilation(target, *call, **details).compile("ttgir")
    for name, kernel in backward_compilations(target, *call, **details, captured=True, whole=False).items():
        if name != "delta":
            kernel.compile("ttgir")


QUERY_ROWS, KEY_ROWS = (torch.ones(*shape, 64, dtype=torch.bfloat16, requires_grad=True) for shape in ((4, 16, 64), (4, 64)))


def with_rows(score, b, h, q_idx, kv_idx):
    """A dot product of 64 elements."""
    return score + 0.2 * torch.dot(QUERY_ROWS[b, h, q_idx].float(), KEY_ROWS[b, kv_idx].float())


def with_rows_of_tokens(sequence):
    """The same in packed sequences, where a load says which row is read."""

    def packed(score, b, h, q_idx, kv_idx):
        return with_rows(score, same_where_seen(sequence[q_idx], sequence[kv_idx]), h, q_idx, kv_idx)

    return packed


@pytest.mark.parametrize("target", offline.TARGETS if PINNED else ["sm_90"])
def test_dot_products_of_rows_compile(target, every_kernel):
    """Forward and decode for every target, the backward pass for one: products take shared memory, and their sums registers."""
    last = by_pinned(every_kernel)
    call = with_rows, mods.causal
    made = [compilation(target, *call), decode_compilations(target, *call, lengths=True, ragged=True)["decode"]]
    if target == "sm_90":
        made += [backward_compilations(target, *call, captured=True)[name] for name in ("dkv", "dq")]
    for kernel in made:
        found = kernel.compile(last)
        assert last or found.shared <= SHARED_MEMORY[architecture_for(target)]
        assert (found.spilled or 0) <= (60 if NEWER else 0), (kernel.constants, found.spilled)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"] if PINNED else ["sm_90"])
def test_tangents_of_dot_products_compile(target, every_kernel):
    """All kernels of second derivatives for one target, the tangent alone for the others."""
    last, made = by_pinned(every_kernel), tangent_compilations(target, with_rows, mods.causal, head_dim=64)
    for name in made if target == "sm_90" or every_kernel else ["tangent"]:
        found = made[name].compile(last)
        assert last or found.shared <= SHARED_MEMORY[architecture_for(target)]
        assert (found.spilled or 0) <= (60 if NEWER else 0), (name, found.spilled)


@pytest.mark.parametrize("target", ["sm_80", "gfx942"] if PINNED else ["sm_90"])
def test_dot_products_of_rows_that_a_load_gives_pass_triton(target):
    call, details = (with_rows_of_tokens(torch.zeros(4096, dtype=torch.int32)), make("document")[1]), dict(head_dim=64, starts=True)
    backward = backward_compilations(target, *call, **details, captured=True)
    for kernel in (compilation(target, *call, **details), backward["dkv"], backward["dq"]):
        kernel.compile("ttgir")


def test_vectors_compile(every_kernel):
    """Twelve numbers of each query and each key."""
    call = make("invariant_points")
    found = compilation("sm_90", *call, head_dim=64).compile(by_pinned(every_kernel))
    assert (found.spilled or 0) <= (8 if NEWER else 0)
    compilation("gfx942", *call, head_dim=64).compile("ttgir")
    with pytest.raises(ValueError, match="vectors of captured tensors take more registers"):
        hopper_compilation("sm_90", *call)
    with pytest.raises(ValueError, match="vectors of captured tensors take more registers"):
        hopper_backward_compilations(*call)
    with pytest.raises(ValueError, match="a further product of matrices, which this kernel has not"):
        hopper_backward_compilations(with_rows)


def test_table_of_spills_names_cases():
    assert {target for target, _ in SPILLED} <= set(offline.TARGETS)
    assert {case for _, case in SPILLED} <= set(CASES)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_tma_loads_from_hopper_on(target):
    case = "causal d128 bf16"
    assert dict(kernel_of(target, case).spec.flags)["USE_TMA"] == (target != "sm_80")
    assert ("async_tma_copy" in kernel_of(target, case).compile("ttgir").assembly["ttgir"]) == (target != "sm_80")
    assert "async_tma_copy" not in kernel_of(target, f"{case} by pointers").compile("ttgir").assembly["ttgir"]


def test_a_tma_load_is_one_instruction_and_a_tensor_map():
    made = compiled("sm_90", "causal d128 bf16")
    assert "cp.async.bulk.tensor" in made.assembly["ptx"]
    assert_packed_as_read(made, 2)


@pytest.mark.skipif(not PINNED, reason="a print is the same under every Triton")
@pytest.mark.parametrize("backend", ["cuda", "hip", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_prints(recipe, backend):
    """`render` parses what it prints, and a kernel says which mod stands in it."""
    text = render(preview(*make(recipe), backend=backend))
    mod = next((m for m in make(recipe) if m), None)
    assert mod is None or f"_mod: {mod.__name__}" in text


@pytest.mark.parametrize(
    "recipes, dtype, head_dim", [("plain", "float32", 64), ("alibi causal", "bfloat16", 64), ("document", "float16", 80)]
)
def test_preview_is_what_a_call_prints(recipes, dtype, head_dim):
    score_mod, mask_mod = make(*recipes.split())
    q = torch.randn(1, 16, 128, head_dim, dtype=getattr(torch, dtype))
    mask = create_block_mask(mask_mod, None, None, 128, 128, device="cpu") if mask_mod else None
    flex_attention(q, q, q, score_mod=score_mod, block_mask=mask)
    printed = printed_kernels()[-1].read_text(encoding="utf-8")
    spec = preview(score_mod, mask_mod, dtype, head_dim, backend="cpu")
    assert without_comments(printed) == without_comments(render(spec))


@pytest.mark.gpu
@pytest.mark.parametrize("recipes", ["plain", "alibi causal", "relative_bias"])
def test_preview_is_what_a_call_on_a_gpu_prints(recipes):
    with torch.device("cuda"):
        score_mod, mask_mod = make(*recipes.split())
    q = torch.randn(4, 16, 4096, 128, dtype=torch.bfloat16, device="cuda")
    mask = create_block_mask(mask_mod, None, None, 4096, 4096) if mask_mod else None
    target = architecture("hip" if torch.version.hip else "cuda", torch.cuda.get_device_capability())
    for backend, imagine in (("TRITON", compilation), ("GLUON", hopper_compilation))[: 2 if target == "sm_90" else 1]:
        flex_attention(q, q, q, score_mod=score_mod, block_mask=mask, kernel_options={"BACKEND": backend})
        printed = {without_comments(path.read_text(encoding="utf-8")) for path in printed_kernels()}  # maybe for an earlier test
        assert without_comments(render(imagine(target, score_mod, mask_mod).spec)) in printed


def test_ptx_is_for_the_assembler_that_reads_it(monkeypatch):
    """Whatever TRITON_PTXAS_PATH becomes between two compilations: torch.compile may set it in its process."""
    newer = newer_assembler(90)
    monkeypatch.setenv("TRITON_PTXAS_PATH", triton.knobs.nvidia.ptxas.path)
    written = re.search(r"\.version (\d+)\.(\d+)", compilation("sm_90", head_dim=64).compile().assembly["ptx"])
    assert int(written[1] + written[2]) == ptx_get_version(newer.version)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"] if PINNED else ["sm_90"])
def test_the_assembler_never_sees_what_it_does_not_wrap(target):
    """It takes neg.s16 and abs.s16 of -32768 for 32768 where int32 comes next."""
    x = torch.zeros(8, dtype=torch.int16)

    def far(b, h, q_idx, kv_idx):
        return (~x[q_idx] + 1 > kv_idx) & (torch.abs(x[kv_idx]) > q_idx) & (x[kv_idx] * -1 > h)

    ptx = compilation(target, None, far).compile().assembly["ptx"]
    assert "add.s16" in ptx and "max.s16" in ptx
    assert not re.search(r"(neg|abs)\.s16", ptx)


def test_unknown_target():
    with pytest.raises(ValueError, match="sm_80, sm_90, sm_100, gfx942, got 'sm_70'"):
        compilation("sm_70")
    with pytest.raises(ValueError, match="'cpu' compiles nothing"):
        compilation("cpu").compile()


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_products_that_decide_are_rounded(target):
    """The compiler makes multiply-adds of them and 0, not of one of them and the other (see decisions.py)."""
    x, y = torch.rand(300), torch.rand(300)

    def turned_left(b, h, q_idx, kv_idx):
        return x[q_idx] * y[kv_idx] - x[kv_idx] * y[q_idx] >= 0

    added = re.findall(r"fma\.rn\.f32[^;]*, (\S+);", dense_mask_compilation(target, turned_left).compile("ptx").assembly["ptx"])
    assert added and set(added) == {"0f00000000"}
