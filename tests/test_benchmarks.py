"""The benchmark programs, as far as they can be tried without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import time
from types import ModuleType

import pytest
import torch

from support.benchmarks import benchmark, block_mask, common, forward, implementations, latency, reference, small, supervisor, workloads


@pytest.mark.parametrize("row", workloads.WORKLOADS, ids=lambda row: row.name)
def test_pairs_against_brute_force(row):
    row = small(row)
    _, mask_mod = row.make_mods("cpu")
    zero = torch.tensor(0)
    brute = sum(
        1 if mask_mod is None else int(mask_mod(zero, zero, torch.tensor(i), torch.tensor(j)))
        for i in range(row.length)
        for j in range(row.length)
    )
    assert workloads.count_pairs(mask_mod, row.length, chunk=40) == brute
    assert workloads.count_pairs(mask_mod, row.length) == brute


def test_pairs_in_closed_form():
    def pairs(name, **changes):
        row = dataclasses.replace(workloads.BY_NAME[name], **changes)
        return workloads.count_pairs(row.make_mods("cpu")[1], row.length)

    triangle = 4096 * 4097 // 2
    assert pairs("full_d128") == 4096**2
    assert pairs("causal_d128") == triangle
    assert pairs("causal_4001") == 4001 * 4002 // 2
    assert pairs("prefix_d128") == triangle + 1024 * 1023 // 2
    assert pairs("window_16k", length=3000) == 1024 * 1025 // 2 + (3000 - 1024) * 1024
    ids = workloads.document_ids(5000, 12, "cpu")
    assert ids.dtype == torch.int32 and ids.diff().min() == 0
    sizes = ids.bincount()
    assert len(sizes) == 12 and sizes.min() > 0
    assert pairs("documents_16k", length=5000) == int((sizes * (sizes + 1) // 2).sum())


def test_every_row_has_its_own_name():
    assert len(workloads.BY_NAME) == len(workloads.WORKLOADS) == 16


def test_operations_and_rates():
    plain = workloads.BY_NAME["full_d128"]
    assert plain.forward_flops(4096**2) == 4 * 4 * 16 * 4096**2 * 128
    assert plain.backward_flops(4096**2) == 2.5 * plain.forward_flops(4096**2)
    assert workloads.BY_NAME["mla_causal"].forward_flops(10) == 2 * (192 + 128) * 10 * 2 * 16
    assert workloads.BY_NAME["causal_gqa"].forward_flops(1) == 2 * 256 * 4 * 32
    assert common.tflops(549_755_813_888, 1.0) == pytest.approx(549.755813888)
    assert common.ratio(3.0, 2.0) == 1.5 and common.ratio(None, 2.0) is None and common.ratio(1.0, None) is None


def test_inputs_are_the_same_for_the_same_seed():
    row = small(workloads.BY_NAME["mla_causal"])
    first, again, other = row.inputs("cpu"), row.inputs("cpu"), row.inputs("cpu", seed=1)
    assert [tuple(x.shape) for x in first] == [(2, 16, 97, 192), (2, 16, 97, 192), (2, 16, 97, 128), (2, 16, 97, 128)]
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_results_are_replaced_whole(tmp_path, monkeypatch):
    out = tmp_path / "deep" / "results.json"
    common.write_results(out, {"gpu": None}, [{"case": "a"}])
    assert common.read_results(out) == ({"gpu": None}, [{"case": "a"}])
    with pytest.raises(ValueError):
        common.write_results(out, {}, [{"rel_err": math.nan}])

    def crash(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(common.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        common.write_results(out, {}, [])
    assert common.read_results(out) == ({"gpu": None}, [{"case": "a"}])
    assert [path.name for path in out.parent.iterdir()] == ["results.json"]


def test_header_is_json_without_a_gpu():
    head = common.header("abc123")
    assert head["commit"] == "abc123" and head["torch"] == torch.__version__
    assert set(head) >= {"gpu", "driver", "torch", "triton", "cuda", "flexpress", "commit", "date"}
    json.dumps(head, allow_nan=False)


def test_choices_keep_their_order_and_name_the_unknown():
    choose = common.names(("a", "b", "c"))
    assert choose("c, a") == ["a", "c"]
    with pytest.raises(common.argparse.ArgumentTypeError, match="x: choose from a, b, c"):
        choose("a,x")
    with pytest.raises(common.argparse.ArgumentTypeError):
        choose(",")


def test_default_options_parse():
    args = forward.parse([])
    assert args.cases == list(workloads.BY_NAME)
    assert args.impls == ["flexpress", "torch_flex", "cudnn", "flash"]
    assert set(latency.CASES) <= set(workloads.BY_NAME)
    assert latency.parse([]).measures == list(latency.MEASURES)
    assert block_mask.parse(["--lengths", "131072"]).lengths == ["131072"]


def test_first_calls_of_a_new_process(tmp_path):
    """By the program, with a process for each row, and what goes wrong there."""
    cold, out = benchmark("cold"), tmp_path / "cold.json"
    asked = ["--out", str(out), "--runs", "1", "--part", "precompile,first", "--waits", "0", "--length", "32"]
    assert cold.main(asked) == 0
    first, precompiled = common.read_results(out)[1]
    assert (first["part"], first["waits"], precompiled["part"], precompiled["waits"]) == ("first", False, "precompile", True)
    assert first["mask_s"] + first["forward_s"] + first["backward_s"] < first["in_place_s"] and first["kernels"].startswith(
        "forward   PORTABLE"
    )
    assert first["steps"] == cold.AFTER and first["step_ms"] <= first["longest_ms"] and precompiled["all_s"] > 0
    assert cold.main([*asked, "--limit", "0.1"]) == 0
    assert [row["error"] for row in common.read_results(out)[1]] == ["ran past 0.1 s"] * 2


def test_eight_mods_at_once():
    cold = benchmark("cold")
    row = cold.eight(32)
    assert 0 < row["all_s"] <= row["in_place_s"] < cold.PATIENCE
    with pytest.raises(ValueError, match="3"):
        cold.in_threads(lambda n: int(n), ["1", "a3"])


REFERENCE_CASES = ("full_d128", "causal_gqa", "softcap_window_d256", "mla_causal", "relative_bias_d128")


@pytest.mark.parametrize("name", REFERENCE_CASES)
def test_reference_agrees_with_plain_attention(name):
    row = small(workloads.BY_NAME[name], batch=2)
    score_mod, mask_mod = row.make_mods("cpu")
    *tensors, grad_out = (x.double() for x in row.inputs("cpu"))
    q, k, v = (x.requires_grad_() for x in tensors)
    group = row.heads // row.kv_heads
    scores = q @ k.repeat_interleave(group, 1).mT * row.d_qk**-0.5
    b, h, i, j = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod:
        scores = score_mod(scores, b, h, i, j)
    if mask_mod:
        scores = scores.where(mask_mod(b, h, i, j), -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    answers = reference.references(row, (q, k, v), (score_mod, mask_mod), grad_out, chunk=40)
    assert [(x.batch, x.kv_head) for x in answers] == [(0, 0), (1, row.kv_heads - 1)]
    assert max(reference.output_errors(answers, out)) < 1e-12
    assert reference.gradient_error(answers, *grads) < 1e-12
    assert reference.gradient_error(answers, grads[0], grads[1] * 1.5, grads[2]) == pytest.approx(0.5)
    out[-1, -1, 50] = 0
    overall, worst = reference.output_errors(answers, out)
    assert 0 < overall < worst == pytest.approx(1)


@pytest.fixture
def candidates(monkeypatch):
    """Stand-ins for implementations: right, wrong, leaving a row unwritten, and raising."""

    def right(row, mods, device):
        def attention(q, k, v):
            k, v = (x.repeat_interleave(row.heads // row.kv_heads, 1) for x in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=row.mask is not None)

        return attention

    def wrong(row, mods, device):
        return lambda q, k, v: right(row, mods, device)(q, k, v) * 1.1

    def unwritten(row, mods, device):
        return lambda q, k, v: right(row, mods, device)(q, k, v).index_fill(2, torch.tensor([5]), math.nan)

    def broken(row, mods, device):
        raise RuntimeError("\nno such luck\nand more")

    stand_ins = (right, wrong, unwritten, broken)
    found = {build.__name__: implementations.Implementation(build) for build in stand_ins}
    monkeypatch.setattr(forward, "IMPLEMENTATIONS", found)
    monkeypatch.setattr(common, "queued_ms", lambda fn, rep: fn() is not None and 2.0)
    return list(found)


@pytest.mark.parametrize("backward", [False, True])
def test_failures_become_rows(candidates, tmp_path, backward):
    case = small(workloads.BY_NAME["causal_gqa"], batch=1)
    rows: list[dict] = []
    marker = tmp_path / "running"
    forward.run_case(case, candidates, rows, supervisor.Watch(marker), device="cpu", backward=backward)
    assert not marker.exists()
    right, wrong, unwritten, broken = rows
    flops = 2 * 256 * (97 * 98 // 2) * 32
    assert right["fwd_ms"] == 2.0 and right["fwd_rounds"] == [2.0] * forward.ROUNDS
    assert right["fwd_tflops"] == pytest.approx(flops * 1e-9 / 2)
    assert right["bwd_tflops"] == (pytest.approx(2.5 * flops * 1e-9 / 2) if backward else None)
    assert 0 < right["rel_err"] < 0.02 and "error" not in right
    assert wrong["rel_err"] == pytest.approx(0.1, rel=0.1) and wrong["error"].startswith("WrongResult")
    assert unwritten["rel_err"] is None and unwritten["error"].startswith("WrongResult")
    assert broken["error"] == "RuntimeError: no such luck"
    assert all(row["fwd_ms"] is None for row in rows[1:]) and all(supervisor.finished(row, "fwd_ms") for row in rows)
    common.write_results(tmp_path / "results.json", {}, rows)


def test_a_dead_worker_is_blamed_and_replaced(tmp_path, monkeypatch):
    """The first worker dies in a kernel, the second loses the GPU, the third finishes."""
    args = forward.parse(["--out", str(tmp_path / "results.json")])
    marker = supervisor.marker_of(args.out)
    endings = iter((-11, supervisor.DEVICE_LOST, 0))

    def worker(command):
        code = next(endings)
        if code == -11:
            marker.write_text('["causal_d128", "flexpress"]')
        return code

    monkeypatch.setattr(supervisor.subprocess, "call", worker)
    assert supervisor.supervise(args, [], "forward.py", forward.new_row) == 0
    _, (row,) = common.read_results(args.out)
    assert (row["case"], row["impl"]) == ("causal_d128", "flexpress") and "code -11" in row["error"]
    assert next(endings, None) is None and not marker.exists()


@pytest.mark.gpu
def test_a_late_host_is_not_counted():
    x = torch.zeros(8, device="cuda")
    assert common.queued_ms(lambda: (time.sleep(2e-3), x.add_(1)), rep=0.1) < 0.5
    with pytest.raises(RuntimeError, match="they wait for the device"):
        common.queued_ms(torch.cuda.synchronize)


def fake_rows():
    """Rows of two cases, one of them failed."""
    rates = {
        ("causal_d128", "flexpress"): 500.0,
        ("causal_d128", "torch_flex"): 400.0,
        ("causal_d128", "cudnn"): 625.0,
        ("alibi_full_d64", "flexpress"): 300.0,
    }
    rows = [forward.new_row(*key) | {"fwd_ms": 1.0, "fwd_tflops": rate, "rel_err": 0.003} for key, rate in rates.items()]
    return [*rows, forward.new_row("alibi_full_d64", "torch_flex") | {"error": "RuntimeError: out of luck"}]


def test_summary():
    _, causal, alibi = forward.summary(fake_rows()).splitlines()
    assert causal.split() == ["causal_d128", "500", "400", "625", "1.25", "0.8", "0.003"]
    assert alibi.split() == ["alibi_full_d64", "300", "failed", "-", "-", "-", "0.003"]


def plot_module() -> ModuleType:
    pytest.importorskip("matplotlib")
    return importlib.import_module("plot")


def test_plot(tmp_path):
    plot = plot_module()
    results, out = tmp_path / "results.json", tmp_path / "out.png"
    common.write_results(results, {"gpu": "Some GPU", "torch": "2.0"}, fake_rows())
    assert plot.main([str(results), str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    with pytest.raises(ValueError, match="bwd_tflops"):
        plot.main([str(results), str(out), "--backward"])


def test_features_are_compared_before_they_are_timed(monkeypatch):
    """On the CPU torch has no dropout and no second derivatives to compare with."""
    features = benchmark("features")
    monkeypatch.setattr(features.common, "time_ms", lambda run, rep: (run(), 2.0)[1])
    monkeypatch.setattr(features, "ROUNDS", 1)
    small_ones = {
        "sinks": lambda: features.sinks_case((1, 4, 2, 70, 16), features.causal),
        "dropout": lambda: features.dropout_case((1, 2, 2, 70, 16), is_causal=True),
        "jvp": lambda: features.jvp_case((1, 2, 2, 40, 16), is_causal=True),
        "second": lambda: features.second_case((1, 2, 2, 40, 16), is_causal=False),
        "dots": lambda: features.dots_case((1, 2, 2, 70, 16)),
        "statistics": lambda: features.statistics_case((1, 2, 2, 70, 16)),
    }
    monkeypatch.setattr(features, "torch_flex", lambda **_: None)
    monkeypatch.setattr(features, "CASES", small_ones)
    for name in small_ones:
        rows = {row["way"]: row for row in features.measure(name, 1.0)}
        assert rows["feature"]["fwd_cost"] == 1.0 and "error" not in rows["feature"]
        assert all(rows[way]["diff"] < 0.05 for way in ("by_hand", "unrolled") if way in rows)
        assert features.summary(list(rows.values()))
    wrong = small_ones["sinks"]()
    wrong.ways["feature"] = wrong.ways["plain"]
    monkeypatch.setitem(small_ones, "sinks", lambda: wrong)
    assert "another result" in {row["way"]: row for row in features.measure("sinks", 1.0)}["by_hand"]["error"]
