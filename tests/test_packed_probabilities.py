"""What return_aux tells of packed sequences: what it tells of each sequence alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from flexpress import AuxRequest, flex_attention, mods, varlen_attention
from support.dense import relative_error
from support.devices import DEVICES, for_any
from support.probabilities import ALL, MASKS, MODS, assert_right

NAMES = "entropy", "top_index", "column_sums"


def ends(lengths, device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def of_sequences(packed: tuple, lengths: list, lengths_k: list):
    """q and k of each sequence, as flex_attention takes them."""
    return zip(*(t.transpose(0, 1)[None].split(n, 2) for t, n in zip(packed, (lengths, lengths_k), strict=True)), strict=True)


@st.composite
def packed_problems(draw, device):
    """q, k, the sequences' lengths, score_mod, mask_mod, scale and sinks."""
    torch.manual_seed(draw(st.integers(0, 99)))
    lengths = draw(st.lists(st.sampled_from([0, 1, 5, 33, 130]), min_size=1, max_size=4))
    lengths_k = draw(st.sampled_from([None, draw(st.permutations(lengths)), [150] * len(lengths)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q = torch.randn(sum(lengths), 4, 20, device=device, dtype=dtype)
    k = torch.randn(sum(lengths_k or lengths), draw(st.sampled_from([1, 2, 4])), 20, device=device, dtype=dtype)
    mod, mask = MODS[draw(st.sampled_from([*MODS]))](device), MASKS[draw(st.sampled_from([*MASKS]))](device)
    sinks = draw(st.sampled_from([None, torch.tensor([-1.0, 2.0, 40.0, 0.0], device=device)]))
    return q, k, lengths, lengths_k, mod, mask, draw(st.sampled_from([None, -0.5])), sinks


@for_any(packed_problems, cpu=12, cuda=80)
def test_any_problem(p, device):
    q, k, lengths, lengths_k, score_mod, mask_mod, scale, sinks = p
    cu_k = None if lengths_k is None else ends(lengths_k, device)
    given = {"cu_seqlens_k": cu_k, "score_mod": score_mod, "mask_mod": mask_mod, "scale": scale, "sinks": sinks}
    out, lse = varlen_attention(q, k, k, ends(lengths, device), **given, return_lse=True)
    again, aux = varlen_attention(q, k, k, ends(lengths, device), **given, return_aux=ALL)
    assert torch.equal(out, again) and torch.equal(lse, aux.lse) and aux.max_scores.shape == aux.entropy.shape == lse.shape
    close = 2e-5 if device == "cpu" else 3e-3 if q.dtype == torch.float32 else 1e-2
    ways = zip(NAMES, (lengths, lengths, lengths_k or lengths), strict=True)
    places = zip(*(getattr(aux, name).split(n) for name, n in ways), strict=True)
    for (queries, keys), found in zip(of_sequences((q, k), lengths, lengths_k or lengths), places, strict=True):
        if 0 in (queries.shape[2], keys.shape[2]):
            assert not found[0].any() and (found[1] == -1).all() and not found[2].any()
            continue
        of_one = aux._replace(**{name: t.T[None] for name, t in zip(NAMES, found, strict=True)})
        assert_right(of_one, queries, keys, score_mod, mask_mod, scale, close, sinks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("learned", [False, True])
def test_long_sequences(learned, device, poisoned_memory):
    """Whose blocks begin where they do. Gradients, too, are those of each sequence alone."""
    torch.manual_seed(0)
    lengths = [300, 290] if device == "cpu" else [700, 300, 1024]
    q = torch.randn(sum(lengths), 2, 16, device=device, requires_grad=learned)
    k = torch.randn(sum(lengths), 1, 16, device=device, requires_grad=learned)
    slopes, sinks = torch.tensor([0.1, 0.01], device=device), torch.tensor([0.5, 2.0], device=device)
    options = {"score_mod": mods.alibi(slopes.requires_grad_(learned)), "mask_mod": mods.causal, "sinks": sinks.requires_grad_(learned)}
    aux = varlen_attention(q, k, k, ends(lengths, device), **options, return_aux=ALL)[1]
    apart = [flex_attention(*x, x[1], enable_gqa=True, **options, return_aux=ALL)[1] for x in of_sequences((q, k), lengths, lengths)]
    close = {"rtol": 1e-4, "atol": 1e-4} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-2}
    for name in ("entropy", "column_sums", "max_scores"):
        wanted = torch.cat([getattr(one, name)[0].T for one in apart])
        torch.testing.assert_close(getattr(aux, name), wanted, **close)
    assert (aux.top_index == torch.cat([one.top_index[0].T for one in apart])).float().mean() > (0.999 if device == "cpu" else 0.99)
    if learned:
        inputs = q, k, slopes, sinks
        found = torch.autograd.grad(aux.entropy.square().sum() + aux.column_sums.square().sum(), inputs)
        loss = sum(one.entropy.square().sum() + one.column_sums.square().sum() for one in apart)
        for have, want in zip(found, torch.autograd.grad(loss, inputs), strict=True):
            assert relative_error(have, want.double()) < (1e-4 if device == "cpu" else 1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device):
    """Of more than one set of lengths, with gradients."""
    torch.manual_seed(0)

    def attend(q, k, cu_q, cu_k):
        out, aux = varlen_attention(q, k, k, cu_q, cu_k, mods.softcap(3.0), mods.causal, dropout_p=0.2, dropout_seed=seed, return_aux=ALL)
        return out, *aux

    seed = torch.tensor([5], device=device)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for lengths in ([20, 40, 3], [11, 0, 32, 64]):
        q, k = (torch.randn(n, h, 16, device=device, requires_grad=True) for n, h in ((sum(lengths), 4), (sum(lengths[::-1]) + 5, 2)))
        cu_k = ends([*lengths[::-1][:-1], lengths[0] + 5], device)
        wanted, found = (function(q, k, ends(lengths, device), cu_k) for function in (attend, compiled))
        assert all(map(torch.equal, found, wanted))
        wanted, found = (torch.autograd.grad(x[3].sum() + x[5].square().sum(), (q, k)) for x in (wanted, found))
        for have, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_what_is_refused():
    q = torch.randn(8, 2, 16)
    with pytest.raises(ValueError, match="return_lse and return_aux exclude each other"):
        varlen_attention(q, q, q, ends([8], "cpu"), return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(TypeError, match="return_aux must be AuxRequest"):
        varlen_attention(q, q, q, ends([8], "cpu"), return_aux=True)
    with pytest.raises(NotImplementedError, match="with context="):
        varlen_attention(q, q, q, context=object(), return_aux=AuxRequest(entropy=True))
    half = q.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="float8"):
        varlen_attention(half, half, half, ends([8], "cpu"), return_aux=AuxRequest(entropy=True))
    _, aux = varlen_attention(q, q, q, ends([8], "cpu"), return_aux=AuxRequest(max_scores=True))
    assert aux._fields == ("lse", "max_scores") and aux.lse is None and aux.max_scores.shape == (8, 2)
