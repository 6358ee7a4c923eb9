"""Gradients of flex_attention against float64 autograd through dense attention: q, k, v, lse and captured tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexpress import cache_info, create_block_mask, explain, flex_attention, mods
from flexpress.codegen import registry
from flexpress.codegen.plan.backward import whole_blocks
from flexpress.codegen.run.preview import backward_compilations, preview
from support.dense import dense_attention, relative_error
from support.devices import DEVICES, for_any
from support.gradients import GradientProblem, check_gradients, gradient_problems, reference_gradients
from support.problems import LEARNED_MODS, learned_mods

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@for_any(gradient_problems, cpu=14, cuda=80)
def test_any_problem(p, device):
    check_gradients(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", LEARNED_MODS)
def test_learned_tensors(name, deterministic, device):
    """Every way to index a learned tensor, with several tiles and a causal tail."""
    shape = dict(B=2, Q_LEN=70, KV_LEN=90, D_QK=16, D_V=16, BLOCK_SIZE=64)
    p = GradientProblem(**shape, dtype=torch.float32, score=name, mask="causal", seed=3, lse=True, deterministic=deterministic)
    check_gradients(p, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name, length, block_size, options",
    [
        ("table", 256, None, {}),
        ("bias", 128, None, {}),
        ("distance", 96, 48, {}),
        ("table", 96, 64, {}),
        ("table", 128, None, {"BLOCK_M1": 256, "BLOCK_N2": 256}),
    ],
)
def test_lengths_of_whole_blocks(name, length, block_size, options, device):
    """Tiles that end where the sequence does check nothing; blocks of another size and a user's larger tiles do."""
    q, k, v, d_out = (torch.randn(1, 2, length, 16, device=device) for _ in range(4))
    make, learned = learned_mods(1, 2, length, device)[name]
    inputs = [t.requires_grad_() for t in (q, k, v, *learned)]
    mask_mod = mods.causal if block_size else None
    mask = mask_mod and create_block_mask(mask_mod, None, None, length, length, device, block_size)
    out = flex_attention(q, k, v, make(*learned), mask, kernel_options={"BACKEND": "TRITON", **options})
    grads = torch.autograd.grad(out, inputs, d_out)
    exact = reference_gradients(inputs, make, mask_mod, None, d_out, None, torch.float64)
    assert all(relative_error(g, e) < 4e-6 for g, e in zip(grads, exact, strict=True))
    assert whole_blocks(length, length, mask and mask.as_lists().blocks) == (block_size != 64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
    ids=str,
)
def test_elements_of_every_dtype(dtype, device):
    """An element for every position: inside, and outside of the tensor, where it is zero."""
    length = 256 if device == "cuda" else 70
    q, k, v, d_out = (torch.randn(1, 2, length, 16, device=device, requires_grad=True) for _ in range(4))
    far, near = (torch.randint(0, 8, (2, n), device=device).to(dtype) for n in (2 * length + 256, length // 2))

    def inside(s, b, h, m, n):
        return s + far[h, n - m + length] * 0.5

    def outside(s, b, h, m, n):
        return s + near[h, (n - m).abs()] * 0.5

    def padded(s, b, h, m, n):
        return s + torch.where((n - m).abs() < length // 2, near[h, (n - m).abs().clamp(max=length // 2 - 1)] * 0.5, 0.0)

    for mod, reference in ((inside, inside), (outside, padded)):
        out = flex_attention(q, k, v, mod, kernel_options={"BACKEND": "TRITON"})
        grads = torch.autograd.grad(out, (q, k, v), d_out)
        exact = reference_gradients([q, k, v], lambda mod=reference: mod, None, None, d_out, None, torch.float64)
        assert all(relative_error(g, e) < 4e-6 for g, e in zip(grads, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_places_outside_a_learned_tensor(deterministic, device):
    """Negative indices count from the end; what lies outside reads zero and gets nothing."""
    q, k, v, d_out = (torch.randn(1, 2, 90, 16, device=device, requires_grad=True) for _ in range(4))
    table = torch.randn(45, device=device, requires_grad=True)
    out = flex_attention(q, k, v, lambda s, b, h, m, n: s + table[m - n], deterministic=deterministic)

    def inside(t):
        return lambda s, b, h, m, n: s + torch.where(((m - n) >= -45) & ((m - n) < 45), t[(m - n).clamp(-45, 44)], 0)

    grads = torch.autograd.grad(out, (q, k, v, table), d_out)
    exact = reference_gradients([q, k, v, table], inside, None, None, d_out, None, torch.float64)
    assert all(relative_error(g, e) < 4e-6 for g, e in zip(grads, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_keys_without_partners(device):
    """A row that sees nothing, and a key that nobody sees, have gradients of exactly zero."""
    q, k, v = (torch.randn(1, 2, 100, 32, device=device, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, m, n: (m >= 40) & (n < 70), None, None, 100, 100, device, 32)
    scale = torch.tensor(0.7, device=device, requires_grad=True)
    out, lse = flex_attention(q, k, v, lambda s, b, h, m, n: torch.log(s.abs()) * scale, mask, return_lse=True)
    grads = torch.autograd.grad((out, lse), (q, k, v, scale), (torch.randn_like(out), torch.randn_like(lse)))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][:, :, :40].any() and not grads[1][:, :, 70:].any() and not grads[2][:, :, 70:].any()
    assert all(g.any() for g in grads)


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_asked_for(device):
    """Inputs that want no gradient get none; lse alone may carry the loss; a second pass over a kept graph gives the same."""
    q, k, v = (torch.randn(1, 1, 40, 16, device=device) for _ in range(3))
    v.requires_grad_()
    out, lse = flex_attention(q, k, v, mods.alibi(torch.ones(1, device=device)), return_lse=True)
    first = torch.autograd.grad(out.square().sum(), v, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(out.square().sum(), v, retain_graph=True)[0])
    assert not torch.autograd.grad(lse.sum(), v)[0].any()
    q.requires_grad_()
    slopes = torch.ones(1, device=device, requires_grad=True)
    _, lse = flex_attention(q, k, v, mods.alibi(slopes), return_lse=True)
    dq, dv, ds = torch.autograd.grad(lse.sum(), (q, v, slopes))
    assert dq.any() and ds.any() and not dv.any()
    with torch.no_grad():
        assert not flex_attention(q, k, v, mods.alibi(slopes)).requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_captured_tensor_that_the_mod_computes(device):
    """Work on captured tensors alone runs in torch, and gradients flow through it."""
    weight = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).mul(0.3).to(device).requires_grad_()
    q = torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(1)).to(device)

    def mod(score, b, h, q_idx, kv_idx):
        return score * weight.exp().sum(1)[h]

    (got,) = torch.autograd.grad(flex_attention(q, q, q, mod).square().sum(), weight)
    q64, w64 = q.double(), weight.detach().double().requires_grad_()
    out, *_ = dense_attention(q64, q64, q64, lambda s, b, h, m, n: s * w64.exp().sum(1)[h])
    assert relative_error(got, torch.autograd.grad(out.square().sum(), w64)[0]) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_overwritten_is_noticed(device):
    """Overwriting a captured tensor between forward and backward is autograd's own error, for score_mod and mask_mod alike."""
    q = torch.randn(1, 1, 20, 16, device=device, requires_grad=True)
    slopes, ids = torch.ones(1, device=device), torch.zeros(20, dtype=torch.int32, device=device)
    mask = create_block_mask(mods.document(ids), None, None, 20, 20, device)
    for tensor in (slopes, ids):
        out = flex_attention(q, q, q, mods.alibi(slopes), mask)
        tensor.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(device, reentrant):
    q, k, v = (torch.randn(1, 2, 50, 16, device=device, requires_grad=True) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 50, 50, device)

    def attend(q, k, v):
        return flex_attention(q, k, v, mods.softcap(5.0), mask)

    plain = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    checkpoint(attend, q, k, v, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(a, t.grad) for a, t in zip(plain, (q, k, v), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_block_masks_of_torch(device):
    from torch.nn.attention import flex_attention as theirs

    q, k, v = (torch.randn(2, 2, 130, 16, device=device, requires_grad=True) for _ in range(3))
    made = theirs.create_block_mask(mods.causal, 1, 1, 130, 130, device=device, BLOCK_SIZE=64)
    d_out = torch.randn(2, 2, 130, 16, device=device)
    grads = torch.autograd.grad(flex_attention(q, k, v, block_mask=made), (q, k, v), d_out)
    exact = reference_gradients([q, k, v], lambda: None, mods.causal, None, d_out, None, torch.float64)
    assert all(relative_error(g, e) < 2e-6 for g, e in zip(grads, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_empty_lengths(device):
    q = torch.randn(1, 2, 5, 16, device=device, requires_grad=True)
    kv = torch.randn(1, 2, 0, 16, device=device, requires_grad=True)
    flex_attention(q, kv, kv).sum().backward()
    assert not q.grad.any() and kv.grad.shape == kv.shape


@pytest.mark.parametrize("device", DEVICES)
def test_new_lengths_and_values_compile_nothing(device):
    """A new length, window or slope finds the backward kernels compiled."""

    def step(length, window, slope):
        q = torch.randn(1, 2, length, 16, device=device, requires_grad=True)
        mask = create_block_mask(mods.sliding_window(window), None, None, length, length, device)
        slopes = torch.full((2,), slope, device=device, requires_grad=True)
        flex_attention(q, q, q, mods.alibi(slopes), mask).sum().backward()

    step(100, 9, 0.5)
    before = cache_info()
    step(130, 20, 0.25)
    step(77, 3, 0.75)
    assert cache_info().compiles == before.compiles


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_kept_for_repeated_passes_is_of_their_kind(device):
    """Passes that differ in one thing each, twice, give what they give when nothing is kept."""

    def tensor(length, order=(0, 1, 2, 3)):
        return torch.randn([(1, 2, length, 16)[i] for i in order], device=device).permute([order.index(i) for i in range(4)])

    slopes = torch.rand(2, device=device, requires_grad=True)
    fixed, learned = mods.alibi(slopes.detach()), mods.alibi(slopes)
    masks = [create_block_mask(mods.sliding_window(w), None, None, 64, 64, device, block) for w, block in ((9, 64), (20, 64), (9, 32))]
    turned = tensor(64, (0, 2, 1, 3))
    first = {
        "q": tensor(64),
        "k": tensor(64),
        "d_out": tensor(64),
        "scale": 0.3,
        "lse": False,
        "mod": fixed,
        "mask": None,
        "deterministic": False,
    }
    kinds = [
        first,
        *(
            {**first, name: value}
            for name, value in (
                ("scale", 0.2),
                ("q", turned),
                ("k", turned),
                ("d_out", turned),
                ("lse", True),
                ("mod", None),
                ("mod", learned),
                ("mask", masks[0]),
                ("mask", masks[1]),
                ("mask", masks[2]),
                ("k", tensor(80)),
                ("deterministic", True),
            )
        ),
    ]

    def gradients(q, k, d_out, scale, lse, mod, mask, deterministic):
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        out, sums = flex_attention(q, k, k, mod, mask, scale=scale, return_lse=True, deterministic=deterministic)
        outputs, weights = ((out, sums), (d_out, sums.detach())) if lse else (out, d_out)
        return torch.autograd.grad(outputs, [q, k, *([slopes] if mod is learned else [])], weights)

    fresh = []
    for kind in kinds:
        registry.clear()
        fresh.append(gradients(**kind))
    for _ in range(2):
        for kind, expected in zip(kinds, fresh, strict=True):
            assert all(torch.equal(g, e) for g, e in zip(gradients(**kind), expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "option",
    [{"BLOCK_M1": 16, "BLOCK_N1": 32}, {"bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 16, "bwd_num_warps": 4}, {"FLOAT32_PRECISION": "tf32"}],
)
def test_kernel_options(device, option):
    q, k, v = (torch.randn(1, 2, 70, 32, device=device, requires_grad=True) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 70, 70, device)
    d_out = torch.randn(1, 2, 70, 32, device=device)
    out = flex_attention(q, k, v, mods.softcap(5.0), mask, kernel_options=option)
    grads = torch.autograd.grad(out, (q, k, v), d_out)
    exact = reference_gradients([q, k, v], lambda: mods.softcap(5.0), mods.causal, None, d_out, None, torch.float64)
    limit = 4e-3 if "FLOAT32_PRECISION" in option else 4e-6
    assert all(relative_error(g, e) < limit for g, e in zip(grads, exact, strict=True))


REAL_LENGTHS = [1, 15, 129, 257, 1025, 2046, 4001]
REAL_HEAD_DIMS = [16, 31, 64, 72, 80, 96, 128, (192, 128), 256]
REAL_GROUPS = [(12, 2), (28, 4), (48, 2), (64, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("length", REAL_LENGTHS)
@pytest.mark.parametrize("head_dim", REAL_HEAD_DIMS)
def test_real_shapes_are_as_exact_as_fused_attention(length, head_dim):
    """bfloat16, causal: the error of every gradient is at most that of torch's fused kernel on the same input."""
    d_qk, d_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    q, k = (torch.randn(1, 2, length, d_qk, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, length, d_v, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_out = torch.randn(1, 2, length, d_v, device="cuda", dtype=torch.bfloat16)
    mask = create_block_mask(mods.causal, None, None, length, length, "cuda")
    grads = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask), (q, k, v), d_out)
    fused = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), d_out)
    exact = reference_gradients([q, k, v], lambda: None, mods.causal, None, d_out, None, torch.float64)
    for got, theirs, want in zip(grads, fused, exact, strict=True):
        assert got.isfinite().all()
        assert relative_error(got, want) <= max(1.05 * relative_error(theirs, want), 4.5e-3)  # rounding to bfloat16 alone costs 1.7e-3


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads", REAL_GROUPS)
@pytest.mark.parametrize("name", ["none", "distance", "temperature", "table", "bias", "buckets"])
def test_real_groups(heads, kv_heads, name):
    shape = dict(Hkv=kv_heads, group=heads // kv_heads, Q_LEN=1025, KV_LEN=1025, D_QK=64, D_V=64, layouts=("bshd",) * 3)
    p = GradientProblem(**shape, dtype=torch.bfloat16, score=name, mask="tiles" if name == "none" else "causal", seed=5)
    check_gradients(p, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [40, 48, 64, 80, 88, 96, 128])
@pytest.mark.parametrize("name", ["none", "table"])
def test_repeats_are_bitwise_equal(head_dim, name):
    """200 runs: the forward always, gradients when deterministic."""
    q, k, v = (torch.randn(2, 4, 517, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    make, learned = learned_mods(2, 4, 517, "cuda")[name]
    inputs = [q, k, v, *(t.requires_grad_() for t in learned)]
    mask = create_block_mask(mods.causal, None, None, 517, 517, "cuda")
    d_out = torch.randn_like(q)
    first = None
    for _ in range(200):
        out = flex_attention(q, k, v, make(*learned), mask, deterministic=True)
        found = [out, *torch.autograd.grad(out, inputs, d_out)]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


@pytest.mark.gpu
def test_backward_allocates_no_scores():
    """Peak memory of the backward pass is the gradients, two float32 numbers a row, and a float32 dQ if one kernel makes all gradients."""
    q, k, v = (torch.randn(1, 8, 16384, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(mods.causal, None, None, 16384, 16384, "cuda")
    slopes = torch.rand(8, device="cuda", requires_grad=True)
    for _ in range(2):  # the first run compiles
        out = flex_attention(q, k, v, mods.alibi(slopes), mask)
        d_out = torch.randn_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, (q, k, v, slopes), d_out)
        used = torch.cuda.max_memory_allocated() - before
    fused = "backward  GLUON" in explain(q, k, v, mods.alibi(slopes), mask)
    assert used <= sum(g.nbytes for g in grads) + 2 * 4 * 8 * 16384 + (2 << 20) + fused * 4 * q.numel()


INFINITE = {  # score_mods with factors that are infinite where nothing is attended to, or past the end
    "past the end of a tensor's use": lambda t: lambda s, b, h, m, n: s * t[n],
    "literals": lambda t: lambda s, b, h, m, n: s * torch.where(n - m <= 0, 1.0, -math.inf),
    "captured numbers": lambda t: lambda s, b, h, m, n: s * torch.where(n <= m, 1.0, INFINITY),
    "quotients": lambda t: lambda s, b, h, m, n: s / torch.where(n <= m, 1.0, ZERO),
    "both": lambda t: lambda s, b, h, m, n: torch.tanh(s) * t[n] + t[0] * s,
    "overflow": lambda t: lambda s, b, h, m, n: s * torch.where(n > m, 1e38, 1.0) * 1e10,
    "half precision": lambda t: lambda s, b, h, m, n: s * torch.where(n <= m, 1.0, (n + 60000.0 - m) * 2).half(),
}
INFINITY, ZERO = math.inf, 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, lengths", [*((name, (20, 20)) for name in INFINITE), ("literals", (33, 50)), ("quotients", (128, 128))])
def test_nothing_flows_from_where_nothing_is_attended_to(name, lengths, device):
    """Whatever the derivative is there: in tiles past the end, under masks, and in whole blocks."""
    q, k, v = (torch.randn(1, 2, n, 16, device=device, requires_grad=True) for n in (lengths[0], lengths[1], lengths[1]))
    factor = torch.ones(256, device=device)
    factor[lengths[1] :] = math.inf
    mask = create_block_mask(mods.causal, None, None, *lengths, device=device)
    out = flex_attention(q, k, v, INFINITE[name](factor), mask, scale=0.25, kernel_options={"BACKEND": "TRITON"})
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    seen = {"both": lambda s, b, h, m, n: torch.tanh(s) + s, "overflow": lambda s, b, h, m, n: s * 1e10}
    exact = reference_gradients([q, k, v], lambda: seen.get(name), mods.causal, 0.25, torch.ones_like(out), None, torch.float64)
    assert all(g.isfinite().all() for g in grads)
    if name != "overflow":  # whose gradients are rounding errors times 1e10
        assert all(relative_error(g, e) < 1e-5 for g, e in zip(grads, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_mod_that_makes_nan_of_zero_scores(device):
    """As those past the end are. Near zero the derivative cancels to noise, so no such scores are drawn."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 16, device=device, requires_grad=True) for _ in range(3))
    score_mod = lambda s, b, h, m, n: s + s / torch.abs(s)  # noqa: E731
    out = flex_attention(q, k, v, score_mod, scale=0.25, kernel_options={"BACKEND": "TRITON"})
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    exact = reference_gradients([q, k, v], lambda: score_mod, None, 0.25, torch.ones_like(out), None, torch.float64)
    assert all(relative_error(g, e) < 1e-5 for g, e in zip(grads, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_number_that_becomes_infinite_is_seen(device):
    """The kernels of ordinary numbers, which are kept, do not serve it."""
    q = torch.randn(1, 2, 20, 16, device=device, requires_grad=True)
    mask, found = create_block_mask(mods.causal, None, None, 20, 20, device=device), []
    for number in (2.0, math.inf, 2.0):
        out = flex_attention(
            q, q, q, lambda s, b, h, m, n, number=number: s * torch.where(n <= m, 1.0, number), mask, kernel_options={"BACKEND": "TRITON"}
        )
        found += torch.autograd.grad(out, q, torch.ones_like(out))
    assert relative_error(found[1], found[0]) < 1e-6 and torch.equal(found[2], found[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score_mod", [None, mods.softcap(20.0)], ids=["plain", "softcap"])
def test_queries_scaled_in_half_precision_are_so_in_the_backward_pass(score_mod, dtype, device):
    """The gradients are those of scores of scaled queries as they were rounded."""
    q, k, v, d_out = (torch.randn(1, 2, 100, 32, device=device).to(dtype) * f for f in (4, 4, 1, 1))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = flex_attention(q, k, v, score_mod, scale=0.3, kernel_options={"PRESCALE_QK": True})
    grads = torch.autograd.grad(out, inputs, d_out)
    scaled = (q.detach().float() * 0.3).to(dtype).requires_grad_()
    exact = reference_gradients([scaled, k, v], lambda: score_mod, None, 1.0, d_out, None, torch.float64)
    exact = (exact[0] * 0.3, *exact[1:])
    plain = reference_gradients([scaled, k, v], lambda: score_mod, None, 1.0, d_out, None, dtype)
    plain = (plain[0] * 0.3, *plain[1:])
    for g, e, p in zip(grads, exact, plain, strict=True):
        assert relative_error(g, e) <= 1.5 * relative_error(p, e) + 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_at_indices_from_an_expanded_tensor(axis, device):
    """An index that is loaded by q_idx and kv_idx, but is the same along one of them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 9, (1, 70) if axis == 0 else (70, 1), generator=generator).to(device).expand(70, 70)
    table = torch.randn(70, 9, generator=generator).to(device).requires_grad_()
    q, k, v = (torch.randn(1, 1, 70, 16, generator=generator).to(device) for _ in range(3))
    score_mod = lambda score, b, h, q_idx, kv_idx: score + table[kv_idx, ids[q_idx, kv_idx]]  # noqa: E731
    (found,) = torch.autograd.grad(flex_attention(q, k, v, score_mod, scale=0.25).square().sum(), table)
    scores = (q @ k.mT * 0.25).double()
    scores = score_mod(scores, 0, 0, torch.arange(70, device=device)[:, None], torch.arange(70, device=device))
    (expected,) = torch.autograd.grad((torch.softmax(scores, -1) @ v.double()).square().sum(), table)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name, inside", [("head_bias", True), ("turned", False), ("bias", False), ("table", False), ("per_key", False), ("none", False)]
)
def test_batch_entries_that_share_a_bias_are_computed_beside_each_other(name, inside):
    make, learned = learned_mods(3, 2, 64, "cpu")[name]
    backward = backward_compilations("sm_90", make(*learned), head_dim=64).values()
    kernels = [preview(make(*learned), head_dim=64), *(c.spec for c in backward)]
    expected = {"forward", "backward_dq", "backward_dkv"} if inside else set()
    assert {spec.template for spec in kernels if spec.flag["BATCH_INSIDE"]} == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "hidden",
    [
        lambda x: x.to(torch.bfloat16).float(),
        lambda x: x.clone(),
        lambda x: x**1,
        lambda x: torch.stack([x, x]).flip(0)[0],
        lambda x: torch.stack([x, x]).unbind(0)[1],
        lambda x: x * 1.5,
        lambda x: torch.as_tensor(x),  # which is x itself, with its gradient
    ],
    ids=["cast", "clone", "power", "flip", "unbind", "product", "x itself"],
)
def test_no_gradient_flows_through_what_no_grad_makes(hidden, device):
    q, k, v = (torch.randn(1, 1, 32, 16, device=device) for _ in range(3))

    def mod(score, *_):
        x = score * 2
        with torch.no_grad():
            y = hidden(x)
        return x * 0.5 + y

    given, exact = q.clone().requires_grad_(), q.double().requires_grad_()
    flex_attention(given, k, v, mod).square().sum().backward()
    (mod(exact @ k.double().mT * 0.25).softmax(-1) @ v.double()).square().sum().backward()
    assert relative_error(given.grad, exact.grad) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "hidden",
    [
        lambda a, c, m, n, rows: a[m] * c[n],
        lambda a, c, m, n, rows: rows[0] * rows[1],
        lambda a, c, m, n, rows: (a[m].float(), c[n]),
        lambda a, c, m, n, rows: (a[m] * 1.0, c[n] * 1.0),
        lambda a, c, m, n, rows: (a[m], c[n]),
    ],
    ids=["product", "product of rows read before", "a cast", "elements", "rows"],
)
def test_no_gradient_flows_to_rows_that_no_grad_reads(hidden, device):
    """What is left of a tensor, long rows, and products of them; the other row of a product has its gradient."""
    generator = torch.Generator().manual_seed(2)
    q, a, c, table = (torch.randn(*shape, generator=generator).to(device) for shape in ((1, 2, 32, 16), (32, 24), (32, 24), (2, 32)))
    a, c, table = (t.requires_grad_() for t in (a, c, table))

    def mod(score, b, h, m, n):
        rows = a[m], c[n]
        with torch.no_grad():
            found, row, same = hidden(a, c, m, n, rows), table[h], score.view(())
        products = found[0] * found[1] if type(found) is tuple else found
        return score + 0.1 * products.sum(-1) + row[n] + 0.1 * same

    x = q.clone().requires_grad_()
    out = flex_attention(x, q, q, mod)
    exact = q.double().requires_grad_()
    score = exact @ q.double().mT * 0.25
    expected = (score + 0.1 * a.double() @ c.double().T + table[None, :, None].double() + 0.1 * score.detach()).softmax(-1) @ q.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(out.square().sum(), [x, a, c, table], allow_unused=True)
    assert not any(g is not None and g.any() for g in found[1:])
    assert relative_error(found[0], torch.autograd.grad(expected.square().sum(), exact)[0]) < 1e-4


def test_one_row_of_a_product_that_no_grad_reads():
    a, c, q = torch.randn(20, 24, requires_grad=True), torch.randn(20, 24, requires_grad=True), torch.randn(1, 1, 20, 16)

    def mod(score, b, h, m, n):
        with torch.no_grad():
            row = a[m]
        return score + 0.1 * torch.dot(row, c[n])

    found = torch.autograd.grad(flex_attention(q, q, q, mod).square().sum(), [a, c], allow_unused=True)
    wanted = torch.autograd.grad(flex_attention(q, q, q, lambda s, b, h, m, n: s + 0.1 * torch.dot(a[m], c[n])).square().sum(), c)
    assert found[0] is None or not found[0].any()
    torch.testing.assert_close(found[1], wanted[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_logarithm_that_no_gradient_reaches(device):
    """xlogy of 0 where `where` takes something else: no NaN, as in torch."""
    q, w = torch.randn(1, 1, 16, 16, device=device, requires_grad=True), torch.tensor(0.7, device=device, requires_grad=True)
    p = torch.tensor([0.0, 0.5] * 8, device=device)
    mod = lambda s, b, h, i, j: torch.where(p[j] > 0, torch.xlogy(w, p[j]) + torch.xlogy(s, p[j]), s)  # noqa: E731
    found = torch.autograd.grad(flex_attention(q, q, q, mod).square().sum(), (w, q))
    scores = (q @ q.mT).double() / 4
    scores = torch.where(p > 0, torch.xlogy(w, p.double()) + torch.xlogy(scores, p.double()), scores)
    exact = torch.autograd.grad((scores.softmax(-1) @ q.double()).square().sum(), (w, q))
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(found, exact, strict=True))


def test_a_deterministic_gradient_by_the_score_is_refused():
    q, table = torch.randn(1, 2, 20, 16), torch.randn(64, requires_grad=True)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[(score * 4).int() + 20]

    with pytest.raises(NotImplementedError, match="deterministic=True: .* indexed by the score"):
        flex_attention(q, q, q, mod, deterministic=True).sum().backward()
