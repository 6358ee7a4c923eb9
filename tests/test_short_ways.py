"""Operators on the short way to their functions (custom_ops.py): with the same results and effects as on torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flexpress import AuxRequest, BlockMask, cached_attention, create_block_mask, flex_attention, mods, update_cache, varlen_attention
from flexpress.graphs import custom_ops
from flexpress.masks import mask_lists
from support.devices import DEVICES

OPS = torch.ops.flexpress


class Seen(TorchDispatchMode):
    """Keeps flexpress's operators that it sees, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flexpress":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def recorded(call) -> tuple:
    """The operator, and its arguments, of a call."""
    with torch.no_grad(), Seen() as seen:
        call()
    (found,) = seen.calls
    return found


def tensors(device, length=70):
    torch.manual_seed(0)
    return [torch.randn(1, 2, length, 16, device=device) for _ in range(3)]


def attention(device):
    q, k, v = tensors(device)
    slopes = torch.tensor([0.3, 0.1], device=device)
    mask = create_block_mask(mods.causal, None, None, 70, 70, device)
    return recorded(lambda: flex_attention(q, k, v, mods.alibi(slopes), mask))


@pytest.fixture
def whole_ways(monkeypatch):
    """How often torch's own way was gone, by operators' names, of those registered since."""
    counts: dict[str, int] = {}
    ordinary = custom_ops.make_autograd_impl

    def counted(overload, made):
        whole = ordinary(overload, made)

        def run(*args):
            counts[overload._opname] = counts.get(overload._opname, 0) + 1
            return whole(*args)

        return run

    monkeypatch.setattr(custom_ops, "make_autograd_impl", counted)
    return counts


def doubled(x: torch.Tensor, others: list[torch.Tensor], factor: float = 2.0) -> torch.Tensor:
    return x * factor


def filled(x: torch.Tensor, value: float) -> None:
    x.data.fill_(value)  # which torch does not count, as kernels' writes


@pytest.mark.parametrize("device", DEVICES)
def test_who_goes_which_way(device, whole_ways):
    made = custom_ops.operator("doubled_in_a_test")(doubled)
    made.register_fake(lambda x, others, factor=2.0: torch.empty_like(x))
    made.register_autograd(lambda ctx, g: (g * 2.0, [], None)[: len(ctx.needs_input_grad)])
    run, x = OPS.doubled_in_a_test, torch.ones(3, device=device)
    assert run(x, [], 3.0).tolist() == [3.0] * 3 and run(x, [x]).tolist() == [2.0] * 3
    with torch.inference_mode():
        assert run(torch.ones(2, device=device), []).tolist() == [2.0] * 2
    assert not whole_ways
    learned = x.clone().requires_grad_()
    with torch.no_grad():
        assert not run(learned, []).requires_grad
    assert not whole_ways
    (gradient,) = torch.autograd.grad(run(learned, []).sum(), learned)
    assert gradient.tolist() == [2.0] * 3 and whole_ways.pop("doubled_in_a_test") == 1
    with Seen() as seen:
        assert run(x, []).tolist() == [2.0] * 3
    assert len(seen.calls) == 1 and whole_ways.pop("doubled_in_a_test") >= 1
    assert run(x.to("meta"), []).shape == (3,)
    turned = torch.ones(3, dtype=torch.complex64, device=device).conj()  # what is conjugate only as a view is so for the function
    assert run(turned, []).tolist() == [2.0] * 3
    assert torch.func.vmap(lambda t: t.sum())(x.expand(2, 3)).tolist() == [3.0, 3.0]


def scaled(x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
    return x * factor


@pytest.mark.parametrize("device", DEVICES)
def test_arguments_by_name(device, whole_ways):
    custom_ops.operator("scaled_in_a_test")(scaled)
    x = torch.ones(2, device=device)
    assert OPS.scaled_in_a_test(x, factor=3.0).tolist() == [3.0] * 2 and OPS.scaled_in_a_test(x=x).tolist() == [2.0] * 2
    assert not whole_ways


@pytest.mark.parametrize("device", DEVICES)
def test_writes_are_counted(device, whole_ways):
    custom_ops.operator("filled_in_a_test", ("x",))(filled)
    x = torch.zeros(3, device=device)
    before = x._version
    OPS.filled_in_a_test(x, 2.0)
    assert x.tolist() == [2.0] * 3 and x._version > before and not whole_ways
    kept = torch.zeros(3, device=device, requires_grad=True)
    y = (kept * x).sum()  # keeps x
    OPS.filled_in_a_test(x, 3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        z = torch.zeros(3, device=device)
        OPS.filled_in_a_test(z, 2.0)
        assert z.tolist() == [2.0] * 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_caches_writes_are_counted(device):
    key, cache = torch.randn(2, 2, 1, 16, device=device), [torch.zeros(2, 8, 2, 16, device=device) for _ in range(2)]
    kv_len = torch.tensor([3, 5], dtype=torch.int32, device=device)
    call, given = recorded(lambda: update_cache(key, key, *cache, kv_len))
    before = [t._version for t in cache]
    call(*given)
    assert all(t._version > n for t, n in zip(cache, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_an_operator_are_walked_as_they_are(device, monkeypatch):
    """Q_LEN cuts the last block: what was full in it is partial already, and nothing is made anew at each call."""
    call, given = attention(device)
    expected = call(*given)
    monkeypatch.setattr(mask_lists, "with_rows_beyond", lambda *_: pytest.fail("made anew"))
    monkeypatch.setattr(mask_lists, "regridded", lambda *_: pytest.fail("made anew"))
    for found, other in zip(call(*given), expected, strict=True):
        assert torch.equal(found, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["attention", "mask_mod", "statistics", "cached", "packed"])
def test_where_another_thread_has_a_level_of_forward_mode(name, device):
    """Levels are those of the process; an operator is below all of them."""
    q, k, v = tensors(device)
    mask = create_block_mask(mods.causal, None, None, 70, 70, device)
    cache, kv_len = [t.transpose(1, 2).contiguous() for t in (k, v)], torch.tensor([50], dtype=torch.int32, device=device)
    packed, ends = [t[0].transpose(0, 1).contiguous() for t in (q, k, v)], torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
    request = AuxRequest(entropy=True)
    calls = {
        "attention": lambda: flex_attention(q, k, v, block_mask=mask),
        "mask_mod": lambda: flex_attention(q, k, v, mask_mod=mods.causal),
        "statistics": lambda: flex_attention(q, k, v, mask_mod=mods.causal, return_aux=request)[1].entropy,
        "cached": lambda: cached_attention(q[:, :, :1], *cache, kv_len),
        "packed": lambda: varlen_attention(*packed, ends, mask_mod=mods.causal),
    }
    wanted = calls[name]()
    with forward_ad.dual_level():
        with Seen() as seen:
            assert torch.equal(calls[name](), wanted)
        assert seen.calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of", ["operator", "backward", "mode", "aot_eager"])
def test_lists_with_too_few_rows_are_refused(of, device):
    """Kernels would read behind them."""
    q, k, v = tensors(device, 300)
    made = create_block_mask(mods.causal, None, None, 70, 70, device)

    def attend(q, k, v, counts, indices):
        return flex_attention(q, k, v, block_mask=BlockMask.from_kv_blocks(counts, indices, mask_mod=mods.causal, seq_lengths=(300, 300)))

    given = q, k, v, made.kv_num_blocks, made.kv_indices
    with pytest.raises(ValueError, match="lists 1 rows of blocks, but 300 queries"):
        if of == "mode":
            with Seen():
                attend(*given)
        elif of == "aot_eager":
            torch.compile(attend, backend=of, fullgraph=True)(*given)
        elif of == "backward":
            rows = create_block_mask(mods.causal, None, None, 300, 300, device)
            inputs = [t.requires_grad_() for t in (q, k, v)]
            with Seen() as seen:
                torch.autograd.grad(flex_attention(*inputs, block_mask=rows).sum(), inputs)
            (call, arguments), *_ = [(f, a) for f, a in seen.calls if "backward" in f.name()]
            OPS.flex_attention_backward(*arguments[:10], [t[:, :, :1] for t in arguments[10]], *arguments[11:])
        else:
            rows = create_block_mask(mods.causal, None, None, 300, 300, device)
            call, arguments = recorded(lambda: flex_attention(q, k, v, block_mask=rows))
            call(*arguments[:6], [t[:, :, :1] for t in arguments[6]], *arguments[7:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [8, 1024])
def test_lists_of_an_operator_that_kernels_cannot_walk(size, device):
    q, k, v = tensors(device)
    mask = create_block_mask(mods.causal, None, None, 70, 70, device, BLOCK_SIZE=size)
    call, given = recorded(lambda: flex_attention(q, k, v, block_mask=mask))
    assert torch.equal(call(*given)[0], flex_attention(q, k, v, block_mask=mask))
