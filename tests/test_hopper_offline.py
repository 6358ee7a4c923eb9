"""The forward kernel for Hopper compiles without a GPU, fits, spills no registers, and its wgmma run asynchronously."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch

from flexpress.codegen.device import offline
from flexpress.codegen.device.cache import load_module, store
from flexpress.codegen.gpus import SHARED_MEMORY
from flexpress.codegen.plan.extras import Extras
from flexpress.codegen.plan.forward import Blocks, Cache, ForwardCase, Options
from flexpress.codegen.plan.geometry import geometry_of
from flexpress.codegen.plan.hopper_forward import UNEVEN_BYTES, enough_heads, fits, heads_per_group, is_uneven, plan_hopper_forward
from flexpress.codegen.run.preview import Compilation, hopper_compilation
from flexpress.codegen.text.render import render
from flexpress.commands.recipes import make
from flexpress.graphs.bound_mods import graph_and_values
from support.assembly import assert_packed_as_read
from support.tritons import PINNED, chosen, features, last_stage

FLOAT8 = dict(dtype="float8_e4m3fn", extras=Extras(scales="qkv", out="bfloat16"))
MLA = dict(head_dim=192, head_dim_v=128)
CASES = {
    "plain d128 bf16": ("plain", {}),
    "plain d64 fp16": ("plain", dict(head_dim=64, dtype="float16")),
    "causal d128 bf16": ("causal", {}),
    "causal d64 bf16": ("causal", dict(head_dim=64)),
    "causal d128 fp16, one list": ("causal", dict(dtype="float16", separate_full=False)),
    "causal d128 bf16, full blocks past the end": ("causal", dict(interior=False)),
    "alibi causal d128 bf16": ("alibi causal", dict(output_rows=True)),
    "alibi causal d64 fp16": ("alibi causal", dict(output_rows=True, head_dim=64, dtype="float16")),
    "softcap causal d128 bf16": ("softcap causal", {}),
    "softcap d64 bf16": ("softcap", dict(head_dim=64)),
    "softcap d64 bf16, few tiles": ("softcap", dict(head_dim=64, few_tiles=True)),
    "relative_bias d128 bf16": ("relative_bias", {}),
    "t5_bias d128 bf16": ("t5_bias", {}),
    "document d128 bf16": ("document", {}),
    "plain d256 bf16": ("plain", dict(head_dim=256)),
    "causal d256 bf16": ("causal", dict(head_dim=256)),
    "alibi causal d256 bf16": ("alibi causal", dict(head_dim=256)),
    "softcap sliding_window d256 bf16": ("softcap sliding_window", dict(head_dim=256)),
    "plain d192x128 bf16": ("plain", MLA),
    "causal d192x128 bf16": ("causal", MLA),
    "causal d136x72 fp16": ("causal", dict(head_dim=136, head_dim_v=72, dtype="float16")),
    "alibi causal d192x128 bf16": ("alibi causal", MLA),
    "softcap sliding_window d192x128 bf16": ("softcap sliding_window", MLA),
    "causal d128 bf16, starts": ("causal", dict(starts=True)),
    "causal d64 bf16, starts": ("causal", dict(head_dim=64, starts=True)),
    "alibi document d128 bf16, max, scale, starts": ("alibi document", dict(output_max=True, scale_is_positive=False, starts=True)),
    "causal d256 bf16, starts": ("causal", dict(head_dim=256, starts=True)),
    "causal d128 bf16, blocks elsewhere": ("causal", dict(shifted=True)),
    "alibi causal d128 bf16, blocks elsewhere": ("alibi causal", dict(output_rows=True, shifted=True)),
    "t5_bias document d128 bf16, blocks elsewhere": ("t5_bias document", dict(shifted=True)),
    "causal d128 bf16, an entry a sequence": ("causal", dict(starts=True, cache=Cache())),
    "causal d128 bf16, pages of 8": ("causal", dict(starts=True, cache=Cache(8))),
    "causal d64 fp16, entries anywhere": ("causal", dict(head_dim=64, dtype="float16", starts=True, cache=Cache(located=True))),
    "alibi causal d128 bf16, pages of 64": ("alibi causal", dict(starts=True, cache=Cache(64, offsets=True))),
    "causal d192x128 bf16, pages of 32": ("causal", dict(**MLA, starts=True, cache=Cache(32))),
    "plain d128 bf16, groups": ("plain", dict(cache=Cache(64, grouped=True))),
    "alibi d128 bf16, groups": ("alibi", dict(cache=Cache(16, grouped=True))),
    "softcap sliding_window d128 fp16, groups": ("softcap sliding_window", dict(dtype="float16", cache=Cache(64, grouped=True))),
    "plain d64 bf16, groups": ("plain", dict(head_dim=64, cache=Cache(64, grouped=True))),
    "plain d256 bf16, groups": ("plain", dict(head_dim=256, cache=Cache(64, grouped=True))),
    "plain d32 bf16": ("plain", dict(head_dim=32)),
    "alibi causal d96 bf16": ("alibi causal", dict(output_rows=True, head_dim=96)),
    "plain d80 fp16, groups": ("plain", dict(head_dim=80, dtype="float16", cache=Cache(64, grouped=True))),
    "softcap causal d192 bf16": ("softcap causal", dict(head_dim=192)),
    "alibi causal d192 bf16": ("alibi causal", dict(output_rows=True, head_dim=192)),
    "causal d160 bf16, pages of 16": ("causal", dict(head_dim=160, starts=True, cache=Cache(16))),
    "causal d128 fp8": ("causal", dict(FLOAT8)),
    "alibi document d128 fp8": ("alibi document", dict(FLOAT8, output_max=True)),
    "alibi causal d192x128 fp8": ("alibi causal", dict(FLOAT8, **MLA, output_max=True)),
    "document d144x128 fp8, in float32": (
        "document",
        dict(FLOAT8, head_dim=144, head_dim_v=128, extras=Extras(scales="qkv", out="float32")),
    ),
    "causal d256 bf16, that was fp8": ("causal", dict(head_dim=256, extras=Extras(scales="qkv"))),
    "plain d80x32 fp8, sinks": ("plain", dict(FLOAT8, head_dim=80, head_dim_v=32, extras=Extras("bfloat16", scales="v", out="float32"))),
}

BY_ALL = {"plain d128 bf16", "causal d128 bf16", "causal d64 bf16, starts"}  # Tritons to the end

# Bytes spilled at most, under any Triton that is tested: numbers that are read once a tile, outside the loop over full blocks. Above 128
# columns some are read inside: one or two a step with Triton 3.7 and ALiBi
SPILLED = {
    "plain d64 fp16": 8,
    "alibi causal d128 bf16": 24,
    "document d128 bf16": 24,
    "t5_bias d128 bf16": 8,
    "softcap sliding_window d256 bf16": 24,
    "causal d128 bf16, starts": 32,
    "alibi causal d128 bf16, blocks elsewhere": 24,
    "t5_bias document d128 bf16, blocks elsewhere": 68,
    "causal d256 bf16": 24,
    "alibi causal d256 bf16": 24,
    "alibi causal d192x128 bf16": 36,
    "softcap sliding_window d192x128 bf16": 24,
    "alibi document d128 bf16, max, scale, starts": 60,
    "causal d256 bf16, starts": 36,
    "causal d192x128 bf16": 24,
    "causal d128 bf16, pages of 8": 48,
    "causal d192x128 bf16, pages of 32": 16,
    "alibi causal d128 bf16, pages of 64": 12,
    "softcap causal d192 bf16": 80,
    "alibi causal d192 bf16": 112,
    "causal d160 bf16, pages of 16": 44,
    "plain d256 bf16, groups": 16,
    "softcap sliding_window d128 fp16, groups": 32,
    "causal d128 fp8": 16,
    "alibi document d128 fp8": 96,
    "alibi causal d192x128 fp8": 28,
    "document d144x128 fp8, in float32": 24,
}

NOTHING = torch.zeros(4096, dtype=torch.int32)
WIDTH = 5
SNIPPETS = {  # what Gluon spells in its own way, results that do not vary along every index, and helpers
    "no index": (lambda s, b, h, m, n: torch.zeros_like(s), lambda b, h, m, n: torch.ones_like(m, dtype=torch.bool)),
    "rows": (lambda s, b, h, m, n: m * 0.5, lambda b, h, m, n: m > WIDTH),
    "columns": (lambda s, b, h, m, n: NOTHING[n - m] * 0.5 + n, lambda b, h, m, n: n < 100),
    "choices": (
        lambda s, b, h, m, n: torch.where(m >= n, torch.minimum(s, torch.sigmoid(s)), -float("inf")) + torch.where(n > 3, 1.0, 0.0),
        lambda b, h, m, n: h < 3,
    ),
    # a quotient of every score is hundreds of instructions for each: rows have the same spelling
    "integers": (lambda s, b, h, m, n: s + (m // WIDTH) + (m - n) % 7 + torch.sign(m - n) + ((n - m) << (n % 3)) + (m - n) ** 2, None),
    "casts": (lambda s, b, h, m, n: s.to(torch.bfloat16).float() + (m > n).float() + s.half() + s.int() + m // 3.0, None),
}


def compilation(case: str) -> Compilation:
    recipes, details = CASES[case]
    return hopper_compilation("sm_90", *make(*recipes.split()), **details)


FEW = chosen({case: [compilation(case).spec] for case in CASES}, sorted(BY_ALL))


@functools.cache
def compiled(case: str) -> offline.Compiled:
    return compilation(case).compile()


def parameters(case: str) -> list[str]:
    """The names of the kernel's parameters."""
    spec = compilation(case).spec
    return getattr(load_module(store(render(spec), spec)), spec.template).arg_names


@pytest.mark.parametrize("case", CASES)
def test_compiles_and_fits(case, every_kernel):
    if last := last_stage(case, FEW, BY_ALL, every_kernel):
        compilation(case).compile(last)
        return
    made = compiled(case)
    assert made.shared <= SHARED_MEMORY["sm_90"]
    assert made.spilled <= SPILLED.get(case, 0)
    assert made.warnings == ()  # C75xx: wgmma that wait for one another
    assert_packed_as_read(made, 2 if "groups" in case else 4)


def test_few_cases_have_what_any_case_has():
    has = {case: features(compilation(case).spec) for case in CASES}
    found = set().union(*(has[case] for case in FEW))
    assert found == set().union(*has.values()) and set(FEW) >= BY_ALL
    assert len(FEW) == len(set(FEW)) < len(CASES) / 2
    assert ("hopper_forward", "SHIFTED", "True") in found and ("hopper_forward", "score", "t5_bias") in found
    assert any(feature[2:] == ("reads", ("kv_idx",)) for feature in found)


def test_table_of_spills_names_cases():
    assert set(SPILLED) | BY_ALL <= set(CASES)


def test_warnings_of_the_assembler_are_seen():
    plan = hopper_compilation("sm_90", head_dim=64)
    flags = {**dict(plan.spec.flags), "CONSUMER_REGISTERS": 104}
    made = replace(plan, spec=replace(plan.spec, flags=tuple(flags.items()))).compile()
    assert made.spilled > 0
    assert any("C75" in warning for warning in made.warnings)


@pytest.mark.parametrize("name", SNIPPETS)
def test_every_kind_of_snippet_compiles(name, every_kernel):
    """What Gluon refuses shows before LLVM."""
    kernel = hopper_compilation("sm_90", *SNIPPETS[name], head_dim=64)
    assert kernel.compile(None if every_kernel else "ttgir").warnings == ()


def test_arguments_of_tiles_that_begin_where_a_tensor_says():
    """The output's address after its descriptor, RANGES and the output's strides after the lists' widths, `starts` after the lists."""
    names = parameters("causal d128 bf16, starts")
    assert names[:7] == ["desc_k", "desc_v", "desc_q", "desc_o", "O", "LSE", "COUNTER"]
    lists = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "starts"]
    assert names[-11:] == ["mask_columns", "full_mask_columns", "RANGES", "stride_oz", "stride_oh", "stride_om", *lists]
    without = parameters("causal d128 bf16")
    assert [name for name in names if name not in ("O", "RANGES", "stride_oz", "stride_oh", "stride_om", "starts")] == without


@pytest.mark.parametrize("case", ["causal d128 bf16, starts", "causal d256 bf16, starts"])
def test_tiles_that_begin_where_a_tensor_says_end_there(case):
    """Rows from the next tile's first on are stored neither by TMA nor by pointers, and lists hold positions."""
    recipes, details = CASES[case]
    text = render(hopper_compilation("sm_90", *make(*recipes.split()), **{**details, "output_max": True}).spec)
    producer, consumer, kernel = (text.index(f"def {name}(") for name in ("forward_producer", "forward_consumer", "hopper_forward"))
    assert re.findall(r"gl.load\((starts.*)\)", text) == re.findall(r"gl.load\((starts.*)\)", text[producer:consumer])
    assert re.findall(r"gl.load\((starts.*)\)", text) == ["starts + q_block", "starts + q_block + 1"]
    assert not re.search(r"\* BLOCK_M|cdiv|block \* ", text[producer:kernel])
    assert re.findall(r"gl.store\((\w+) .*mask=(.*)\)", text[consumer:kernel]) == [("LSE", "offs_m < end_row"), ("MAX", "offs_m < end_row")]
    assert re.findall(r"\n {8}(\S.*)\n {12}tma_store", text) == ["if end_row - first_row >= 64:"]
    assert text.count("tma_store(") == 1
    assert "mask=(row < end)[:, None] & (column < WIDTH - COLUMN)" in text


def test_arguments_of_a_kernel_that_reads_a_cache():
    """Numbers of sequences after the output's strides, where queries and keys are after `starts`; and nothing else is new."""
    names = parameters("alibi causal d128 bf16, pages of 64")
    numbers, places = ["SEQUENCES", "MAX_Q", "stride_pages"], ["sequences", "cu_q", "kv_lens", "q_offsets", "pages"]
    at = names.index("stride_om")
    assert names[at + 1 : at + 4] == numbers
    at = names.index("starts")
    assert names[at + 1 : at + 6] == places
    without = parameters("causal d128 bf16, starts")
    assert [n for n in names if n not in (*numbers, *places, "SM_SCALE", "ptr_slopes")] == without


def described(plan) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the blocks that TMA copies, in the order of the kernel's parameters."""
    found = [p.type.rsplit(":", 1)[1] for p in plan.spec.parameters if p.type.startswith("desc:")]
    return tuple(tuple(map(int, block.split("x"))) for block in found)


@pytest.mark.parametrize("size, pieces", [(0, 1), (8, 16), (64, 2), (128, 1), (384, 1)])
def test_a_block_of_keys_comes_page_by_page(size, pieces):
    """64 columns at a time if a block has more pages than one, as a block's columns beyond 64 lie behind all its rows."""
    plan = plan_hopper_forward(
        ForwardCase(torch.bfloat16, 128, 64, use_tma=True, blocks=Blocks(True, 128, 128, starts=True), cache=Cache(size)), None, None
    )
    keys = ((128, 128), (128, 64)) if pieces == 1 else ((size, 64),) * 2
    assert described(plan) == (*keys, (64, 128), (64, 64))
    text = render(plan.spec)
    assert f"gl.static_range({pieces})" in text or pieces == 1
    assert text.count("zero_rows(") == 2  # of V, past a sequence's end


def test_output_of_a_cut_tile_leaves_16_bytes_at_a_time():
    stores = re.findall(r"(@%p\d+)? st\.global\.(\S+)", compiled("causal d64 bf16, starts").assembly["ptx"])
    assert all(predicate for predicate, _ in stores)
    assert sum(width == "v4.b32" for _, width in stores) == 2 * 64 * 64 * 2 // 16 // 128  # of two consumers of 128 threads


def geometry(shape=(2, 4, 256, 128), strides=None):
    shapes = (shape,) * 3
    own = strides or tuple(torch.empty(shape, device="meta").stride())
    rest = tuple(torch.empty(shape, device="meta").stride())
    return geometry_of(2, shapes, (own, rest, rest), rest)


def test_what_it_serves():
    case = ForwardCase(torch.bfloat16, 128, 128, use_tma=True)
    assert fits(case, geometry()) is None
    assert fits(case._replace(blocks=Blocks(True, 256, 128)), geometry()) is None
    assert "float32" in fits(case._replace(dtype=torch.float32), geometry())
    assert "17 to 256" in fits(case._replace(d_qk=16), geometry())
    assert "17 to 256" in fits(case._replace(d_v=264), geometry())
    assert "TMA" in fits(case, geometry(strides=(4 * 256 * 128, 256 * 128, 1, 256)))
    assert "TMA" in fits(case, geometry(strides=(4 * 256 * 129, 256 * 129, 129, 1)))
    assert "TMA" in fits(case, geometry(strides=(0, 256 * 128, 128, 1)))
    assert "PRESCALE_QK" in fits(case._replace(options=Options(prescale_qk=True)), geometry())
    assert "num_warps" in fits(case._replace(options=Options(tile=(("num_warps", 8),))), geometry())
    for sizes in ((64, 128), (128, 64)):
        assert "block sizes" in fits(case._replace(blocks=Blocks(True, *sizes)), geometry())
    assert fits(case._replace(blocks=Blocks(True, 128, 256, starts=True)), geometry()) is None
    assert "must have 128 queries" in fits(case._replace(blocks=Blocks(True, 256, 128, starts=True)), geometry())
    starts = case._replace(blocks=Blocks(True, 128, 128, starts=True))
    assert all(fits(starts._replace(cache=Cache(size)), geometry()) is None for size in (0, 8, 16, 32, 64, 128, 256, 384))
    assert all("pages have" in fits(starts._replace(cache=Cache(size)), geometry()) for size in (1, 4, 24, 96, 192))
    wide = case._replace(d_qk=256, d_v=256)  # 64 keys at a time
    assert fits(wide._replace(blocks=Blocks(True, 128, 64)), geometry()) is None
    assert "block sizes" in fits(wide._replace(blocks=Blocks(True, 64, 64)), geometry())
    assert "33 to 256" in fits(starts._replace(d_v=32, cache=Cache()), geometry())
    with pytest.raises(ValueError, match="17 to 256"):
        hopper_compilation(head_dim=16)
    with pytest.raises(ValueError, match="sm_90"):
        hopper_compilation("sm_100")


@pytest.mark.parametrize(
    "d_qk, d_v, block_n, columns, output_in_q",
    [
        (17, 32, 128, (32, 32), False),
        (64, 64, 128, (64, 64), False),
        (96, 128, 128, (128, 128), False),
        (129, 65, 128, (64, 128), True),
        (192, 128, 128, (64, 128), True),
        (192, 64, 128, (64, 64), False),
        (192, 129, 128, (64, 64), True),
        (193, 128, 64, (256, 128), False),
        (128, 256, 64, (128, 256), False),
        (256, 256, 64, (256, 256), True),
    ],
)
def test_what_is_copied_at_once(d_qk, d_v, block_n, columns, output_in_q):
    """129 to 192 columns come in slices of 64: no product is with padding."""
    plan = plan_hopper_forward(ForwardCase(torch.bfloat16, d_qk, d_v, use_tma=True), None, None)
    assert described(plan) == ((block_n, columns[0]), (block_n, columns[1]), (64, columns[0]), (64, columns[1]))
    assert plan.tile.output_in_q == output_in_q


def test_mods_read_once_a_tile_and_what_keys_have_in_the_producer():
    """Slopes and the ids of rows once a tile, ids of keys by the producer, which hands them out with K; nothing else is read."""
    text = render(hopper_compilation("sm_90", *make("alibi", "document")).spec)
    text = re.sub(r"^    ptr_.*", "", text, flags=re.M)
    folding, producer, consumer, kernel = (
        text.index(f"def {name}(") for name in ("fold_scores", "forward_producer", "forward_consumer", "hopper_forward")
    )
    loop = text.index("for i in range", consumer)
    assert re.findall(r"gl.load\((ptr_\w+) \+ (\w+)", text[consumer:loop]) == [("ptr_slopes", "h"), ("ptr_ids", "m")]
    assert re.findall(r"(\w+) = gl.load\(ptr_ids \+ n", text[producer:consumer]) == ["mask_1"]
    assert "shared.mask_1.index(slot).store(mask_1)" in text[producer:consumer]
    assert re.findall(r"mask_1 = shared.mask_1.*\n\s+(\w+ = warpgroup_mma_wait)", text[loop:]) == 2 * ["qk = warpgroup_mma_wait"]
    assert "ptr_" not in text[folding:producer] + re.sub(r"ptr_\w+,", "", text[loop:kernel])


@pytest.mark.parametrize(
    "heads, kv_bytes, enough, expected",
    [(64, 2 << 20, 64, 16), (64, 2 << 20, 4, 4), (64, 1 << 30, 4, 1), (3, 1, 4, 3), (17, 2 << 20, 16, 9)],
)
def test_heads_per_group(heads, kv_bytes, enough, expected):
    assert heads_per_group(heads, kv_bytes, enough) == expected


@pytest.mark.parametrize(
    "heads, tiles, listed, expected",
    [
        (64, 1, False, 32),
        (64, 4, False, 8),
        (64, 512, False, 1),
        (512, 4, True, 32),
        (64, 128, True, 4),
        (16, 32, True, 16),
        (17, 32, True, 4),
    ],
)
def test_few_heads_are_worked_on_at_a_time(heads, tiles, listed, expected):
    assert enough_heads(heads, tiles, listed) == expected


@pytest.mark.parametrize(
    "recipe, expected", [("causal", False), ("document", True), ("jagged_window", True), ("graph_neighbors", False), ("plain", False)]
)
def test_masks_with_long_rows_anywhere(recipe, expected):
    """Those that read what positions have of their own; an element of every pair says nothing of it."""
    mask = make(recipe)[1]
    assert is_uneven(graph_and_values(mask, "mask") if mask else None) is expected


@pytest.mark.parametrize("tiles, kv_bytes, expected", [(128, 8 << 20, 16), (32, 2 << 20, 64), (512, 32 << 20, 4), (512, 8 << 20, 4)])
def test_many_heads_are_worked_on_where_long_rows_lie_anywhere(tiles, kv_bytes, expected):
    """16 tiles for each of 128 multiprocessors, if their K and V are not too many."""
    assert heads_per_group(64, kv_bytes, enough_heads(64, tiles, True, True), UNEVEN_BYTES) == expected


@pytest.mark.parametrize(
    "to_the_end, head_dim, dtype, of_bias, recipe, spilled",
    [
        (True, 128, "bfloat16", "bfloat16", "plain", 0),
        (False, 128, "bfloat16", "float32", "causal", 24),
        (False, 64, "float16", "float16", "causal", 24),
        (False, 64, "bfloat16", "float32", "plain", 8),
    ],
)
def test_elements_of_every_score(to_the_end, head_dim, dtype, of_bias, recipe, spilled, every_kernel):
    """They come to registers by ldmatrix: no thread reads memory in the loop."""
    bias = torch.empty(16, 4096, 4096, dtype=getattr(torch, of_bias), device="meta")
    kernel = hopper_compilation(
        "sm_90", lambda s, b, h, m, n: s + bias[h, m, n], make(recipe)[1], head_dim=head_dim, dtype=dtype, output_rows=True
    )
    assert kernel.spec.flag["ELEMENTS"].dtype == bias.dtype
    if not (every_kernel or PINNED and to_the_end):
        kernel.compile("ttgir")
        return
    made = kernel.compile()
    assert made.shared <= SHARED_MEMORY["sm_90"] and made.spilled <= spilled and made.warnings == ()
    assert ("ldmatrix" in made.assembly["ptx"]) == (of_bias != "float32")
