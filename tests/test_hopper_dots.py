"""Dot products of rows of captured tensors in the forward kernel for Hopper. On a CPU its text runs in a stand-in for Gluon."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexpress import create_block_mask, explain, flex_attention, mods
from flexpress.codegen import registry
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.plan.hopper_dots import DotRows
from flexpress.codegen.run.backward import backward
from flexpress.codegen.run.call import Bound, Inputs
from flexpress.codegen.run.forward import forward
from flexpress.codegen.run.preview import hopper_compilation
from support.dense import dense_attention, relative_error
from support.evaluate import make_mod
from support.fake_hopper import forward_on_cpu

MODS = {  # and the same with `product`, or `other`, which is dense, in place of what makes it
    "score + torch.dot(qr[b, h, q_idx], kr[b, kv_idx])": "score + half(product)",
    "(qr[b, h, q_idx].float() * kr[b, kv_idx].float()).sum(-1) + score": "score + product",
    "torch.tanh(score + 0.2 * torch.dot(kr[b, kv_idx].float(), qr[b, h, q_idx].float())) * slopes[h]": (
        "torch.tanh(score + 0.2 * product) * slopes[h]"
    ),
    "score + by_head[h, q_idx].float().dot(shared[kv_idx].float()) + slopes[h] * (kv_idx - q_idx)": (
        "score + other + slopes[h] * (kv_idx - q_idx)"
    ),
}


@pytest.fixture(autouse=True)
def fresh():
    """What one test pretends to have compiled is not there in another."""
    registry.clear()
    yield
    registry.clear()


def captured(dtype: torch.dtype, heads: int, lengths: tuple[int, int], width: int) -> dict[str, torch.Tensor]:
    """Rows of some queries and keys are missing, and some are there that no key has."""
    generator, (Q, K) = torch.Generator().manual_seed(width), lengths

    def random(*shape):
        return torch.randn(shape, generator=generator)

    rows = {"qr": random(heads, 2, Q, width).transpose(0, 1), "kr": random(2, K + 5, width)}
    rows["kr"][:, K:] = float("nan")
    rows |= {"by_head": random(heads, Q - 2, width), "shared": random(K - 3, width)}
    return {name: t.to(dtype) for name, t in rows.items()} | {"slopes": random(heads) * 0.1}


def dense_mod(text: str, values: dict[str, torch.Tensor], dtype: torch.dtype, lengths: tuple[int, int]):
    """The mod on grids of positions in float64."""
    Q, K = lengths
    held = {name: t.double() for name, t in values.items()}
    other = held["slopes"].new_zeros(held["by_head"].shape[0], Q, K)
    other[:, : Q - 2, : K - 3] = held["by_head"] @ held["shared"].T
    names = {"product": held["qr"] @ held["kr"][:, None, :K].transpose(-1, -2), "other": other, "slopes": held["slopes"][:, None, None]}
    names |= {"half": lambda t: t.to(dtype).double(), "torch": torch}
    return make_mod(MODS[text].replace("slopes[h]", "slopes"), "score", names)


problems = st.fixed_dictionaries(
    dict(
        text=st.sampled_from(list(MODS)),
        dtype=st.sampled_from([torch.bfloat16, torch.float16]),
        dims=st.sampled_from([(64, 64), (128, 128), (96, 72), (40, 56)]),
        width=st.sampled_from([24, 40, 64]),
        lengths=st.tuples(st.integers(65, 300), st.integers(10, 300)),
        masked=st.booleans(),
    )
)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems)
def test_any_products_and_gradients(problem):
    text, dtype, (d_qk, d_v), lengths = (problem[name] for name in ("text", "dtype", "dims", "lengths"))
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, lengths[0], d_qk), (2, 2, lengths[1], d_qk), (2, 2, lengths[1], d_v)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    values = captured(dtype, 4, lengths, problem["width"])
    mask_mod, lists = (mods.causal if problem["masked"] else None), (None, None)
    if mask_mod:
        mask = create_block_mask(mask_mod, None, None, *lengths, device="cpu")
        lists = mask.as_lists(), lambda _: mask.as_transposed_lists()
    bounds = bind(make_mod(text, "score", values), "score"), mask_mod and bind(mask_mod, "mask")
    bound = Bound(q, k, v, Inputs(q, k, v, True), d_qk**-0.5, *bounds, *lists)
    registry.clear()
    with pytest.MonkeyPatch.context() as patch:
        launched = forward_on_cpu(patch)
        for _ in range(2):
            out, lse, _, rows = forward(bound, output_rows=True)
        assert [launch.spec.template for launch in launched] == ["hopper_forward"] * 2
    registry.clear()
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    wanted, wanted_lse, _ = dense_attention(*exact, dense_mod(text, values, dtype, lengths), mask_mod)
    assert relative_error(out, wanted) < 5e-3 and relative_error(lse, wanted_lse) < 1e-4
    do = torch.randn(out.shape, generator=generator).to(dtype)
    found = backward(bound, out, rows, do, None)[:3]
    for have, want in zip(found, torch.autograd.grad(wanted, exact, do.double()), strict=True):
        assert relative_error(have, want) < 1e-2


def test_other_rows_in_later_calls(monkeypatch):
    """Of another length, elsewhere in memory, at an odd address, or none at all."""
    launched = forward_on_cpu(monkeypatch)
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (100, 150, 150))
    qr = torch.randn(1, 100, 64).bfloat16()
    for kr in (torch.randn(1, 150, 64), torch.randn(1, 90, 64), torch.randn(1 + 150 * 64)[1:].view(1, 150, 64), torch.randn(1, 0, 64)):
        kr = kr.bfloat16()
        out = flex_attention(
            q, k, v, lambda score, b, h, q_idx, kv_idx, kr=kr: score + torch.dot(qr[b, q_idx].float(), kr[b, kv_idx].float())
        )
        product = torch.zeros(1, 1, 100, 150, dtype=torch.float64)
        product[..., : kr.shape[1]] = qr.double() @ kr.double().transpose(1, 2)
        assert relative_error(out, dense_attention(q, k, v, lambda score, *_, product=product: score + product)[0]) < 5e-3
    assert len(launched) == 4


def test_rows_at_an_odd_address_are_copied_as_they_lie():
    """TMA needs rows whole 16 bytes apart: of 20 elements, 24 apart, a copy has them 24 apart, too."""
    rows = torch.randn(400).bfloat16()[1:].as_strided((15, 20), (24, 1))
    lying = DotRows("Q_ROWS", 0, ("q_idx",)).lying([rows])
    assert rows.data_ptr() % 16 == 2 and lying.data_ptr() % 16 == 0
    assert lying.stride()[2:] == (24, 1)
    assert torch.equal(lying[0, 0], rows)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, dtype", [(128, torch.bfloat16), (64, torch.float16), (96, torch.bfloat16)])
@pytest.mark.parametrize("text", list(MODS))
def test_at_real_lengths(text, head_dim, dtype):
    """The kernel for Hopper serves, and errors of the output and of every gradient are at most twice those of a plain computation."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    lengths, generator = (1100, 1300), torch.Generator().manual_seed(2)
    shapes = (2, 4, lengths[0], head_dim), (2, 2, lengths[1], head_dim), (2, 2, lengths[1], head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in shapes)
    values = {name: t.cuda() for name, t in captured(dtype, 4, lengths, 64).items()}
    mod, dense = make_mod(text, "score", values), dense_mod(text, values, dtype, lengths)
    for mask_mod in (None, mods.causal):
        mask = mask_mod and create_block_mask(mask_mod, None, None, *lengths, device="cuda")
        given = dict(score_mod=mod, block_mask=mask, enable_gqa=True)
        assert "HOPPER" in explain(q, k, v, **given).splitlines()[0].split(";")[0]
        out = flex_attention(q, k, v, **given)
        weights = torch.randn_like(out)
        results = [(out, *torch.autograd.grad(out, (q, k, v), weights))]
        for precision in (torch.float64, dtype):
            inputs = [t.detach().to(precision).requires_grad_() for t in (q, k, v)]
            plain = dense_attention(*inputs, dense, mask_mod, precision=precision)[0]
            results.append((plain, *torch.autograd.grad(plain, inputs, weights.to(precision))))
        for found, exact, plain in zip(*results, strict=True):
            assert relative_error(found, exact) <= 2 * relative_error(plain, exact)


@pytest.mark.parametrize(
    "text, changes, why",
    [
        ("score * 0.5 + {d}", {}, "a further product of matrices, here in a sum"),
        ("score + {d} + score", {}, "a further product of matrices, here in a sum"),
        ("score + {d} * slopes[h]", {}, "a further product of matrices, here in a sum"),
        ("score + {d} + torch.dot(qr[b, h, q_idx], kr[b, kv_idx // 2])", {}, "a further product of matrices, here in a sum"),
        ("score + torch.dot(qr[b, h, q_idx // 2], kr[b, kv_idx])", {}, "read in another way than by b, h and a position"),
        ("score + torch.dot(qr[b, h, q_idx], odd[b, kv_idx])", {}, "lie where TMA cannot copy from"),
        ("score + torch.dot(qr[b, h, q_idx].float(), wide[b, kv_idx])", {}, "are not bfloat16, as q is"),
        ("score + {d}", dict(head_dim=256), "there is room for up to 64"),
        ("score + {d}", dict(head_dim=128, head_dim_v=64), "there is room for up to 64"),
        ("score + {d}", dict(scale_is_positive=False), "a scale that is not positive"),
    ],
)
def test_what_the_portable_kernels_keep(text, changes, why):
    values = captured(torch.bfloat16, 4, (100, 100), 40)
    values |= {"odd": torch.zeros(2, 105, 41).bfloat16()[..., :40], "wide": values["kr"].float()}
    mod = make_mod(text.format(d="torch.dot(qr[b, h, q_idx], kr[b, kv_idx])"), "score", values)
    with pytest.raises(ValueError, match=why):
        hopper_compilation("sm_90", mod, **changes)


@pytest.mark.parametrize("to_the_end, head_dim, dtype", [(True, 128, "bfloat16"), (False, 64, "float16")])
def test_it_compiles_without_spills(to_the_end, head_dim, dtype, every_kernel):
    rows = [torch.zeros(*shape, 4096, 64, dtype=getattr(torch, dtype)) for shape in ((4, 16), (4,))]

    def mod(score, b, h, q_idx, kv_idx):
        return score + torch.dot(rows[0][b, h, q_idx], rows[1][b, kv_idx])

    kernel = hopper_compilation("sm_90", mod, mods.causal, head_dim=head_dim, dtype=dtype, output_rows=True)
    if not (every_kernel or to_the_end):
        kernel.compile("ttgir")
        return
    found = kernel.compile()
    assert found.spilled <= 32 and found.shared <= 232448 and not found.warnings
