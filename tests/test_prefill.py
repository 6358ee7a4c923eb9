"""Long ragged prompts against a cache by the kernel for Hopper: which calls, and, in a stand-in for Gluon, what it computes."""

from __future__ import annotations

import ast

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from flexpress import cached_attention, mods, printed_kernels, update_cache
from flexpress.codegen import registry
from flexpress.codegen.device import devices
from flexpress.codegen.plan.forward import Options
from flexpress.codegen.run import forward_kernels, prefill
from flexpress.codegen.run.cached_call import CachedCall
from flexpress.codegen.run.call import Cached
from flexpress.codegen.run.decode import DecodeCached
from flexpress.codegen.run.layouts import output_like
from flexpress.inputs import checks
from support.dense import dense_attention, relative_error
from support.devices import hopper
from support.fake_hopper import Variant, forward_on_cpu, pass_for_hopper
from support.prefill import MODS, Batch, batches, check, made_mods


@pytest.fixture(autouse=True)
def fresh():
    """What one test pretends to have compiled is not there in another."""
    registry.clear()
    yield
    registry.clear()


CASES = {
    "an entry a sequence": dict(),
    "entries anywhere": dict(located=True, heads=(4, 2)),
    "pages of 8": dict(page_size=8),
    "pages of 16, head dim 128": dict(page_size=16, dims=(128, 128)),
    "pages of 32, head dims 192 and 128": dict(page_size=32, dims=(192, 128)),
    "pages of 64, float16": dict(page_size=64, dims=(72, 40), dtype=torch.float16),
    "pages of 128": dict(page_size=128, dims=(64, 128)),
    "pages of 256": dict(page_size=256, heads=(4, 1)),
    "pages of 16, head dim 256": dict(page_size=16, dims=(256, 256)),
    "pages of 16, head dims 160 and 192": dict(page_size=16, dims=(160, 192)),
    "pages of 128, head dim 256": dict(page_size=128, dims=(256, 200)),
    **{f"{name}, pages of 64": dict(page_size=64, mod=name) for name in MODS},
    "alibi, head dim 128": dict(dims=(128, 128), mod="alibi"),
    "positions of queries": dict(page_size=64, offsets=[150, 3, 37, 0]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_kernel_computes(monkeypatch, name):
    """By the kernel's text, from what it finds in a cache that is NaN wherever no sequence is."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 128)
    p = Batch([200, 0, 345, 33], [200, 5, 500, 33], more=20, **CASES[name])
    found = cached_attention(**p.arguments(), **p.mods(), return_lse=True, check=False)
    assert len(launched) == 1
    check(p, found)


@pytest.mark.parametrize("mod", MODS)
def test_more_queries_than_keys(monkeypatch, mod):
    """The first ones stand before the sequence: mods are told negative positions."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 128)
    p = Batch([200, 190, 300], [345, 33, 0], page_size=16, mod=mod)
    found = cached_attention(**p.arguments(), **p.mods(), return_lse=True, check=False)
    assert len(launched) == 1
    check(p, found)


@pytest.mark.parametrize("page_size", [0, 16])
def test_sinks_of_queries_of_sequences_alone(monkeypatch, page_size):
    """Beside those without: also of a sequence without keys, but not of tokens after the last sequence."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 64)
    sinks = torch.tensor([0.5, 3.0])
    arguments = {**Batch([140, 130], [200, 0], more=150, page_size=page_size).arguments(), "return_lse": True, "check": False}
    plain, lse = cached_attention(**arguments)
    out, total = cached_attention(**arguments, sinks=sinks)
    assert len(launched) == 2 and (lse[140:] == -torch.inf).all()
    torch.testing.assert_close(total[:270], torch.logaddexp(lse[:270], sinks.expand(270, 2)))
    assert (total[270:] == -torch.inf).all() and not out[140:].any()
    torch.testing.assert_close(out[:140].float(), plain[:140] * (lse - total)[:140, :, None].exp(), rtol=2e-2, atol=2e-3)


PADDED = {
    "queries beside each other": ([200, 200], lambda q: q.contiguous().transpose(1, 2)),
    "one sequence": ([300], lambda q: q.contiguous().transpose(1, 2)),
    "one sequence, heads apart": ([300], lambda q: q.transpose(1, 2).contiguous()),
    "heads around sequences": ([150, 150, 150], lambda q: q.permute(2, 0, 1, 3).contiguous().transpose(0, 1)),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("case", [dict(mod="alibi", page_size=16), dict(offsets=[7, 30, 60], heads=(4, 2)), dict(mod="per sequence")])
def test_padded_queries_that_lie_one_after_another(monkeypatch, name, case):
    """Are ragged ones of equal lengths; results lie as those of any padded queries."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 128)
    q_lens, laid = PADDED[name]
    case = {**case, **({"offsets": case["offsets"][: len(q_lens)]} if "offsets" in case else {})}
    p = Batch(q_lens, [400, 150, 220][: len(q_lens)], **case)
    arguments = p.arguments()
    del arguments["cu_seqlens_q"], arguments["max_q_len"]
    arguments["query"] = laid(arguments["query"].unflatten(0, (len(q_lens), q_lens[0])))
    out, lse = cached_attention(**arguments, **p.mods(), return_lse=True, check=False)
    assert len(launched) == 1 and out.stride() == output_like(arguments["query"], out.shape[3]).stride() and lse.is_contiguous()
    check(p, (out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)))


def test_negative_positions_index_as_python_does(monkeypatch):
    """From a table's end; what lies before its first element is outside, and reads zero."""
    forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 128)
    arguments, table = Batch([190], [33]).arguments(), torch.ones(20)

    def attend(mask_mod):
        return cached_attention(**arguments, mask_mod=mask_mod, return_lse=True, check=False)

    found = attend(lambda b, h, q_idx, kv_idx: (table[q_idx] > 0) | (kv_idx < 5))
    expected = attend(lambda b, h, q_idx, kv_idx: (kv_idx < 5) | ((q_idx >= -20) & (q_idx < 20)))
    for have, want in zip(found, expected, strict=True):
        torch.testing.assert_close(have, want)


def test_sequences_without_queries_or_keys(monkeypatch):
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 0)
    for q_lens, kv_lens in (([0, 128, 0], [7, 128, 0]), ([0, 0, 130], [1, 2, 130]), ([128, 64], [0, 64])):
        p = Batch(q_lens, kv_lens, page_size=16)
        arguments = p.arguments()
        del arguments["max_q_len"]
        check(p, cached_attention(**arguments, return_lse=True, check=False))
    assert len(launched) == 3


@pytest.mark.parametrize("page_size", [0, 16])
def test_more_keys_than_there_is_room_for(monkeypatch, page_size):
    """Are taken as the room."""
    forward_on_cpu(monkeypatch)
    arguments = Batch([200, 300], [320, 320], page_size=page_size).arguments()
    for cache in ("k_cache", "v_cache"):
        arguments[cache] = arguments[cache][:, :320].nan_to_num() if not page_size else arguments[cache].nan_to_num()
    if page_size:
        arguments["page_table"] = arguments["page_table"][:, :20].contiguous()
    monkeypatch.setattr(prefill, "LEAST", 128)
    arguments |= {"q_offset": torch.tensor([120, 20], dtype=torch.int32), "check": False}
    expected = cached_attention(**arguments)
    assert torch.equal(cached_attention(**{**arguments, "kv_len": torch.tensor([400, 999], dtype=torch.int32)}), expected)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(cu_seqlens_q=[0, 500, 300]),
        dict(cu_seqlens_q=[0, 900, 500]),
        dict(cu_seqlens_q=[-300, 100, 500]),
        dict(max_q_len=100),
        dict(cu_seqlens_q=[3, 200, 500]),
        dict(cu_seqlens_q=[0, 1 << 30, 1 << 30]),
        dict(cu_seqlens_q=[0, -(1 << 31), 500]),
        dict(kv_len=[-5, 1 << 30]),
        dict(q_offset=[-1000, 1 << 20]),
        dict(kv_len=[100, 100]),
        dict(page_table=-1),
        dict(page_table=1 << 30),
        dict(page_table=[[0, -1, 1 << 30, -(1 << 31)] * 5] * 2),
    ],
)
def test_wrong_values_read_nothing_outside(monkeypatch, wrong):
    """The stand-in fails where an address lies outside its tensor."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 128)
    arguments = Batch([200, 300], [200, 300], page_size=16).arguments()
    arguments |= {
        name: torch.tensor(v, dtype=torch.int32)
        if isinstance(v, list)
        else torch.full_like(arguments[name], v)
        if name == "page_table"
        else v
        for name, v in wrong.items()
    }
    arguments |= {name: arguments[name].nan_to_num() for name in ("k_cache", "v_cache")}
    torch.use_deterministic_algorithms(True)  # memory that nobody writes is NaN
    try:
        found = cached_attention(**arguments, score_mod=made_mods()["by position"][0], return_lse=True, check=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched and not any(t.isnan().any() for t in found)


def test_queries_past_a_max_q_len_that_lies_are_right_or_nothing(monkeypatch):
    """Its tiles know where sequences end, not max_q_len: the lists hold for whole blocks of queries."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 0)
    arguments = Batch([300], [400], page_size=16).arguments()
    arguments |= {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx // 128 == q_idx // 128), "check": False}
    expected, found = (cached_attention(**arguments | {"max_q_len": n}, return_lse=True) for n in (300, 140))
    assert len(launched) == 2
    assert all(torch.equal(a[:256], b[:256]) for a, b in zip(expected, found, strict=True))
    assert (found[0][256:] == 0).all() and (found[1][256:] == float("-inf")).all()


def test_which_calls_it_serves(monkeypatch):
    """Long prompts in a cache that TMA can copy; all else is decode's, and gives what it gave."""
    launched = forward_on_cpu(monkeypatch, run=False)
    decoded = []
    monkeypatch.setattr(DecodeCached, "run", lambda *_, **__: decoded.append(1))

    def goes(q_lens=(512, 600), page_size=16, change=None, **options):
        launched.clear(), decoded.clear()
        case = {name: options.pop(name) for name in ("dims", "dtype", "heads") if name in options}
        arguments = Batch(list(q_lens), list(q_lens), page_size=page_size, **case).arguments()
        if change:
            change(arguments)
        cached_attention(**arguments, **options, check=False)
        assert len(launched) + len(decoded) == 1
        return bool(launched)

    assert goes() and goes(page_size=0) and goes(dtype=torch.float16) and goes(mask_mod=mods.sliding_window(9)) and goes((0, 1024))
    assert all(goes(page_size=size) for size in (8, 16, 32, 64, 128, 256, 384))
    assert not any(goes(page_size=size) for size in (1, 4, 5, 48, 96, 192, 200))
    assert not goes((512, 511)) and not goes((4000, *[1] * 8))
    assert not goes(dtype=torch.float32) and not goes(batch_invariant=True)
    assert not goes(dims=(32, 64)) and not goes(dims=(64, 20)) and goes(dims=(40, 72)) and goes(dims=(256, 256))

    def scaled(arguments):
        arguments |= {name: arguments[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        arguments |= {name: torch.ones(1) for name in ("k_scale", "v_scale")}

    def unaligned(arguments):
        k = arguments["k_cache"]
        arguments["k_cache"] = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)

    def one_entry(arguments):
        k = arguments["k_cache"]
        arguments["k_cache"] = k[:1].expand(k.shape)

    def padded(arguments, length=512):
        arguments["query"] = arguments["query"][: 2 * length].view(2, length, 2, 64).transpose(1, 2)
        del arguments["cu_seqlens_q"], arguments["max_q_len"]

    def short(arguments):
        padded(arguments, 511)

    def apart(arguments):
        padded(arguments)
        arguments["query"] = arguments["query"].contiguous()

    assert goes(change=padded)
    assert not any(goes(change=change) for change in (scaled, unaligned, one_entry, short, apart))
    monkeypatch.setattr(devices, "capability_of", lambda _: (8, 0))
    assert not goes()
    monkeypatch.setattr(devices, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(checks, "DEFAULT", Options(backend="PORTABLE"))
    assert not goes()


def test_few_tiles_are_for_decode(monkeypatch):
    """Which splits keys."""
    pass_for_hopper(monkeypatch, Variant, multiprocessors=132)
    few, many = (Batch([640], [640], heads=(heads, 1)).arguments() for heads in (4, 16))
    for arguments, served in ((few, False), (many, True)):
        q, k, v = arguments["query"].transpose(0, 1)[None], *(arguments[t].transpose(1, 2) for t in ("k_cache", "v_cache"))
        where = Cached(arguments["cu_seqlens_q"], 640, arguments["kv_len"])
        call = CachedCall(q, k, v, q, q, (1, q.shape[1], 640, 640), 0.1, where, True, None, Options(), lambda _: None, lambda _: None)
        reason = prefill.Prefill().worthwhile(call)
        assert prefill.Prefill().fits(call) is None and (reason is None) == served


def test_a_kernel_that_spills_or_does_not_compile_is_not_tried_again(monkeypatch):
    decoded, tried = [], []
    pass_for_hopper(monkeypatch, lambda name: Variant(name, local=5000))
    monkeypatch.setattr(forward_kernels, "worthwhile", lambda *_: None)
    monkeypatch.setattr(DecodeCached, "run", lambda *_, **__: decoded.append(1))
    plan = forward_kernels.plan_hopper_forward
    monkeypatch.setattr(forward_kernels, "plan_hopper_forward", lambda *a: tried.append(1) or plan(*a))
    arguments = Batch([512, 600], [512, 600], page_size=64).arguments()
    for _ in range(2):
        cached_attention(**arguments, check=False)
    assert len(decoded) == 2 and len(tried) == 1


@pytest.mark.parametrize("page_size", [0, 64])
def test_arguments_arrive_where_the_kernel_reads_them(monkeypatch, page_size):
    launched = []

    class Recorder(Variant):
        def launch(self, grid, args, _) -> None:
            launched.append((self.name, grid, args))

    pass_for_hopper(monkeypatch, Recorder, multiprocessors=20)
    monkeypatch.setattr(forward_kernels, "worthwhile", lambda *_: None)
    arguments = Batch([512, 600], [700, 800], page_size=page_size, heads=(4, 2), more=10).arguments()
    out, lse = cached_attention(**arguments, scale=0.5, return_lse=True, check=False)
    ((name, grid, values),) = launched
    text = next(path for path in printed_kernels() if path.stem == name).read_text()
    entry = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "hopper_forward")
    found = dict(zip([a.arg for a in entry.args.args], values, strict=True))
    room = 832 if page_size else 803
    expected = {
        "Hq": 4,
        "GROUP_SIZE": 2,
        "Q_LEN": 1122,
        "KV_LEN": room,
        "HEADS": 4,
        "RANGES": 1122 // 128 + 3,
        "SEQUENCES": 2,
        "MAX_Q": 600,
        "mask_stride_z": 5,
        "mask_stride_h": 0,
        "mask_columns": 7,
        "full_mask_columns": 7,
        "stride_oh": 64,
        "stride_om": 256,
        "O": out.data_ptr(),
        "LSE": lse.data_ptr(),
        "cu_q": arguments["cu_seqlens_q"].data_ptr(),
        "kv_lens": arguments["kv_len"].data_ptr(),
    }
    if page_size:
        expected |= {"stride_pages": 13, "pages": arguments["page_table"].data_ptr()}
    assert grid == (20,) and {name: found[name] for name in expected} == expected
    assert found["TO_LOG2"] == pytest.approx(0.5 * 1.4426950408889634)
    boxes = {t: found[f"desc_{t}"].block_shape for t in "kvqo"}
    keys = [1, 1, 64 if page_size else 128, 64]
    assert boxes == {"k": keys, "v": keys, "q": [1, 1, 64, 64], "o": [1, 1, 64, 64]}
    assert found["desc_k"].shape == [*arguments["k_cache"].transpose(1, 2).shape]


def test_lengths_and_values_compile_nothing(monkeypatch):
    """Nor do numbers of sequences and of pages, slopes and windows."""
    names = set()
    pass_for_hopper(monkeypatch, lambda name: names.add(name) or Variant(name))
    monkeypatch.setattr(forward_kernels, "worthwhile", lambda *_: None)
    for q_lens, slope, window in (([512, 600], 0.5, 100), ([700, 0, 900], 0.1, 90), ([513], 0.2, 1000)):
        arguments = Batch(q_lens, [n + 100 for n in q_lens], page_size=64).arguments()
        cached_attention(**arguments, score_mod=mods.alibi(torch.full((2,), slope)), mask_mod=mods.sliding_window(window), check=False)
    assert len(names) == 1


@pytest.fixture
def forced(monkeypatch):
    """Small problems as well, and nothing by decode. Memory that is then free is NaN: what a kernel does not write shows."""

    def decode(*_, **__):
        raise AssertionError("decode took a call")

    monkeypatch.setattr(forward_kernels, "worthwhile", lambda *_: None)
    monkeypatch.setattr(prefill, "LEAST", 0)
    monkeypatch.setattr(DecodeCached, "run", decode)
    torch.full((1 << 26,), float("nan"), device="cuda")


@hopper
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(forced, name):
    case = {"dims": (128, 128), **CASES[name]}
    if "offsets" in case:
        case["offsets"] = [0, 3, 700, 0, 4000]
    p = Batch([1000, 0, 2045, 33, 641], [1000, 5, 2900, 33, 5000], more=300, **case)
    arguments = {**p.arguments("cuda"), **p.mods("cuda")}
    found = cached_attention(**arguments, return_lse=True)
    check(p, found, factor=2.0)
    again = cached_attention(**arguments, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@hopper
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(p=batches())
def test_any_batch_on_a_gpu(forced, p):
    torch.full((1 << 26,), float("nan"), device="cuda")
    check(p, cached_attention(**p.arguments("cuda"), **p.mods("cuda"), return_lse=True), factor=2.0)


@hopper
@pytest.mark.parametrize("page_size", [0, 16, 128])
def test_a_graph_sees_other_lengths(forced, page_size):
    """And other pages, when it is replayed; the host does not wait for the device."""
    arguments = Batch([700, 500, 800], [700, 900, 800], page_size=page_size, dims=(128, 128)).arguments("cuda")
    arguments["max_q_len"] = 1500
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].nan_to_num(1.0)
    if page_size:
        pages = len(arguments["k_cache"])
        arguments["page_table"] = torch.randperm(pages, device="cuda")[: pages // 3 * 3].to(torch.int32).view(3, -1)
    cached_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cached_attention(**arguments)
    for q_lens, kv_lens in (([700, 500, 800], [700, 900, 800]), ([3, 0, 1500], [900, 7, 899]), ([900, 850, 0], [900, 900, 0])):
        arguments["cu_seqlens_q"].copy_(torch.tensor([0, *torch.tensor(q_lens).cumsum(0)], dtype=torch.int32))
        arguments["kv_len"].copy_(torch.tensor(kv_lens, dtype=torch.int32))
        if page_size:
            arguments["page_table"].copy_(arguments["page_table"].flip(1))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, cached_attention(**arguments)) and not out.isnan().any()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cached_attention(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@hopper
def test_pages_beyond_2_31_elements(forced):
    size, Hkv, D = 64, 8, 128
    pages = (1 << 31) // (size * Hkv * D) + 10
    caches = [torch.empty(pages, size, Hkv, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table = torch.tensor([[pages - 1, 0, pages - 3, 1], [pages - 2, pages - 9, 4, 5]], dtype=torch.int32, device="cuda")
    k, v = (torch.randn(2, Hkv, 250, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    kv_len, cu = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([250, 250], [0, 250, 500]))
    update_cache(k, v, *caches, kv_len, page_table=table)
    q = torch.randn(500, 16, D, device="cuda", dtype=torch.bfloat16)
    out = cached_attention(q, *caches, kv_len, page_table=table, cu_seqlens_q=cu)
    expected = dense_attention(q.view(2, 250, 16, D).transpose(1, 2), k, v, None, mods.causal)[0]
    assert relative_error(out.view(2, 250, 16, D).transpose(1, 2), expected) < 4e-3


def test_distances_of_negative_positions(monkeypatch):
    """The difference of positions from 0 on is that of bits, but not before."""
    launched = forward_on_cpu(monkeypatch)
    monkeypatch.setattr(prefill, "LEAST", 128)

    def squared(score, b, h, q_idx, kv_idx):
        return score - 0.002 * (q_idx - kv_idx).float() ** 2

    batch = Batch([200, 190, 300], [345, 33, 10], page_size=16)
    out = cached_attention(**batch.arguments(), score_mod=squared, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= 0, check=False)
    assert len(launched) == 1
    q, k, v = (t.double() for t in batch.sequences()[1])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    positions = torch.arange(190)[:, None] + (33 - 190)
    scores = squared(q @ k.mT * q.shape[-1] ** -0.5, 0, 0, positions, torch.arange(33)[None])
    assert relative_error(out[200:390], (scores.softmax(-1) @ v)[0].transpose(0, 1)) < 1e-2
