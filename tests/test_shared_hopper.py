"""Prefixes that sequences share by the kernel for Hopper. On a CPU its text runs in a stand-in for Gluon."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexpress import cached_attention, printed_kernels
from flexpress.caches import shared_attention, shared_prefix
from flexpress.codegen import registry
from flexpress.codegen.run import shared_parts
from flexpress.codegen.run.launch import Unusable
from flexpress.codegen.run.shared_tables import Laid
from flexpress.codegen.run.shared_tiles import lay_tiles
from support.devices import DEVICES, hopper
from support.fake_hopper import prefixes_on_cpu
from support.prefixes import Forked, batches, check, made


@pytest.fixture(autouse=True)
def by_tiles(monkeypatch):
    """However little need not be read again, and however empty tiles are."""
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0)
    monkeypatch.setattr(shared_attention, "LEAST_FILL", 0.0)
    registry.clear()
    yield
    registry.clear()


def forked(**changes) -> Forked:
    """0, 1 and 2 share 400, 3 and 4 share 80."""
    forks = [(-1, 0, 400), (0, 400, 3), (0, 400, 1), (-1, 0, 90), (3, 90, 2)]
    sizes = dict(page_size=8, dtype=torch.bfloat16, D_QK=64, D_V=64, Hkv=1, Hq=2)
    usual = dict(forks=forks, order=[3, 1, 0, 4, 2], q_lens=[1, 2, 1, 1, 1], **sizes)
    return Forked(**usual | changes)


LONG = dict(forks=[(-1, 0, 300), (0, 260, 40), (0, 260, 150), (0, 20, 30)], order=[2, 0, 3, 1])
CASES = {
    "plain": dict(),
    "one query each": dict(q_lens=[1] * 5, ragged=False),
    "queries of each, float16": dict(q_lens=[3] * 5, ragged=False, dtype=torch.float16, score="softcap"),
    "pages of 16, head dims 128": dict(page_size=16, D_QK=128, D_V=128, Hkv=2, Hq=4, made_before=True),
    "pages of 32, head dims 192 and 128": dict(page_size=32, D_QK=192, D_V=128),
    "pages of 64, head dims 72 and 40": dict(page_size=64, D_QK=72, D_V=40, score="alibi"),
    "pages of 128, head dims 256": dict(page_size=128, D_QK=256, D_V=256),
    "head dims 160 and 192": dict(D_QK=160, D_V=192, mask="window"),
    "alibi": dict(score="alibi", q_lens=[2] * 5, ragged=False),
    "by sequence": dict(score="per sequence", mask="per sequence"),
    "all see all": dict(mask="all", score="softcap"),
    "a mask of each head": dict(mask="per head", Hq=4),
    "a window": dict(mask="window", score="alibi", page_size=16),
    "sinks": dict(sinks=True, score="alibi"),
    "queries that stand before": dict(moved=5, mask="all"),
    "several tiles of a group": dict(LONG, page_size=16, q_lens=[140, 1, 0, 35]),
    "several tiles of a group, masked": dict(LONG, page_size=16, q_lens=[140, 40, 1, 0], mask="per sequence", score="alibi"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_kernel_computes(monkeypatch, name):
    """From a cache that is NaN wherever no sequence is, in memory that is NaN."""
    launched = prefixes_on_cpu(monkeypatch)
    check(forked(**CASES[name]), "cpu")
    assert [launch.spec.flag["GROUPED"] for launch in launched] == [True]


def fitting(p: Forked) -> Forked:
    """With head dims, pages and a dtype that TMA copies."""
    dims = {16: 40, 20: 72, 64: 64}[p.D_QK], {16: 40, 24: 64}[p.D_V]
    dtype = torch.float16 if p.dtype is torch.float32 else p.dtype
    return replace(p, D_QK=dims[0], D_V=dims[1], page_size={1: 8, 4: 16, 16: 64}[p.page_size], dtype=dtype, fp8=False)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=batches("cpu"))
def test_any_batch(monkeypatch, drawn):
    with monkeypatch.context() as patch:
        prefixes_on_cpu(patch, multiprocessors=30)
        check(fitting(drawn), "cpu")
    registry.clear()


def test_no_error_is_added(monkeypatch):
    """Parts stay in float32: what is lost is at most what two calls that are merged lose."""
    errors = []
    for fill in (0.0, 2.0):
        monkeypatch.setattr(shared_attention, "LEAST_FILL", fill)
        with monkeypatch.context() as patch:
            launched = prefixes_on_cpu(patch, multiprocessors=60)
            p = forked(q_lens=[1] * 5, ragged=False, Hq=8, D_QK=128, D_V=128)
            arguments, sequences, _ = made(p, "cpu")
            out = cached_attention(**arguments)
            assert len(launched) == (fill == 0.0)
        exact = []
        for q, k, v in sequences:
            weights = torch.softmax(q.double() @ k.transpose(-1, -2) * p.D_QK**-0.5, -1)
            exact.append(weights @ v)
        errors.append(float((out.double() - torch.cat(exact)).norm()))
    assert errors[0] <= 1.02 * errors[1]


def test_a_kernel_that_is_not_usable_is_not_tried_again(monkeypatch):
    """And the usual kernels take its place."""
    prefixes_on_cpu(monkeypatch)
    tried = []

    def persistent(*_):
        tried.append(1)
        raise Unusable("its threads would spill")

    monkeypatch.setattr(shared_parts.forward_kernels, "persistent", persistent)
    for _ in range(2):
        check(forked(), "cpu")
    assert tried == [1]


@pytest.mark.parametrize(
    "changes", [dict(dtype=torch.float32), dict(fp8=True), dict(D_QK=32), dict(page_size=4), dict(page_size=200)], ids=str
)
def test_what_it_does_not_serve(monkeypatch, changes):
    """The usual kernels do."""
    launched = prefixes_on_cpu(monkeypatch)
    check(forked(**changes), "cpu")
    assert not launched


def test_few_queries_are_for_the_kernel_for_few(monkeypatch):
    """Where less than half of the rows of tiles are queries."""
    launched = prefixes_on_cpu(monkeypatch)
    arguments, _, _ = made(forked(q_lens=[1] * 5, ragged=False), "cpu")
    fill = arguments["shared_prefix"].fills(5)
    assert fill == pytest.approx((400 * 3 + 88 * 2) / (488 * 128))
    for least, served in ((fill * 0.99, True), (fill * 1.01, False)):
        monkeypatch.setattr(shared_attention, "LEAST_FILL", least)
        launched.clear()
        cached_attention(**arguments)
        assert bool(launched) == served


def laid(rows: list[int], alone: tuple[int, ...], device: str) -> Laid:
    """Groups of so many rows, and three tokens of none; rows of `alone` read all by themselves."""
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    T = int(starts[-1]) + 3
    token = torch.randperm(T, generator=torch.Generator().manual_seed(T)).int()
    place = torch.full((T,), -1, dtype=torch.int32)
    for row in {*range(T - 3)} - {*alone}:
        place[token[row]] = row
    none = torch.empty(0)
    return Laid(none, none, none, *(t.to(device) for t in (starts, token)), none, none, place.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "rows, lengths, parts",
    [
        ([128], [8192], [4]),  # 32 tiles of 64 blocks of keys: 4 parts for 132 multiprocessors
        ([128], [200], [2]),  # no part is empty
        ([512], [8192], [1]),
        ([64, 64], [8192, 1024], [3, 1]),
        ([5, 200, 0, 64], [0, 2048, 512, 4096], [0, 1, 0, 2]),
        ([3] * 200, [128] * 200, [1] * 200),
        ([], [], []),
    ],
)
def test_tiles(monkeypatch, device, rows, lengths, parts):
    """Of all rows of each group that has keys, each part once, for times as equal as there are multiprocessors."""
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")
    alone = (0,) if rows else ()
    table = laid(rows, alone, device)
    found = lay_tiles(table, torch.tensor(lengths, dtype=torch.int32, device=device), 32, 132)
    expected, first = [], 0
    for group, (count, of_each) in enumerate(zip(rows, parts, strict=True)):
        for tile in range(-(-count // 128)):
            begin = first + tile * 128
            expected += [[begin, min(begin + 128, first + count), group, tile, part, of_each] for part in range(of_each)]
        first += count
    assert found.tiles[: int(found.count)].tolist() == expected
    of_rows = [n for count, n in zip(rows, parts, strict=True) for _ in range(count)] + [0] * 3
    assert found.parts[table.token.long()].tolist() == [0 if row in alone else n for row, n in enumerate(of_rows)]


@pytest.mark.parametrize("device", DEVICES)
def test_tables_that_lie_make_no_rows_outside(monkeypatch, device):
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")
    table = laid([130, 5, 60], (), device)
    for starts in ([0, 1 << 30, 5, 7], [-5, 100, 50, 1 << 31 - 1], [400, 0, 500, 190]):
        wrong = table._replace(starts=torch.tensor(starts, dtype=torch.int32, device=device))
        found = lay_tiles(wrong, torch.tensor([1 << 30, -5, 300], dtype=torch.int32, device=device), 8, 132)
        tiles = found.tiles[: int(found.count)]
        assert ((tiles[:, 0] >= 0) & (tiles[:, 0] < tiles[:, 1]) & (tiles[:, 1] <= len(table.token))).all()
        assert (tiles[:, 4] < tiles[:, 5]).all() and (tiles[:, 5] <= found.most).all()


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 999))
def test_a_shared_prefix_that_lies_reads_nothing_outside(monkeypatch, seed):
    """The stand-in fails where an address lies outside its tensor. Every row is written."""
    g = torch.Generator().manual_seed(seed)
    with monkeypatch.context() as patch:
        launched = prefixes_on_cpu(patch, multiprocessors=40)
        arguments, _, _ = made(forked(score="per sequence", mask="window" if seed % 2 else "none"), "cpu")
        arguments |= {name: arguments[name].nan_to_num() for name in ("k_cache", "v_cache")}
        for name in ("order", "starts", "lengths", "pages", "prefix"):
            tensor = getattr(arguments["shared_prefix"], name)
            lies = torch.randint(-(2**31), 2**31 - 1, tensor.shape, generator=g) // 10 ** int(torch.randint(10, (), generator=g))
            tensor.copy_(torch.where(torch.rand(tensor.shape, generator=g) < 0.7, lies.int(), tensor))
        out, lse = cached_attention(**arguments, check=False, return_lse=True)
    assert len(launched) == 1 and not out.isnan().any() and not lse.isnan().any()
    registry.clear()


@hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    """The same on the real thing; memory that is free is NaN."""
    torch.full((1 << 26,), float("nan"), device="cuda")
    check(forked(**CASES[name]), "cuda")
    assert any("tiles_of_groups" in path.read_text() for path in printed_kernels())


@hopper
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=batches("cuda"))
def test_any_batch_on_a_gpu(drawn):
    check(fitting(drawn), "cuda")
