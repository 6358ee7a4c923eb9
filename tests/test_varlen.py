"""varlen_attention against dense float64 attention, sequence by sequence: lengths, mods, gradients, and nothing made twice."""

from __future__ import annotations

import pytest
import torch

from flexpress import ModError, cache_clear, cache_info, mods, varlen_attention
from flexpress.calls import packed_blocks, probabilities
from flexpress.calls.call import attend
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.varlen import SCORE_MODS, Problem, by_sequence, check_problem, offsets, problems


@for_any(problems, cpu=18, cuda=120)
def test_any_problem(p, device):
    check_problem(p, device)


EXAMPLE = [40, 0, 65, 1]  # lengths


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_lengths", [None, [30, 5, 80, 0]])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("score", SCORE_MODS)
def test_gradients(score, apart, kv_lengths, device):
    """Of captured tensors with every kind of index: sequence, head, positions and their distance."""
    check_problem(Problem(lengths=EXAMPLE, kv_lengths=kv_lengths, score=score, apart=apart), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apart", [False, True])
def test_deterministic_gradients(apart, device):
    check_problem(Problem(lengths=EXAMPLE, score="bias", deterministic=True, apart=apart), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_lengths", [None, [30, 5, 80, 0]])
@pytest.mark.parametrize("apart", [False, True])
def test_dropout(apart, kv_lengths, device):
    check_problem(Problem(lengths=EXAMPLE, kv_lengths=kv_lengths, score="alibi", apart=apart, dropout=0.3), device)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lengths", [None, [1000, 4096, 0, 333, 1500, 900]])
@pytest.mark.parametrize("score", ["none", "alibi", "sequence"])
@pytest.mark.parametrize("mask", ["causal", "prefix"])
def test_long_sequences(mask, score, kv_lengths):
    lengths = [2000, 4001, 1, 0, 777, 1024]
    shape = dict(Hkv=2, group=4, D=128, Dv=128, dtype=torch.bfloat16)
    check_problem(Problem(lengths=lengths, kv_lengths=kv_lengths, **shape, score=score, mask=mask), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lengths", [None, [300, 1024, 0, 333, 700, 600]])
@pytest.mark.parametrize("score", ["none", "alibi"])
@pytest.mark.parametrize("D", [64, 128])
def test_dropout_of_long_sequences(D, score, kv_lengths):
    shape = dict(Hkv=2, group=2, D=D, Dv=D, dtype=torch.bfloat16)
    check_problem(Problem(lengths=[600, 1001, 1, 0, 177, 1024], kv_lengths=kv_lengths, **shape, score=score, dropout=0.4), "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_tensor_twice_is_left_out(device):
    """A call of the form that FlashAttention asks for gets the kernels of shared sequences."""
    starts = torch.tensor([0, 30, 30, 47], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(47, 2, 16, device=device) for _ in range(3))
    slopes = torch.tensor([0.1, 0.3], device=device)
    call = lambda other: varlen_attention(q, k, v, starts, other, mods.alibi(slopes), mods.causal, return_lse=True)
    found = call(None)
    assert made_by(lambda: call(starts)) == (0, 0, 0) and all(map(torch.equal, call(starts), found))
    for mine, other in zip(call(starts.clone()), found, strict=True):
        torch.testing.assert_close(mine, other)
    q, k, starts = q.cpu(), torch.cat([k, k[:1]]).cpu(), starts.cpu()
    with pytest.raises(ValueError, match="cu_seqlens_k must be .* the 48 tokens of k"):
        varlen_attention(q, k, k, starts, starts)


def made_by(work) -> tuple[int, int, int]:
    """Traces, prints and compiles that `work` costs."""
    before = cache_info()
    work()
    after = cache_info()
    return after.traces - before.traces, after.prints - before.prints, after.compiles - before.compiles


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "apart, form, cross",
    [
        (False, "distances", True),
        (False, "positions", False),
        (False, "plain", True),
        (True, "positions", True),
        (True, "distances", False),
    ],
)
def test_other_lengths_compile_nothing(apart, form, cross, device, monkeypatch):
    """Nor does another number of sequences, a fresh lambda with another number, other offsets' dtype or unaligned rows."""
    if apart:
        monkeypatch.setattr(packed_blocks, "LONG", 0)

    def run(lengths, shift, dtype=torch.int32, D=16):
        slopes = torch.rand(2, device=device, requires_grad=True)
        sizes = torch.ones(len(lengths), device=device)
        score, mask = {
            "distances": (lambda s, b, h, m, n: s + (m - n - shift) * slopes[h] * sizes[b], lambda b, h, m, n: m + shift >= n),
            "positions": (lambda s, b, h, m, n: s + (m * shift - n) * slopes[h] * sizes[b], lambda b, h, m, n: m % shift >= n % 5),
            "plain": (None, None),
        }[form]
        kv_lengths = lengths[::-1] if cross else lengths
        q, k, v = (torch.randn(sum(t), 2, D, device=device, requires_grad=True) for t in (lengths, kv_lengths, kv_lengths))
        cu_q, cu_k = offsets(lengths, device, dtype), offsets(kv_lengths, device, dtype)
        out = varlen_attention(q, k, v, cu_q, cu_k if cross else None, score, mask)
        out.backward(torch.randn_like(out))

    cache_clear()
    assert made_by(lambda: run([30, 41], 3))[0]
    few = [18] if apart else [7]  # up to 16 queries have no blocks of their own
    for lengths, shift in (([30, 41], 3), ([64, 62], 5), (few, 2), ([0, 1, 33, 128, 2], 9), ([16, 16, 16, 16], 4)):
        assert made_by(lambda lengths=lengths, shift=shift: run(lengths, shift)) == (0, 0, 0), lengths
    traces, prints, compiles = made_by(lambda: run([64, 64], 3))  # whole blocks
    assert traces == 0 and prints <= 2 and compiles <= 2
    assert made_by(lambda: run([100, 28, 128], 5)) == (0, 0, 0)
    assert made_by(lambda: run([30, 5], 6, torch.int64)) == (0, 0, 0)
    run([30, 41], 3, D=5)
    assert made_by(lambda: run([16, 16], 3, D=5)) == (0, 0, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_copied(device, monkeypatch):
    """The kernels get views of a packed qkv, and their output comes back as it lies."""
    calls = []

    def spy(call, *options):
        calls.append((*call[:3], *attend(call, *options)))
        return calls[-1][3:]

    monkeypatch.setattr(probabilities, "attend", spy)
    qkv = torch.randn(75, 3, 4, 40, device=device, requires_grad=True)
    cu = offsets([33, 42], device)
    out, lse = varlen_attention(*qkv.unbind(1), cu, mask_mod=mods.causal, return_lse=True)
    ((*views, result, rows, _),) = calls
    for i, view in enumerate(views):
        assert view.data_ptr() == qkv[:, i].data_ptr() and view.shape == (1, 4, 75, 40) and view.stride()[1:] == (40, 480, 1)
    assert out.data_ptr() == result.data_ptr() and out.is_contiguous() and lse.data_ptr() == rows.data_ptr()
    (got,) = torch.autograd.grad(out.square().sum(), qkv)
    apart = [t.detach().clone().requires_grad_() for t in qkv.unbind(1)]
    want = torch.autograd.grad(varlen_attention(*apart, cu, mask_mod=mods.causal).square().sum(), apart)
    assert relative_error(got, torch.stack(want, 1)) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths, device):
    q, k, v = (torch.randn(0, 2, 16, device=device, requires_grad=True) for _ in range(3))
    for mask_mod in (None, mods.causal, mods.prefix_lm(3)):
        out, lse = varlen_attention(q, k, v, offsets(lengths, device), mask_mod=mask_mod, return_lse=True)
        assert out.shape == (0, 2, 16) and lse.shape == (0, 2)
    k, v = (torch.randn(5, 2, 16, device=device) for _ in range(2))
    if lengths:
        assert varlen_attention(q, k, v, offsets(lengths, device), offsets([5] + lengths[1:], device)).shape == (0, 2, 16)
        k.requires_grad_()
        out = varlen_attention(k, q, q, offsets([5] + lengths[1:], device), offsets(lengths, device))
        assert out.shape == (5, 2, 16) and (out == 0).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (k, q)))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    q, k, v = torch.randn(20, 2, 16, device=device), *(torch.randn(20, 2, 16, device=device, dtype=torch.bfloat16) for _ in range(2))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert varlen_attention(q, k, v, offsets([12, 8], device)).dtype == torch.bfloat16


@pytest.mark.gpu
def test_the_host_does_not_wait():
    q, k, v = (torch.randn(900, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu, other = offsets([500, 0, 400], "cuda"), offsets([300, 400, 200], "cuda", torch.int64)

    def both():
        for cu_k in (None, other.to(cu.dtype)):
            for mask_mod in (mods.causal, mods.prefix_lm(7)):
                varlen_attention(q, k, v, cu, cu_k, mask_mod=mask_mod).sum().backward()

    both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_graphs_replay_other_lengths():
    q, k, v = (torch.randn(1000, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = offsets([300, 200, 500], "cuda")

    def run():
        return varlen_attention(q, k, v, cu, mask_mod=mods.causal)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in ([300, 200, 500], [1, 0, 999], [600, 399, 1]):
        cu.copy_(offsets(lengths, "cuda"))
        graph.replay()
        want, _ = by_sequence(q, k, v, lengths, lengths, None, mods.causal, None, torch.float64)
        assert relative_error(out, want) < 1e-2


X, CU = torch.zeros(20, 4, 16), offsets([12, 8])
K = torch.zeros(30, 2, 16)
BAD = {
    "list": (dict(q=[1.0]), TypeError, r"q must be a torch.Tensor of shape \(total_q, Hq, D\), got list"),
    "rank": (dict(k=K[None]), ValueError, r"k must have shape \(total_k, Hkv, D\), got \(1, 30, 2, 16\)"),
    "dtype": (dict(q=X.double()), TypeError, r"q has dtype torch.float64; supported are float16"),
    "dtypes": (dict(v=X.half()), TypeError, r"q and v must have the same dtype, got torch.float32 and torch.float16"),
    "device": (dict(k=X.to("meta")), ValueError, r"q is on cpu but k is on meta"),
    "k and v": (dict(v=X[1:]), ValueError, r"same tokens and heads, got k \(20, 4, 16\) and v \(19, 4, 16\)"),
    "head dim": (dict(k=X[..., :8]), ValueError, r"same head dim, got q \(20, 4, 16\) and k \(20, 4, 8\)"),
    "heads": (dict(q=X[:, :3]), ValueError, r"multiple of k's, got q \(20, 3, 16\) and k \(20, 4, 16\)"),
    "large head dim": (dict(v=torch.zeros(20, 4, 600)), NotImplementedError, r"v has head_dim 600 .* supported are 1 to 512"),
    "tokens": (dict(k=K, v=K), ValueError, r"got q \(20, 4, 16\) and k \(30, 2, 16\); pass cu_seqlens_k"),
    "no tensor": (dict(cu_seqlens_q=[0, 12, 20]), TypeError, r"cu_seqlens_q must be a torch.Tensor of shape \(sequences \+ 1\), got list"),
    "cu rank": (dict(cu_seqlens_q=CU[None]), ValueError, r"cu_seqlens_q must have shape \(sequences \+ 1\), got \(1, 3\)"),
    "cu dtype": (dict(cu_seqlens_q=CU.float()), TypeError, r"cu_seqlens_q has dtype torch.float32, not int32 or int64; .*cumsum"),
    "cu device": (dict(cu_seqlens_k=CU.to("meta")), ValueError, r"k is on cpu but cu_seqlens_k is on meta"),
    "empty": (dict(cu_seqlens_q=CU[:0]), ValueError, r"shape \(0,\), but n sequences have n \+ 1 numbers"),
    "start": (dict(cu_seqlens_q=CU + 1), ValueError, r"cu_seqlens_q must be 0 and then .* 20 tokens of q \(20, 4, 16\), got \[1, 13, 21\]"),
    "end": (dict(cu_seqlens_q=offsets([12, 7])), ValueError, r"got \[0, 12, 19\]; torch.nn.functional.pad"),
    "falling": (dict(cu_seqlens_k=offsets([30, -10])), ValueError, r"cu_seqlens_k must be 0 and then .* got \[0, 30, 20\]"),
    "many": (dict(cu_seqlens_q=offsets(range(10))), ValueError, r"got \[0, 0, 1, 3, \.\.\., 45\]"),
    "sequences": (
        dict(cu_seqlens_k=offsets([20])),
        ValueError,
        r"as many sequences, and so of the same length, got shapes \(3,\) and \(2,\)",
    ),
    "option": (dict(kernel_options={"BLOK_M": 64}), ValueError, r"no 'BLOK_M'"),
    "scale": (dict(scale="big"), TypeError, r"scale must be a number, got str"),
    "no function": (dict(score_mod=3), TypeError, r"score_mod must be a function, got int"),
    "mask for score": (dict(score_mod=mods.causal), ModError, r"This looks like a mask_mod"),
    "own line": (dict(mask_mod=lambda b, h, m, n: m + n), ModError, r"(?s)returns torch.int32, not torch.bool.*test_varlen.py"),
    "captured device": (dict(score_mod=mods.alibi(torch.rand(4, device="meta"))), ValueError, r"captures slopes, .* on meta"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_arguments(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught:
        varlen_attention(**{"q": X, "k": X, "v": X, "cu_seqlens_q": CU, **arguments})
    assert len(str(caught.value)) < 500


def test_offsets_that_are_a_column_of_a_table():
    """Sequences so long that blocks are made of where they begin."""
    q, k, v = torch.randn(3, 600, 1, 8).unbind()
    starts = torch.tensor([[0, 0], [300, 290], [600, 600]], dtype=torch.int32)[:, 0]
    torch.testing.assert_close(varlen_attention(q, k, v, starts), varlen_attention(q, k, v, starts.contiguous()))


def test_cu_seqlens_inside_transforms():
    """Integers have no derivative: they may be arguments of what is differentiated, or made inside."""
    q, cu = torch.randn(7, 2, 16), torch.tensor([0, 3, 7])
    want = torch.func.grad(lambda q: varlen_attention(q, q, q, cu).sin().sum())(q)
    for of in (
        torch.func.grad(lambda q, cu: varlen_attention(q, q, q, cu).sin().sum()),
        torch.func.grad(lambda q, cu: varlen_attention(q, q, q, cu.diff().cumsum(0).new_tensor([0, 3, 7]), cu).sin().sum()),
        lambda q, cu: torch.vmap(torch.func.grad(lambda q, cu: varlen_attention(q, q, q, cu).sin().sum()), (0, None))(q[None], cu)[0],
    ):
        torch.testing.assert_close(of(q, cu), want)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q is a tensor of a torch.func transform"):
        torch.vmap(lambda cu: varlen_attention(q, q, q, cu))(torch.stack([cu, cu]))
