"""The benchmark programs, as far as they can be tried without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the programs import each other by plain names, as they do when run as scripts
common, decode, forward, implementations, latency, block_mask, ragged, reference, serving, supervisor, workloads = map(
    importlib.import_module,
    (
        "common",
        "decode",
        "forward",
        "implementations",
        "latency",
        "block_mask",
        "ragged",
        "reference",
        "serving",
        "supervisor",
        "workloads",
    ),
)

LENGTH, SIZE = 97, 13


def small(row, **changes):
    """Return a workload of the same kind that a test can afford."""
    return dataclasses.replace(row, length=LENGTH, size=min(row.size, SIZE), **changes)


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


def eager(run):
    """Stands in for common.captured: replaying is running again."""
    outs = run()

    def replay():
        for out, new in zip(outs, run(), strict=True):
            out.copy_(new)

    return outs, replay


TOOLS = decode.Tools(eager, lambda replay, rep: 2.0)


def run_small(case, impls, tmp_path):
    """The rows of a case on the CPU, through the interpreter."""
    rows: list[dict] = []
    decode.run_case(case, impls, rows, supervisor.Watch(tmp_path / "running"), "cpu", copy_tb_s=4.0, tools=TOOLS)
    assert not (tmp_path / "running").exists()
    common.write_results(tmp_path / "results.json", {}, rows)
    return common.read_results(tmp_path / "results.json")[1]


def small_step(name):
    """A decoding case of the same kind that the interpreter can afford."""
    row = serving.BY_NAME[name]
    return dataclasses.replace(
        row, batch=min(row.batch, 3), heads=4, kv_heads=row.kv_heads // 8, length=70, d_qk=16, d_v=16, size=min(row.size, 20)
    )


def test_decoding_cases():
    cases = serving.BY_NAME
    assert len(cases) == len(serving.CASES) == 13
    assert [c.name for c in serving.CASES if c.batch == 64] == ["b64_8k", "b64_4k", "b64_mixed"]
    assert cases["b16_8k"].q_len == 1 and cases["b16_q4"].q_len == 4 and workloads.BY_NAME["causal_4001"].q_len == 4001
    lengths = cases["b64_mixed"].lengths()
    assert len(lengths) == 64 and 256 <= min(lengths) < 1000 and 7500 < max(lengths) <= 8192
    assert lengths == cases["b64_mixed"].lengths() and set(cases["b16_8k"].lengths()) == {8192}

    def takers(name):
        return {impl for impl, how in serving.IMPLEMENTATIONS.items() if how.takes(cases[name])}

    ours = {"flexpress_cached", *(f"flexpress_paged_{n}" for n in (16, 64, 128))}
    flex = ours | {"flexpress", "torch_flex"}
    assert takers("b16_8k") == takers("b1_128k") == flex | {"cudnn", "flash"}
    assert takers("b8_mha_8k") == set(serving.IMPLEMENTATIONS)
    assert takers("b16_q4") == flex | {"flash"}
    assert takers("b16_alibi") == takers("b16_softcap") == takers("b16_window") == flex
    assert takers("b64_mixed") == ours


def test_bytes_of_caches():
    cases = serving.BY_NAME
    assert cases["b16_8k"].kv_bytes() == 16 * 8 * 8192 * 256 * 2
    assert cases["b8_mha_8k"].kv_bytes() == 8 * 32 * 8192 * 256 * 2
    assert cases["b16_d64"].kv_bytes() == cases["b16_8k"].kv_bytes() // 2
    assert cases["b16_q4"].kv_bytes() == cases["b16_8k"].kv_bytes()
    assert cases["b16_window"].kv_bytes() == 16 * 8 * 1024 * 256 * 2
    assert dataclasses.replace(cases["b16_window"], q_len=4).kv_bytes() == 16 * 8 * 1027 * 256 * 2
    mixed = cases["b64_mixed"]
    assert mixed.kv_bytes() == sum(mixed.lengths()) * 8 * 256 * 2


@pytest.mark.parametrize("l2, copies, calls", [(0, 2, 8), (1000, 3, 9), (4000, 10, 10)])
def test_copies_exceed_l2(l2, copies, calls):
    case = dataclasses.replace(small_step("b1_8k"), length=50)
    assert case.kv_bytes() == 3200
    step = case.problem("cpu", l2)
    assert step.copies == copies and len(step.order) == calls and set(step.order) == set(range(copies))
    for caches in (step.dense, step.contiguous, step.paged(16)[1]):
        assert len({k.data_ptr() for k, _ in caches} | {v.data_ptr() for _, v in caches}) == 2 * copies
        assert all(x.equal(y) for copy in caches[1:] for x, y in zip(copy, caches[0], strict=True) if not x.isnan().any())


def test_pages_hold_the_sequences_in_random_order(monkeypatch):
    monkeypatch.setattr(serving, "SHORTEST", 5)
    step = small_step("b64_mixed").problem("cpu", 0)
    table, ((k_cache, v_cache), *_) = step.paged(16)
    counts = [-(-n // 16) for n in step.lengths]
    used = [page for pages, n in zip(table.tolist(), counts, strict=True) for page in pages[:n]]
    assert len(set(step.lengths)) > 1
    assert used != sorted(used) and sorted(used) == list(range(sum(counts))) and len(k_cache) == sum(counts)
    for cache, dense, contiguous in zip((k_cache, v_cache), (step.k, step.v), step.contiguous[0], strict=True):
        assert torch.equal(cache.isnan().all(-1).sum(), torch.tensor(len(used) * 16 - sum(step.lengths)))
        for b, n in enumerate(step.lengths):
            found = cache[table[b, : counts[b]].long()].flatten(0, 1)
            assert torch.equal(found[:n].transpose(0, 1), dense[b, :, :n]) and found[n:].isnan().all()
            assert torch.equal(contiguous[b, :n].transpose(0, 1), dense[b, :, :n]) and contiguous[b, n:].isnan().all()


@pytest.mark.parametrize("name", serving.BY_NAME)
def test_decoding_against_the_reference(name, tmp_path, monkeypatch):
    """Every implementation of ours, in its own layout and in terms of its own positions, finds the same float64 answer."""
    monkeypatch.setattr(serving, "SHORTEST", 5)
    monkeypatch.setattr(serving, "CALLS", 2)
    case = small_step(name)
    impls = [i for i, how in serving.IMPLEMENTATIONS.items() if i.startswith("flexpress") and how.takes(case)]
    rows = run_small(case, impls, tmp_path)
    assert [row["impl"] for row in rows] == impls
    for row in rows:
        assert "error" not in row and 0 < row["rel_err"] < 0.02 and row["calls"] == 2 and row["bytes"] == case.kv_bytes()
        assert row["us"] == 1000.0 and row["us_rounds"] == [1000.0] * 3
        assert row["tb_s"] == pytest.approx(case.kv_bytes() / 1e-3 * 1e-12) and row["of_copy"] == row["tb_s"] / 4
        assert row["tflops"] is None and row["update_us"] is None


@pytest.mark.parametrize("name", ["b16_8k", "b16_q4", "b16_alibi", "b16_softcap", "b16_window", "b64_mixed"])
def test_reference_of_decoding(name, monkeypatch):
    """Against dense attention of whole sequences, of which the last queries are the new ones."""
    monkeypatch.setattr(serving, "SHORTEST", 5)
    case = small_step(name)
    step = case.problem("cpu", 0)
    answers = {(x.batch, x.kv_head): x.out for x in step.answers}
    assert {b for b, _ in answers} == set(range(case.batch))
    score_mod, mask_mod = case.make_mods("cpu")
    for (b, kv_head), found in answers.items():
        n, group = step.lengths[b], case.heads // case.kv_heads
        q, k, v = step.q[b].double()[kv_head * group :][:group], step.k[b, kv_head, :n].double(), step.v[b, kv_head, :n].double()
        scores = q @ k.T * 0.25
        h = torch.arange(kv_head * group, kv_head * group + group)[:, None, None]
        i, j = torch.arange(n - case.q_len, n)[:, None], torch.arange(n)
        scores = score_mod(scores, torch.tensor(b), h, i, j) if score_mod else scores
        scores = scores.where(mask_mod(b, h, i, j), -math.inf) if mask_mod else scores
        assert (found - scores.softmax(-1) @ v).norm() < 1e-12 * found.norm()


def test_decoding_that_is_wrong_or_fails(tmp_path, monkeypatch):
    def wrong(step):
        return lambda i: serving.cached(step)(i) * 1.1

    def broken(step):
        raise RuntimeError("\nno such luck")

    found = {build.__name__: serving.Implementation(build) for build in (serving.cached, wrong, broken)}
    monkeypatch.setattr(serving, "IMPLEMENTATIONS", found)
    right, wrong, broken = run_small(small_step("b16_8k"), list(found), tmp_path)
    assert "error" not in right and right["us"] == 250.0
    assert wrong["rel_err"] == pytest.approx(0.1, rel=0.1) and wrong["error"].startswith("WrongResult")
    assert broken["error"] == "RuntimeError: no such luck"
    assert wrong["us"] is None and broken["us"] is None and not wrong["us_rounds"]


def test_a_failed_capture_ends_the_worker(tmp_path):
    """For the current stream is in doubt."""

    def capture(run):
        raise common.CaptureFailed("RuntimeError: cannot wait in a capture")

    rows: list[dict] = []
    with pytest.raises(supervisor.DeviceLost):
        decode.run_case(
            small_step("b16_8k"),
            ["flexpress_cached", "flexpress"],
            rows,
            supervisor.Watch(tmp_path / "running"),
            "cpu",
            tools=TOOLS._replace(capture=capture),
        )
    assert [supervisor.finished(row, "us") for row in rows] == [True, False]
    assert rows[0]["error"] == "CaptureFailed: RuntimeError: cannot wait in a capture"


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph and torch.cuda.graph; the end of the capture complains about what went wrong in it."""

    replays = 0

    def replay(self):
        self.replays += 1

    @contextlib.contextmanager
    def capture(self, graph, stream, capture_error_mode):
        assert graph is self and stream.waited == ["current"] and capture_error_mode == "thread_local"
        try:
            yield
        except ValueError:
            raise RuntimeError("the capture was invalidated") from None


class FakeStream:
    """Knows whom it waited for."""

    def __init__(self):
        self.waited = []

    def wait_stream(self, stream):
        self.waited.append("side" if self is FakeStream.current else "current")


FakeStream.current = FakeStream()


class FakeEvent:
    """A clock on which a replay takes 3 ms."""

    def __init__(self, graph):
        self.graph = graph

    def record(self):
        self.at = self.graph.replays

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 3.0 * (end.at - self.at)


def test_graphs_are_captured_and_timed(monkeypatch):
    graph = FakeGraph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", graph.capture)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(graph))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream.current)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    count = itertools.count()
    outs, replay = common.captured(lambda: [next(count)])
    assert outs == [1] and FakeStream.current.waited == ["side"]
    assert common.replay_ms(replay, rep=120.0) == 3.0
    assert graph.replays == 2 + 4 + 10 * (1 + 4)  # 10 groups of 12 ms, and what comes before each
    assert common.replay_ms(replay, rep=1.0) == 3.0

    def wrong(second):
        if second or next(count) > 2:
            raise ValueError("synchronizes")

    with pytest.raises(common.CaptureFailed, match="ValueError: synchronizes"):
        common.captured(lambda: wrong(False))
    with pytest.raises(ValueError, match="synchronizes"):
        common.captured(lambda: wrong(True))


@pytest.mark.parametrize("prefill", [False, True])
def test_work_writes_every_case(tmp_path, monkeypatch, prefill):
    """Two cases, and later the implementation that was not asked for at first."""
    prompts = dataclasses.replace(ragged.CASES[0], batch=2, heads=2, kv_heads=2, length=20, d_qk=16, d_v=16)
    monkeypatch.setattr(serving, "BY_NAME", {name: small_step(name) for name in ("b16_8k", "b16_window")})
    monkeypatch.setattr(ragged, "BY_NAME", {"ragged_prefill": prompts})
    monkeypatch.setattr(common, "copy_tb_s", lambda rep: 3.0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"L2_cache_size": 50 << 20}))
    monkeypatch.setattr(decode, "run_case", functools.partial(decode.run_case, device="cpu", tools=TOOLS))
    first, second = ("flexpress_varlen", "flexpress_equal") if prefill else ("flexpress", "flexpress_cached")
    which = ["--ragged-prefill"] if prefill else ["--cases", "b16_8k,b16_window"]
    for impls in (first, f"{first},{second}"):
        assert decode.work(decode.parse([*which, "--impls", impls, "--out", str(tmp_path / "out.json")])) == 0
    head, rows = common.read_results(tmp_path / "out.json")
    assert head["copy_tb_s"] == 3.0 and head["l2_bytes"] == 50 << 20 and "gpu" in head
    names = ["ragged_prefill"] if prefill else ["b16_8k", "b16_window"]
    assert sorted((row["case"], row["impl"]) for row in rows) == [(n, i) for n in names for i in sorted((first, second))]
    assert not any("error" in row for row in rows) and all(row["of_copy"] or prefill for row in rows)
    assert len(decode.summary(rows).split("\n\n")) == 2 - prefill


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_other_attentions_find_the_same_answers(tmp_path, monkeypatch):
    """torch's flex_attention, not compiled, and FlashAttention where this machine has it."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(serving, "CALLS", 2)
    for name in ("b16_8k", "b16_alibi", "b16_softcap", "b16_window", "b16_q4"):
        case = small_step(name)
        rows = run_small(case, [i for i in ("torch_flex", "flash") if serving.IMPLEMENTATIONS[i].takes(case)], tmp_path)
        assert not any("error" in row for row in rows) and max(row["rel_err"] for row in rows) < 0.02


def test_equal_lengths_are_as_much_work():
    (case,) = ragged.CASES
    lengths, equal = case.lengths(), case.equal()
    assert len(lengths) == 64 and min(lengths) >= 16 and 4000 < max(lengths) <= 4096
    assert equal.length**2 * 64 == pytest.approx(sum(n * n for n in lengths), rel=1e-3)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert case.flops("flexpress_varlen") == case.flops("flexpress_cached") == 2 * 256 * 32 * pairs
    assert case.flops("flexpress_equal") == equal.forward_flops(workloads.count_pairs(equal.make_mods("cpu")[1], equal.length))
    assert case.flops("torch_flex_equal") == pytest.approx(case.flops("flexpress_varlen"), rel=0.01)


def test_ragged_prefill(tmp_path, monkeypatch):
    monkeypatch.setattr(ragged, "PAGE", 16)
    case = dataclasses.replace(ragged.CASES[0], batch=3, heads=4, kv_heads=2, length=40, d_qk=16, d_v=16)
    rows = run_small(case, list(ragged.DEFAULT), tmp_path)
    for row in rows:
        assert "error" not in row and 0 < row["rel_err"] < 0.02
        assert row["us"] == 2000.0 and row["tflops"] == pytest.approx(case.flops(row["impl"]) / 2e-3 * 1e-12)
        assert row["update_us"] == (2000.0 if row["impl"] == "flexpress_cached" else None)


def test_options_of_decode():
    args = decode.parse([])
    assert args.cases == list(serving.BY_NAME) and not args.ragged_prefill and not args.worker
    assert "efficient" not in args.impls and len(args.impls) == len(serving.IMPLEMENTATIONS) - 1
    args = decode.parse(["--ragged-prefill", "--rep", "20", "--impls", "flexpress_varlen", "--worker"])
    assert args.ragged_prefill and args.worker and args.rep == 20.0
    assert args.cases == ["ragged_prefill"] and args.impls == ["flexpress_varlen"]
    with pytest.raises(SystemExit):
        decode.parse(["--impls", "flexpress_varlen"])


def test_summary_of_decoding():
    def row(case, impl, us, **figures):
        return decode.new_row(case, impl) | {"us": us} | figures

    rows = [
        row("b16_8k", "flexpress", 200.0, tb_s=2.7, of_copy=0.9, rel_err=0.003),
        row("b16_8k", "flexpress_cached", 180.0, tb_s=3.0, of_copy=1.0, rel_err=0.004),
        row("b16_8k", "torch_flex", 500.0, tb_s=1.0, of_copy=0.3, rel_err=0.003),
        row("b16_8k", "cudnn", 190.0, tb_s=2.8, of_copy=0.95, rel_err=0.003),
        row("b16_alibi", "flexpress", None, error="RuntimeError: out of luck"),
        row("ragged_prefill", "flexpress_varlen", 6000.0, tflops=450.0, rel_err=0.003),
        row("ragged_prefill", "flexpress_equal", 5500.0, tflops=500.0, rel_err=0.003),
    ]
    times, rates, prefill = (part.splitlines() for part in decode.summary(rows).split("\n\n"))
    assert times[0].split() == ["us", "flexpress", "cached", "torch_flex", "cudnn"]
    assert times[1].split() == ["b16_8k", "200", "180", "500", "190"]
    assert times[2].split() == ["b16_alibi", "failed", "-", "-", "-"]
    figures = rates[1].split()
    assert figures[:5] == ["b16_8k", "2.5", "0.95", "-", "2.778"] and figures[5] == "1.056"
    assert figures[-3:] == ["3", "1", "0.004"]
    assert [line.split()[3] for line in prefill[1:]] == ["0.9", "1"]
    assert decode.summary([]) == ""


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
