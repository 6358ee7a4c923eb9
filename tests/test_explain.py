"""flexpress.explain, and the choice between the kernels for Hopper and the portable ones."""

from __future__ import annotations

import pytest
import torch

from flexpress import create_block_mask, explain, flex_attention, mods, varlen_attention
from flexpress.codegen import registry
from flexpress.codegen.device import binary
from flexpress.codegen.plan import hopper_backward, hopper_forward
from flexpress.codegen.plan.forward import Blocks, ForwardCase
from flexpress.codegen.plan.hopper_tiles import has_larger_tiles
from flexpress.codegen.run import backward, backward_kernels, forward_kernels
from support.fake_hopper import Variant, pass_for_hopper


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched, while tensors of the host pass for a Hopper GPU's."""
    found: list = []

    class Recorder(Variant):
        def launch(self, *_) -> None:
            found.append(self.name)

        launch_plain = launch

    pass_for_hopper(monkeypatch, lambda name: Recorder(name, local=2000), multiprocessors=4)
    monkeypatch.setattr(hopper_forward, "FEW_KEYS", 0)
    registry.clear()
    yield found
    registry.clear()


def tensors(head_dim=128, head_dim_v=None, dtype=torch.bfloat16, wants=True, length=256):
    widths = (head_dim, head_dim, head_dim_v or head_dim)
    return [torch.zeros(1, 4, length, d, dtype=dtype, requires_grad=wants) for d in widths]


LEARNED = torch.zeros(4, requires_grad=True)
LEARNED_PER_POSITION = torch.zeros(256, requires_grad=True)
CASES = {  # tensors, arguments, and a word of the reasons forward and backward; None: the kernels for Hopper
    "plain": (tensors(), {}, None, None),
    "fp16, 64": (tensors(64, dtype=torch.float16), {}, None, None),
    "float32": (tensors(dtype=torch.float32), {}, "wgmma", "wgmma"),
    "no gradients": (tensors(wants=False), {}, None, ""),
    "short head dims": (tensors(16), {}, "head dims", "head dims"),
    "head dim 32": (tensors(32), {}, None, None),
    "head dim 256": (tensors(256), {}, None, None),
    "unequal head dims": (tensors(192, 128), {}, None, None),
    "an odd head dim": (tensors(100), {}, "TMA", "TMA"),
    "strides": ([t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors()], {}, "TMA", None),  # copied for the backward pass
    "portable": (tensors(), {"kernel_options": {"BACKEND": "PORTABLE"}}, "BACKEND", "BACKEND"),
    "a tile": (tensors(), {"kernel_options": {"BLOCK_M": 64}}, "BLOCK_M", None),
    "a tile backward": (tensors(), {"kernel_options": {"BLOCK_M1": 64}}, None, "dkv_BLOCK_M"),
    "no TMA": (tensors(), {"kernel_options": {"USE_TMA": False}}, "USE_TMA", "TMA"),
    "deterministic": (tensors(), {"deterministic": True}, None, "deterministic"),
    "learned, unequal head dims": (
        tensors(192, 128),
        {"score_mod": lambda s, b, h, m, n: s + LEARNED[h]},
        None,
        "captured tensors with head dims 192",
    ),
    "learned": (tensors(), {"score_mod": lambda s, b, h, m, n: s + LEARNED[h]}, None, None),
    "learned per key": (tensors(), {"score_mod": lambda s, b, h, m, n: s + LEARNED_PER_POSITION[n]}, None, "head dims above 64"),
    "learned per key, 64": (tensors(64), {"score_mod": lambda s, b, h, m, n: s + LEARNED_PER_POSITION[n]}, None, None),
    "learned per query": (tensors(64), {"score_mod": lambda s, b, h, m, n: s + LEARNED_PER_POSITION[m]}, None, "query alone"),
    "causal": (tensors(), {"block_mask": create_block_mask(mods.causal, None, None, 256, 256, device="cpu")}, None, None),
    "few queries": (tensors(length=64), {}, "64 queries", None),
    "dropout": (tensors(), {"dropout_p": 0.1}, None, None),
    "dropout, 192 columns": (
        tensors(192),
        {"dropout_p": 0.1, "dropout_seed": torch.ones(1, dtype=torch.int64)},
        None,
        "dropout with head dims",
    ),
    "sinks": (tensors(), {"sinks": torch.zeros(4, requires_grad=True)}, None, None),
    "float8": ([t.to(torch.float8_e4m3fn) for t in tensors(wants=False)], {"q_scale": torch.ones(1)}, None, ""),
    "float8 in float32": (
        [t.to(torch.float8_e4m3fn) for t in tensors(wants=False)],
        {"k_scale": torch.ones(4), "v_scale": torch.ones(1, 4), "out_dtype": torch.float32},
        None,
        "",
    ),
    "small blocks": (
        tensors(),
        {"block_mask": create_block_mask(mods.causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)},
        "block sizes",
        "block sizes",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_reason_is_named(name, launched):
    given, arguments, *reasons = CASES[name]
    text = explain(*given, **arguments)
    lines = text.splitlines()
    assert len(lines) == (2 if given[0].requires_grad else 1)
    for line, what, reason in zip(lines, ("forward", "backward"), reasons, strict=False):
        assert line.startswith(what) and (line.split()[1].rstrip(";") == "HOPPER") == (reason is None)
        assert reason is None or reason in line


def test_the_backward_pass_is_told_what_the_forward_kernel_leaves(launched, monkeypatch):
    """Scores without scale, where a score_mod adds to them what kernels add behind the loop or by a product."""
    told, rows, details_of = [], torch.zeros(1, 4, 256, 32, dtype=torch.bfloat16), backward.details_of
    monkeypatch.setattr(backward, "details_of", lambda call, raw, *others: told.append(raw) or details_of(call, raw, *others))
    explain(*tensors(), lambda s, b, h, m, n: s + torch.dot(rows[b, h, m], rows[b, h, n]))
    explain(*tensors(), mods.alibi(torch.zeros(4)))
    explain(*tensors(), mods.softcap(20.0))
    explain(*tensors(), mods.alibi(torch.zeros(4)), kernel_options={"BACKEND": "PORTABLE"})
    assert told == [True, True, False, False]


def test_few_tiles(launched, monkeypatch):
    """The kernel for Hopper has larger tiles, and so too few of them sooner."""
    monkeypatch.setattr(forward_kernels, "multiprocessors", lambda _: 17)
    assert "8 tiles of 128 queries, for 17 multiprocessors" in explain(*tensors())
    monkeypatch.setattr(forward_kernels, "multiprocessors", lambda _: 16)
    assert "forward   HOPPER" in explain(*tensors())
    assert "forward   HOPPER" in explain(*tensors(length=1), kernel_options={"BACKEND": "HOPPER"})


@pytest.mark.parametrize(
    "length, heads, head_dim, listed, by_hopper",
    [
        (256, 32, 128, False, False),  # too few tiles
        (256, 64, 128, False, False),  # a tile for every multiprocessor, of two blocks of keys
        (256, 67, 128, False, True),  # two rounds
        (512, 16, 128, True, False),
        (512, 32, 128, True, True),
        (1024, 8, 128, False, False),
        (256, 64, 64, False, False),
        (512, 8, 64, False, True),  # without lists, one tile gains
        (1024, 8, 64, False, True),
        (1024, 8, 64, True, False),
        (512, 33, 64, True, False),
        (512, 34, 64, True, True),
        (256, 132, 64, True, False),
        (256, 133, 64, True, True),
        (512, 32, 192, False, True),
    ],
)
def test_few_keys(length, heads, head_dim, listed, by_hopper):
    """Of 132 multiprocessors, as it was measured (docs/lab.md)."""
    why = hopper_forward.worthwhile(length, length, heads, head_dim, listed, 132)
    assert (why is None) == by_hopper
    assert why is None or "for 132 multiprocessors" in why


@pytest.mark.parametrize(
    "length, heads, group, head_dim, listed, by_hopper",
    [
        (256, 64, 1, 128, False, False),
        (256, 67, 1, 128, False, True),
        (512, 8, 1, 128, True, True),
        (512, 66, 1, 64, True, False),
        (512, 67, 1, 64, True, True),
        (512, 33, 1, 64, False, False),
        (512, 34, 1, 64, False, True),
        (512, 8, 4, 64, False, True),  # four heads share keys: a program has 2048 queries
        (1024, 8, 1, 64, True, False),
        (1024, 9, 1, 64, True, True),
        (128, 8, 1, 256, True, True),
    ],
)
def test_few_queries_of_a_backward_pass(length, heads, group, head_dim, listed, by_hopper):
    why = hopper_backward.worthwhile(group * length, length, heads, head_dim, listed, 132)
    assert (why is None) == by_hopper
    assert why is None or why.endswith("and 132 multiprocessors")


def test_a_backward_pass_by_the_kernel_that_is_named(launched, monkeypatch):
    monkeypatch.setattr(backward_kernels, "worthwhile", hopper_backward.worthwhile)
    assert "there are 128 queries for 4 tiles of 128 keys, and 4 multiprocessors" in explain(*tensors(64, length=128))
    assert "backward  HOPPER" in explain(*tensors(64, length=128), kernel_options={"BACKEND": "HOPPER"})


@pytest.mark.parametrize("length, heads, consumers", [(1024, 16, 2), (2048, 16, 2), (2048, 17, 3), (4096, 64, 3)])
def test_tiles_of_dense_attention(monkeypatch, length, heads, consumers):
    """Three consumers of 64 rows, where that leaves no multiprocessors idle."""
    assert hopper_forward.are_few(length, heads, 132) == (consumers == 2)
    case = ForwardCase(torch.bfloat16, 64, 64, few_tiles=consumers == 2)
    assert hopper_forward.plan_hopper_forward(case, None, None).tile.consumers == consumers
    listed = case._replace(blocks=Blocks(True, 128, 128))
    assert has_larger_tiles(case) and not has_larger_tiles(case._replace(d_v=96)) and not has_larger_tiles(listed)


def test_spills(launched):
    """A kernel that was compiled, and spills, is not run: the portable one is, from then on."""
    q, k, v = tensors(wants=False)
    for _ in range(2):
        flex_attention(q, k, v)
    assert [name.startswith("forward") for name in launched] == [True, True]
    assert "not HOPPER: its threads would spill 2000 bytes, more than 1024" in explain(q, k, v)
    flex_attention(q, k, v, kernel_options={"BACKEND": "HOPPER"})
    assert launched[-1].startswith("hopper_forward")


def test_gluon_of_another_version(launched, monkeypatch):
    """Gluon is experimental: where a kernel in it does not compile, the portable one runs, and a warning says so."""

    def obtain(name, *_):
        if name.startswith("hopper"):
            raise AttributeError("gl has no such name")
        return Variant(name), False

    monkeypatch.setattr(binary, "obtain", obtain)
    tensor = tensors()
    with pytest.warns(RuntimeWarning, match=r"hopper_forward does not compile with Triton [\d.]+ \(AttributeError\).*no such name"):
        out = flex_attention(*tensor)
    with pytest.warns(RuntimeWarning, match="hopper_backward does not compile"):
        out.sum().backward()
    assert explain(*tensor).count("does not compile") == 2
    with pytest.raises(AttributeError):
        flex_attention(*tensor, kernel_options={"BACKEND": "HOPPER"})


def test_forced(launched):
    """BACKEND="HOPPER" is an error where the kernel does not serve, before anything is launched."""
    q, k, v = tensors(16)
    with pytest.raises(ValueError, match="names HOPPER, but head dims are 16 and 16.*leave BACKEND out"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "HOPPER"})
    with pytest.raises(ValueError, match="'AUTO', 'CPP', 'HOPPER', 'PORTABLE', 'DECODE'"):
        flex_attention(q, k, v, kernel_options={"BACKEND": "CUTE"})


def test_on_the_cpu():
    text = explain(*tensors())
    assert "not HOPPER: the kernel for Hopper needs sm_90, this is cpu" in text and "interpreter" in text
    with pytest.raises(ValueError, match="needs sm_90"):
        flex_attention(*tensors(), kernel_options={"BACKEND": "HOPPER"})


def test_packed_sequences(launched):
    """As varlen_attention chooses: of dropout, by their lengths."""
    q, k, v = (torch.zeros(1024, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for lengths, dropout_p, reason in (([300, 500, 224], 0.1, None), ([8] * 128, 0.0, None), ([8] * 128, 0.1, "dropout")):
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        options = {"mask_mod": mods.causal, "sinks": torch.zeros(4), "dropout_p": dropout_p}
        found = explain(q, k, v, cu_seqlens_q=ends, **options).splitlines()
        assert [line.split()[1].rstrip(";") for line in found] == ["HOPPER" if reason is None else "PORTABLE"] * 2
        assert reason is None or all(reason in line for line in found)
        launched.clear()
        varlen_attention(q, k, v, ends, **options).sum().backward()
        assert any(name.startswith("hopper_backward") for name in launched) == (reason is None)
    with pytest.raises(ValueError, match="varlen_attention takes no block_mask"):
        explain(q, k, v, block_mask=create_block_mask(mods.causal, None, None, 256, 256, device="cpu"), cu_seqlens_q=ends)
    with pytest.raises((TypeError, ValueError), match="cu_seqlens_q must say where sequences are"):
        explain(q, k, v, cu_seqlens_k=ends)


def test_sinks_that_learn_alone():
    assert "backward" in explain(*tensors(wants=False), sinks=torch.zeros(4, requires_grad=True))


def test_what_flex_attention_refuses():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="dropout_p"):
        explain(q, k, v, dropout_p=2.0)
    with pytest.raises(ValueError, match="sinks"):
        explain(q, k, v, sinks=torch.zeros(3))
    with pytest.raises(TypeError, match="query must be a torch.Tensor"):
        explain(None, k, v)  # type: ignore[arg-type]
