"""A repeated call takes a shorter way to the kernel (launch.Launch.again): it must arrive with the same arguments.

No GPU is needed: tensors in host memory stand for tensors on one, and what would be launched is compared instead of run.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from flexpress import AuxRequest, cache_info, cached_attention, create_block_mask, flex_attention, mods
from flexpress.calls.arguments import as_before
from flexpress.calls.call import attend, bound
from flexpress.calls.packing import packing_of
from flexpress.codegen import registry
from flexpress.codegen.device import tma
from flexpress.codegen.device.arguments import Numbers, plain_values
from support.fake_hopper import Variant, pass_for_hopper


def flat(args: list) -> list:
    """Arguments with those of descriptors one by one."""
    return [value for arg in args for value in (arg if isinstance(arg, tuple) else (arg,))]


class Recorder(Variant):
    """Keeps the arguments of its launches, descriptors expanded."""

    def __init__(self, launches: list) -> None:
        super().__init__()
        self.launches = launches

    def launch(self, grid, args, _) -> None:
        count = sum(isinstance(a, tma.Descriptor) for a in args)
        self.launches.append(("long", self.plain(*grid), flat([*self.expanded(args[:count]), *args[count:]])))

    def launch_plain(self, x, y, z, _, args) -> None:
        self.launches.append(("short", self.plain(x, y, z), flat(args)))

    @staticmethod
    def plain(x: int, y: int = 1, z: int = 1) -> int | tuple[int, int]:
        assert z == 1
        return x if y == 1 else (x, y)


@pytest.fixture
def launches(monkeypatch):
    """What is launched while tensors of the host pass for a Hopper GPU's."""
    found: list = []
    pass_for_hopper(monkeypatch, lambda _: Recorder(found))
    registry.clear()
    yield found
    registry.clear()


def tensors(dtype=torch.bfloat16, B=2, Hq=4, Hkv=2, length=200, D=64, D_V=None):
    return [torch.zeros(B, h, length, d, dtype=dtype) for h, d in ((Hq, D), (Hkv, D), (Hkv, D_V or D))]


def same_but_for(first: list, second: list, made: list) -> bool:
    """Equal arguments, but for the addresses of what each call allocates."""
    return len(first) == len(second) and all(a == b for i, (a, b) in enumerate(zip(first, second, strict=True)) if i not in made)


SLOPES = torch.rand(4)
CAP = 20.0
CASES = {
    "plain": {},
    "float32": {"dtype": torch.float32},
    "no TMA": {"kernel_options": {"USE_TMA": False}},
    "alibi": {"score_mod": mods.alibi(SLOPES)},
    "numbers": {"score_mod": lambda s, b, h, m, n: torch.tanh(s / CAP) * CAP + (m - n) * len(CASES)},
    "causal": {"mask": mods.causal},
    "alibi, window": {"score_mod": mods.alibi(SLOPES), "mask": mods.sliding_window(30)},
    "max scores": {"mask": mods.causal, "return_aux": AuxRequest(lse=True, max_scores=True)},
    "negative scale": {"scale": -0.5},
    "head dim 256": {"D": 256},
    "head dims 192 and 128": {"D": 192, "D_V": 128, "mask": mods.causal},
}


@pytest.mark.parametrize("backend", ["TRITON", "AUTO"])
@pytest.mark.parametrize("name", CASES)
def test_the_short_way_has_the_same_arguments(name, backend, launches):
    case = dict(CASES[name])
    case["kernel_options"] = {"BACKEND": backend, **case.get("kernel_options", {})}
    q, k, v = tensors(**{name: case.pop(name) for name in ("dtype", "D", "D_V") if name in case})
    mask = case.pop("mask", None)
    if mask is not None:  # made by the interpreter
        case["block_mask"] = create_block_mask(mask, None, None, 200, 200, "cpu")
    outs = [flex_attention(q, k, v, enable_gqa=True, **case) for _ in range(3)]
    assert [way for way, *_ in launches] == ["long", "short", "short"]
    (_, grid, first), (_, other_grid, second), _ = launches
    portable = backend == "TRITON" or name in ("float32", "no TMA")
    out = (3 if name in ("float32", "no TMA") else 9) if portable else 12  # after K, V and Q: addresses, or descriptors of four values
    lse = out + (1 if portable else 4)
    made = [out, lse, *([lse + 1] if name == "max scores" else [])]
    assert (grid == 5) != portable
    assert grid == other_grid and same_but_for(first, second, made)
    first_out, second_out = (o[0] if isinstance(o, tuple) else o for o in outs[:2])
    assert first_out.stride() == second_out.stride() and first_out.dtype == second_out.dtype
    assert second[out] == second_out.data_ptr()


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("backend", ["TRITON", "AUTO"])
def test_packed_sequences_have_the_same_arguments(backend, D, launches):
    """Where blocks begin comes after the lists; the kernel for Hopper also takes out by pointer, and its strides."""
    cu_seqlens = torch.tensor([0, 900, 900, 1600], dtype=torch.int32)
    q, k, v = (torch.zeros(1600, heads, D, dtype=torch.bfloat16).unsqueeze(0).transpose(1, 2) for heads in (4, 2, 2))
    packing = packing_of(cu_seqlens, None, 1600, 1600)
    call = bound(q, k, v, None, None, None, True, {"BACKEND": backend}, packing.mask_mod(mods.causal), (packing.starts_q, packing.starts_k))
    for _ in range(3):
        out, _, _ = attend(call, False, False)
    assert [way for way, *_ in launches] == ["long", "short", "short"]
    (_, grid, first), (_, other_grid, second), _ = launches
    hopper, lists = backend == "AUTO", call.lists
    ranges = 1600 // 128 + 3
    made = [12, 16, 17] if hopper else [9, 10]
    assert grid == other_grid and (grid == 5 if hopper else grid % (4 * ranges) == 0)
    assert same_but_for(first, second, made)
    assert not hopper or second[16] == second[12] and second[16] != 0
    at = second.index(lists.kv_num_blocks.data_ptr())
    assert second[at - 4 : at] == [ranges, *out.stride()[:3]] if hopper else second[at - 1] == ranges
    assert second[at + 4] == lists.starts.data_ptr()


LEARNED = torch.rand(4, requires_grad=True)
BACKWARD = {  # how many launches a forward and a backward pass take, and arguments
    "fused": (3, {"mask": mods.causal}),
    "fused, learned": (3, {"score_mod": mods.alibi(LEARNED), "mask": mods.causal}),
    "fused, gradient of lse": (3, {"mask": mods.sliding_window(30), "return_lse": True}),
    "fused, head dims 192 and 128": (3, {"D": 192, "D_V": 128}),
    "fused, sinks and dropout": (3, {"sinks": torch.rand(4, requires_grad=True), "dropout_p": 0.5, "dropout_seed": torch.tensor([3])}),
    "portable": (4, {"mask": mods.causal, "kernel_options": {"BACKEND": "TRITON"}}),
    "portable, no TMA, learned": (4, {"score_mod": mods.alibi(LEARNED), "kernel_options": {"BACKEND": "TRITON", "USE_TMA": False}}),
    "portable, float32": (4, {"dtype": torch.float32, "mask": mods.causal}),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_pass_has_the_same_arguments(name, launches):
    """But for addresses of what each pass allocates, of which all kernels of a pass get the same."""
    count, case = BACKWARD[name][0], dict(BACKWARD[name][1])
    inputs = [t.requires_grad_() for t in tensors(**{name: case.pop(name) for name in ("dtype", "D", "D_V") if name in case})]
    mask = case.pop("mask", None)
    if mask is not None:
        case["block_mask"] = create_block_mask(mask, None, None, 200, 200, "cpu")
    wanted = [*inputs, *([LEARNED] if "learned" in name else []), *([case["sinks"]] if "sinks" in case else [])]
    passes, kept = [], []
    for _ in range(3):
        launches.clear()
        found = flex_attention(*inputs, enable_gqa=True, **case)
        found = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(found, wanted, [torch.ones_like(t) for t in found])
        kept.append((found, gradients))  # so that nobody gets their memory
        passes.append(list(launches))
    assert [[way for way, *_ in made] for made in passes] == [["long"] * count, ["short"] * count, ["short"] * count]
    theirs = {t.data_ptr() for t in inputs}
    for made, (_, gradients) in zip(passes[1:], kept[1:], strict=True):
        known, back = {}, {}
        for (_, grid, first), (_, other_grid, second) in zip(passes[0], made, strict=True):
            assert grid == other_grid and len(first) == len(second)
            for a, b in zip(first, second, strict=True):
                assert a == b or (a % 16 == b % 16 == 0 and min(a, b) > 1 << 30 and a not in theirs)
                assert known.setdefault(a, b) == b and back.setdefault(b, a) == a
        last = {value for _, _, args in made[1:] for value in args if type(value) is int}
        assert {t.data_ptr() for t in gradients[:3]} <= last


CACHED = {"check": False}
DECODE = {  # arguments, and B and D; with "check", of cached_attention
    "one query": ({}, 1, 64),
    "causal": ({"mask_mod": lambda b, h, q_idx, kv_idx: q_idx + 296 >= kv_idx}, 1, 64),
    "alibi": ({"score_mod": mods.alibi(SLOPES)}, 1, 64),
    "max scores, not split": ({"return_aux": AuxRequest(lse=True, max_scores=True)}, 40, 64),
    "a cache": (CACHED, 2, 64),
    "pages": (CACHED | {"page_table": torch.arange(4, dtype=torch.int32).reshape(2, 2), "score_mod": mods.alibi(SLOPES)}, 2, 64),
    "ragged": (CACHED | {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "max_q_len": 1}, 2, 20),
}


@pytest.mark.parametrize("name", DECODE)
def test_few_queries_have_the_same_arguments(name, launches):
    """Of two kernels where keys are split."""
    arguments, B, D = DECODE[name]
    q, k, v = tensors(length=600, B=B, D=D)
    for _ in range(3):  # with tensors of its own each time
        query = q[:, :, 0].clone() if "cu_seqlens_q" in arguments else q[:, :, :1].clone()
        if "check" in arguments:
            lengths = torch.tensor([600, 7], dtype=torch.int32)
            cached_attention(query, k.transpose(1, 2), v.transpose(1, 2), lengths, **arguments)
        else:
            flex_attention(query, k, v, enable_gqa=True, **arguments)
    kernels = 1 if "not split" in name else 2
    found = [launch for launch in launches if len(launch[2]) > 9][-3 * kernels :]  # those of the mask aside
    assert [way for way, *_ in found] == ["long"] * kernels + ["short"] * 2 * kernels
    for i, (_, grid, first) in enumerate(found):
        _, other_grid, second = found[i % kernels]
        assert grid == other_grid and len(first) == len(second)
        assert all(a % 16 == b % 16 == 0 and a > 1 << 30 for a, b in zip(first, second, strict=True) if a != b)  # addresses


def test_what_the_short_way_cannot_serve(launches):
    """Addresses and numbers that need another variant of the kernel go the long way, and do not spoil the next call."""
    window = 30

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx - kv_idx < window, score, -1.0)

    q, k, v = tensors()
    shifted = torch.zeros(q.numel() + 8, dtype=q.dtype)[1 : 1 + q.numel()].view(q.shape)
    assert shifted.data_ptr() % 16 and shifted.stride() == q.stride()
    for query, size in ((q, 30), (q, 31), (shifted, 31), (q, 1 << 40), (q, 32)):
        window = size
        flex_attention(query, k, v, mod, enable_gqa=True)
    assert [way for way, *_ in launches] == ["long", "short", "long", "long", "short"]
    assert launches[-1][2][-1] == 32
    assert launches[2][1] != launches[1][1]  # what TMA cannot load: another kernel


@pytest.mark.parametrize(
    "D, D_V, blocks",
    [
        (128, 128, ((128, 128), (128, 128), (64, 128), (64, 128))),
        (192, 128, ((128, 64), (128, 128), (64, 64), (64, 128))),
        (256, 256, ((64, 256), (64, 256), (64, 256), (64, 256))),
    ],
)
def test_what_tma_copies_at_once(D, D_V, blocks, launches):
    """Of K, V, Q and the output, whose descriptors tell all columns and begin at the first, however many are copied at once."""
    q, k, v = tensors(D=D, D_V=D_V)
    out = flex_attention(q, k, v, enable_gqa=True, kernel_options={"BACKEND": "GLUON"})
    expected = [[t.data_ptr(), tuple(t.shape), t.stride(), (1, 1, *block)] for t, block in zip((k, v, q, out), blocks, strict=True)]
    assert launches[0][2][:16] == sum(expected, [])


def test_other_addresses_get_their_own_maps(launches):
    before = cache_info().hits
    for _ in range(2):
        for _ in range(3):
            q, k, v = tensors()
            flex_attention(q, k, v, enable_gqa=True)
            assert launches[-1][2][:12:4] == [t.data_ptr() for t in (k, v, q)]
    assert [way for way, *_ in launches] == ["long"] + ["short"] * 5
    assert cache_info().hits == before + 5


def test_rows_in_a_dot_product_get_maps_of_their_own_layout(launches):
    q, k, v = tensors()
    query_rows = torch.zeros(2, 200, 40, dtype=torch.bfloat16)
    for length, way in ((200, "long"), (200, "short"), (150, "long"), (150, "short"), (200, "long")):
        key_rows = torch.zeros(2, length, 40, dtype=torch.bfloat16)
        flex_attention(q, k, v, lambda s, b, h, m, n, key_rows=key_rows: s + torch.dot(query_rows[b, m], key_rows[b, n]), enable_gqa=True)
        assert (launches[-1][0], launches[-1][2][16:24:4]) == (way, [query_rows.data_ptr(), key_rows.data_ptr()])


def test_what_fits_into_the_short_way():
    """Aligned addresses, and integers of 32 bits."""
    ones = torch.ones(9)
    assert plain_values([ones, 3, 0.5, ones[4:]]) == [ones.data_ptr(), 3, 0.5, ones.data_ptr() + 16]
    assert plain_values([3, ones[1:]]) is None
    assert plain_values([Numbers([3, 0.5]), 4]) == [3, 0.5, 4] and plain_values([Numbers([2**31]), 4]) is None
    assert plain_values([2**31 - 1, -(2**31)]) and plain_values([2**31]) is None and plain_values([-(2**31) - 1]) is None


class Labelled(torch.Tensor):
    pass


def surroundings():
    """Where a call is not what the same call outside is."""
    return {
        "a mode that only fakes": FakeTensorMode(allow_non_fake_inputs=True),
        "a mode that sees operations": FlopCounterMode(display=False),
        "forward mode": forward_ad.dual_level(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }


@pytest.mark.parametrize("name", surroundings())
def test_calls_in_other_surroundings_are_not_like_the_one_before(name):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    flex_attention(q, k, v)
    assert as_before(q, k, v, False) is not None
    with surroundings()[name]:
        assert as_before(q, k, v, False) is None


def test_calls_in_transforms_are_not_like_the_one_before():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    flex_attention(q, k, v)
    seen = []

    def ask(x):
        seen.append(as_before(q, k, v, False))
        return x

    for transform in (torch.func.vmap, torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        transform(ask)(torch.ones(2).sum() if transform is torch.func.grad else torch.ones(2))
    torch.jit.trace(ask, torch.ones(2), check_trace=False)
    assert seen == [None] * 4 and as_before(q, k, v, False) is not None


OTHERS = {
    "shape": lambda t: t[:, :, :10],
    "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda t: t.half(),
    "device": lambda t: t.to("meta"),
    "gradient": lambda t: t.requires_grad_(),
    "parameter": torch.nn.Parameter,
    "subclass": lambda t: t.as_subclass(Labelled),
    "negative": torch._neg_view,
    "nested": lambda t: torch.nested.as_nested_tensor([t[0]]),
    "nothing": lambda t: None,
}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_not_like_those_before(other, which):
    tensors = [torch.randn(1, 2, 20, 16) for _ in range(3)]
    flex_attention(*tensors)
    assert as_before(*(t.clone() for t in tensors), False) is as_before(*tensors, False) is not None
    assert as_before(*tensors, True) is None, "a call that allows groups"
    tensors[which] = other(tensors[which])
    assert as_before(*tensors, False) is None
