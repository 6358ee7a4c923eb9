"""Block lists by torch while kernels are compiled: they are the kernels', bit by bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import create_block_mask, flex_attention, wait_for_kernels
from flexpress.codegen.device import workers
from flexpress.codegen.device.kernel import Kernel, NotYet
from flexpress.codegen.mod.graphs.intervals import analyse
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run import evaluated_masks, masks
from flexpress.codegen.run.block_grid import BlockGrid
from flexpress.codegen.run.status_lists import lists_of_status
from flexpress.mods import causal, sliding_window
from support.block_lists import brute_force, check_lists
from support.problems import MASK_MODS, mask_mods

LENGTHS = st.sampled_from([1, 20, 64, 127, 129, 200])
SIZES = st.sampled_from([(64, 64), (16, 32), (128, 64), (48, 80), (10, 7)])
NAMES = st.sampled_from([m for m in MASK_MODS if m != "none"])


def equal(some, others) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(some, others, strict=True))


def known(lists: list[torch.Tensor]) -> list[torch.Tensor]:
    """Without what is not written past the counts."""
    counts, indices = lists[::2], lists[1::2]
    listed = [torch.where(torch.arange(i.shape[-1]) < n[..., None], i, 0) for n, i in zip(counts, indices, strict=True)]
    return [*counts, *listed]


@settings(max_examples=40)
@given(NAMES, st.sampled_from([1, 2]), st.sampled_from([1, 3]), LENGTHS, LENGTHS, SIZES, st.booleans(), st.integers(0, 2))
def test_all_is_what_kernels_give(name, B, H, Q_LEN, KV_LEN, size, separate, narrower):
    bound = bind(mask_mods(max(Q_LEN, KV_LEN), "cpu")[name], "mask")
    if not evaluated_masks.is_exact(bound[0]):
        return
    call = bound, (B, H, Q_LEN, KV_LEN), torch.device("cpu"), size
    status, counts = BlockGrid(*call).status(separate)
    assert equal(evaluated_masks.evaluated_status(*call), (status, counts))
    with mock.patch.object(evaluated_masks, "_AT_ONCE", B * H * size[0] * (KV_LEN + size[1])):  # a row of blocks
        assert equal([evaluated_masks._evaluated(*call)], [status])
    counts = counts if separate else counts.sum(0, keepdim=True)
    widths = [int(n.amax()) + narrower for n in counts]
    assert equal(evaluated_masks.evaluated_lists(status, widths, separate, device=call[2]), lists_of_status(status, widths, separate))
    if not bound[0].tensors and analyse(bound[0]).by_rules:
        verdicts = evaluated_masks.bounded_status(*call[:2], size)
        for transposed, made in ((False, verdicts), (True, verdicts.transpose(-1, -2))):
            listed = evaluated_masks.evaluated_lists(made, [made.shape[-1]] * 2, True, device=call[2])
            assert equal(known(listed), known(BlockGrid(*call).lists(transposed=transposed)))


def test_integers_are_exact_and_floats_are_not():
    slopes = torch.rand(4)
    assert evaluated_masks.is_exact(bind(sliding_window(30), "mask")[0])
    assert not evaluated_masks.is_exact(bind(lambda b, h, q, kv: slopes[h] * (q - kv) < 3, "mask")[0])
    assert not evaluated_masks.is_exact(bind(lambda b, h, q, kv: (q / 3) > kv, "mask")[0])


def test_what_is_too_large_waits():
    assert evaluated_masks.is_small((1, 1, 16000, 16000), (128, 128)) and not evaluated_masks.is_small((1, 2, 16000, 16000), (128, 128))
    assert not evaluated_masks.is_small((1, 1, 128, 1 << 15), (128, 128))


@pytest.fixture
def compiling(own_directory, monkeypatch):
    """Kernels that are never compiled: what is begun beside, by names."""
    begun, launch = [], Kernel.launch

    def soon(self, *args, waits=True, **options):
        if waits or not self.spec.template.startswith("block"):
            return launch(self, *args, **options)
        raise NotYet(None)

    def begin(self, *args, **options):
        begun.append(self.spec.template)

    monkeypatch.setitem(workers.SETTING, "waits", False)
    monkeypatch.setattr(Kernel, "launch", soon)
    monkeypatch.setattr(Kernel, "begin", begin)
    monkeypatch.setattr(masks, "_must_wait", lambda _: False)
    monkeypatch.setattr(masks, "begin_lists", lambda *_: begun.append("lists"))
    monkeypatch.setattr(workers, "POOL", workers.Pool())
    monkeypatch.setattr(workers.POOL, "await_start", lambda: None)
    return begun


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("capacity", [None, 3, 9])
def test_a_mask_does_not_wait_for_its_kernels(compiling, separate, capacity):
    ids = torch.arange(300) // 70
    for mod, names in ((causal, 1), (lambda b, h, q, kv: ids[q] == ids[kv], 2)):
        compiling.clear()
        mask = create_block_mask(mod, None, None, 300, 300, "cpu", 128, separate_full_blocks=separate, capacity=capacity)
        check_lists(mask, brute_force(mod, 1, 1, 300, 300, (128, 128), "cpu"))
        assert wait_for_kernels(30) and compiling == ["block_zones", "block_status", "lists"][2 - names :]
        begun = len(compiling)
        with mock.patch.object(masks, "evaluated_status", None):  # what did not come is compiled here
            mask = create_block_mask(mod, None, None, 300, 300, "cpu", 128, separate_full_blocks=separate, capacity=capacity)
        check_lists(mask, brute_force(mod, 1, 1, 300, 300, (128, 128), "cpu"))
        assert len(compiling) == begun


def test_a_call_with_a_mask_mod_does_not_wait_for_its_lists(compiling):
    q, k, v = torch.randn(3, 1, 2, 200, 16).unbind()
    out = flex_attention(q, k, v, mask_mod=sliding_window(30))
    assert wait_for_kernels(30) and compiling == ["block_lists"]
    mask = create_block_mask(sliding_window(30), None, None, 200, 200, "cpu")
    torch.testing.assert_close(out, flex_attention(q, k, v, block_mask=mask))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [m for m in MASK_MODS if m != "none"])
def test_lists_while_kernels_are_compiled_on_gpu(own_directory, monkeypatch, name):
    """Before and after."""
    monkeypatch.setitem(workers.SETTING, "waits", False)
    mod = mask_mods(3000, "cuda")[name]
    expected = brute_force(mod, 2, 3, 3000, 2050, (128, 128), "cuda").cpu()
    for _ in range(2):
        check_lists(create_block_mask(mod, 2, 3, 3000, 2050, "cuda"), expected)
        assert wait_for_kernels(60)
