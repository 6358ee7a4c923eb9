"""The kernel for few queries, through flex_attention: keys are split among programs, and heads that share keys share a tile."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from flexpress import AuxRequest, create_block_mask, explain, flex_attention, mods
from flexpress.codegen.plan.decode import rows_of, splits_of
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any

OPTIONS = {"BACKEND": "DECODE"}


def score_mods(device):
    vector = torch.linspace(0.1, 0.9, 4096, device=device)
    return {
        "none": None,
        "alibi": mods.alibi(vector[:24]),
        "softcap": mods.softcap(2.0),
        "head alone": lambda s, b, h, m, n: h * 0.1,
        "head added": lambda s, b, h, m, n: s + vector[h] + b,
        "per head and key": lambda s, b, h, m, n: s * vector[h + n % 7],
        "per query": lambda s, b, h, m, n: s * vector[m],
    }


MASK_MODS = {
    "none": None,
    "window": lambda b, h, m, n: n >= 40 + m,
    "prefix": lambda b, h, m, n: n < 100 - 3 * m,
    "per head": lambda b, h, m, n: n > h * 9,
    "holes": lambda b, h, m, n: (n + b) % 5 > m % 3,
    "nothing": lambda b, h, m, n: n < 0,
}


@dataclass(kw_only=True)
class Problem:
    """q (Z, Hq, Q_LEN, D_QK), k (Z, Hkv, KV_LEN, D_QK), v (Z, Hkv, KV_LEN, D_V); `Zkv`: k and v have one batch entry."""

    Z: int
    Zkv: bool
    Hkv: int
    Hq: int
    Q_LEN: int
    KV_LEN: int
    D_QK: int
    D_V: int
    dtype: torch.dtype
    score: str
    mask: str
    lists: str
    scale: float | None
    transposed: bool
    seed: int


@st.composite
def problems(draw, device):
    big = device == "cuda"
    Hkv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3), (1, 24), (2, 7)]))
    return Problem(
        Z=draw(st.integers(1, 3)),
        Zkv=draw(st.booleans()),
        Hkv=Hkv,
        Hq=Hkv * group,
        Q_LEN=draw(st.sampled_from([1, 1, 2, 3, 8, 16])),
        KV_LEN=draw(st.sampled_from([1, 70, 600, 1500] if big else [1, 70, 300, 600])),
        D_QK=draw(st.sampled_from([16, 20, 64])),
        D_V=draw(st.sampled_from([16, 40])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        score=draw(st.sampled_from(list(score_mods("cpu")))),
        mask=draw(st.sampled_from(list(MASK_MODS))),
        lists=draw(st.sampled_from(["mask_mod", "block_mask", "one list", "per head"])),
        scale=draw(st.sampled_from([None, 0.3, -0.2])),
        transposed=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def check(p: Problem, device: str) -> None:
    torch.manual_seed(p.seed)

    def random(Z, H, S, D):
        t = torch.randn(Z, H, S, D, device=device).to(p.dtype)
        return t.transpose(1, 2).contiguous().transpose(1, 2) if p.transposed else t

    q, (k, v) = (random(p.Z, p.Hq, p.Q_LEN, p.D_QK), (random(1 if p.Zkv else p.Z, p.Hkv, p.KV_LEN, D) for D in (p.D_QK, p.D_V)))
    score_mod, mask_mod = score_mods(device)[p.score], MASK_MODS[p.mask]
    masks = {}
    if mask_mod and p.lists == "mask_mod":
        masks["mask_mod"] = mask_mod
    elif mask_mod:
        heads = p.Hq if p.lists == "per head" else None
        if heads or p.mask != "per head":
            masks["block_mask"] = create_block_mask(
                mask_mod, p.Z, heads, p.Q_LEN, p.KV_LEN, device, 64, separate_full_blocks=p.lists != "one list"
            )
        else:
            masks["mask_mod"] = mask_mod
    torch.full((1 << 16,), float("nan"), device=device)
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod,
        scale=p.scale,
        enable_gqa=True,
        kernel_options=OPTIONS,
        return_aux=AuxRequest(lse=True, max_scores=True),
        **masks,
    )
    exact = dense_attention(q, k, v, score_mod, mask_mod, p.scale)
    plain = dense_attention(q, k, v, score_mod, mask_mod, p.scale, precision=p.dtype)
    rounded = 2**-24 * exact[2].nan_to_num(0.0, 0.0, 0.0).abs().max()  # of a score in float32: by so much a weight is off, up or down
    assert relative_error(out, exact[0]) <= 1.2 * relative_error(plain[0], exact[0]) + 1e-6 + rounded
    for found, right, other in zip(aux, exact[1:], plain[1:], strict=True):
        assert torch.equal(found == float("-inf"), right == float("-inf"))
        error, usual = ((t - right).nan_to_num(0.0, 0.0, 0.0).abs().max() for t in (found, other))
        assert error <= 2 * usual + 1e-5


@for_any(problems, cpu=20, cuda=100)
def test_any_problem(p, device):
    check(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", [200, 600], ids=["whole", "split"])
def test_gradients(keys, device):
    """The backward pass is the usual one."""
    options = OPTIONS, {"BACKEND": "PORTABLE"}
    q, k, v = (torch.randn(1, 2, n, 16, device=device, requires_grad=True) for n in (3, keys, keys))
    grads = [torch.autograd.grad(flex_attention(q, k, v, kernel_options=o).square().sum(), (q, k, v)) for o in options]
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*grads, strict=True))


def test_what_it_does_not_serve_is_an_error():
    q = torch.randn(1, 1, 17, 16)
    with pytest.raises(ValueError, match="names DECODE, but query has 17 positions, more than 16; leave BACKEND out"):
        flex_attention(q, q, q, kernel_options=OPTIONS)
    with pytest.raises(ValueError, match="BLOCK_N is for the other kernels"):
        flex_attention(q[:, :, :1], q, q, kernel_options={**OPTIONS, "BLOCK_N": 32})
    assert explain(q[:, :, :1], q, q, kernel_options=OPTIONS).startswith("forward   DECODE")


def test_chosen_for_few_queries_and_many_keys():
    q, k = torch.randn(1, 1, 17, 16), torch.randn(1, 1, 256, 16)
    assert explain(q[:, :, :16], k, k).startswith("forward   DECODE")
    for few, keys, options in (
        (q, k, {}),
        (q[:, :, :16], k[:, :, :255], {}),
        (q[:, :, :16], k, {"BLOCK_M": 16}),
        (q[:, :, :16], k, {"BACKEND": "PORTABLE"}),
    ):
        assert explain(few, keys, keys, kernel_options=options).startswith("forward   PORTABLE")


@pytest.mark.parametrize(
    "q_len, group, q_block, expected",
    [
        (1, 4, 0, (1, 4)),
        (1, 1, 0, (1, 1)),
        (16, 4, 128, (16, 4)),
        (500, 4, 128, (16, 4)),
        (500, 1, 16, (16, 1)),
        (3, 7, 0, (4, 7)),
        (1, 71, 0, (1, 71)),
        (1, 142, 0, (1, 71)),
        (500, 12, 128, (4, 12)),
        (2, 128, 0, (1, 128)),
    ],
)
def test_rows_of_a_tile(q_len, group, q_block, expected):
    """Queries are a power of two that divides a mask's blocks, heads divide their group, and there are 16 to 128 rows."""
    rows = rows_of(q_len, group, q_block)
    assert rows == expected
    assert 16 <= rows.rows <= 128


def test_splits():
    """Nearly whole waves of programs, of few parts; parts of 256 keys at least, and none where programs abound."""
    assert [splits_of(n, 8, 132) for n in (100, 1024, 8192, 131072)] == [1, 4, 16, 16]
    assert [splits_of(8192, n, 132) for n in (1, 64, 128, 256, 512, 5000)] == [32, 2, 1, 1, 1, 1]
    assert splits_of(8192, 160, 132) == 4  # 4.85 waves, where 160 programs are 1.2
