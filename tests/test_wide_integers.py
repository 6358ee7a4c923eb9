"""Arithmetic of indices that leaves int32 is that of torch's eager reference, which has indices in int64."""

import math

import pytest
import torch

from flexpress import cached_attention, create_block_mask, create_mask, evaluate_mod, flex_attention, varlen_attention
from flexpress.codegen.mod.graphs.wide import in_wide_integers
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.commands.recipes import RECIPES, make
from support.dense import dense_attention, relative_error
from support.devices import DEVICES
from support.exported import saved

S = 70
FACTOR = 1103515245
SMALL = torch.arange(S, dtype=torch.int32) * 1000


def mixed(b, h, q_idx, kv_idx):
    return ((q_idx * FACTOR + kv_idx * 12345 + h) >> 8) % 10 < 6


def scores(device: str) -> dict:
    table, few = SMALL.to(device), (SMALL // 1000).to(device)
    return {
        "a square": lambda s, b, h, m, n: s - ((m * 50000 - n) ** 2).float() * 1e-13,
        "a number that is captured": lambda s, b, h, m, n: s + (m * FACTOR + n * 12345) % 7,
        "exclusive or": lambda s, b, h, m, n: s + ((m * 2654435761) ^ (n * 40503)) % 11 * 0.1,
        "a shift": lambda s, b, h, m, n: s + ((n << 28) + m) % 13 * 0.1,
        "a choice": lambda s, b, h, m, n: s + torch.where(m > n, n * FACTOR, m - n) % 17 * 0.1,
        "a number like an index": lambda s, b, h, m, n: s + (torch.full_like(m, 1 << 40) + n.new_tensor(1 << 33) * n) % 7 * 0.1,
        "a captured number like an index": lambda s, b, h, m, n: s + (torch.full_like(m - n, FACTOR) * 5 + n) % 7 * 0.1,
        "a small number like an index": lambda s, b, h, m, n: (
            torch.where(torch.full_like(b, 2) <= 1 << 62, s - 1, s) + (torch.ones_like(m) << 40) % 7
        ),
        "an element beside a number like an index": lambda s, b, h, m, n: (
            s + (torch.minimum(table[n], torch.zeros_like(m)) - (1 << 33)) % 11 * 0.1
        ),
        "a comparison": lambda s, b, h, m, n: torch.where(n * FACTOR > table[n] * 1000, s, s + 1),
        "an index": lambda s, b, h, m, n: s + table[(m * FACTOR + n) % S] * 1e-5,
        "a negative number": lambda s, b, h, m, n: s - (-(n * FACTOR)) // 1000000000 * 0.01,
        "as a float": lambda s, b, h, m, n: s + (n * FACTOR) / 1e11,
        "elements beside an index": lambda s, b, h, m, n: s + (few[n] * n * 10000000) % 19 * 0.1,
        "a multiple of an element beside an index": lambda s, b, h, m, n: s + torch.add(m, table[n], alpha=3000) % 19 * 0.1,
        "a product of elements beside an index": lambda s, b, h, m, n: s + torch.addcmul(m, table[n], table[n]) % 19 * 0.1,
        "a multiple of an index": lambda s, b, h, m, n: s + torch.sub(table[n], m * 7, alpha=FACTOR) % 19 * 0.1,
        "elements alone, which wrap": lambda s, b, h, m, n: s + (table[n] * table[n] * table[n] * table[n] * table[n]) % 19 * 0.1,
    }


NAMES = list(scores("cpu"))


def tensors(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 2, S, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]


def reference(q, k, v, score=None, mask=None) -> torch.Tensor:
    """Attention with indices in int64."""
    m, n = torch.arange(S, device=q.device)[:, None], torch.arange(S, device=q.device)
    b, h = torch.arange(2, device=q.device)[:, None, None, None], torch.arange(2, device=q.device)[:, None, None]
    s = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    s = score(s, b, h, m, n) if score else s
    s = s.masked_fill(~mask(b, h, m, n), float("-inf")) if mask else s
    return s.softmax(-1).nan_to_num(0) @ v.double()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_keep_their_kernels(recipe):
    """At a million positions."""
    for mod, kind in zip(make(recipe), ("score", "mask"), strict=True):
        if mod is not None:
            bound = bind(mod, kind)
            assert in_wide_integers(bound, (4, 32, 1 << 20, 1 << 20)) is bound


@pytest.mark.parametrize("length, wide", [(32768, False), (46341, True), (1 << 20, True)])
def test_what_fits_stays_in_int32(length, wide):
    bound = bind(lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx) ** 2, "score")
    assert (in_wide_integers(bound, (1, 1, length, length)) is not bound) == wide


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients(name, device):
    score, (q, k, v) = scores(device)[name], tensors(device)
    out, exact = flex_attention(q, k, v, score), reference(q, k, v, score)
    assert relative_error(out, exact) < 1e-5
    found, wanted = (torch.autograd.grad(t.double().square().sum(), (q, k, v)) for t in (out, exact))
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["a square", "exclusive or", "a comparison"])
def test_in_cpp(in_cpp, name):
    score, (q, k, v) = scores("cpu")[name], tensors("cpu")
    assert relative_error(flex_attention(q, k, v, score, mask_mod=mixed), reference(q, k, v, score, mixed)) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_masks(device):
    q, k, v = tensors(device)
    exact = reference(q, k, v, mask=mixed)
    m, n, h = torch.arange(S)[:, None], torch.arange(S), torch.arange(2)[:, None, None]
    assert torch.equal(create_mask(mixed, 1, 2, S, S, device)[0].cpu(), mixed(0, h, m, n))
    assert torch.equal(evaluate_mod(mixed, torch.zeros(1, 2, S, S, device=device), "mask")[0].cpu(), mixed(0, h, m, n))
    for heads, size in ((2, 16), (None, 128)):
        mask = create_block_mask(mixed, None, heads, S, S, device, BLOCK_SIZE=size)
        assert relative_error(flex_attention(q, k, v, block_mask=mask), exact) < 1e-5
    assert relative_error(flex_attention(q, k, v, mask_mod=mixed), exact) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_and_transformed(device):
    (q, k, v), score = tensors(device), scores(device)["a square"]
    exact = reference(q, k, v, score, mixed)
    compiled = torch.compile(lambda *t: flex_attention(*t, score, mask_mod=mixed), backend="aot_eager", fullgraph=True)
    assert relative_error(compiled(q, k, v), exact) < 1e-5
    with torch.no_grad():
        out, _ = torch.func.jvp(lambda q: flex_attention(q, k, v, score, mask_mod=mixed), (q,), (q,))
    assert relative_error(out, exact) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences_and_caches(device):
    """Positions in sequences are elements of a tensor there."""
    q, k, v = (t.detach() for t in tensors(device))
    score = scores(device)["a square"]
    exact = reference(q, k, v, score, mixed)
    packed = [t.transpose(1, 2).reshape(2 * S, 2, 16) for t in (q, k, v)]
    out = varlen_attention(*packed, torch.tensor([0, S, 2 * S], dtype=torch.int32, device=device), score_mod=score, mask_mod=mixed)
    assert relative_error(out.view(2, S, 2, 16).transpose(1, 2), exact) < 1e-5
    caches = [t.transpose(1, 2).contiguous() for t in (k, v)]
    lens = torch.full((2,), S, dtype=torch.int32, device=device)
    out = cached_attention(q[:, :, -3:], *caches, lens, score_mod=score, mask_mod=mixed)
    assert relative_error(out, exact[:, :, -3:]) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_a_long_sequence(device):
    """Distances whose squares are near 2**32, where int32 has them at 0."""
    far = 65536 + 64
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).to(device) for n in (65, far, far))

    def near(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) ** 2 < 400

    def apart(b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < 20

    assert relative_error(flex_attention(q, k, v, mask_mod=near), flex_attention(q, k, v, mask_mod=apart)) < 1e-6


def test_exported_files_serve_any_length(tmp_path, in_cpp):
    """Also lengths at which other integers leave int32 than at those of the call that was exported."""
    generator = torch.Generator().manual_seed(5)
    far = 65536 + 64
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator) for n in (65, far, far))

    def near(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) ** 2 < 400

    _, module = saved(tmp_path, q, k[:, :, :300], v[:, :, :300], mask_mod=near)
    for length in (200, far):
        found = module.attention(q, k[:, :, :length], v[:, :, :length])
        assert relative_error(found, flex_attention(q, k[:, :, :length], v[:, :, :length], mask_mod=near)) < 1e-6


def hashed(seed):
    return lambda b, h, q_idx, kv_idx: ((q_idx * seed + kv_idx * 7) % 11 != 0) | (q_idx == kv_idx)


def reaching(step):
    return lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) * step <= step * 3


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("make, name", [(hashed, "seed"), (reaching, "step")])
def test_exported_files_serve_any_captured_number(tmp_path, in_cpp, make, name, target):
    """Also one that is longer than that of the call that was exported; the file's own reference, too."""
    q, k, v = torch.randn(3, 1, 2, 60, 16, generator=torch.Generator().manual_seed(6)).unbind()
    with torch.no_grad():
        _, module = saved(tmp_path, q, k, v, mask_mod=make(3), target=target)
    for number in (3, 2**27 - 1, 2**29 + 1):
        exact = dense_attention(q, k, v, mask_mod=make(number))[0]
        assert relative_error(module.attention(q, k, v, **{name: number}), exact) < 1e-6
        assert relative_error(module.reference(q, k, v, **{name: number})[0], exact) < 1e-12


@pytest.mark.parametrize(
    "index", [([1, 0, 1],), (slice(None), [1, 0]), (slice(None), slice(None), [3, 0, 4]), (slice(None), slice(None), [1, 2])]
)
def test_slices_of_a_mask(index):
    """Entries, heads and rows of a slice are elements of a tensor, or a first one and a step."""

    def hashed(b, h, q_idx, kv_idx):
        return (q_idx * FACTOR + (b + 1) * 2654435761 + h * 40503 * 2654435761 + kv_idx) % 10 < 6

    mask = create_block_mask(hashed, 2, 2, S, S, "cpu", BLOCK_SIZE=16)[index]
    b, h, rows = (*(torch.arange(n)[i] for n, i in zip((2, 2, 5), index, strict=False)), *map(torch.arange, (2, 2, 5)[len(index) :]))
    at = torch.cat([torch.arange(16 * r, min(16 * r + 16, S)) for r in rows.tolist()])
    whole = hashed(b[:, None, None, None], h[:, None, None], at[:, None], torch.arange(S))
    q, k, v = (torch.randn(len(b), len(h), n, 16) for n in (len(at), S, S))
    exact = (q.double() @ k.double().mT / 4).masked_fill(~whole, float("-inf")).softmax(-1).nan_to_num(0) @ v.double()
    assert relative_error(flex_attention(q, k, v, block_mask=mask), exact) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_many_batch_entries(device):
    assert create_mask(lambda b, h, m, n: b * 32767 >= 0, 70000, 1, 1, 1, device=device).all()
