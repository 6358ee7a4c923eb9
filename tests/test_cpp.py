"""Kernels in C++ against torch: operations, masks, attention and its gradients of any problem, as for the interpreter; and which calls get
them."""

from __future__ import annotations

import base64
import errno
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpress import (
    BlockMask,
    cache_clear,
    cached_attention,
    create_block_mask,
    create_mask,
    evaluate_mod,
    explain,
    flex_attention,
    mods,
    printed_kernels,
    update_cache,
)
from flexpress.codegen.device import cpp, cpp_build, cpp_compiler
from flexpress.codegen.mod.graphs.wide import in_wide_integers
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.masks import automatic_lists
from flexpress.codegen.run.status_lists import block_starts, owned_starts
from support.attention import check_attention
from support.batches import Batch, batches, made
from support.batches import check as check_batch
from support.block_lists import as_kernels_compute, brute_force, check_bounds, check_lists, dense_status
from support.caches import check_update, updates
from support.compositions import MASK_LEAVES, compositions, mask_captures
from support.dense import dense_attention, positions, relative_error
from support.evaluate import check, make_mod
from support.extras import check_dropout, check_sinks, dropout_problems, sink_problems, with_sinks
from support.float8 import check_quantised, quantised_problems
from support.gradients import GradientProblem, check_gradients, gradient_problems
from support.long_dots import check_dot_derivatives, check_dots, dot_problems
from support.probabilities import check_probabilities, probability_problems
from support.problems import problems
from support.tangents import check_second, check_tangents, derivative_problems

EXAMPLES = int(os.environ.get("FLEXPRESS_CPU_EXAMPLES", "6"))  # `make test-cpu` draws more
pytestmark = pytest.mark.usefixtures("in_cpp")


@pytest.mark.parametrize(
    "expression",
    [
        "(q_idx - kv_idx) // 3 + (kv_idx - 7) % 5 + (q_idx - 4) ** 3 + (kv_idx >> 1) - (h << 2)",
        "torch.where((q_idx < kv_idx) ^ (h == 1), torch.minimum(score, x[q_idx]), x[kv_idx] / (score + 300))",
        "score // x[kv_idx] + score % 7 + torch.round(score) + torch.floor(x[q_idx]) - torch.sign(score)",
        "torch.tanh(score / 9) + torch.exp(-torch.abs(score)) + torch.erf(score) + torch.log1p(score * score) + torch.sigmoid(score)",
        "(i8[q_idx] * i8[kv_idx] + 100).float() + (u8[kv_idx] - u8[q_idx]).float() + score",
        "(score.to(torch.bfloat16) + score.half() + x[(q_idx - kv_idx) % 24]).float()",
    ],
)
def test_operations(expression):
    """Vectors of queries, numbers that they share, and both together; those of 8 bits wrap around."""
    generator = torch.Generator().manual_seed(0)
    small = [torch.randint(0, 120, (24,), generator=generator).to(dtype) for dtype in (torch.int8, torch.uint8)]
    captured = {"x": torch.randn(24, generator=generator), "i8": small[0], "u8": small[1]}
    scores = torch.randn(2, 2, 20, 24, generator=generator) * 10
    check(expression, scores, captured)


@settings(max_examples=EXAMPLES)
@given(problems("cpu"))
def test_any_problem(p):
    check_attention(p, "cpu")


@settings(max_examples=EXAMPLES // 3)
@given(quantised_problems("cpu"))
def test_any_problem_of_float8(p):
    check_quantised(p, "cpu")


@settings(max_examples=EXAMPLES // 2)
@given(gradient_problems("cpu"))
def test_any_gradient(p):
    check_gradients(p, "cpu")


@settings(max_examples=EXAMPLES // 3)
@given(derivative_problems("cpu"))
def test_any_tangent(p):
    check_tangents(p, "cpu")


@settings(max_examples=EXAMPLES // 3)
@given(derivative_problems("cpu"))
def test_any_second_derivative(p):
    check_second(p, "cpu")


@settings(max_examples=EXAMPLES // 2)
@given(sink_problems("cpu"))
def test_any_problem_with_sinks(drawn):
    check_sinks(drawn, "cpu")


@settings(max_examples=EXAMPLES // 2)
@given(dropout_problems("cpu"))
def test_any_problem_with_dropout(drawn):
    check_dropout(drawn, "cpu")


@settings(max_examples=max(1, EXAMPLES // 6))  # beside those below
@given(derivative_problems("cpu"))
def test_any_derivative_with_dropout(p):
    check_tangents(p, "cpu", dropout_p=0.3)
    check_second(p, "cpu", dropout_p=0.3)


@pytest.mark.parametrize("score", ["none", "per_key", "table"])
def test_derivatives_with_dropout(score):
    shape = dict(B=2, Q_LEN=20, KV_LEN=133, D_QK=16, D_V=8, BLOCK_SIZE=64, group=2)
    p = GradientProblem(**shape, dtype=torch.float32, score=score, mask="causal", seed=3, lse=True)
    check_tangents(p, "cpu", dropout_p=0.3)
    check_second(p, "cpu", dropout_p=0.3)


@settings(max_examples=EXAMPLES // 2)
@given(probability_problems("cpu"))
def test_any_probabilities(p):
    check_probabilities(p, "cpu")


@settings(max_examples=EXAMPLES // 2)
@given(dot_problems("cpu"))
def test_any_dot_products(p):
    check_dots(p, "cpu")


@settings(max_examples=max(1, EXAMPLES // 4))
@given(dot_problems("cpu"))
def test_any_derivative_of_dot_products(p):
    check_dot_derivatives(p, "cpu")


def test_sinks_of_a_cache():
    """Where keys are split among tasks: a sink counts once."""
    cache_clear()
    q, k, v, sinks = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 1500, 2, 16), torch.randn(4) * 3
    out, lse = cached_attention(q, k, v, torch.tensor([1500], dtype=torch.int32), sinks=sinks, return_lse=True)
    exact, total, _ = with_sinks(q, k.transpose(1, 2), v.transpose(1, 2), sinks)
    assert relative_error(out, exact) < 2e-6 and relative_error(lse, total) < 2e-6
    assert {path.suffix for path in printed_kernels()} == {".cpp"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_is_read_as_it_is(dtype):
    value = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).reshape(1, 1, -1, 64).nan_to_num(0.0, 0.0, 0.0)
    if dtype is torch.bfloat16:  # a CPU's products of these take denormal numbers as 0
        value[value.float().abs() < torch.finfo(dtype).tiny] = 0
    zeros = torch.zeros_like(value)
    assert torch.equal(flex_attention(zeros, zeros, value, mask_mod=lambda b, h, q_idx, kv_idx: q_idx == kv_idx), value)


@pytest.mark.parametrize(
    "cpu, expected",
    [
        ("vendor_id : AuthenticAMD flags : avx512f avx512_bf16", ["-DFAST_BFLOAT16"]),
        ("vendor_id : GenuineIntel flags : avx512f avx512_bf16", []),
        ("vendor_id : GenuineIntel flags : avx512_bf16 amx_bf16 amx_tile", ["-DFAST_BFLOAT16", "-DBRGEMM"]),
        ("vendor_id : AuthenticAMD flags : avx512f", []),
    ],
)
def test_flags_by_cpu(monkeypatch, cpu, expected):
    monkeypatch.setattr(cpp_build, "described", lambda: cpu)
    assert [flag for flag in cpp_build.flags() if flag.startswith("-D")] == expected


@pytest.mark.parametrize("flag", ["", "-UFAST_BFLOAT16 -UBRGEMM", "-UBRGEMM", "-DFAST_BFLOAT16 -DBRGEMM"])
@pytest.mark.parametrize("d_qk, d_v, step", [(64, 40, 1), (31, 34, 2)])
def test_products_of_bfloat16(monkeypatch, flag, d_qk, d_v, step):
    """By the CPU's own products and by float32's: odd lengths, head dims and strides, columns and rows that do not follow one another."""
    monkeypatch.setenv("FLEXPRESS_CXXFLAGS", f"{os.environ.get('FLEXPRESS_CXXFLAGS', '')} {flag}")
    cache_clear()
    generator = torch.Generator().manual_seed(d_qk)
    sizes = ((4, 77, d_qk), (2, 131, d_qk), (2, 131, d_v))
    tensors = (torch.randn(1, h, n, d * step + step % 2, generator=generator).bfloat16() for h, n, d in sizes)
    q, k, v = (t[..., : d * step : step] for t, (_, _, d) in zip(tensors, sizes, strict=True))
    out, lse = flex_attention(q, k, v, mask_mod=mods.causal, enable_gqa=True, return_lse=True)
    exact, wanted_lse, _ = dense_attention(q, k, v, None, mods.causal)
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ keys.mT * d_qk**-0.5).masked_fill(~torch.ones(77, 131, dtype=torch.bool).tril(), -float("inf"))
    assert relative_error(out, exact) <= relative_error(scores.softmax(-1) @ values, exact)
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-5, atol=1e-5)


def test_gradients_of_huge_scores_of_bfloat16():
    """The backward pass finds the very scores of the forward pass, or the largest one would be off by more than its weight says."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 100, 64, generator=generator).bfloat16().unbind()
    v.requires_grad_()
    (found,) = torch.autograd.grad(flex_attention(q * 1e8, k, v), v, torch.ones_like(v))
    counts = torch.nn.functional.one_hot((q.double() @ k.double().mT).argmax(-1), 100).sum(-2)
    torch.testing.assert_close(found, counts[..., None].expand_as(found).to(found.dtype))


def test_numbers_are_rounded_to_8_bits_as_torch_does():
    """All halves; but what is larger than the largest number becomes that one, as on a GPU."""
    value = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).reshape(1, 1, -1, 64)
    caches = [torch.zeros(1, value.shape[2], 1, 64, dtype=torch.float8_e4m3fn) for _ in range(2)]
    update_cache(value, value, *caches, kv_len=torch.tensor([value.shape[2]], dtype=torch.int32))
    expected = value.transpose(1, 2).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    for cache in caches:
        torch.testing.assert_close(cache.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=EXAMPLES)
@given(updates("cpu"))
def test_any_update_of_a_cache(p):
    check_update(p, "cpu")


@settings(max_examples=EXAMPLES)
@given(batches("cpu"))
def test_any_batch_of_a_cache(p):
    check_batch(p, "cpu")


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
def test_few_queries_of_many_keys(queries, listed):
    """Keys are split among tasks, and heads that share keys are rows of one tile; with gradients another kernel serves."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 40, generator=generator, requires_grad=True) for h, n in ((6, queries), (2, 1500), (2, 1500)))
    score_mod, mask_mod = (
        mods.alibi(torch.rand(6, generator=generator) * 0.01),
        mods.sliding_window_bidirectional(400, 1000) if listed else None,
    )
    out, lse = flex_attention(q, k, v, score_mod, enable_gqa=True, mask_mod=mask_mod, return_lse=True)
    wanted, wanted_lse, _ = dense_attention(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-5, atol=1e-5)
    weight = torch.randn(out.shape, generator=generator)
    gradients = zip(torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(wanted, (q, k, v), weight.double()), strict=True)
    for one, other in ((out, wanted.float()), *gradients):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)
    with torch.no_grad():
        out, lse = flex_attention(q, k, v, score_mod, enable_gqa=True, mask_mod=mask_mod, return_lse=True)
    torch.testing.assert_close(out, wanted.detach().float(), rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(lse, wanted_lse.detach().float(), rtol=1e-5, atol=1e-5)


def huge(queries, keys, size, dtype, seed=0, heads=(4, 2), head_dim=24):
    """query, key and value whose scores are as large as size**2, and no whole numbers; the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, h, n, head_dim) for h, n in zip((heads[0], heads[1], heads[1], heads[0]), (queries, keys, keys, queries), strict=True)]
    q, k, v, d_out = (torch.randn(shape, generator=generator) for shape in shapes)
    return *(t.to(dtype).requires_grad_() for t in (q * size, k * size, v)), d_out.to(dtype)


@settings(max_examples=4 * EXAMPLES)
@given(
    st.integers(1, 40),
    st.integers(1, 200),
    st.floats(0, 13),
    st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]),
    st.integers(0, 99),
)
def test_weights_of_huge_scores_add_up_to_one_in_the_backward_pass(queries, keys, log_size, kind, seed):
    """Whatever rounding does to scores: it finds those of the forward pass. The gradient of V, added up over keys, is then that of the
    output, added up over queries."""
    dtype, distant = kind
    q, k, v, d_out = huge(queries, keys, 2.0**log_size, dtype, seed)
    score_mod = mods.alibi(torch.tensor([3e5, 0.7, 1e-3, 77.7])) if distant else None
    (d_v,) = torch.autograd.grad(flex_attention(q, k, v, score_mod, enable_gqa=True), v, d_out)
    found, wanted = d_v.double().sum(2), d_out.double().unflatten(1, (2, 2)).sum((2, 3))
    most = d_v.double().abs().sum(2) + d_out.double().abs().unflatten(1, (2, 2)).sum((2, 3))
    assert ((found - wanted).abs() <= most * (1e-6 if dtype is torch.float32 else 8e-3)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [3, 16, 20])
@pytest.mark.parametrize("size", [16.0, 300.0, 4096.0])
def test_huge_scores_that_are_no_whole_numbers(size, queries, dtype):
    """The output and the gradient of V are as near to those in float64 as dense attention in torch at the same precision."""
    q, k, v, d_out = huge(queries, 200, size, dtype)

    def dense(*inputs):
        one, other, values = (t.detach().to(inputs[-1]) for t in inputs[:-1])
        values.requires_grad_()
        scores = one @ other.repeat_interleave(2, 1).mT * 24**-0.5
        found = torch.softmax(scores, -1) @ values.repeat_interleave(2, 1)
        return found, *torch.autograd.grad(found, values, d_out.to(found))

    out = flex_attention(q, k, v, enable_gqa=True)
    found = out, *torch.autograd.grad(out, v, d_out)
    for mine, plain, exact in zip(found, dense(q, k, v, dtype), dense(q, k, v, torch.float64), strict=True):
        # of rows with one weight a plain computation rounds nothing; here it is rounded beside its sum, as others are
        assert relative_error(mine, exact) <= 2 * relative_error(plain, exact) + (2e-7 if dtype is torch.float32 else 2.0**-9)


@pytest.mark.parametrize("mask_mod", [None, mods.sliding_window(300)], ids=["causal", "window"])
@pytest.mark.parametrize("others", [3, 120])
def test_a_sequence_alone_is_bitwise_the_same(others, mask_mod):
    """batch_invariant, whatever room the others' caches need, and however many queries they have."""
    arguments, _ = made(Batch(q_lens=[1, others], kv_lens=[1100, 2500], page_size=0, invariant=True), "cpu")
    arguments["mask_mod"] = mask_mod
    whole = cached_attention(**arguments)
    alone = {name: arguments[name] for name in ("k_cache", "v_cache", "batch_invariant", "mask_mod")}
    alone |= {"kv_len": arguments["kv_len"][:1], "cache_loc": torch.zeros(1, dtype=torch.int32)}
    assert torch.equal(cached_attention(arguments["query"][:1].transpose(0, 1)[None], **alone)[0].transpose(0, 1), whole[:1])


def test_explain_names_the_kernel():
    q = torch.randn(1, 2, 50, 16)
    assert "CPP" in str(explain(q, q, q, mods.softcap(3.0)))


@pytest.mark.filterwarnings("ignore:where received a uint8 condition")
@settings(max_examples=EXAMPLES)
@given(
    compositions("b", 2, MASK_LEAVES),
    mask_captures(),
    st.sampled_from([(64, 64), (128, 128), (64, 128)]),
    st.sampled_from([(1, 127), (129, 1), (127, 129), (300, 127)]),
)
def test_any_mask(expression, captured, size, lengths):
    """Lists are exact where what bounds cannot decide is evaluated, and never wrong by bounds alone; so is the dense mask."""
    mask_mod = make_mod(expression, "mask", captured)
    bound = in_wide_integers(bind(mask_mod, "mask"), (1, 2, *lengths))
    if bound[0].symbols:
        meant = as_kernels_compute(bound, (1, 2, *lengths))
        truth = brute_force(meant, 1, 2, *lengths, size, "cpu")
        check_lists(create_block_mask(mask_mod, 1, 2, *lengths, "cpu", size), truth)
        found = dense_status(automatic_lists(bound, (1, 2, *lengths), torch.device("cpu"), size), *truth.shape[-2:])
        assert ((found == 1) | (found == truth)).all()
        dense = meant(*positions((1, 2, *lengths), "cpu")).expand(1, 2, *lengths)
        assert torch.equal(create_mask(mask_mod, 1, 2, *lengths, device="cpu"), dense)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_bounds_of_what_a_mask_captures(dtype):
    """Zones of every kind of number, with those at its ends; for floats NaN among them."""
    ends = {torch.bool: [0, 1], torch.uint8: [0, 255, 7], torch.int64: [-(1 << 63), (1 << 63) - 1, 0]}
    ends = torch.tensor(ends.get(dtype, [float("nan"), float("inf"), -1.0]), dtype=dtype)
    x = ends[torch.randint(len(ends), (200,), generator=torch.Generator().manual_seed(0))]
    x[:64] = ends[-1]
    truth = check_bounds(make_mod("x[q_idx] == x[kv_idx]", "mask", {"x": x}), 1, 1, 200, 200, (32, 32), "cpu")[1]
    assert len(truth.unique()) > 1
    check_lists(create_block_mask(make_mod("~(x[q_idx] != x[kv_idx])", "mask", {"x": x}), 1, 1, 200, 200, "cpu", 32), truth)


def test_where_blocks_of_packed_sequences_begin():
    offsets = torch.tensor([0, 300, 300, 400], dtype=torch.int32)
    assert block_starts(offsets, 400, 128).tolist() == [0, 128, 256, 300, 400, 400, 400]
    starts, owners = owned_starts(torch.tensor([0, 130, 40, 400], dtype=torch.int32), 400, 128)
    assert starts.tolist()[:5] == [0, 128, 130, 258, 386] and owners.tolist()[:5] == [0, 0, 3, 3, 3]


def test_a_score_mod_as_a_dense_mask():
    q = torch.arange(70)
    found = create_mask(lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")), 1, 1, 70, 50, device="cpu")
    assert torch.equal(found[0, 0], q[:, None] >= q[None, :50])


def test_a_mask_needs_no_interpreter():
    """Nothing of a call with a mask is printed in Triton."""
    cache_clear()
    q = torch.randn(1, 2, 200, 16, requires_grad=True)
    seen = torch.arange(200) % 7
    flex_attention(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: seen[q_idx] >= seen[kv_idx]).sum().backward()
    assert {path.suffix for path in printed_kernels()} == {".cpp"}


@pytest.mark.parametrize("name", ["asinh", "acosh"])
def test_inverse_hyperbolic_functions_of_huge_numbers(name):
    function = getattr(torch, name)
    x = torch.tensor([3e38, -3e38, 1e20, 1.1e18, 0.9e18, -1e18, 1e3, 1.5, 0.5, math.inf, -math.inf, math.nan])
    found = evaluate_mod(lambda score, b, h, q_idx, kv_idx: function(score), x[None, None, None])
    torch.testing.assert_close(found.flatten(), function(x.double()).float(), rtol=3e-7, atol=0, equal_nan=True)


def test_evaluate_mod_of_a_dot_product_of_rows():
    """Of rows that all positions have in common, too."""
    rows, one = torch.randn(20, 32), torch.randn(32).expand(9, 32)
    mod = lambda score, b, h, q_idx, kv_idx: score + torch.dot(rows[q_idx], rows[kv_idx]) + torch.dot(one[q_idx], rows[kv_idx])  # noqa: E731
    seen = torch.arange(20)[:, None] < 9
    wanted = rows @ rows.T + torch.where(seen, one[0] @ rows.T, 0.0)
    torch.testing.assert_close(evaluate_mod(mod, torch.zeros(1, 1, 20, 20))[0, 0], wanted, rtol=1e-4, atol=1e-4)


def attend():
    q = torch.randn(1, 1, 20, 16)
    mask = create_block_mask(mods.causal, None, None, 20, 20, "cpu", 32)
    torch.testing.assert_close(
        flex_attention(q, q, q, block_mask=mask), torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    )


def test_without_a_compiler_the_interpreter_serves(monkeypatch, own_directory):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match="there is no C\\+\\+ compiler; CXX is 'no-such-compiler', which is no program here"):
        attend()
    with pytest.raises(ValueError, match="there is no C\\+\\+ compiler"):
        flex_attention(*torch.randn(3, 1, 1, 20, 16), kernel_options={"BACKEND": "CPP"})


def test_a_compiler_may_be_a_command(monkeypatch, own_directory):
    """With a launcher before it, or flags behind it."""
    for command in ("env c++", "c++ -O1 -DWORDS='a b'"):
        monkeypatch.setenv("CXX", command)
        cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attend()
        assert cpp_compiler.compiler()[1:] == tuple(shlex.split(command)[1:])
        assert cpp_compiler.version(cpp_compiler.compiler())
    assert {path.suffix for path in printed_kernels()} == {".cpp"}


@pytest.mark.parametrize("name", ["CXX", "FLEXPRESS_CXXFLAGS"])
def test_an_open_quote_is_an_error_with_the_variable(monkeypatch, own_directory, name):
    monkeypatch.setenv(name, "c++ '-O1")
    with pytest.raises(ValueError, match=f'{name} is "c\\+\\+ \'-O1": no closing quotation'):
        attend()


def test_a_program_that_is_no_compiler_fails_as_one(monkeypatch, own_directory):
    """It ends well, and has written nothing."""
    monkeypatch.setenv("CXX", "true")
    with pytest.warns(RuntimeWarning, match="(?s)kernels for the CPU do not compile.*true does not compile.*writes no file"):
        attend()


@pytest.mark.parametrize("how", ["the driver is killed", "the compiler is killed", "the disk is full"])
def test_a_compiler_that_was_stopped_is_asked_again(monkeypatch, own_directory, tmp_path, how):
    """By Ctrl-C of a shell's job, or where memory is short: it says nothing of kernels, and of those that are compiled least of all."""
    told = {
        "the driver is killed": "kill -9 $$",
        "the compiler is killed": "echo 'Killed signal terminated program cc1plus' >&2; exit 1",
        "the disk is full": "echo 'ld: final link failed: No space left on device' >&2; exit 1",
    }[how]
    program = tmp_path / "compiler"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -x ] && mkdir {shlex.quote(str(tmp_path / "stopped"))} 2>/dev/null; then {told}; fi\nexec c++ "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.warns(RuntimeWarning, match="was not compiled. Triton's interpreter runs it for this once.*was killed") as seen:
        attend()
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()
    assert explain(*torch.randn(3, 1, 1, 20, 16)).startswith("forward   CPP")


def test_what_a_compiler_has_written_goes_with_it(monkeypatch, own_directory, tmp_path):
    """Whatever ends the wait for it: Ctrl-C, for example, which is this process's alone."""
    program, begun = tmp_path / "compiler", tmp_path / "begun"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -x ]; then touch "$TMPDIR/part"; echo $$ > {shlex.quote(str(begun))}; sleep 60 & wait; fi\nexec c++ "$@"\n'
    )
    program.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    process, kept = [], subprocess.Popen.wait

    def interrupted(self, *given, **options):
        process.append(self)
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.01)
        monkeypatch.setattr(subprocess.Popen, "wait", kept)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cpp_build.library((str(program),), "", "a kernel")
    assert list((tmp_path / "temporary").iterdir()) == [] and process[0].returncode == -signal.SIGKILL


def ends_beside_a_fork(begun) -> bool:
    """Does a first call end that was under way, as the file `begun` says, while a fork was made that lives on?"""
    thread = threading.Thread(target=attend, daemon=True)
    thread.start()
    while not begun.exists():
        time.sleep(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    try:
        thread.join(60)
        return not thread.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_holds_up_no_compiler(monkeypatch, own_directory, tmp_path):
    """A child that lives on, as workers of a DataLoader do, has whatever was open when it was forked."""
    program, begun = tmp_path / "compiler", tmp_path / "begun"
    program.write_text(f'#!/bin/sh\nif [ "$1" = -x ]; then touch {shlex.quote(str(begun))}; sleep 1; fi\nexec c++ "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert ends_beside_a_fork(begun)


def test_where_nothing_may_be_executed(monkeypatch, own_directory):
    """Neither in the folder of kernels nor among temporary files."""

    def refused(path, *given):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(cpp.ctypes, "CDLL", refused)
    with pytest.warns(RuntimeWarning, match="compiled code cannot be loaded: .*failed to map.*TMPDIR be a folder where files may be exec"):
        attend()


@pytest.mark.parametrize("written", ["echo no library >", "echo 'int other;' | c++ -x c++ - -shared -fPIC -o"], ids=["text", "another's"])
def test_a_library_that_cannot_be_loaded_is_made_anew(written, monkeypatch, own_directory, tmp_path):
    """By a compiler that said it had written it. Other processes have only the file on disk."""
    program = tmp_path / "compiler"
    program.write_text(f'#!/bin/sh\nif [ "$1" != -x ]; then exec c++ "$@"; fi\nfor last; do :; done\n{written} "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.warns(RuntimeWarning, match="kernels for the CPU cannot be loaded.*The compiler must make a whole library") as seen:
        attend()
    assert len(seen) == 1
    program.write_text('#!/bin/sh\nexec c++ "$@"\n')
    cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()
    assert explain(*torch.randn(3, 1, 1, 20, 16)).startswith("forward   CPP")


def test_a_compiler_that_can_never_run_is_given_up(monkeypatch, own_directory, tmp_path):
    for number, text in enumerate(("#!/no/such/interpreter\n", "no program\n")):
        program = tmp_path / f"compiler{number}"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        with pytest.warns(RuntimeWarning, match="kernels for the CPU do not compile and run in Triton's interpreter. .*does not run"):
            attend()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attend()


def test_a_fork_while_the_compiler_is_asked_who_it_is(monkeypatch, own_directory, tmp_path):
    """Neither its answer nor what Python says of the CPU may come through a pipe, which a child takes along."""
    program, begun = tmp_path / "compiler", tmp_path / "begun"
    program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then touch {shlex.quote(str(begun))}; sleep 1; fi\nexec c++ "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    asked = []
    monkeypatch.setattr(platform, "processor", lambda: asked.append(1) or "")  # which reads from a pipe
    cache_clear()
    assert ends_beside_a_fork(begun) and not asked


def test_no_room_for_temporary_files(monkeypatch, own_directory):
    def full(*given, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.warns(RuntimeWarning, match="has no room for files .TMPDIR says where.: .*No space left on device"):
        attend()


def test_where_python_drops_asserts_and_a_mod_has_words_in_another_alphabet_than_the_locale(own_directory):
    program = "import torch; from flexpress import create_mask, flex_attention\nids = torch.arange(8) // 3\n"
    program += "print(int(create_mask(lambda b, h, i, j: ids[i] == ids[j], 1, 1, 8, 8, 'cpu').sum()))\n"
    program += "def причина(s, b, h, i, j): return s * 2  # ü\nq = torch.randn(1, 1, 8, 16)\n"
    program += "print(torch.allclose(flex_attention(q, q, q, причина), flex_attention(q, q, q, scale=0.5), atol=1e-6))"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "FLEXPRESS_CPU": "cpp"}
    run = f"import base64; exec(compile(base64.b64decode('{base64.b64encode(program.encode()).decode()}').decode(), 'mod.py', 'exec'))"
    done = subprocess.run([sys.executable, "-O", "-c", run], env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.stdout == "22\nTrue\n", done.stderr


def test_a_compiler_that_fails_is_named_once(monkeypatch, own_directory):
    monkeypatch.setenv("FLEXPRESS_CXXFLAGS", "--no-such-flag")
    with pytest.warns(RuntimeWarning, match="(?s)kernels for the CPU do not compile.*no-such-flag") as seen:
        attend()
    assert len(seen) == 1
    assert "failed before" in explain(*torch.randn(3, 1, 1, 20, 16))
    with pytest.raises(RuntimeError, match="no-such-flag"):
        flex_attention(*torch.randn(3, 1, 1, 20, 16), kernel_options={"BACKEND": "CPP"})


def test_a_kernel_that_does_not_compile_leaves_the_others(monkeypatch, own_directory):
    """It is a fault of the print: the compiler serves all other calls. The print is not compiled again."""
    tried = []

    def compiled(source, name):
        if "attends_to_nothing" in source:
            tried.append(name)
            source += "\n#error a fault of the print\n"
        return cpp_compiler.compiled(source, name)

    def attends_to_nothing(score, b, h, q_idx, kv_idx):
        return score - 1

    monkeypatch.setattr(cpp, "compiled", compiled)
    q = torch.randn(1, 1, 20, 16)
    with pytest.warns(
        RuntimeWarning, match="(?s)a kernel for the CPU does not compile, a fault of Flexpress.*a fault of the print"
    ) as seen:
        torch.testing.assert_close(flex_attention(q, q, q, attends_to_nothing), flex_attention(q, q, q))
        flex_attention(q, q, q, attends_to_nothing)
    assert len({str(w.message) for w in seen}) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()
    assert {path.suffix for path in printed_kernels()} == {".cpp", ".py"}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a fault of the print"):
            flex_attention(q, q, q, attends_to_nothing, kernel_options={"BACKEND": "CPP"})
    assert len(tried) == 1


def test_negative_indices_of_a_dimension_of_more_than_32_bits(in_cpp):
    ones = torch.ones(1).expand(1 << 33)
    assert torch.equal(evaluate_mod(lambda score, b, h, i, j: score + ones[i - j], torch.zeros(1, 1, 3, 3)), torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize("of", ["vectors", "numbers"])
def test_bools_of_any_byte(of, in_cpp):
    """torch has some that are neither 0 nor 1, as where bytes are viewed: they are true."""
    b, c = (torch.tensor(bytes_, dtype=torch.uint8).view(torch.bool) for bytes_ in ([2, 0, 4, 1], [1, 1, 128, 0]))
    for form in (
        lambda x, y: x ^ y,
        lambda x, y: x == y,
        lambda x, y: ~x & ~y,
        lambda x, y: x.to(torch.int32) + y == 2,
        lambda x, y: torch.where(x, y, True),
    ):

        def mask_mod(batch, h, q_idx, kv_idx, form=form):
            return form(b[q_idx], c[kv_idx]) if of == "vectors" else form(b[kv_idx], c[kv_idx])

        expected = mask_mod(0, 0, torch.arange(4)[:, None], torch.arange(4)).expand(4, 4)
        assert torch.equal(create_mask(mask_mod, 1, 1, 4, 4, "cpu")[0, 0], expected)
    assert torch.equal(evaluate_mod(lambda score, batch, h, i, j: score + b[i] * 1.0, torch.zeros(1, 1, 4, 1)).flatten(), b.float())


@pytest.mark.filterwarnings("ignore:score_mod .* captures .* float64:UserWarning")
def test_gradients_of_captured_tensors_as_they_lie(in_cpp):
    """One of float64 with an element for each position; an empty one whose rows are apart."""
    q = torch.randn(1, 1, 9, 8, requires_grad=True)  # an element of bias is for one position
    bias, nothing = torch.randn(9, 9, dtype=torch.float64, requires_grad=True), torch.randn(4, 100)[:0, :5].requires_grad_()
    for mod in (lambda score, b, h, i, j: score + bias[i, j], lambda score, b, h, i, j: score + nothing[i - j, h]):
        captured = nothing if "nothing" in mod.__code__.co_freevars else bias
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            (found,) = torch.autograd.grad(flex_attention(q, q, q, mod).sin().sum(), captured)
        assert found.dtype == captured.dtype and found.shape == captured.shape
        if found.numel():
            scores = (q @ q.mT * 8**-0.5).double() + bias
            (expected,) = torch.autograd.grad((scores.softmax(-1) @ q.double()).sin().sum(), bias)
            assert relative_error(found, expected) < 1e-6


def test_indices_of_32_and_of_64_bits_in_one_place(in_cpp):
    """As tables of relative positions are read: by position, and by an index that the mod makes int64. Its gradient is scattered."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(3)).unbind()
    ids = torch.randint(0, 12, (40,), generator=torch.Generator().manual_seed(4))
    table, wide = (torch.randn(*n, generator=torch.Generator().manual_seed(5)).requires_grad_() for n in ((40, 12), (2, 40, 12)))
    for mod in (
        lambda score, b, h, q_idx, kv_idx: score + table[q_idx, (q_idx - kv_idx).clamp(-5, 6).long() + 5],
        lambda score, b, h, q_idx, kv_idx: score * table[kv_idx, ids[(q_idx + kv_idx) % 40]],
        lambda score, b, h, q_idx, kv_idx: score + wide[h, q_idx, torch.floor(ids[kv_idx] * 0.9).long()],
        lambda score, b, h, q_idx, kv_idx: score + wide[h, q_idx, (-(q_idx - kv_idx).abs()).clamp(-12).long()],
    ):
        found, exact = flex_attention(q, k, v, mod), dense_attention(q, k, v, score_mod=mod)[0]
        assert relative_error(found, exact) < 1e-6
        learned = wide if "wide" in mod.__code__.co_freevars else table
        (mine,), (reference,) = (torch.autograd.grad(out.sin().sum(), learned) for out in (found, exact))
        assert relative_error(mine, reference) < 1e-5


FORKED = """
import os, signal, torch, flexpress
attend = lambda: flexpress.flex_attention(q, q, q)
if {exported}:
    import importlib.util
    flexpress.export(torch.randn(1, 2, 40, 16), *[torch.randn(1, 2, 40, 16)] * 2, path={path!r}, backward=False)
    spec = importlib.util.spec_from_file_location("exported", {path!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attend = lambda: module.attention(q, q, q)
torch.set_num_threads(2)
q = torch.randn(1, 2, 40, 16)
attend()
pid = os.fork()
if not pid:
    signal.alarm(60)
    attend()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("exported", [False, True])
def test_a_forked_child_has_no_threads_of_its_parents(exported, tmp_path):
    """It would wait for them for ever."""
    environment = {**os.environ, "FLEXPRESS_CPU": "cpp", "FLEXPRESS_CXXFLAGS": "-O1", "FLEXPRESS_EXPORTED_DIR": str(tmp_path)}
    program = FORKED.format(exported=exported, path=str(tmp_path / "exported.py"))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "0\n", done.stderr


def test_the_interpreter_may_be_asked_for(monkeypatch, own_directory):
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()
    assert {path.suffix for path in printed_kernels()} == {".py"}


def test_c_plus_plus_is_the_default(monkeypatch, own_directory):
    monkeypatch.delenv("FLEXPRESS_CPU")
    attend()
    assert {path.suffix for path in printed_kernels()} == {".cpp"}


def test_another_word_than_these_is_an_error(monkeypatch):
    monkeypatch.setenv("FLEXPRESS_CPU", "fast")
    with pytest.raises(ValueError, match="FLEXPRESS_CPU is 'fast'; write 'cpp' or 'interpreter'"):
        attend()


def continued(score, b, h, q_idx, kv_idx):
    # fmt: off
    return score \
        + q_idx
    # fmt: on


def test_a_line_that_ends_with_a_backslash_hides_none():
    """In C++ such a comment would go on in the next line."""
    scores = torch.randn(1, 1, 20, 5)
    assert torch.allclose(evaluate_mod(continued, scores), scores + torch.arange(20.0)[:, None])


@pytest.mark.parametrize("batch, length", [(1, 300), (12, 700)])
def test_any_number_of_threads_gives_the_same_gradients(batch, length):
    """Of a table whose elements all heads and positions share, and of rows that many queries share, which torch adds up."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(batch, 4, length, 16, requires_grad=True, generator=generator) for _ in range(3)]
    table, rows = (torch.randn(n, requires_grad=True, generator=generator) for n in (2 * length, 7))
    found, before = [], torch.get_num_threads()

    def mod(score, b, h, q_idx, kv_idx):
        return torch.tanh(score + table[q_idx - kv_idx + length] + rows[q_idx % 7])

    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        out = flex_attention(*inputs, mod)
        found.append(torch.autograd.grad(out.sum(), (*inputs, table, rows)))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.int32])
def test_small_integers_as_indices(in_cpp, dtype):
    """Strides and sizes are no numbers of their dtype."""
    bucket, q = (torch.arange(256) % 100).to(dtype), torch.randn(1, 8, 256, 16)
    tables = by_head, long, wide = [torch.randn(shape, requires_grad=True) for shape in ((100, 8), (40000,), (100, 300))]
    exact = [table.detach().double().requires_grad_() for table in tables]
    at = bucket.long()
    dense = exact[0][at].T[:, None] + exact[1][at] + exact[2][at][:, :256].T
    expected = torch.nn.functional.scaled_dot_product_attention(*[q.double()] * 3, attn_mask=dense[None])
    out = flex_attention(q, q, q, lambda s, b, h, m, n: s + by_head[bucket[n], h] + long[bucket[n]] + wide[bucket[n], m])
    assert relative_error(out.detach(), expected.detach()) < 1e-5
    of_tables = [torch.autograd.grad(o.square().sum(), t) for o, t in ((out, tables), (expected, exact))]
    for found, wanted in zip(*of_tables, strict=True):
        assert relative_error(found, wanted) < 1e-4


def test_bytes_divided_by_255(in_cpp):
    """Which is no -1."""
    values = torch.arange(256, dtype=torch.uint8)
    for mod in (lambda b, h, m, n: values[n] // 255 == 0, lambda b, h, m, n: values[n] % 255 == values[n]):
        seen = create_mask(mod, 1, 1, 1, 256, device="cpu")[0, 0, 0]
        assert seen[:255].all() and not seen[255]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("queries", [1, 20])
def test_scores_on_both_sides_of_huge(queries, upwards, dtype):
    """Where the scores of one block count as huge and those of the next do not, the larger ones get all weight."""
    bound = (2.0**28 if dtype is torch.float16 else 2.0**30) / 1.4426950408889634
    q, k, v = (torch.randn(1, 16, n, 16).to(dtype) for n in (queries, 1500, 1500))
    steps = torch.linspace(0.01, 0.2, 16)
    near, far = bound * (1 - steps), bound * (1 + steps)
    first, second = (-far, -near) if upwards else (near, far)

    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx < 700, first[h], second[h]) + score * 0.0

    for needs in (False, True):
        with torch.set_grad_enabled(needs):
            out, lse = flex_attention(q.detach().requires_grad_(needs), k, v, mod, scale=1.0, return_lse=True)
        wanted, exact, _ = dense_attention(q, k, v, mod, None, 1.0)
        assert relative_error(out, wanted) < (1e-5 if dtype is torch.float32 else 2e-3)
        assert relative_error(lse, exact) < 1e-6


@pytest.mark.parametrize("queries", [1, 20])
def test_rows_with_nothing_to_attend_to_at_first(queries):
    """For whole blocks, and in all of them."""
    q, k, v = (torch.randn(1, 2, n, 16) for n in (queries, 1500, 1500))
    for first in (1400, 1500):
        mask = lambda b, h, q_idx, kv_idx, first=first: (kv_idx >= first) | (h == 0)  # noqa: E731
        found, exact = flex_attention(q, k, v, mask_mod=mask), dense_attention(q, k, v, None, mask)[0]
        assert found.isfinite().all() and relative_error(found, exact) < 1e-5


@pytest.mark.parametrize("width", [16, 129, 144, 200, 248, 512])
def test_values_of_any_width_in_a_cache(width):
    """Heads that share keys are rows of one tile, whose outputs lie one after another."""
    lengths = torch.tensor([37, 300], dtype=torch.int32)
    q, k, v = torch.randn(2, 8, 1, 24), torch.randn(2, 300, 2, 24), torch.randn(2, 300, 2, width)
    out = cached_attention(q, k, v, lengths)
    for b, n in enumerate(lengths.tolist()):
        wanted = dense_attention(q[b : b + 1], k[b : b + 1, :n].transpose(1, 2), v[b : b + 1, :n].transpose(1, 2))[0]
        assert relative_error(out[b : b + 1], wanted) < 1e-5


@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_of_heads_with_lists_of_their_own(queries):
    """Heads that share keys are then no rows of one tile."""
    q, k, v = (torch.randn(1, h, n, 16) for h, n in ((4, queries), (2, 1500), (2, 1500)))
    own = lambda b, h, q_idx, kv_idx: (kv_idx >= 300 * h) & (kv_idx < 300 * h + 400)  # noqa: E731
    mask = create_block_mask(own, 1, 4, queries, 1500, "cpu")
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert relative_error(out, dense_attention(q, k, v, None, own)[0]) < 1e-5
    whole = BlockMask.from_kv_blocks(
        mask.kv_num_blocks * 0, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, seq_lengths=(queries, 1500)
    )
    seen = whole.to_dense()[0].bool().repeat_interleave(128, 2)[:, :1, :1500]
    out = flex_attention(q, k, v, block_mask=whole, enable_gqa=True)
    wanted = dense_attention(q, k, v, None, lambda b, h, q_idx, kv_idx: seen[h, 0 * q_idx, kv_idx])[0]
    assert relative_error(out, wanted) < 1e-5


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_rows_whose_scores_are_all_large(size):
    """Weights come of one multiply-add each, whatever -O a kernel is compiled with: its shift alone is rounded."""
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind()
    out = flex_attention(q, k, v, lambda s, b, h, m, n: s - size, scale=1.0)
    wanted = dense_attention(q, k, v, lambda s, b, h, m, n: (s.float() - size).double(), None, 1.0)[0]
    assert relative_error(out, wanted) < 2e-5
