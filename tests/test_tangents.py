"""Forward mode: tangents of mods by the op table's derivatives, and those of out and lse by the kernel `tangent`."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from flexpress import cache_info, create_block_mask, flex_attention, mods, printed_kernels
from flexpress.codegen.mod.table.ops import OPS
from support.devices import DEVICES, for_any
from support.gradients import GradientProblem
from support.problems import LEARNED_MODS
from support.tangents import ModTangents, check_tangents, derivative_problems

pytestmark = pytest.mark.usefixtures("poisoned_memory")

RULES = {  # one for every row that has a derivative
    "add": "score * score + t[q_idx]",
    "sub": "t[q_idx] - score * score",
    "mul": "score * t[q_idx] * score",
    "div": "t[q_idx] / (score * score + 1)",
    "remainder": "(score * score) % (t[q_idx] * t[q_idx] + 1)",
    "fmod": "torch.fmod(score * score, t[q_idx] * t[q_idx] + 1)",
    "pow": "(score * score + 0.5) ** t[q_idx] + (score * score + 0.5) ** 2.5",
    "neg": "-(score * score)",
    "abs": "abs(score) * t[kv_idx]",
    "minimum": "torch.minimum(score * score, t[q_idx] * score)",
    "maximum": "torch.maximum(score * score, t[q_idx] * score)",
    "atan2": "torch.atan2(score * score, t[q_idx])",
    "where": "torch.where(score > t[q_idx], score * score, score * t[kv_idx])",
    "exp": "torch.exp(score * t[q_idx] * 0.3)",
    "exp2": "torch.exp2(score * t[q_idx] * 0.3)",
    "expm1": "torch.expm1(score * t[q_idx] * 0.3)",
    "log": "torch.log(score * score + t[q_idx] * t[q_idx] + 0.1)",
    "log2": "torch.log2(score * score + t[q_idx] * t[q_idx] + 0.1)",
    "log1p": "torch.log1p(score * score * t[q_idx] * t[q_idx])",
    "sqrt": "torch.sqrt(score * score + t[q_idx] * t[q_idx] + 0.1)",
    "rsqrt": "torch.rsqrt(score * score + t[q_idx] * t[q_idx] + 0.1)",
    "sin": "torch.sin(score * t[q_idx])",
    "cos": "torch.cos(score * t[q_idx])",
    "tan": "torch.tan(score * 0.2) * t[q_idx]",
    "atan": "torch.atan(score * t[q_idx])",
    "asin": "torch.asin(torch.tanh(score) * 0.9) * t[q_idx]",
    "acos": "torch.acos(torch.tanh(score) * 0.9) * t[q_idx]",
    "sinh": "torch.sinh(score * t[q_idx])",
    "cosh": "torch.cosh(score * t[q_idx])",
    "asinh": "torch.asinh(score * t[q_idx])",
    "acosh": "torch.acosh(score * score + t[q_idx] * t[q_idx] + 1.1)",
    "atanh": "torch.atanh(torch.tanh(score) * 0.9) * t[q_idx]",
    "log10": "torch.log10(score * score + t[q_idx] * t[q_idx] + 0.1)",
    "hypot": "torch.hypot(score * score, t[q_idx] + 3.0)",
    "erf": "torch.erf(score * t[q_idx])",
    "erfc": "torch.erfc(score * t[q_idx])",
    "sigmoid": "torch.sigmoid(score * t[q_idx])",
    "tanh": "torch.tanh(score * t[q_idx])",
}


def test_every_row_with_a_derivative_has_an_example():
    assert set(RULES) == {name for name, row in OPS.items() if row.derivative}


@pytest.mark.parametrize("name", RULES)
def test_a_derivative_can_be_differentiated(name):
    scores = torch.randn(1, 2, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = ModTangents(RULES[name], scores, {"t": torch.randn(8, generator=torch.Generator().manual_seed(2))})
    assert name in found.operations
    ours, theirs = found.ours(), found.theirs()
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        torch.testing.assert_close(ours[key], expected, rtol=1e-6, atol=1e-8)


def test_what_does_not_move_has_no_tangent():
    """Steps, integers and what is detached pass none; a mod of them alone has no tangent at all."""
    scores = torch.randn(1, 1, 4, 5, dtype=torch.float64)
    for expression in ("torch.floor(score)", "(score > 0) * 2.0", "score.detach() * 3", "q_idx * 0.5", "torch.sign(score)"):
        found = ModTangents(expression, scores, {})
        assert found.derived.result is None and found.derived.of_score is None


@for_any(derivative_problems, cpu=6, cuda=60)
def test_any_problem(p, device):
    check_tangents(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LEARNED_MODS)
def test_learned_tensors(name, device):
    shape = dict(B=2, Q_LEN=20, KV_LEN=70, D_QK=16, D_V=8, BLOCK_SIZE=64, group=1)
    check_tangents(GradientProblem(**shape, dtype=torch.float32, score=name, mask="causal", seed=3), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moving", ["q", "k", "v", "slopes", "scale"])
def test_one_tangent_alone(moving, device):
    """What has no tangent is no argument of the kernel, and the others are not touched."""
    tensors = {n: torch.randn(1, 2, 20, 16, device=device) for n in "qkv"} | {"slopes": torch.rand(2, device=device)}
    tensors["scale"] = torch.tensor(0.3, device=device)

    def attend(q, k, v, slopes, scale):
        return flex_attention(q, k, v, mods.alibi(slopes), scale=scale, mask_mod=mods.causal)

    direction = torch.randn_like(tensors[moving])
    step = 2e-3
    with forward_ad.dual_level():
        out = attend(**(tensors | {moving: forward_ad.make_dual(tensors[moving], direction)}))
        out, tangent = forward_ad.unpack_dual(out)
    ends = [attend(**(tensors | {moving: tensors[moving] + sign * step * direction})) for sign in (1, -1)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(out, attend(**tensors))


@pytest.mark.parametrize("device", DEVICES)
def test_what_scores_of_a_row_change_by_together_changes_nothing(device):
    """It cancels before weights are rounded to 16 bits; the tangent of lse has it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 150, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    shift, direction = torch.zeros(2, device=device), torch.randn_like(q)

    def attend(q, shift):
        return flex_attention(q, k, v, lambda s, b, h, m, n: s + shift[h], mask_mod=mods.causal, return_lse=True)

    found = [torch.func.jvp(attend, (q, shift), (direction, shift + together))[1] for together in (0.0, 1000.0)]
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found[1][1], found[0][1] + 1000.0, rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_another_length_direction_and_slope_compile_nothing(device):
    def once(length, slopes):
        q = torch.randn(1, 2, length, 16, device=device)
        with forward_ad.dual_level():
            flex_attention(forward_ad.make_dual(q, torch.randn_like(q)), q, q, mods.alibi(slopes), mask_mod=mods.causal)

    once(40, torch.rand(2, device=device))
    before = cache_info().compiles
    once(70, torch.rand(2, device=device))
    assert cache_info().compiles == before
    assert any("tangent_" in path.stem for path in printed_kernels())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_keys_have_no_tangent(device):
    """Where nothing attends, and where a derivative is infinite behind the mask, nothing flows."""
    q, k, v = (torch.randn(1, 2, 40, 16, device=device) for _ in range(3))
    k[:, :, 30:] = 0  # scores of 0, whose logarithm has an infinite derivative
    mask = create_block_mask(lambda b, h, m, n: (m >= 8) & (n < 30), None, None, 40, 40, device, 32)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in (q, k, v)]
        out, lse = flex_attention(*duals, lambda s, b, h, m, n: torch.log(s.abs()), mask, return_lse=True)
        tangents = [forward_ad.unpack_dual(t).tangent for t in (out, lse)]
    assert all(t.isfinite().all() and not t[:, :, :8].any() and t[:, :, 8:].any() for t in tangents)
