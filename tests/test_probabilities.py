"""What return_aux tells of the probabilities: entropy, top index and column sums, against dense attention in float64."""

from __future__ import annotations

import pytest
import torch

from flexpress import AuxRequest, cache_info, create_block_mask, flex_attention, mods, printed_kernels
from support.devices import DEVICES, for_any
from support.probabilities import ALL, assert_right, check_probabilities, probability_problems


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


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    """Those of the output are what they are; through entropy and column sums there are none, and that is said."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 150, 16, device=device).requires_grad_() for _ in range(3))
    slopes = mods.alibi_slopes(2, device).requires_grad_()
    d_out = torch.randn(1, 2, 150, 16, device=device)
    wanted = torch.autograd.grad(flex_attention(q, k, v, mods.alibi(slopes)), (q, k, v, slopes), d_out)
    out, aux = flex_attention(q, k, v, mods.alibi(slopes), return_aux=ALL)
    assert_right(aux, q, k, mods.alibi(slopes.detach()), close=2e-5 if device == "cpu" else 3e-3)
    found = torch.autograd.grad(out, (q, k, v, slopes), d_out, retain_graph=True)
    assert all(map(torch.equal, found[:3], wanted[:3]))
    for refused in (aux.entropy, aux.column_sums):
        with pytest.raises(NotImplementedError, match=r"entropy and column_sums of return_aux have no gradient: detach them"):
            (out.sum() + refused.sum()).backward(retain_graph=True)
    (out.sum() + aux.entropy.detach().sum()).backward()
    _, aux = flex_attention(*(t.detach() for t in (q, k, v)), mods.alibi(slopes), return_aux=AuxRequest(entropy=True))
    with pytest.raises(NotImplementedError, match="have no gradient"):
        aux.entropy.sum().backward()
    with torch.no_grad():
        assert not flex_attention(q, k, v, return_aux=ALL)[1].entropy.requires_grad


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


@pytest.mark.parametrize("learned", ["query", "key", "slopes"])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_under_torch_compile(learned, device):
    """Refused as in eager mode; statistics that a loss does not read change nothing."""
    x = {name: torch.randn(1, 2, 30, 16, device=device) for name in ("query", "key", "value")} | {"slopes": torch.ones(2, device=device)}
    x[learned].requires_grad_()

    def attend(weight):
        q, k, v, slopes = x.values()
        out, aux = flex_attention(q, k, v, mods.alibi(slopes), return_aux=ALL)
        return out.square().sum() + weight * (aux.entropy.sum() + aux.column_sums.square().sum()), aux.entropy

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    (wanted,), (found,) = (torch.autograd.grad(function(0.0)[0], x[learned]) for function in (attend_alone(x), compiled))
    torch.testing.assert_close(found, wanted)
    for function in (attend, compiled):
        with pytest.raises(NotImplementedError, match="have no gradient"):
            function(1.0)[0].backward()


def attend_alone(x):
    q, k, v, slopes = x.values()
    return lambda _: (flex_attention(q, k, v, mods.alibi(slopes)).square().sum(),)


def test_in_transforms():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(NotImplementedError, match="are not there inside transforms"):
        torch.func.grad(lambda q: flex_attention(q, q, q, return_aux=AuxRequest(top_index=True))[0].sum())(q)


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
    with pytest.raises(
        NotImplementedError, match="entropy, top_index and column_sums are not known where keys or heads lie on several devices"
    ):
        flex_attention(q, q, q, return_aux=AuxRequest(entropy=True), context=object())
