"""Kernels with sinks and dropout compile for every kind of GPU; sinks make none of them spill.

Each is compiled for Hopper and one other target in turn: test_offline.py compiles its template for all, and what these kernels have beside
it is the same in all of them. Few reach the assembler. --every-kernel: all of them do, for all targets.
"""

from __future__ import annotations

import pytest
import torch

from flexpress.codegen.device.offline import TARGETS
from flexpress.codegen.plan.extras import ORDINARY, Extras
from flexpress.codegen.plan.forward import Blocks, Cache
from flexpress.codegen.run.preview import (
    backward_compilations,
    compilation,
    decode_compilations,
    hopper_backward_compilations,
    hopper_compilation,
    statistics_compilations,
    tangent_compilations,
)
from flexpress.commands.recipes import make
from flexpress.mods import alibi, causal
from support.tritons import PINNED, further, my_turn

SINKS = Extras("bfloat16")
KINDS = TARGETS if PINNED else ["sm_90"]  # of GPUs
PORTABLE = {
    "forward": lambda target, extras: compilation(target, None, causal, head_dim=64, output_rows=True, output_max=True, extras=extras),
    "delta": lambda target, extras: backward_compilations(target, None, causal, head_dim=64, extras=extras)["delta"],
    "decode": lambda target, extras: decode_compilations(target, None, causal, head_dim=64, split=False, extras=extras)["decode"],
    "rows": lambda target, extras: statistics_compilations(target, None, causal, head_dim=64, extras=extras)["rows"],
    "combine": lambda target, extras: decode_compilations(target, None, causal, head_dim=64, split=True, extras=extras)["combine"],
}
DROPPING = {
    "forward": lambda target, extras: compilation(target, None, causal, head_dim=64, extras=extras),
    **{
        name: lambda target, extras, name=name: backward_compilations(target, None, causal, head_dim=64, extras=extras)[name]
        for name in ("dkv", "dq")
    },
    **{
        f"tangent {name}": lambda target, extras, name=name: tangent_compilations(target, None, causal, head_dim=64, extras=extras)[name]
        for name in ("tangent", "dkv", "dq")
    },
}
DROPPING_TO_THE_END = {("dkv", "sm_90"), ("dq", "gfx942"), ("tangent dkv", "sm_100")}  # the kernels' lines that drop are the same
HOPPER = {
    "forward": lambda extras: hopper_compilation("sm_90", None, causal, output_rows=True, output_max=True, extras=extras),
    "forward, raw sums": lambda extras: hopper_compilation("sm_90", alibi(torch.rand(16)), causal, head_dim=64, extras=extras),
    "delta": lambda extras: hopper_backward_compilations(None, causal, extras=extras)["delta"],
    "delta, raw tops": lambda extras: hopper_backward_compilations(alibi(torch.rand(16)), causal, raw_tops=True, extras=extras)["delta"],
    "forward, cache": lambda extras: hopper_compilation("sm_90", None, causal, cache=Cache(16), starts=True, extras=extras),
}


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("kernel", PORTABLE)
def test_portable_kernels(kernel, target, every_kernel):
    number = list(PORTABLE).index(kernel)
    last = stage_in_turn(target, number, PINNED and (target == "sm_90" or number % 2 == 0), every_kernel)
    _compare(PORTABLE[kernel](target, SINKS), PORTABLE[kernel](target, ORDINARY), last, every_kernel)


@pytest.mark.parametrize("target", KINDS)
def test_scales(target, every_kernel):
    """For elements that are float8 where a GPU multiplies none, and wide ones where it does. Each of the two to the end for one target."""
    last = None if every_kernel or target in ("sm_80", "sm_90") else "ttgir"
    if target in ("sm_90", "sm_100"):
        extras = Extras(scales="qkv", out="bfloat16")
        found = compilation(target, None, causal, dtype="float8_e4m3fn", head_dim=256, extras=extras).compile(last)
    else:
        found = compilation(target, None, causal, head_dim=64, extras=Extras(scales="qkv")).compile(last)
    assert {"Q_SCALES", "K_SCALES", "V_SCALES"} < set(found.signature) and not found.spilled


@pytest.mark.parametrize("kernel", HOPPER)
def test_hopper_kernels(kernel, every_kernel):
    last = None if every_kernel or my_turn(list(HOPPER).index(kernel)) else "ttgir"
    _compare(HOPPER[kernel](SINKS), HOPPER[kernel](ORDINARY), last, every_kernel)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("kernel", DROPPING)
def test_dropout(kernel, target, every_kernel):
    """A random number serves all weights that a thread has of its group: then there are few of them."""
    part = kernel in ("dkv", "tangent tangent", "tangent dkv")
    made = DROPPING[kernel](target, Extras(dropout="packed" if "dq" in kernel else "positions", part=part))
    number = list(DROPPING).index(kernel)
    counted = kernel == "forward" and target in ("sm_80", "sm_90")
    to_the_end = counted or PINNED and (kernel, target) in DROPPING_TO_THE_END
    found = made.compile(stage_in_turn(target, number, to_the_end, every_kernel))
    assert "SEED" in found.signature
    if counted:
        bodies, scores = 3, made.constants["BLOCK_M"] * made.constants["BLOCK_N"] // (32 * made.num_warps)
        assert found.assembly["ptx"].count("mul.wide.u32") <= bodies * 14 * scores // 8


@pytest.mark.parametrize(
    "extras", [SINKS, Extras(dropout="positions"), Extras("float32", "positions", part=True), Extras(dropout="packed")]
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_a_hopper_kernel_takes_them_or_refuses(kernel, starts, dims, extras):
    """A kernel that serves a call reads what the call brings."""
    try:
        specs = [made.spec for made in hopper_kernels(kernel, None, causal, starts, head_dim=dims[0], head_dim_v=dims[1], extras=extras)]
    except ValueError as why:
        if "dropout" not in str(why):
            assert starts and dims[0] == 256 and "they must have 64 keys" in str(why)
        else:
            assert kernel == "backward" and dims[0] > 128 or extras.dropout == "packed" and not starts
    else:
        taken = {p.name for spec in specs for p in spec.parameters}
        assert starts or extras.dropout != "packed"  # a tile's weights are whole groups of one sequence alone
        assert not extras.sinks or "SINKS" in taken
        assert not extras.dropout or {"SEED", "DROPPED", "KEPT_SCALE"} <= taken
        assert (extras.dropout == "packed") == ({"DROP_Q", "DROP_K"} <= taken)


@pytest.mark.parametrize(
    "to_the_end, kernel, dropout, most",
    [
        (False, "forward", "positions", 64),
        (False, "backward", "positions", 288),
        (False, "forward", "packed", 480),
        (True, "backward", "packed", 480),
    ],
)
def test_dropout_spills_little_in_hopper_kernels(to_the_end, kernel, dropout, most, every_kernel):
    mods = (None, causal) if dropout == "positions" else make("causal", "document")
    made = hopper_kernels(kernel, *mods, dropout == "packed", extras=Extras(dropout=dropout))[-1]
    if every_kernel or PINNED and to_the_end:
        assert made.compile().spilled <= most
    else:
        made.compile("ttgir")


@pytest.mark.parametrize("dropout", ["positions", "packed"])
def test_dropout_of_blocks_elsewhere_passes_triton(dropout):
    """As a rank of a context plan has them; of packed sequences by the portable kernels alone."""
    extras, blocks = Extras(dropout=dropout, part=True), Blocks(True, 128, 128, shifted=True)
    made = [compilation("sm_90", None, causal, head_dim=64, shifted=True, extras=extras)]
    backward = backward_compilations("sm_90", None, causal, head_dim=64, shifted=True, extras=extras)
    made += [backward[name] for name in ("dkv", "dq")]
    if dropout == "positions":
        made.append(hopper_compilation("sm_90", None, causal, shifted=True, output_rows=True, extras=extras))
        made.append(hopper_backward_compilations(None, causal, blocks=blocks, extras=extras)["fused"])
    for kernel in made:
        assert {"SEED", "kv_shifts"} <= set(kernel.compile("ttgir").signature)


def hopper_kernels(kernel, score_mod, mask_mod, starts, **given):
    """Those of a forward or of a backward pass."""
    if kernel == "forward":
        return [hopper_compilation("sm_90", score_mod, mask_mod, output_rows=True, starts=starts, **given)]
    blocks = {"blocks": Blocks(True, 128, 128, starts=True)} if starts else {}
    return list(hopper_backward_compilations(score_mod, mask_mod, **given, **blocks).values())


def stage_in_turn(target: str, number: int, to_the_end: bool, every_kernel: bool) -> str | None:
    """How far a kernel with this number is compiled for a target: None, to the end, or "ttgir". Skips the test where it is not."""
    if every_kernel:
        return None
    if not further(target, number):
        pytest.skip("it is compiled for Hopper and one other target; --every-kernel compiles it")
    return None if to_the_end else "ttgir"


def _compare(with_sinks, without, last, every_kernel):
    """Without sinks these kernels spill nothing: it is asked with all kernels only."""
    found = with_sinks.compile(last)
    assert (found.spilled or 0) <= (every_kernel and without.compile().spilled or 0)
    assert len(found.signature) > len(without.spec.parameters)
