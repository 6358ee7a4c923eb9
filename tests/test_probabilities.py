"""What return_aux tells of the probabilities: entropy, top index and column sums, against dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexpress import AuxRequest, cache_info, create_block_mask, flex_attention, mods, printed_kernels
from flexpress.operators import probability_operators
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.probabilities import ALL, assert_right, check_probabilities, dense, probability_problems


@for_any(probability_problems, cpu=10, cuda=120)
def test_any_problem(p, device):
    check_probabilities(p, device)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_scores_the_first_key_is_the_top(device, poisoned_memory):
    """Wherever its block stands in the lists: full blocks come after partial ones."""
    q = torch.ones(1, 2, 300, 16, device=device)
    for mask_mod, first in ((None, 0), (mods.causal, 0), (lambda b, h, q_idx, kv_idx: (kv_idx > 3) & (kv_idx != 130), 4)):
        _, aux = flex_attention(q, q, q, mask_mod=mask_mod, return_aux=AuxRequest(top_index=True))
        assert (aux.top_index == first).all() and aux.entropy is aux.column_sums is aux.lse is aux.max_scores is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e4, 1e9, 1e30])
def test_huge_scores(size, device):
    """Where one score of a row is far above others its probability is 1, or shared among equals; no NaN anywhere."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-3, 4, (1, 1, 70, 150), generator=generator).to(device)

    def score_mod(score, b, h, q_idx, kv_idx):
        return whole[b, h, q_idx, kv_idx] * size

    q, k = torch.zeros(1, 1, 70, 16, device=device), torch.zeros(1, 1, 150, 16, device=device)
    _, aux = flex_attention(q, k, k, score_mod, return_aux=ALL)
    most = whole == whole.amax(-1, keepdim=True)
    torch.testing.assert_close(aux.entropy, most.sum(-1).float().log(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.column_sums, (most / most.sum(-1, keepdim=True)).sum(-2), rtol=1e-5, atol=1e-5)
    assert torch.equal(aux.top_index, most.int().argmax(-1))


@pytest.mark.parametrize("device", DEVICES)
def test_entropy_of_known_distributions(device, poisoned_memory):
    """Of n equal scores ln(n); of one key exactly 0; of nothing 0, with no top index and no sums."""
    q = torch.ones(1, 1, 128, 16, device=device)
    _, aux = flex_attention(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx < q_idx) & (q_idx < 100), return_aux=ALL)
    counts = torch.arange(128, device=device) * (torch.arange(128, device=device) < 100)
    torch.testing.assert_close(aux.entropy[0, 0], counts.clamp_min(1).float().log(), rtol=1e-6, atol=2e-6)
    assert not aux.entropy[0, 0, counts == 1].any() and torch.equal(aux.top_index[0, 0] < 0, counts == 0)
    torch.testing.assert_close(aux.column_sums.sum(), torch.tensor(99.0, device=device))
    none = flex_attention(q, q[:, :, :0], q[:, :, :0], return_aux=ALL)[1]
    assert not none.entropy.any() and (none.top_index == -1).all() and none.column_sums.shape == (1, 1, 0)
    none = flex_attention(q[:, :, :0], q, q, return_aux=ALL)[1]
    assert none.entropy.shape == none.top_index.shape == (1, 1, 0) and not none.column_sums.any()


@pytest.mark.parametrize("device", DEVICES)
def test_calls_with_sinks_have_kernels_of_their_own(device, poisoned_memory):
    """Of the same tensors with, without, and with others of another dtype."""
    q, k = torch.randn(1, 2, 40, 16, device=device), torch.randn(1, 2, 50, 16, device=device)
    logits = torch.tensor([0.5, 3.0], device=device)
    for sinks in (None, logits, None, logits.bfloat16(), -logits):
        _, aux = flex_attention(q, k, k, sinks=sinks, return_aux=ALL)
        assert_right(aux, q, k, sinks=sinks, close=2e-5 if device == "cpu" else 3e-3)


def test_evicting_keys_that_nobody_looks_at():
    """What has no weight may go: the output stays."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 16, 32), torch.randn(1, 1, 200, 32), torch.randn(1, 1, 200, 32)
    seen = torch.rand(200) < 0.4
    out, aux = flex_attention(
        q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: seen[kv_idx], enable_gqa=True, return_aux=AuxRequest(column_sums=True)
    )
    kept = aux.column_sums.sum((0, 1)).nonzero()[:, 0]
    assert torch.equal(kept, seen.nonzero()[:, 0])
    torch.testing.assert_close(flex_attention(q, k[:, :, kept], v[:, :, kept], enable_gqa=True), out)


def loss_of(entropy, column_sums):
    """One in which every row and every column counts, each in its way."""
    rows, columns = (torch.arange(t.numel(), device=t.device).view(t.shape) for t in (entropy, column_sums))
    return (entropy * torch.sin(rows)).sum() + (column_sums.square() * torch.cos(columns)).sum()


def exact_gradients(x: dict, mask_mod=None) -> list:
    """Of query, key, slopes and sinks, by float64 autograd; the score_mod is softcap and ALiBi."""
    x = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    _, entropy, _, column_sums = dense(x["query"], x["key"], capped(x["slopes"]), mask_mod, sinks=x["sinks"])
    return [*torch.autograd.grad(loss_of(entropy, column_sums), tuple(x.values()))]


def capped(slopes):
    return lambda s, b, h, m, n: 3.0 * torch.tanh(s / 3.0) - slopes[h] * (m - n)


def learned_tensors(device: str) -> dict:
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 4, 33, 16), "key": (1, 2, 40, 16), "slopes": (4,), "sinks": (4,)}
    return {name: torch.randn(shape, generator=generator).to(device).requires_grad_() for name, shape in shapes.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", ["", "mask_mod", "block_mask"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic, masked, device, poisoned_memory):
    """Of everything that a score depends on; rows without keys, which have their sink alone, have none."""
    x, options = learned_tensors(device), {"enable_gqa": True, "deterministic": deterministic}
    seen = lambda b, h, q_idx, kv_idx: kv_idx < q_idx - 3  # noqa: E731
    if masked:
        options[masked] = seen if masked == "mask_mod" else create_block_mask(seen, None, None, 33, 40, device, BLOCK_SIZE=16)
    q, k, slopes, sinks = x.values()
    v = torch.randn(1, 2, 40, 8, device=device)
    out, aux = flex_attention(q, k, v, capped(slopes), **options, sinks=sinks, return_aux=ALL)
    assert_right(aux, q, k, capped(slopes.detach()), seen if masked else None, sinks=sinks, close=2e-5 if device == "cpu" else 3e-3)
    found = torch.autograd.grad(loss_of(aux.entropy, aux.column_sums), (q, k, slopes, sinks), retain_graph=True)
    for have, want in zip(found, exact_gradients(x, seen if masked else None), strict=True):
        assert relative_error(have, want) < (1e-4 if device == "cpu" else 1e-2)
    again = torch.autograd.grad(loss_of(aux.entropy, aux.column_sums), (q, k, slopes, sinks))
    assert not deterministic or all(map(torch.equal, found, again))
    wanted = torch.autograd.grad(flex_attention(q, k, v, capped(slopes), **options, sinks=sinks).sum(), (q, k, slopes, sinks))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, slopes, sinks))[:2], wanted[:2]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("learned", ["query", "key", "slopes", "sinks"])
def test_gradients_of_one_input(learned, device):
    """In one precision and the other, of entropy alone; without sinks where these do not learn."""
    x = {name: t.detach().requires_grad_(name == learned) for name, t in learned_tensors(device).items()}
    q, k, slopes, sinks = x.values()
    sinks = sinks if learned == "sinks" else None
    for dtype, close in ((torch.float32, 1e-4 if device == "cpu" else 1e-2), (torch.bfloat16, 5e-2)):
        halves = [t.to(dtype) for t in (q, k)]
        request = AuxRequest(entropy=True)
        entropy = flex_attention(*halves, halves[1], capped(slopes), enable_gqa=True, sinks=sinks, return_aux=request)[1].entropy
        (found,) = torch.autograd.grad(entropy.square().sum(), x[learned])
        exact = {name: t.detach().to(dtype if name in ("query", "key") else t.dtype).double() for name, t in x.items()}
        exact[learned].requires_grad_()
        wanted = dense(exact["query"], exact["key"], capped(exact["slopes"]), sinks=None if sinks is None else exact["sinks"])[1]
        assert relative_error(found, torch.autograd.grad(wanted.square().sum(), exact[learned])[0]) < close
    with torch.no_grad():
        assert not flex_attention(q, k, k, enable_gqa=True, return_aux=ALL)[1].entropy.requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("statistic", ["entropy", "column_sums"])
def test_a_scaled_loss_in_half_precision(statistic, device):
    """A gradient beyond what float16 holds, of a tensor in float32."""
    x = learned_tensors(device)
    q, k, slopes = x["query"].detach().half(), x["key"].detach().half(), x["slopes"]
    request = AuxRequest(**{statistic: True})
    found = getattr(flex_attention(q, k, k, capped(slopes), enable_gqa=True, return_aux=request)[1], statistic)
    wanted = slopes.detach().double().requires_grad_()
    _, entropy, _, column_sums = dense(q, k, capped(wanted))
    for loss, leaf in ((found, slopes), (entropy if statistic == "entropy" else column_sums, wanted)):
        leaf.grad = None
        (loss.square().sum() * 1e9).backward()
    assert relative_error(slopes.grad, wanted.grad) < 2e-2


def test_no_queries_and_no_keys():
    for q_len, kv_len in ((0, 7), (7, 0)):
        q, k = torch.randn(1, 2, q_len, 8, requires_grad=True), torch.randn(1, 2, kv_len, 8, requires_grad=True)
        _, aux = flex_attention(q, k, k, return_aux=ALL)
        found = torch.autograd.grad(aux.entropy.sum() + aux.column_sums.square().sum(), (q, k))
        assert found[0].shape == q.shape and found[1].shape == k.shape and not found[0].any() and not found[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_nothing(dtype, device):
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)

    def looked() -> tuple[torch.Tensor, ...]:
        _, aux = flex_attention(q, q, q, mods.softcap(2.0), return_aux=ALL)
        return *aux, *torch.autograd.grad(aux.entropy.sum() + aux.column_sums.square().sum(), q)

    wanted = looked()
    torch.set_default_dtype(dtype)
    try:
        for have, want in zip(looked(), wanted, strict=True):
            torch.testing.assert_close(have, want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_under_activation_checkpointing(device):
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)

    def loss(q):
        _, aux = flex_attention(q, q, q, mods.softcap(2.0), return_aux=ALL)
        return aux.entropy.sum() + aux.column_sums.square().sum()

    found = [torch.autograd.grad(run(q), q)[0] for run in (loss, lambda q: checkpoint(loss, q, use_reentrant=False))]
    torch.testing.assert_close(*found)


def test_entropy_of_wide_heads_has_no_gradient():
    q = torch.randn(1, 1, 5, 320, requires_grad=True)
    with pytest.raises(NotImplementedError, match="entropy of return_aux has gradients for head dims up to 256, and q and k have 320"):
        flex_attention(q, q, q, return_aux=AuxRequest(entropy=True))
    _, aux = flex_attention(q.detach(), q.detach(), q.detach(), return_aux=AuxRequest(entropy=True))
    assert aux.entropy.shape == (1, 1, 5)
    flex_attention(q, q, q, return_aux=AuxRequest(column_sums=True))[1].column_sums.square().sum().backward()
    assert q.grad.any()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_between_the_passes_is_noticed(device):
    q = torch.randn(1, 1, 9, 8, device=device, requires_grad=True)
    table = torch.randn(9, device=device)
    _, aux = flex_attention(q, q, q, lambda s, b, h, m, n: s + table[n], return_aux=AuxRequest(entropy=True))
    table.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        aux.entropy.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 100, 16, device=device).requires_grad_() for _ in range(3))
    slopes = mods.alibi_slopes(2, device).requires_grad_()

    def attend(q, k, v, slopes):
        out, aux = flex_attention(q, k, v, mods.alibi(slopes), mask_mod=mods.causal, return_aux=ALL)
        return out, aux.lse, aux.max_scores, aux.entropy.detach(), aux.top_index, aux.column_sums.detach()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = [function(q, k, v, slopes) for function in (attend, compiled)]
    assert all(map(torch.equal, *results))
    wanted, found = (torch.autograd.grad(result[0].sum(), (q, k, v)) for result in results)
    assert all(map(torch.equal, found, wanted))
    mask = create_block_mask(mods.causal, None, None, 100, 100, device)
    only = torch.compile(
        lambda: flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(column_sums=True))[1], fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(only().column_sums, results[1][5], rtol=0, atol=30)
    assert torch.equal(only().column_sums, flex_attention(q, k, v, block_mask=mask, return_aux=ALL)[1].column_sums)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_under_torch_compile(sinks, device):
    """As in eager mode; statistics that a loss does not read change nothing, and no gradient of theirs is computed."""
    x = learned_tensors(device)
    q, k, slopes, learned = x.values()
    inputs = (q, k, slopes, learned) if sinks else (q, k, slopes)

    def attend(weight):
        options = {"enable_gqa": True, "sinks": learned if sinks else None, "mask_mod": mods.causal}
        out, aux = flex_attention(q, k, k, capped(slopes), **options, return_aux=ALL)
        return out.square().sum() + (weight * loss_of(aux.entropy, aux.column_sums) if weight else 0.0)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for weight in (1.0, 0.0):
        wanted, found = (torch.autograd.grad(function(weight), inputs) for function in (attend, compiled))
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_zeros_computes_nothing(monkeypatch):
    """A compiler gives one where nobody wants it."""
    q = torch.randn(1, 1, 9, 8, requires_grad=True)
    monkeypatch.setattr(probability_operators, "gradients", None)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(weight):
        _, aux = flex_attention(q, q, q, return_aux=AuxRequest(entropy=True, column_sums=True))
        return (aux.entropy * weight).sum()

    assert not torch.autograd.grad(attend(torch.zeros(())), q)[0].any()
    with pytest.raises(TypeError, match="NoneType"):
        torch.autograd.grad(attend(torch.ones(())), q)


def test_shapes_without_memory():
    q, k = torch.randn(2, 4, 30, 16, device="meta"), torch.randn(2, 2, 50, 16, device="meta")
    _, aux = flex_attention(q, k, k, enable_gqa=True, return_aux=ALL)
    assert aux.entropy.shape == aux.top_index.shape == (2, 4, 30) and aux.column_sums.shape == (2, 4, 50)
    assert (aux.entropy.dtype, aux.top_index.dtype, aux.column_sums.dtype) == (torch.float32, torch.int64, torch.float32)


def test_other_lengths_and_windows_print_nothing_again():
    q = torch.randn(1, 2, 41, 16)
    flex_attention(q, q, q, mask_mod=mods.sliding_window(9), return_aux=ALL)
    before = cache_info()
    q = torch.randn(2, 4, 57, 16)
    flex_attention(q, q, q, mask_mod=mods.sliding_window(12), return_aux=ALL)
    assert cache_info().prints == before.prints


def test_a_pass_does_what_it_is_asked_for():
    """Nothing is computed that nobody wants."""
    q = torch.randn(1, 2, 41, 16)
    flex_attention(q, q, q, return_aux=AuxRequest(top_index=True))
    texts = [path.read_text() for path in printed_kernels() if "top_i " in path.read_text()]
    assert any("e_i" not in text and "ROWS" not in text for text in texts)


def test_sequences_over_several_devices_are_refused():
    q = torch.randn(1, 2, 41, 16)
    with pytest.raises(NotImplementedError, match="entropy, top_index and column_sums are not known where sequences lie on several"):
        flex_attention(q, q, q, return_aux=AuxRequest(entropy=True), context=object())
