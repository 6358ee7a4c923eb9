"""The forward kernel for Hopper compiles without a GPU, fits, spills no registers, and its wgmma run asynchronously."""

from __future__ import annotations

import functools
import re
import struct

import pytest
import torch

from flexpress.codegen import offline
from flexpress.codegen.cuda import argument_format
from flexpress.codegen.forward_plan import Blocks, ForwardCase, Options, geometry_of
from flexpress.codegen.hopper_plan import fits, heads_per_group
from flexpress.codegen.preview import hopper_compilation
from flexpress.codegen.tiles import SHARED_MEMORY
from flexpress.recipes import make

CASES = {
    "plain d128 bf16": ("plain", {}),
    "plain d64 fp16": ("plain", dict(head_dim=64, dtype="float16")),
    "plain d96 bf16": ("plain", dict(head_dim=96)),
    "plain d128x64 bf16": ("plain", dict(head_dim_v=64)),
    "causal d128 bf16": ("causal", {}),
    "causal d64 bf16": ("causal", dict(head_dim=64)),
    "causal d128 fp16, one list": ("causal", dict(dtype="float16", separate_full=False)),
    "causal d128 bf16, full blocks past the end": ("causal", dict(interior=False)),
    "causal d128 bf16, blocks of 256": ("causal", dict(block_size=(256, 256))),
    "alibi causal d128 bf16": ("alibi causal", {}),
    "alibi causal d64 fp16": ("alibi causal", dict(head_dim=64, dtype="float16")),
    "alibi causal d128 bf16, max, scale": ("alibi causal", dict(output_max=True, scale_is_positive=False)),
    "softcap causal d128 bf16": ("softcap causal", {}),
    "softcap causal d128 fp16": ("softcap causal", dict(dtype="float16")),
    "softcap d64 bf16": ("softcap", dict(head_dim=64)),
    "relative_bias d128 bf16": ("relative_bias", {}),
    "relative_bias d64 fp16": ("relative_bias", dict(head_dim=64, dtype="float16")),
    "relative_bias causal d128 bf16": ("relative_bias causal", {}),
    "document d128 bf16": ("document", {}),
    "document d80 fp16": ("document", dict(head_dim=80, dtype="float16")),
    "softcap sliding_window d64 bf16": ("softcap sliding_window", dict(head_dim=64)),
}

# Bytes spilled at most, under any Triton that is tested: numbers that are read once a tile, outside the loop over full blocks
SPILLED = {
    "alibi causal d128 bf16": 24,
    "alibi causal d128 bf16, max, scale": 24,
    "document d128 bf16": 24,
    "document d80 fp16": 24,
    "relative_bias causal d128 bf16": 96,
}

NOTHING = torch.zeros(4096, dtype=torch.int32)
WIDTH = 5
SCORES = {  # what Gluon spells in its own way, results that do not vary along every index, and helpers
    "no index": lambda s, b, h, m, n: torch.zeros_like(s),
    "rows": lambda s, b, h, m, n: m * 0.5,
    "columns": lambda s, b, h, m, n: NOTHING[n - m] * 0.5 + n,
    "choices": lambda s, b, h, m, n: torch.where(m >= n, torch.minimum(s, torch.sigmoid(s)), -float("inf")) + torch.where(n > 3, 1.0, 0.0),
    "integers": lambda s, b, h, m, n: s + ((n - m) // WIDTH) + (m - n) % 7 + torch.sign(m - n) + ((n - m) << (n % 3)) + (m - n) ** 2,
    "casts": lambda s, b, h, m, n: s.to(torch.bfloat16).float() + (m > n).float() + s.half() + s.int() + s // 3.0,
}
MASKS = {
    "rows": lambda b, h, m, n: m > WIDTH,
    "columns": lambda b, h, m, n: n < 100,
    "heads": lambda b, h, m, n: h < 3,
    "no index": lambda b, h, m, n: torch.ones_like(m, dtype=torch.bool),
}


@functools.cache
def compiled(case: str) -> offline.Compiled:
    recipes, details = CASES[case]
    return hopper_compilation("sm_90", *make(*recipes.split()), **details).compile()


@pytest.mark.parametrize("case", CASES)
def test_compiles_and_fits(case):
    made = compiled(case)
    assert made.shared <= SHARED_MEMORY["sm_90"]
    assert made.spilled <= SPILLED.get(case, 0)
    assert made.warnings == ()  # C75xx: wgmma that wait for one another


def test_table_of_spills_names_cases():
    assert set(SPILLED) <= set(CASES)


def test_warnings_of_the_assembler_are_seen():
    plan = hopper_compilation("sm_90", head_dim=64)
    flags = {**dict(plan.spec.flags), "CONSUMER_REGISTERS": 104}
    spec = type(plan.spec)(plan.spec.template, plan.spec.mods, tuple(flags.items()), plan.spec.backend)
    made = type(plan)(plan.target, spec, plan.tensors, plan.floats, plan.constants).compile()
    assert made.spilled > 0
    assert any("C75" in warning for warning in made.warnings)


@pytest.mark.parametrize("mod", [*(("score", name) for name in SCORES), *(("mask", name) for name in MASKS)], ids=" ".join)
def test_every_kind_of_snippet_compiles(mod):
    kind, name = mod
    mods = (SCORES[name], None) if kind == "score" else (None, MASKS[name])
    assert hopper_compilation("sm_90", *mods).compile().warnings == ()


@pytest.mark.parametrize("case", ["plain d128 bf16", "alibi causal d64 fp16"])
def test_arguments_are_packed_as_the_kernel_reads_them(case):
    """struct's fields are as long as the .param lines of the PTX; four tensor maps are among them."""
    made = compiled(case)
    sizes = []
    for line in re.search(r"\.entry \w+\((.*?)\)", made.assembly["ptx"], re.S)[1].split(","):
        tensor_map = re.search(r"\.b8 \w+\[(\d+)\]", line)
        sizes.append(int(tensor_map[1]) if tensor_map else int(re.search(r"\.param \.\w(\d+)", line)[1]) // 8)
    fields = argument_format([t for t in made.signature.values() if t != "constexpr"])
    assert [struct.calcsize(field) for field in fields] == sizes
    assert fields.count("128s") == 4


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
    assert "33 to 128" in fits(case._replace(d_qk=192), geometry())
    assert "TMA" in fits(case, geometry(strides=(4 * 256 * 128, 256 * 128, 1, 256)))
    assert "TMA" in fits(case, geometry(strides=(4 * 256 * 129, 256 * 129, 129, 1)))
    assert "TMA" in fits(case, geometry(strides=(0, 256 * 128, 128, 1)))
    assert "PRESCALE_QK" in fits(case._replace(options=Options(prescale_qk=True)), geometry())
    assert "num_warps" in fits(case._replace(options=Options(tile=(("num_warps", 8),))), geometry())
    for sizes in ((64, 128), (128, 64)):
        assert "block sizes" in fits(case._replace(blocks=Blocks(True, *sizes)), geometry())
    with pytest.raises(ValueError, match="33 to 128"):
        hopper_compilation(head_dim=256)
    with pytest.raises(ValueError, match="sm_90"):
        hopper_compilation("sm_100")


@pytest.mark.parametrize("heads, kv_bytes, expected", [(64, 2 << 20, 16), (64, 1 << 30, 1), (3, 1, 3), (17, 2 << 20, 9)])
def test_heads_per_group(heads, kv_bytes, expected):
    assert heads_per_group(heads, kv_bytes) == expected
