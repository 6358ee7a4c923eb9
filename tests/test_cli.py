"""The command line: what it prints and its exit codes."""

from __future__ import annotations

import ast
import re

import pytest
import torch

from flexpress.commands import cli, demo, doctor, recipes


def test_demo_shows_picture_error_time_and_files(capsys):
    assert cli.main(["demo", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "  |████░░                          |\n" in shown
    assert "printed kernel" in shown and "plain attention in bfloat16" in shown and "ok: at most 2 x" in shown
    assert "attention, first call" in shown and "attention, repeated" in shown
    assert "/forward_alibi_sliding_window_d64_bf16_" in shown


def test_demo_by_kernels_in_cpp(capsys, monkeypatch):
    """Beside torch; what does not run is said to."""
    monkeypatch.setenv("FLEXPRESS_CPU", "cpp")
    monkeypatch.setitem(demo._SIZES, "cpu", demo._SIZES["interpreter"])
    monkeypatch.setattr(demo, "_peers", lambda *_: {"dense": lambda: torch.zeros(3), "broken": lambda: 1 // 0})
    assert cli.main(["demo", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "float32, on the CPU, in C++" in shown and "/cpu_forward_alibi_sliding_window_d64_fp32_" in shown
    assert re.search(r"  dense +[\d.]+ ms\n  broken +does not run here \(ZeroDivisionError\)\n", shown)


def test_demo_fails_on_a_wrong_result(capsys, monkeypatch):
    monkeypatch.setattr(demo, "flex_attention", lambda q, k, v, **_: torch.full_like(q, float("nan")))
    assert cli.main(["demo", "--device", "cpu"]) == 1
    assert "TOO LARGE" in capsys.readouterr().out


@pytest.mark.gpu
def test_demo_and_doctor_on_a_gpu(capsys):
    assert cli.main(["demo"]) == 0
    assert "S 4096, D 128, bfloat16, on NVIDIA" in capsys.readouterr().out
    assert cli.main(["doctor"]) == 0
    assert "  ok      cuda:0 " in capsys.readouterr().out


def test_render_for_a_cpu(capsys):
    assert cli.main(["render", "alibi", "causal", "--target", "cpu"]) == 0
    assert "// cpu forward alibi causal d128 bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, found",
    [
        (["plain"], "# hopper forward d128 bf16\n"),
        (["plain", "--portable"], "# forward d128 bf16\n"),
        (["plain", "--target", "sm_80"], "# forward d128 bf16\n"),
        (["plain", "--dtype", "fp32"], "# forward d128 fp32\n"),  # which the kernel for Hopper does not serve
        (["alibi", "causal", "--head-dim", "64", "--dtype", "fp16"], "# mods/causal.py:"),
        (["softcap", "--target", "gfx942"], "tanh_by_exp2"),
        (["document", "--target", "cpu", "--portable", "--head-dim", "192x128"], "# forward document and inner d192x128 bf16\n"),
        (["causal", "--target", "sm_90", "--portable"], "desc_k.load("),
        (["causal", "--target", "sm_90", "--no-tma"], "tl.load(k_ptrs"),
        (["causal", "--gluon"], "# hopper forward causal d128 bf16\n"),
        (["sliding_window", "prefix_lm"], "mask_mod: sliding_window_and_prefix_lm"),
    ],
)
def test_render(capsys, arguments, found):
    assert cli.main(["render", *arguments]) == 0
    text = capsys.readouterr().out
    ast.parse(text)
    assert found in text


@pytest.mark.parametrize(
    "arguments, found",
    [
        (["plain", "--head-dim", "64", "--portable"], "return_lse=False"),
        (["alibi", "sliding_window", "--backward", "--heads", "8:2", "--dtype", "fp16"], "slopes, window=1024"),
        (["alibi", "--page-size", "16", "--heads", "8:2", "--target", "sm_80"], "page_table, *, slopes"),
        (["alibi", "--page-size", "16", "--heads", "8:2", "--dtype", "fp32", "--target", "cpu"], "page_table, *, slopes"),
        (["alibi", "--backward", "--head-dim", "320x272", "--dtype", "fp32", "--target", "cpu"], "slopes, scale"),
    ],
)
def test_export(capsys, tmp_path, arguments, found):
    path = tmp_path / "exported.py"
    assert cli.main(["export", *arguments, "-o", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    (attention,) = (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("def attention("))
    assert found in attention
    elsewhere = {"--page-size", "--portable", "cpu"}  # files for Hopper know nothing of caches
    assert ("HOPPER_FORWARD" in path.read_text(encoding="utf-8")) == elsewhere.isdisjoint(arguments)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["export", *arguments, "-o", str(path)])
    assert "is there already" in capsys.readouterr().err
    assert cli.main(["export", *arguments, "-o", str(path), "--overwrite"]) == 0


@pytest.mark.parametrize("recipe", ["alibi", "relative_bias", "t5_bias", "disentangled", "forget_gate", "invariant_points", "graph_bias"])
def test_the_example_follows_the_heads(tmp_path, recipe):
    """The demo gives every head what the recipe has for it."""
    path = tmp_path / "heads.py"
    assert cli.main(["export", recipe, "--heads", "32:8", "--head-dim", "16", "--target", "cpu", "-o", str(path)]) == 0
    captured = path.read_text().split("\ndef demo()")[1].split("captured = {")[1].split("    }")[0]
    shapes = [re.findall(r"\d+", shape) for shape in re.findall(r"\((\d[\d, ]*)\)", captured)]
    assert any("32" in shape for shape in shapes)
    assert not any(shape[0] == "16" for shape in shapes)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["export", "causal"], "the following arguments are required: -o"),
        (["export", "causal", "--heads", "3:2", "-o", "x"], "'3:2' are no heads"),
        (["export", "causal", "--heads", "99999999", "-o", "x"], "'99999999' are no heads"),
        (["export", "causal", "--page-size", "99999999", "-o", "x"], "write a whole number from 1 to 65536"),
        (["export", "causal", "--page-size", "0", "-o", "x"], "argument --page-size: '0' is no size of a page"),
        (["export", "causal", "--page-size", "-4", "-o", "x"], "argument --page-size"),
        (["export", "causal", "--head-dim", "300", "--backward", "-o", "x"], "exported files have backward kernels up to 256"),
        (["export", "causal", "-o", __file__], "is there already; choose another path, or pass --overwrite"),
        (["export", "causal", "--target", "cpu", "-o", ""], "path must name the file"),
        (["export", "causal", "--target", "cpu", "--portable", "-o", "x.py"], "leave --portable out"),
        (["export", "causal", "--target", "cpu", "--page-size", "16", "--portable", "-o", "x.py"], "leave --portable out"),
        (["export", "causal", "--target", "cpu", "-o", f"{__file__}/x.py"], "test_cli.py is a file, and no folder"),
        (["export", "causal", "--head-dim", "320", "--backward", "-o", "x.py"], "up to 256, leave --backward out"),
        (["render", "caual"], "invalid choice: 'caual'"),
        (["render", "causal", "--head-dim", "600"], "'600' is not a head dim: write 1 to 512"),
        (["render", "causal", "--target", "sm_70"], "invalid choice: 'sm_70'"),
        (["render", "causal", "--gluon", "--dtype", "fp32"], "--gluon: float32 has no wgmma"),
        (["render", "causal", "--gluon", "--portable"], "not allowed with argument"),
        ([], "required"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_help_names_commands_and_recipes(capsys):
    for arguments, names in ((["--help"], ("demo", "render", "export", "doctor")), (["render", "--help"], recipes.RECIPES)):
        with pytest.raises(SystemExit, match="0"):
            cli.main(arguments)
        shown = capsys.readouterr().out
        assert all(name in shown for name in names)


def test_doctor_finds_this_machine_well(capsys):
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in (torch.__version__, "sm_80", "sm_90", "sm_100", "gfx942", "cpu", "All that this machine needs works."):
        assert word in shown
    assert "failed" not in shown


def test_doctor_tells_what_is_needed(capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "_compile", broken)
    assert cli.main(["doctor"]) == 0  # without a GPU nothing needs a compiler
    assert "failed  sm_90          no such compiler (not needed on this machine)" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_attend", broken)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("failed: cpu\n")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_doctor_wants_a_compiler_where_there_is_no_gpu(capsys, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor, "_compile", lambda *_: "well")
    monkeypatch.setattr(doctor, "_attend", lambda *_: "well")
    monkeypatch.delenv("FLEXPRESS_CPU", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["doctor"]) == (not has_gpu)
    said = capsys.readouterr().out
    assert "failed  c++            there is no C++ compiler; CXX is 'no-such-compiler'" in said
    assert ("(not needed on this machine)" in said) == has_gpu


def test_doctor_counts_kernels_in_both_languages(capsys, monkeypatch, tmp_path):
    for name in ("a.py", "b.cpp", "b.12.so", "b.12.json"):
        (tmp_path / name).write_text("x" * 1024)
    monkeypatch.setattr(doctor.flexpress, "cache_dir", lambda: tmp_path)
    assert ", 2 printed kernels, 2 KiB" in doctor._cache_directory()


def test_make_composes():
    score_mod, mask_mod = recipes.make("softcap", "alibi", "causal", "sliding_window")
    assert score_mod.__name__ == "compose_scores" and mask_mod.__name__ == "causal_and_sliding_window"
    assert recipes.make("plain") == (None, None)
    with pytest.raises(ValueError, match="there is no recipe 'x'; there are plain, causal"):
        recipes.make("x")
