"""The benchmark of decoding and ragged prefill, as far as it can be tried without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math

import pytest
import torch

from support.benchmarks import common, decode, ragged, serving, supervisor, workloads


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
    score_mod, mask_mod = case.make_mods("cpu")[:2]
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
