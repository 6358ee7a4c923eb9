"""The fused backward kernel compiles for Hopper, fits its shared memory, spills little and keeps its products asynchronous."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from flexpress import create_block_mask, flex_attention, mods, varlen_attention
from flexpress.calls import packed_blocks
from flexpress.codegen import registry
from flexpress.codegen.device import counters, kernel
from flexpress.codegen.device.offline import Compiled
from flexpress.codegen.gpus import SHARED_MEMORY
from flexpress.codegen.mod.table.dtypes import dtype_name
from flexpress.codegen.plan.backward import BackwardCase, delta_rows, delta_spec
from flexpress.codegen.plan.forward import Blocks, Options
from flexpress.codegen.plan.hopper_backward import enough_heads, fits, lacks_room
from flexpress.codegen.run import backward_kernels
from flexpress.codegen.run.preview import Compilation, hopper_backward_compilations
from flexpress.codegen.text.render import render
from flexpress.commands.recipes import make
from support.assembly import assert_packed_as_read
from support.fake_hopper import Variant, pass_for_hopper
from support.hopper_backward import PLAIN, planned
from support.tritons import chosen, last_stage

SPILLED = {  # bytes at most; 0 elsewhere. Of the loops without a mask only those at head dim 64 load values again, up to 7 a block
    # a number or two of the program's, at its start
    "plain d128 bf16": 16,
    "plain d128 bf16, negative scale": 16,
    "learned table, d64 bf16": 16,
    "relative_bias d128 bf16": 120,
    "causal d128, 64 bf16": 24,
    "plain d256 bf16": 16,
    "learned slopes, document d64 bf16, starts": 32,
    "plain d64 fp16": 64,
    "causal d128 bf16": 72,
    "causal d64 bf16": 328,
    "alibi causal d64 bf16": 16,
    "causal d128 bf16, one list": 72,
    "alibi causal d128 bf16": 48,
    "softcap causal d128 bf16": 128,
    "document d128 bf16": 96,
    "causal d32 bf16": 40,
    "softcap causal d32 bf16": 180,
    "causal d96 bf16": 24,
    "plain d192 bf16": 16,
    "causal d192 bf16": 96,
    "alibi causal d24 fp16": 16,
    "plain d192, 128 bf16": 160,
    "causal d192, 128 bf16": 296,
    "softcap causal d192, 128 fp16": 388,
    "alibi causal d136, 40 bf16": 352,
    "causal d256 bf16": 32,
    "alibi causal d256 bf16": 40,
    "softcap causal d192, 160 fp16": 104,
    "alibi causal d136, 176 bf16, blocks elsewhere": 16,
    "alibi causal d80 fp16": 16,
    "a derivative that may be NaN, a mask of keys, d64 bf16": 144,
    "learned slopes, causal d128 bf16": 672,
    "learned bias, d64 bf16": 96,
    "learned per key, d64 bf16": 32,
    "causal d128 bf16, starts": 96,
    "causal d128 bf16, blocks elsewhere": 72,
    "alibi causal d128 bf16, blocks elsewhere": 48,
    "softcap causal d192, 128 bf16, blocks elsewhere": 472,
    "causal d128, 64 bf16, one list, starts": 16,
    "learned per key, causal d64 bf16, starts": 48,
    "causal document d128 bf16, starts": 160,
    "alibi document d80 fp16, starts": 64,
    "causal document d136, 40 bf16, starts": 392,
}
TABLES = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
STARTS = Blocks(True, 128, 128, starts=True)
SHIFTED = Blocks(True, 128, 128, shifted=True)

VECTOR, BIAS = torch.zeros(4096), torch.zeros(4, 16, 64, 64)

BY_ALL = {"causal d128 bf16", "causal d128 bf16, starts"}  # Tritons to the end

CASES = {  # mods, or recipes for them, and what differs from PLAIN
    "plain d128 bf16": ("", {}),
    "plain d64 fp16": ("", dict(dtype=torch.float16, d_qk=64, d_v=64)),
    "plain d128 bf16, negative scale": ("", dict(scale_is_positive=False)),
    "causal d128 bf16": ("causal", {}),
    "causal d64 bf16": ("causal", dict(d_qk=64, d_v=64)),
    "causal d32 bf16": ("causal", dict(d_qk=32, d_v=32)),
    "alibi causal d24 fp16": ("alibi causal", dict(dtype=torch.float16, d_qk=24, d_v=24)),
    "causal d128 bf16, one list": ("causal", dict(blocks=Blocks(False, 128, 128))),
    "alibi causal d128 bf16": ("alibi causal", {}),
    "alibi causal d64 bf16": ("alibi causal", dict(d_qk=64, d_v=64)),
    "softcap causal d128 bf16": ("softcap causal", {}),
    "softcap d64 fp16": ("softcap", dict(dtype=torch.float16, d_qk=64, d_v=64)),
    "relative_bias d128 bf16": ("relative_bias", {}),
    "document d128 bf16": ("document", {}),
    "softcap causal d32 bf16": ("softcap causal", dict(d_qk=32, d_v=32)),
    "causal d96 bf16": ("causal", dict(d_qk=96, d_v=96)),
    "plain d192 bf16": ("", dict(d_qk=192, d_v=192)),
    "causal d192 bf16": ("causal", dict(d_qk=192, d_v=192)),
    "alibi causal d160 bf16, starts": ("alibi causal", dict(d_qk=160, d_v=160, blocks=STARTS)),
    "alibi causal d136, 176 bf16, blocks elsewhere": ("alibi causal", dict(d_qk=136, d_v=176, blocks=SHIFTED)),
    "alibi causal d80 fp16": ("alibi causal", dict(dtype=torch.float16, d_qk=80, d_v=80)),
    "causal d128, 64 bf16": ("causal", dict(d_v=64)),
    "plain d192, 128 bf16": ("", dict(d_qk=192)),
    "causal d192, 128 bf16": ("causal", dict(d_qk=192)),
    "softcap causal d192, 128 fp16": ("softcap causal", dict(dtype=torch.float16, d_qk=192)),
    "alibi causal d136, 40 bf16": ("alibi causal", dict(d_qk=136, d_v=40)),
    "plain d256 bf16": ("", dict(d_qk=256, d_v=256)),
    "causal d256 bf16": ("causal", dict(d_qk=256, d_v=256)),
    "alibi causal d256 bf16": ("alibi causal", dict(d_qk=256, d_v=256)),
    "softcap causal d192, 160 fp16": ("softcap causal", dict(dtype=torch.float16, d_qk=192, d_v=160)),
    "learned slopes, causal d128 bf16": ("alibi causal", dict(captured=frozenset({0}))),
    "learned per key, d64 bf16": ((lambda s, b, h, m, n: torch.tanh(s) * VECTOR[n], None), dict(captured=frozenset({0}), d_qk=64, d_v=64)),
    "learned table, d64 bf16": ("relative_bias", dict(captured=frozenset({0}), d_qk=64, d_v=64)),
    "learned bias, d64 bf16": ((lambda s, b, h, m, n: s + BIAS[b, h, m, n], None), dict(captured=frozenset({0}), d_qk=64, d_v=64)),
    "a score_mod without derivative, d64 bf16": ((lambda s, b, h, m, n: (m - n) * 0.1, None), dict(d_qk=64, d_v=64)),
    "a derivative that may be NaN, a mask of keys, d64 bf16": (
        (lambda s, b, h, m, n: torch.sqrt(torch.abs(s)) + torch.exp(s) * h, lambda b, h, m, n: n < 100 * (b + 1)),
        dict(d_qk=64, d_v=64),
    ),
    "causal d128 bf16, starts": ("causal", dict(blocks=STARTS)),
    "causal d128, 64 bf16, one list, starts": ("causal", dict(d_v=64, blocks=STARTS._replace(has_full=False))),
    "causal d128 bf16, blocks elsewhere": ("causal", dict(blocks=SHIFTED)),
    "alibi causal d128 bf16, blocks elsewhere": ("alibi causal", dict(blocks=SHIFTED)),
    "softcap causal d192, 128 bf16, blocks elsewhere": ("softcap causal", dict(d_qk=192, blocks=SHIFTED)),
    "causal document d128 bf16, starts": ("causal document", dict(blocks=STARTS)),
    "alibi document d80 fp16, starts": ("alibi document", dict(dtype=torch.float16, d_qk=80, d_v=80, blocks=STARTS)),
    "causal document d136, 40 bf16, starts": ("causal document", dict(d_qk=136, d_v=40, blocks=STARTS)),
    "learned slopes, document d64 bf16, starts": ("alibi document", dict(captured=frozenset({0}), d_qk=64, d_v=64, blocks=STARTS)),
    "learned per key, causal d64 bf16, starts": (
        (lambda s, b, h, m, n: torch.tanh(s) * VECTOR[n], make("causal")[1]),
        dict(captured=frozenset({0}), d_qk=64, d_v=64, blocks=STARTS),
    ),
}


def kernel_of(name: str) -> Compilation:
    """The fused kernel of a case for sm_90."""
    mods, changes = CASES[name]
    case = PLAIN._replace(**changes)
    kept = {k: v for k, v in changes.items() if k not in ("dtype", "d_qk", "d_v")}
    kept["captured"] = bool(case.captured)
    mods = make(*mods.split()) if isinstance(mods, str) else mods
    return hopper_backward_compilations(*mods, dtype_name(case.dtype), case.d_qk, case.d_v, **kept)["fused"]


FEW = chosen({name: [kernel_of(name).spec] for name in CASES}, sorted(BY_ALL))


@functools.cache
def compiled(name: str) -> Compiled:
    return kernel_of(name).compile()


@pytest.mark.parametrize("name", CASES)
def test_kernel_fits_and_spills_little(name, every_kernel):
    if last := last_stage(name, FEW, BY_ALL, every_kernel):
        kernel_of(name).compile(last)
        return
    made = compiled(name)
    assert made.shared <= SHARED_MEMORY["sm_90"]
    assert made.spilled <= SPILLED.get(name, 0)
    assert not made.warnings  # of wgmma that would run one after another, above all


def test_dq_is_added_to_memory_by_the_tma_unit():
    ptx = compiled("causal d128 bf16").assembly["ptx"]
    assert "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add" in ptx
    assert not re.search(r"\b(atom|red)\.global\S*\.f32", ptx)


def test_dq_is_finished_when_it_is_in_memory():
    """A consumer waits until all that it added has arrived, not only until its buffers have been read; the producer then counts the tile,
    and reads the counts before it hands out a block of dQ. So with zeroes: it waits for its own before it counts them."""
    ptx = compiled("causal d128 bf16").assembly["ptx"]
    assert len(re.findall(r"cp.async.bulk.wait_group 0;", ptx)) == 2 * 2 + 2  # in two places of each consumer's code, and of the producer's
    assert re.search(r"(atom|red)\.global\.gpu\.release\.add\.u32", ptx)
    assert re.search(r"(ld|atom)\.global\.gpu\.acquire", ptx)


def test_gradients_of_captured_tensors_are_gathered():
    roles = {name: [c.role for c, _ in planned(*CASES[name]).captured] for name in CASES if name.startswith("learned")}
    assert roles == {
        "learned slopes, causal d128 bf16": ["head"],
        "learned per key, d64 bf16": ["column"],
        "learned table, d64 bf16": ["atomic"],
        "learned bias, d64 bf16": ["store"],
        "learned slopes, document d64 bf16, starts": ["head"],
        "learned per key, causal d64 bf16, starts": ["column"],
    }


def test_derivative_comes_before_the_wait_for_dp():
    text = render(planned("softcap causal", {}).fused)
    assert text.index("slope = ") < text.index("dp = warpgroup_mma_wait(")


def test_a_bounded_derivative_needs_no_selection():
    """tanh of a score that overflows is 1, but of a captured number that may be NaN it is NaN."""
    assert "slope = gl.where(" not in render(planned("softcap", {}).fused)
    assert "slope = gl.where(p == 0.0" in render(planned("softcap", dict(ordinary=False)).fused)
    assert "slope = gl.where(p == 0.0" in render(planned((lambda s, b, h, m, n: torch.tanh(s * VECTOR[n]), None), {}).fused)
    assert "slope = gl.where(p == 0.0" in render(planned((lambda s, b, h, m, n: torch.sin(s * 1e9), None), {}).fused)


@pytest.mark.parametrize("name", ["plain d128 bf16", "causal d128 bf16", "softcap causal d128 bf16"])
def test_ordinary_scores_need_one_multiply_add(name):
    """In the loop without checks; the difference to the largest score is taken in the other one."""
    text = render(planned(*CASES[name]).fused)
    assert re.findall(r"\n( *)if EDGE:\n(?:\1    .*\n)+?\1    score = .* - top\[None, :\]\n", text) == ["    "]
    assert text.count("top[None, :]") == 1
    assert "p = gl.exp2(gl.fma(score, TO_LOG2, share[None, :]))" in text


@pytest.mark.parametrize(
    "multiprocessors, lengths, grid, heads_per_group",
    [(5, (300, 300), 5, 4), (132, (300, 300), 12, 4), (5, (8192, 8192), 5, 2), (200, (8192, 130), 128, 2)],
)
def test_programs_share_tiles(monkeypatch, multiprocessors, lengths, grid, heads_per_group):
    """As many programs as multiprocessors, or as there are tiles of 128 keys, or blocks of 512 rows of dQ. The query heads of one KV head
    have 8 MiB of Q, dO and dQ at 8192 rows."""
    launches = []

    class Recorder(Variant):
        def launch(self, grid, args, _) -> None:
            launches.append((self.name, grid, args))

        launch_plain = launch

    pass_for_hopper(monkeypatch, Recorder, multiprocessors)
    registry.clear()
    q, k = (torch.zeros(2, h, length, 64, dtype=torch.bfloat16, requires_grad=True) for h, length in zip((4, 2), lengths, strict=True))
    flex_attention(q, k, k, enable_gqa=True).sum().backward()
    addresses = [t.data_ptr() for t in counters._counters.values()]
    registry.clear()
    (found,) = [(g, args) for name, g, args in launches if name.startswith("hopper_backward")]
    assert found[0] == (grid,)
    assert found[1][12:21] == [*addresses, 2, 2, 4, 2, 2, heads_per_group, *lengths]


@pytest.mark.parametrize("kv_len, listed, expected", [(300, True, 43), (4096, False, 4), (8192, False, 2), (8192, True, 4)])
def test_several_heads_are_worked_on_with_lists(kv_len, listed, expected):
    assert enough_heads(kv_len, listed) == expected


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_every_parameter_has_an_argument(monkeypatch, packed, learned):
    """With block lists, with those of packed sequences, and with a captured tensor's gradient."""
    launches = []

    class Recorder(Variant):
        def launch(self, grid, args, _) -> None:
            launches.append((self.name, args))

        launch_plain = launch

    pass_for_hopper(monkeypatch, Recorder)
    registry.clear()
    q = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = create_block_mask(mods.causal, None, None, 300, 300, device="cpu")
    slopes = torch.zeros(2, requires_grad=learned)
    score_mod = (lambda s, b, h, m, n: s + slopes[h] * n) if learned else None
    if packed:
        monkeypatch.setattr(packed_blocks, "LONG", 1)
        x, cu_seqlens = q[0].transpose(0, 1), torch.tensor([0, 130, 300], dtype=torch.int32)
        varlen_attention(x, x, x, cu_seqlens, score_mod=score_mod, mask_mod=mods.causal).sum().backward()
    else:
        flex_attention(q, q, q, score_mod, mask).sum().backward()
    (plan,) = backward_kernels._plans.values()
    assert plan.fused.flag["STARTS"] == packed
    registry.clear()
    (found,) = [args for name, args in launches if name.startswith("hopper_backward")]
    assert len(found) == len(re.search(r"\ndef hopper_backward\((.*?)\n\):", re.sub("#.*", "", render(plan.fused)), re.S)[1].split(",")) - 1
    if not packed:
        tables = [t.data_ptr() for t in mask.as_transposed_lists().tables]
        at = found.index(tables[0])
        assert list(found[at : at + 4]) == tables
    assert not learned or slopes.grad.shape == (2,)


def test_copies_of_statistics_begin_a_row_later_each():
    """TMA reads from whole 16 bytes on: in copy m % 4, row m lies there."""
    rows, out, do = torch.randn(2, 3, 200, 2), torch.randn(2, 3, 200, 16), torch.randn(2, 3, 200, 16)
    rows[0, 1, 5] = torch.tensor([-torch.inf, 0.0])
    rows[0, 1, 7] = torch.tensor([-1e9, -3.0])

    def statistics(blocks: Blocks | None, zero_dq: str, copies: int, huge: bool = True) -> torch.Tensor:
        spec = delta_spec(BackwardCase(torch.float32, 16, 16, blocks=blocks), "cpu", zero_dq)
        tops, delta = (torch.full((2, 3, n * copies, 256), torch.nan) for n in (2, 1))
        sums, done = torch.ones(2, 3, 200, 16), torch.ones(2, 2, 3, dtype=torch.int32)
        known = {"Hq": 3, "Q_LEN": 200, "STATS_LEN": 256, "Zkv": 2, "GROUP_SIZE": 3, "HEADS_PER_GROUP": 1, "TO_LOG2": 2.0}
        count = torch.zeros(2, dtype=torch.int32)
        known |= {"O": out, "DO": do, "ROWS": rows, "TOPS": tops, "DELTA": delta, "DQ_SUM": sums, "DONE": done, "COUNTER": count}
        known |= {f"stride_{name}{dim}": stride // 4 for name in ("o", "do") for dim, stride in zip("zhm", out.stride(), strict=False)}
        block = delta_rows(16)
        kernel.kernel_for(spec).launch((2 * 3 * 256 // block,), spec.arguments(known), out.device, (block,), num_warps=4, num_stages=1)
        assert not sums[: 1 if zero_dq == "first" else 2].any() and not done.any()
        assert zero_dq == "all" or sums[1].all()
        assert count.tolist() == [0, huge]
        return torch.cat((tops.view(2, 3, copies, 2, 256), delta.view(2, 3, copies, 1, 256)), 3)

    plain, copied = statistics(None, "all", 1)[:, :, 0], statistics(STARTS, "first", 4)
    top, share = rows[..., 0].clone(), rows[..., 1].clone()
    ordinary = top > -1e9
    share[ordinary] -= 2 * top[ordinary]
    share[0, 1, 5] = -torch.inf
    torch.testing.assert_close(plain[..., 1, :200], share, rtol=0.0, atol=1e-6)
    assert torch.equal(plain[..., 0, :200], torch.where(top == -1e9, top, 0.0)) and not plain[..., 2, :].isnan().any()
    assert (plain[..., 0, 200:] == 0.0).all() and (plain[..., 1, 200:] == -torch.inf).all()
    for shift in range(4):
        assert torch.equal(copied[:, :, shift, :, : 256 - shift], plain[..., shift:])
        assert copied[:, :, shift, :, 256 - shift :].isnan().all()
    rows[0, 1, 7] = 0.0
    statistics(None, "all", 1, huge=False)


def test_arguments_of_tiles_that_begin_where_a_tensor_says():
    """Addresses of dK and dV after their descriptors, RANGES and their strides after the lists' widths, `starts` after the lists."""
    names = list(compiled("causal d128 bf16, starts").signature)
    own = ["RANGES", *(f"stride_{t}{d}" for t in ("dk", "dv") for d in "zhn")]
    assert names[7:15] == ["desc_dk", "desc_dv", "DQ_SUM", "DQ", "DK", "DV", "DONE", "COUNTER"]
    assert names[-13:] == ["full_mask_rows", *own, *TABLES, "starts"]
    assert [name for name in names if name not in (*own, "DK", "DV", "starts")] == list(compiled("causal d128 bf16").signature)
    assert_packed_as_read(compiled("causal d128 bf16, starts"), 9)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("starts")])
def test_tiles_that_begin_where_a_tensor_says_end_there(name):
    """Keys from the next tile's first on, which mask_mod does not hide from queries of their own sequence, are neither seen nor stored."""
    spec = planned(*CASES[name]).fused
    text = re.sub("#.*", "", render(spec))
    producer, block, consumer, kernel = (
        text.index(f"def {name}(") for name in ("backward_producer", "add_query_block", "backward_consumer", spec.template)
    )
    assert re.findall(r"gl.load\((starts.*)\)", text) == re.findall(r"gl.load\((starts.*)\)", text[producer:block])
    assert re.findall(r"gl.load\((starts.*)\)", text) == ["starts + kv_block", "starts + kv_block + 1"]
    assert not re.search(r"\* BLOCK_N|cdiv\(KV_LEN|block \* ", text[producer:kernel])
    assert "KV_LEN" not in text[block:consumer]
    assert re.search(r"seen = .* & \(n < end_n\)\n", text[block:consumer])
    stores = text[consumer:kernel]
    for store in re.finditer("tma_store", stores):
        assert re.findall(r"^ {8}(\S.*)", stores[: store.start()], re.M)[-1] == "if end_key - first_key >= 64:"
    assert stores.count("tma_store") == stores.count("store_rows(")
    assert all(mask == "own_keys < end_n" for mask in re.findall(r"gl.store\(.*mask=(.*)\)", text[consumer:kernel]))


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(dtype=torch.float32), "wgmma"),
        (dict(d_qk=256), "head dims"),
        (dict(d_qk=16, d_v=16), "head dims"),
        (dict(deterministic=True), "deterministic"),
        (dict(d_qk=192, captured=frozenset({0})), "captured tensors with head dims 192"),
        (dict(d_qk=256, d_v=256, captured=frozenset({0})), "captured tensors with head dims 256"),
        (dict(use_tma=(True, False)), "TMA"),
        (dict(options=Options(tile=(("dq_BLOCK_M", 64),))), "dq_BLOCK_M"),
        (dict(blocks=Blocks(True, 128, 64)), "block sizes"),
        (dict(blocks=Blocks(True, 32, 128)), "block sizes"),
        (dict(blocks=STARTS._replace(kv_block=256)), "must have 128 keys"),
        (dict(blocks=STARTS, d_qk=256, d_v=256), "must have 64 keys"),
    ],
)
def test_what_it_does_not_serve_is_named(changes, word):
    assert word in fits(PLAIN._replace(**changes))


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
def test_what_mods_read_of_a_query_has_its_room(dims):
    """In kernels that leave little of shared memory: a number of 32 bits, or a few bools."""
    ids, flags = torch.zeros(512, dtype=torch.int32), torch.zeros(512, dtype=torch.bool)

    def plan(mask_mod):
        return planned((None, mask_mod), {"d_qk": dims[0], "d_v": dims[1]})

    for fitting in (mods.document(ids, mods.causal), lambda b, h, m, n: flags[m] & flags[n]):
        assert lacks_room(plan(fitting)) is None
    for mask_mod in (mods.document(ids.long(), mods.causal), lambda b, h, m, n: (ids[m] == ids[n]) & (ids[m + 1] >= n)):
        assert "mods read 8 bytes of each query, and for more than 4 there is no shared memory" in lacks_room(plan(mask_mod))
    assert lacks_room(planned((None, mods.document(ids.long(), mods.causal)), {"d_qk": 192, "d_v": 192})) is None
    with pytest.raises(ValueError, match="mods read 8 bytes of each query"):
        hopper_backward_compilations(None, mods.document(ids.long(), mods.causal), head_dim=dims[0], head_dim_v=dims[1])
