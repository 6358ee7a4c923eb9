"""The benchmark programs, as far as they can be tried without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
import time
from types import ModuleType

import pytest
import torch

from support.benchmarks import benchmark, block_mask, common, forward, implementations, latency, reference, small, supervisor, workloads


@pytest.mark.parametrize("row", workloads.WORKLOADS, ids=lambda row: row.name)
def test_pairs_against_brute_force(row):
    row = small(row)
    mask_mod = row.make_mods("cpu").mask
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
        return workloads.count_pairs(row.make_mods("cpu").mask, row.length)

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
    assert len(workloads.BY_NAME) == len(workloads.WORKLOADS) == 29


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
    assert args.impls == [impl for impl in implementations.IMPLEMENTATIONS if impl in forward.DEFAULT] and args.sustained == 0
    assert {"flexpress", "flexpress_varlen", "torch_flex", "cudnn", "flash"} <= set(args.impls)
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
    assert first["torch_backward_s"] > 0
    assert first["steps"] == cold.AFTER and first["step_ms"] <= first["longest_ms"] and precompiled["all_s"] > 0
    assert cold.main([*asked, "--limit", "0.1"]) == 0
    assert [row["error"] for row in common.read_results(out)[1]] == ["ran past 0.1 s"] * 2


def test_eight_mods_at_once():
    cold = benchmark("cold")
    row = cold.eight(32)
    assert 0 < row["all_s"] <= row["in_place_s"] < cold.PATIENCE and row["torch_backward_s"] > 0
    with pytest.raises(ValueError, match="3"):
        cold.in_threads(lambda n: int(n), ["1", "a3"])


REFERENCE_CASES = (
    "full_d128",
    "causal_gqa",
    "softcap_window_d256",
    "mla_causal",
    "relative_bias_d128",
    "learned_alibi",
    "full_bias",
    "gpt_oss_sinks",
)


@pytest.mark.parametrize("name", REFERENCE_CASES)
def test_reference_agrees_with_plain_attention(name):
    row = small(workloads.BY_NAME[name], batch=2)
    mods = row.make_mods("cpu")
    learned = [x.double().requires_grad_() for x in mods.learned]
    score_mod = row.learned.score(learned[0]) if row.learned else mods.score
    *tensors, grad_out = (x.double() for x in row.inputs("cpu"))
    q, k, v = (x.requires_grad_() for x in tensors)
    group = row.heads // row.kv_heads
    scores = q @ k.repeat_interleave(group, 1).mT * row.d_qk**-0.5
    b, h, i, j = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod:
        scores = score_mod(scores, b, h, i, j)
    if mods.mask:
        scores = scores.where(mods.mask(b, h, i, j), -math.inf)
    weights = scores.exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (learned[0].exp()[:, None, None] if row.sinks else 0))
    out = weights @ v.repeat_interleave(group, 1)
    grads = torch.autograd.grad(out, (q, k, v, *learned), grad_out)
    answers = reference.references(row, (q, k, v), mods, grad_out, chunk=40)
    ends = [(0, 0), (1, row.kv_heads - 1)]
    assert [(x.batch, x.kv_head) for x in answers] == (sorted({*ends, (0, row.kv_heads - 1), (1, 0)}) if learned else ends)
    assert max(reference.output_errors(answers, out)) < 1e-12
    assert reference.gradient_error(answers, *grads) < 1e-12
    assert reference.gradient_error(answers, grads[0], grads[1] * 1.5, *grads[2:]) == pytest.approx(0.5)
    if learned:
        assert reference.gradient_error(answers, *grads[:3], grads[3] * 1.5) == pytest.approx(0.5)
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
    monkeypatch.setattr(common, "sustained_ms", lambda fn, seconds: fn() is not None and 2.0 + seconds)
    return list(found)


@pytest.mark.parametrize("backward", [False, True])
def test_failures_become_rows(candidates, tmp_path, backward):
    case = small(workloads.BY_NAME["causal_gqa"], batch=1)
    rows: list[dict] = []
    marker = tmp_path / "running"
    effort = forward.Effort(rest=0, backward=backward, sustained=1.0)
    forward.run_case(case, candidates, rows, supervisor.Watch(marker), "cpu", effort)
    assert not marker.exists()
    right, wrong, unwritten, broken = rows
    flops = 2 * 256 * (97 * 98 // 2) * 32
    assert right["fwd_ms"] == 2.0 and right["fwd_rounds"] == [2.0] * effort.rounds
    assert right["fwd_sustained_rounds"] == [3.0, 3.0] and right["fwd_sustained_tflops"] == pytest.approx(right["fwd_tflops"] * 2 / 3)
    assert right["bwd_sustained_ms"] == (3.0 if backward else None)
    assert right["fwd_tflops"] == pytest.approx(flops * 1e-9 / 2)
    assert right["bwd_tflops"] == (pytest.approx(2.5 * flops * 1e-9 / 2) if backward else None)
    assert 0 < right["rel_err"] < 0.02 and "error" not in right
    assert wrong["rel_err"] == pytest.approx(0.1, rel=0.1) and wrong["error"].startswith("WrongResult")
    assert unwritten["rel_err"] is None and unwritten["error"].startswith("WrongResult")
    assert broken["error"] == "RuntimeError: no such luck"
    assert all(row["fwd_ms"] is None for row in rows[1:]) and all(supervisor.finished(row, "fwd_ms") for row in rows)
    common.write_results(tmp_path / "results.json", {}, rows)


def fake_fa4(monkeypatch):
    """A flash_attn.cute that knows what its functions mean, and wants tensors as the kernels read them: (B, S, H, D) or (T, H, D)."""

    def sees(length, causal, window_size):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        left, right = (length if n is None else n for n in window_size)
        return (distance <= left) & (-distance <= (0 if causal else right))

    def attend(q, k, v, visible, softcap, learnable_sink):
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2).float() for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = (softcap * (scores / softcap).tanh() if softcap else scores).where(visible, -math.inf)
        if learnable_sink is not None:
            scores = torch.cat([scores, learnable_sink[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).to(torch.bfloat16)

    def dense(q, k, v, causal=False, window_size=(None, None), softcap=0.0, learnable_sink=None):
        assert all(x.is_contiguous() and x.dtype == torch.bfloat16 for x in (q, k, v))
        return attend(q, k, v, sees(q.shape[1], causal, window_size), softcap, learnable_sink), None

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, learnable_sink):
        assert all(x.is_contiguous() and x.dim() == 3 for x in (q, k, v)) and cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        document = torch.bucketize(torch.arange(len(q)), cu_seqlens_q[1:], right=True)
        visible = sees(len(q), causal, (None, None)) & (document[:, None] == document)
        return attend(q[None], k[None], v[None], visible, 0.0, learnable_sink)[0], None

    module = ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, varlen
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


FA4_TAKES = {
    *("full_d128", "full_d64", "full_d256", "causal_d128", "causal_d64", "causal_16k", "causal_64k", "causal_128k", "causal_16k_d256"),
    *("causal_gqa", "causal_4001", "mla_causal", "window_16k", "window_128_16k", "window_256_16k", "window_512_16k", "gpt_oss"),
    *("gpt_oss_sinks", "softcap_causal_d128", "softcap_window_d256", "documents_16k"),
}


def test_what_each_implementation_takes():
    def takers(name):
        return {impl for impl, how in implementations.IMPLEMENTATIONS.items() if how.takes(workloads.BY_NAME[name])} - {"fa4"}

    flex = {"flexpress", "flexpress_deterministic", "torch_flex", "torch_flex_tma"}
    assert {row.name for row in workloads.WORKLOADS if implementations.IMPLEMENTATIONS["fa4"].takes(row)} == FA4_TAKES
    assert takers("causal_64k") == {*flex, "cudnn", "flash"} and takers("mla_causal") == {*flex, "cudnn"}
    assert takers("documents_16k") == {*flex, "flexpress_varlen"} and takers("full_bias") == takers("learned_alibi") == flex
    assert takers("gpt_oss_sinks") == {"flexpress", "flexpress_deterministic"} and takers("gpt_oss") == flex
    assert takers("seed_003") == {*flex, "sdpa", "manual"}


LEARNED_AND_NEW = {
    "documents_16k": ["flexpress_varlen", "fa4"],
    "gpt_oss_sinks": ["flexpress", "fa4"],
    "learned_alibi": ["flexpress"],
    "full_bias": ["flexpress"],
    "full_bias_d64": ["flexpress"],
    "seed_003": ["flexpress", "sdpa", "manual"],
}


@pytest.mark.parametrize("name", sorted(FA4_TAKES | LEARNED_AND_NEW.keys()))
def test_implementations_compute_their_workload(name, monkeypatch, tmp_path):
    """On the CPU, forward and backward; FlashAttention-4 by one that knows what its arguments mean."""
    fake_fa4(monkeypatch)
    monkeypatch.setattr(common, "queued_ms", lambda fn, rep: fn() is not None and 2.0)
    row, impls = workloads.BY_NAME[name], LEARNED_AND_NEW.get(name, ["fa4"])
    case = small(row, batch=min(row.batch, 2), heads=row.heads // 4, kv_heads=row.kv_heads // 4)
    rows: list[dict] = []
    forward.run_case(case, impls, rows, supervisor.Watch(tmp_path / "running"), "cpu", forward.Effort(rounds=1, rest=0, backward=True))
    assert [found["impl"] for found in rows] == impls and not [found for found in rows if "error" in found]
    assert all(found["grad_err"] < 0.02 and found["bwd_ms"] == 2.0 for found in rows)


def test_without_flash_attention_4(monkeypatch, tmp_path):
    """It is a row with the reason, and the others are timed."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(common, "queued_ms", lambda fn, rep: 2.0)
    rows: list[dict] = []
    case = small(workloads.BY_NAME["causal_d64"], batch=1, heads=1, kv_heads=1)
    forward.run_case(case, ["flexpress", "fa4"], rows, supervisor.Watch(tmp_path / "running"), "cpu", forward.Effort(rest=0))
    assert rows[0]["fwd_ms"] == 2.0 and rows[1]["error"].startswith("ModuleNotFoundError") and "flash_attn" in rows[1]["error"]


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


@pytest.mark.gpu
def test_sustained_time_is_that_of_one_call():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    began = time.perf_counter()
    ms = common.sustained_ms(lambda: a @ a, 0.3)
    assert time.perf_counter() - began > 0.3 and 0.8 < ms / common.queued_ms(lambda: a @ a, 50.0) < 2


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
    assert causal.split() == ["causal_d128", "500", "400", "625", "1.25", "0.8", "-", "0.003"]
    assert alibi.split() == ["alibi_full_d64", "300", "failed", "-", "-", "-", "-", "0.003"]


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


def scale_rows(scale):
    """Of three points in two parts: one where flexpress is slow, one where it failed, one where it is alone."""
    rates = {
        ("batch_1", "flexpress"): 440.0,
        ("batch_1", "cudnn"): 500.0,
        ("batch_1", "fa4"): 300.0,
        ("batch_2", "cudnn"): 500.0,
        ("heads_1", "flexpress"): 10.0,
    }
    rows = [scale.new_row(*key) | {"fwd_ms": 1.0, "fwd_tflops": rate} for key, rate in rates.items()]
    return [*rows, scale.new_row("batch_2", "flexpress") | {"error": "RuntimeError: out of luck"}]


def test_points_where_flexpress_is_slow():
    scale = benchmark("scale")
    rows = scale_rows(scale)
    assert scale.cliffs(rows) == [("batch_1", 440.0, "cudnn", 0.88), ("batch_2", 0.0, "cudnn", 0.0)]
    assert "fwd: 2 of 3 points below 0.9" in scale.summary(rows, "fwd") and "bwd: 0 of 3" in scale.summary(rows, "bwd")


def test_points():
    scale = benchmark("scale")
    args = scale.parse(["--part", "batch,odd"])
    assert len(args.cases) == 14 and args.rep == 25.0 and {scale.POINTS[case].part for case in args.cases} == {"batch", "odd"}
    rows = scale.POINTS.values()
    assert all(implementations.IMPLEMENTATIONS[impl].takes(row) for impl in ("flexpress", "cudnn", "fa4") for row in rows)
    assert all(row.batch * row.length == scale.TOKENS for row in rows if row.part in ("full", "causal") and row.length <= scale.TOKENS)
    assert {row.length for row in rows if row.part == "odd"} == {2**n - 1 for n in range(9, 18)}
    assert all(row.x in (row.length, row.batch, row.heads, row.d_qk) for row in rows)


def test_a_point_is_timed(tmp_path, monkeypatch):
    """By the program's own work, on the CPU."""
    scale, out = benchmark("scale"), tmp_path / "scale.json"
    monkeypatch.setattr(common, "queued_ms", lambda fn, rep: fn() is not None and 2.0)
    monkeypatch.setattr(forward.run_case, "__defaults__", ("cpu", *forward.run_case.__defaults__[1:]))
    monkeypatch.setitem(scale.POINTS, "heads_1", dataclasses.replace(scale.POINTS["heads_1"], length=97))
    args = scale.parse(["--out", str(out), "--impls", "flexpress", "--part", "heads", "--cases", "heads_1", "--backward"])
    assert scale.work(args) == 0
    head, (row,) = common.read_results(out)
    assert (row["part"], row["x"], row["fwd_rounds"]) == ("heads", 1, [2.0, 2.0]) and row["bwd_tflops"] > 0 and head["rest_s"] == scale.REST


def test_curves(tmp_path):
    plot = plot_module()
    results, out = tmp_path / "results.json", tmp_path / "out.png"
    common.write_results(results, {"gpu": "Some GPU"}, scale_rows(benchmark("scale")))
    assert plot.main([str(results), str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    with pytest.raises(ValueError, match="bwd_tflops"):
        plot.main([str(results), str(out), "--backward"])


def test_features_are_compared_before_they_are_timed(monkeypatch):
    """On the CPU torch has no dropout and no second derivatives to compare with."""
    features, cases = benchmark("features"), benchmark("feature_cases")
    monkeypatch.setattr(features.common, "time_ms", lambda run, rep: (run(), 2.0)[1])
    monkeypatch.setattr(features, "ROUNDS", 1)
    small_ones = {
        "sinks": lambda: cases.sinks_case((1, 4, 2, 70, 16), cases.causal),
        "dropout": lambda: cases.dropout_case((1, 2, 2, 70, 16), is_causal=True),
        "dropout_packed": lambda: cases.packed_dropout_case((70, 20), 2, 16, is_causal=True),
        "jvp": lambda: cases.jvp_case((1, 2, 2, 40, 16), is_causal=True),
        "second": lambda: cases.second_case((1, 2, 2, 40, 16), is_causal=False),
        "dots": lambda: cases.dots_case((1, 2, 2, 70, 16)),
        "statistics": lambda: cases.statistics_case((1, 2, 2, 70, 16)),
        "statistics_packed": lambda: cases.statistics_packed_case((70, 20), 2, 16),
        "statistics_cache": lambda: cases.statistics_cache_case(2, 4, 2, 128, 16, 3, 16),
        "entropy_gradient": lambda: cases.statistics_gradient_case((1, 2, 2, 70, 16), "entropy"),
        "column_sums_gradient": lambda: cases.statistics_gradient_case((1, 2, 2, 70, 16), "column_sums"),
    }
    monkeypatch.setattr(cases, "torch_flex", lambda **_: None)
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


def test_float8_is_compared_with_float64(monkeypatch, tmp_path, capsys):
    float8 = benchmark("float8")
    monkeypatch.setattr(float8.common, "time_ms", lambda run, rep: (run(), 2.0)[1])
    monkeypatch.setattr(float8, "ROUNDS", 1)
    monkeypatch.setattr(float8, "CASES", {"small": float8.Case(1, 30, 32, True, heads=2)})
    float8.main(["--out", str(tmp_path / "float8.json"), "--cases", "small"])
    rows = {row["way"]: row for row in json.loads((tmp_path / "float8.json").read_text())["rows"]}
    assert 0.005 < rows["float8"]["error"] == rows["float8_by_keys"]["error"] < 0.04
    assert rows["bfloat16"]["error"] < 0.01 and rows["widened"]["ms"] == 2.0
    assert rows["float8"]["tflops"] == pytest.approx(4 * 2 * 30 * 31 / 2 * 32 / 2e-3 * 1e-12, rel=1e-2)
    assert "failed" in rows["fa3"] and "float8_by_keys" in capsys.readouterr().out
