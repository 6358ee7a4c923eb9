"""A few hundred programs of the fuzzer (tests/fuzz.py), and that it finds what is planted. FLEXPRESS_FUZZ_SEED chooses other programs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz import outcome

import flexpress
from flexpress import BlockMask
from flexpress.codegen.run import masks
from support import fuzz_programs
from support.devices import DEVICES
from support.fuzz_programs import KINDS, listed, program, true_status

SEED = int(os.environ.get("FLEXPRESS_FUZZ_SEED", 0))
COUNTS = {
    "verdicts": 40,
    "evaluate": 60,
    "attention": 20,
    "varlen": 8,
    "cached": 12,
    "flash": 6,
    "huge": 8,
    "hidden infinities": 8,
    "update": 6,
    "transforms": 10,
    "extras": 16,
}
SMALLER = {"verdicts": 1, "attention": 1, "varlen": 1, "flash": 1, "huge": 1, "hidden infinities": 1, "transforms": 1, "extras": 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_programs_agree_with_float64(kind, device):
    """Every kind of program; the whole of it is `python tests/fuzz.py --n 10000`."""
    compared = []
    for index in range(COUNTS[kind]):
        small = SMALLER.get(kind, 0) if device == "cpu" else 0
        found = outcome(SEED, index, device, (kind,), small)
        assert found.status in ("right", "refused"), (
            f"python tests/fuzz.py --seed {SEED} --device {device} --kinds '{kind}' --only {index} --small {small}\n{found.message}\n"
            + program(SEED, index, device, (kind,), small).body()
        )
        compared += [found.compared] if found.status == "right" else []
    assert sum(compared) / len(compared) > 0.5


def test_every_kind_has_programs_in_make_test():
    assert set(COUNTS) == set(KINDS)


def test_a_program_follows_from_seed_and_index():
    texts = [[program(7, i, "cpu").text() for i in range(12)] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 12


def test_a_program_is_printed_as_a_file_that_runs(tmp_path):
    p = program(SEED, 1, "cpu", ("attention",), 2)
    path = tmp_path / "program.py"
    path.write_text(p.text(), encoding="utf-8")
    names = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    assert torch.equal(names["out"], p.run()["out"])


# What is planted

PLANTED = 3e-4


@functools.cache
def float32_programs(backward: bool = False) -> list:
    """Four programs in float32 whose rows see something, with what they compute."""
    chosen: list = []
    index = -1
    while len(chosen) < 4:
        index += 1
        p = program(5, index, "cpu", ("attention",), 1)
        body = p.body()
        if "torch.float32, device" not in body.split("\nq = laid_out")[1].split("\n")[0] or backward != ("autograd.grad" in body):
            continue
        if "TRITON_DECODE" in body:  # which may be refused
            continue
        names = p.run()
        if names["out"].any():
            assert not p.check(names).differences, body
            chosen.append((p, names))
    return chosen


@pytest.mark.parametrize("where", ["row", "element", "head"])
def test_an_error_of_3e_4_in_float32_is_found(where):
    """In one row, in its largest element, in one head."""
    for p, names in float32_programs():
        out = names["out"].clone()
        at = tuple((out.abs() == out.abs().max()).nonzero()[0].tolist())
        at = {"row": at[:3], "element": at, "head": at[:2]}[where]
        out[at] *= 1 + PLANTED
        assert any(d.name == "out" for d in p.check(names | {"out": out}).differences), p.body()


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_an_error_of_3e_4_in_a_gradient_is_found(name):
    planted = found = 0
    for p, names in float32_programs(backward=True):
        gradient = names[name].clone()
        gradient[gradient.abs() == gradient.abs().max()] *= 1 + PLANTED
        if gradient.abs().max() < 1e-2:  # what cancels has an error of its own
            continue
        planted += 1
        found += any(d.name == name for d in p.check(names | {name: gradient}).differences)
    assert planted and found == planted


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_wrong_nan_infinity_or_zero_is_found(value):
    for p, names in float32_programs():
        out = names["out"].clone()
        out[tuple((out.abs() == out.abs().max()).nonzero()[0].tolist())] = value
        assert p.check(names | {"out": out}).differences


def test_a_wrong_slope_in_one_head_is_found():
    """What the kernel is told is not what the reference is told."""
    p = program(5, 0, "cpu", ("attention",), 1)
    slopes = torch.linspace(0.1, 0.9, 4)
    p.mods = "def score_mod(score, b, h, q_idx, kv_idx):\n    return score + t0[h] * (kv_idx - q_idx)\n"
    p.captured = fuzz_programs.Captures()
    p.captured.add("t0", f"torch.tensor({slopes.tolist()}).to(device)")
    p.inputs = [f"{name} = laid_out((1, 4, 33, 16), torch.float32, device, {i})" for i, name in enumerate("qkv")]
    p.call = ["out, lse = flexpress.flex_attention(q, k, v, score_mod, return_lse=True)"]
    names = p.run()

    def check(captured):
        problem = fuzz_programs.Problem(names["q"], names["k"], names["v"], *fuzz_programs.indices((1, 4, 33, 33), "cpu"), p.mods, captured)
        return fuzz_programs.judge(problem, {"out": names["out"], "lse": names["lse"]}).differences

    assert not check({"t0": names["t0"]})
    wrong = slopes.clone()
    wrong[2] *= 1 + PLANTED
    assert {d.name for d in check({"t0": wrong})} == {"out", "lse"}


@functools.cache
def verdict_programs() -> list:
    """Programs about block lists that have blocks of two kinds or more, with what they compute."""
    chosen: list = []
    index = -1
    while len(chosen) < 6:
        index += 1
        p = program(6, index, "cpu", ("verdicts",))
        if "separate_full_blocks=True" not in p.body():
            continue
        names = p.run()
        if len(names["mask"]._status().unique()) > 1:
            assert not p.check(names).differences, p.body()
            chosen.append((p, names))
    return chosen


@pytest.mark.parametrize("was, becomes", [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_a_flipped_verdict_is_found(was, becomes):
    planted = 0
    for p, names in verdict_programs():
        mask = names["mask"]
        status = mask._status().clone()
        if not (status == was).any():
            continue
        planted += 1
        status[tuple((status == was).nonzero()[0].tolist())] = becomes
        flipped = BlockMask(mask.seq_lengths, *masks.block_lists(status, True), BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod)
        assert p.check(names | {"mask": flipped}).differences
    assert planted


@pytest.mark.parametrize("becomes", [0, 2])
def test_a_flipped_verdict_of_bounds_is_found(becomes, monkeypatch):
    """In the lists that a call makes for mask_mod=."""
    real = masks.automatic_lists

    def flipping(bound, extents, device, size, *, transposed):
        lists = real(bound, extents, device, size, transposed=transposed)
        columns = -(-extents[2 if transposed else 3] // size[0 if transposed else 1])
        status = listed(lists.kv_num_blocks, lists.kv_indices, columns).to(torch.int8)
        status += 2 * listed(lists.full_kv_num_blocks, lists.full_kv_indices, columns).to(torch.int8)
        if (status == 1).any():
            status[tuple((status == 1).nonzero()[0].tolist())] = becomes
        made = masks.block_lists(status, True)
        return type(lists)(*made, lists.q_block, lists.kv_block, lists.interior)

    for p, names in verdict_programs():
        with monkeypatch.context() as patch:
            patch.setattr(masks, "automatic_lists", flipping)
            found = p.check(names).differences
        dense = flexpress.create_mask(names["mask_mod"], *names["mask"].shape, "cpu")
        if (true_status(dense, (128, 128)) == 1).any():
            assert any("bounds call block" in d.what for d in found)


def test_the_command_line():
    """Its exit status, its counts, and one program again."""
    script = str(Path(__file__).parent / "fuzz.py")
    run = subprocess.run([sys.executable, script, "--n", "4", "--kinds", "evaluate"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "no differences" in run.stdout and "4 programs in" in run.stdout, run.stdout + run.stderr
