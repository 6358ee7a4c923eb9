"""Vectors of captured tensors: element by element, and reduced to scalars."""

from __future__ import annotations

import pytest
import torch

from flexpress import ModError, cache_info, create_block_mask, create_mask, evaluate_mod, flex_attention
from flexpress.codegen.mod.tracing.bind import bind
from support.dense import dense_attention
from support.devices import DEVICES
from support.evaluate import DTYPES, traced_dtype
from support.reductions import REDUCTIONS, in_torch, matrices, of_row, rows_of

LENGTH = 50
EXPRESSIONS = {  # of a mod, and of the dense reference with everything materialised
    "distance": (
        "score * torch.exp(-((place[q_idx] - place[kv_idx]).pow(2).sum(-1) + 0.01).sqrt())",
        "score * torch.exp(-((place[:, None] - place).pow(2).sum(-1) + 0.01).sqrt())",
    ),
    "sum": ("score + 2 * place[kv_idx].sum(dim=-1)", "score + 2 * place.sum(-1)"),
    "dot": ("score + torch.dot(table[h, q_idx], table[h][kv_idx])", "score + table @ table.transpose(1, 2)"),
    "matmul": ("score + table[h, q_idx] @ table[h, kv_idx]", "score + table @ table.transpose(1, 2)"),
    "with a whole vector": ("score + (table[h, kv_idx] * weights).sum()", "score + (table * weights).sum(-1)[:, None]"),
    "mean": ("score + (1 - table[h, kv_idx].abs()).mean(-1)", "score + (1 - table.abs()).mean(-1)[:, None]"),
    "prod": ("score + torch.prod(table[h, kv_idx], 0)", "score + table.prod(-1)[:, None]"),
    "greatest": ("score + table[h, kv_idx].relu().amax(0)", "score + table.relu().amax(-1)[:, None]"),
    "slice": ("score + torch.sum(torch.tanh(table[h, kv_idx])[1:3], -1)", "score + torch.tanh(table)[..., 1:3].sum(-1)[:, None]"),
    "element": ("score + (table[h, kv_idx] * 2)[-1]", "score + table[..., -1][:, None] * 2"),
    "norm": (
        "score - torch.linalg.norm(place[q_idx] - place[kv_idx])",
        "score - torch.where((place[:, None] == place).all(-1), 0.0, (place[:, None] - place + 1e-30).norm(dim=-1))",
    ),
    "matrix": ("score + weights[:3] @ (frames[q_idx] @ place[kv_idx])", "score + torch.einsum('c,qcd,kd->qk', weights[:3], frames, place)"),
    "joined": (
        "score + torch.stack([place[q_idx].view(3, 1).flatten(), place[kv_idx]]).mean(0).amax()",
        "score + ((place[:, None] + place) / 2).amax(-1)",
    ),
    "scaled by the score": ("(score * table[h, kv_idx]).sum()", "score * table.sum(-1)[:, None]"),
}


def mod_of(expression: str, **captured):
    return eval(f"lambda score, b, h, q_idx, kv_idx: {expression}", {"torch": torch, **captured})


def captured(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"place": (LENGTH, 3), "table": (2, LENGTH, 4), "weights": (4,), "frames": (LENGTH, 3, 3)}
    return {name: torch.randn(shape, generator=generator).to(device).requires_grad_() for name, shape in shapes.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_vectors_and_their_gradients(name, device):
    values, (expression, reference) = captured(device), EXPRESSIONS[name]
    q, k, v, gradient = torch.randn(4, 2, 2, LENGTH, 16, device=device)
    out = flex_attention(q, k, v, mod_of(expression, **values))
    exact, *_ = dense_attention(q, k, v, mod_of(reference, **values))
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    wanted = [t for name, t in values.items() if name in expression]
    got, expected = (torch.autograd.grad(o, wanted, gradient.to(o.dtype)) for o in (out, exact))
    for g, e in zip(got, expected, strict=True):
        assert (g - e).norm() <= 1e-4 * e.norm()


@pytest.mark.parametrize(
    "form",
    [
        "torch.any(x > 0, dim=()).sum()",
        "torch.all(x > 0, dim=[]).sum()",
        "x.amax(dim=())",
        "torch.einsum('i,i,j->j', x, x, x.half()).sum()",
        "torch.einsum('ij,j->i', x[:, None], x[:1].half()).sum()",
        "torch.nn.functional.linear(x, torch.stack([x, x]), x[0].half()).sum()",
    ],
)
def test_as_torch_has_them_of_other_forms(form):
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    found = evaluate_mod(lambda s, b, h, m, n: s * 0 + eval(form, {"torch": torch, "x": rows[n]}), torch.zeros(1, 1, 1, 20))
    expected = torch.stack([eval(form, {"torch": torch, "x": row}) for row in rows]).float()
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-3, atol=1e-3)


def test_integers_are_summed_in_int64_and_halves_in_float32():
    numbers = torch.tensor([[100, 100, 100]], dtype=torch.uint8)
    halves = torch.tensor([[60000.0, 60000.0, -60000.0]], dtype=torch.float16)
    mask = lambda b, h, q_idx, kv_idx: (numbers[q_idx].sum() == 300) & (halves[q_idx].sum(-1) == 60000.0)  # noqa: E731
    assert create_mask(mask, None, None, 1, 1, "cpu").item()
    assert create_block_mask(mask, None, None, 1, 1, "cpu").sparsity() == 0.0


def _of_rows(form: str, rows: torch.Tensor) -> torch.Tensor | None:
    """torch's results for rows; None where it refuses them."""
    try:
        return torch.stack([in_torch(form, rows, place) for place in range(len(rows))])
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _traced(form: str, rows: torch.Tensor) -> torch.dtype | None:
    try:
        return traced_dtype(of_row(form), {"x": rows, "m": matrices(rows)})
    except ModError:
        return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_reductions(dtype):
    """Of rows of all dtypes; what torch refuses is refused."""
    rows = rows_of(dtype)
    for form in REDUCTIONS:
        exact = _of_rows(form, rows)
        assert _traced(form, rows) == (None if exact is None else exact.dtype), form


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int32], ids=str)
def test_values_of_reductions(dtype, device):
    """As torch has them, or as exact as the result's dtype is: all in one kernel."""
    rows = rows_of(dtype)
    wanted = {form: found for form in REDUCTIONS if (found := _of_rows(form, rows)) is not None}
    lines = [f"    found = torch.where(kv_idx == {i}, ({of_row(form)}).float(), found)" for i, form in enumerate(wanted)]
    namespace = {"torch": torch, "F": torch.nn.functional, "x": rows.to(device), "m": matrices(rows).to(device)}
    exec("\n".join(["def mod(score, b, h, q_idx, kv_idx):\n    found = score", *lines, "    return found"]), namespace)
    found = evaluate_mod(namespace["mod"], torch.zeros(1, 1, len(rows), len(wanted), device=device))[0, 0].cpu()
    for i, (form, exact) in enumerate(wanted.items()):
        rounding = torch.finfo(exact.dtype).eps if exact.dtype in (torch.float16, torch.bfloat16) else 1e-6
        others, plain = [exact.float()], _of_rows(form, rows.double()) if dtype.is_floating_point else None
        others += [] if plain is None else [plain.to(exact.dtype).float()]
        close = [torch.isclose(found[:, i], other, rtol=2 * rounding, atol=1e-6, equal_nan=True) for other in others]
        assert torch.stack(close).any(0).all(), (form, found[:, i], others)


@pytest.mark.parametrize(
    "text, dense",
    [
        ("(tags[q_idx] == tags[kv_idx]).any()", "(tags[:, None] == tags).any(-1)"),
        ("(tags[q_idx] >= tags[kv_idx]).all(-1)", "(tags[:, None] >= tags).all(-1)"),
        ("torch.cdist(place[q_idx][None], place[kv_idx][None]).squeeze() < 2.0", "torch.cdist(place, place) < 2.0"),
        ("(place[q_idx].unsqueeze(0) * place[kv_idx]).sum((0, 1)) > 0", "place @ place.T > 0"),
        ("(tags[q_idx] > (kv_idx % 9)[None]).all()", "(tags[:, None] > (torch.arange(LENGTH) % 9)[:, None]).all(-1)"),
        (
            "((q_idx - kv_idx)[..., None][None] < tags[kv_idx]).any()",
            "((torch.arange(LENGTH)[:, None] - torch.arange(LENGTH))[..., None] < tags).any(-1)",
        ),
        ("(q_idx[...] >= kv_idx[()])", "torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH)"),
    ],
)
def test_masks_of_vectors(text, dense):
    values = {"torch": torch, "LENGTH": LENGTH, "place": captured("cpu")["place"].detach(), "tags": torch.randint(0, 9, (LENGTH, 3))}
    mask = eval(f"lambda b, h, q_idx, kv_idx: {text}", values)
    assert torch.equal(create_mask(mask, None, None, LENGTH, LENGTH, "cpu")[0, 0], eval(dense, values))
    blocks = create_block_mask(mask, None, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    q, k, v = torch.randn(3, 1, 1, LENGTH, 16)
    exact, *_ = dense_attention(q, k, v, None, lambda *_: eval(dense, values))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks).double(), exact, atol=1e-5, rtol=1e-5)


INDEXED = (  # by lists and tensors, as torch indexes by them
    "place[q_idx, [0, 2]].sum()",
    "place[q_idx][[2, -1]].prod()",
    "place[q_idx, torch.tensor([0, 2])][1]",
    "place[q_idx].exp()[torch.tensor([0, 2])].sum()",
    "frames[q_idx, [0, 2], [1, 1]].sum()",
    "frames[[0, 1], :, kv_idx % 3][1, 2]",
    "frames[[0, 1], kv_idx % 3, :][1, 2]",
    "frames[q_idx, [[0], [2]], [1, 0]][1, 0]",
    "frames[q_idx, None, 1:, [0, 2]].sum()",
    "table[h, [0, 7], 1:].sum()",
    "weights[tags[q_idx]].prod()",
    "table[1, tags[q_idx], torch.stack([h, h + 1, h])][1]",
    "torch.stack([place[q_idx], place[kv_idx]])[[1, 0], [0, 2]].prod()",
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", INDEXED)
def test_indices_of_several_elements(text, device):
    values = {name: t.detach() for name, t in captured(device).items()}
    values["tags"] = torch.randint(0, 4, (LENGTH, 3), generator=torch.Generator().manual_seed(2)).to(device)
    found = evaluate_mod(mod_of(text, **values), torch.zeros(1, 2, LENGTH, 7, device=device))[0].cpu()
    names = {"torch": torch, **{name: t.cpu() for name, t in values.items()}}
    for h, q, k in ((0, 0, 0), (1, 3, 4), (0, 49, 6), (1, 20, 5)):
        torch.testing.assert_close(
            found[h, q, k], eval(text, names, {"h": torch.tensor(h), "q_idx": torch.tensor(q), "kv_idx": torch.tensor(k)})
        )


def test_a_tensor_of_indices_of_two_dimensions():
    """It is one index, not one for each dimension."""
    table, places = torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1], [2, 3]])
    scores = torch.randn(1, 1, 7, 9, generator=torch.Generator().manual_seed(1))
    found = evaluate_mod(lambda s, b, h, i, j: s + (2 * table[j])[places].sum() + (2 * table[j, 0])[places % 3].sum(), scores)
    expected = scores + torch.stack([(2 * row)[places].sum() + (2 * row[0])[places % 3].sum() for row in table])
    torch.testing.assert_close(found, expected)


def test_an_index_in_a_tensor_is_read_at_every_call():
    """In host memory it is a part of the trace, which fits no other one."""
    values, places = torch.randn(4, 3), torch.tensor([0, 2])
    mod = mod_of("values[q_idx, places].sum()", values=values, places=places)
    for chosen in ([0, 2], [1, 1], [2, 0]):
        places.copy_(torch.tensor(chosen))
        found = evaluate_mod(mod, torch.zeros(1, 1, 4, 1))[0, 0, :, 0]
        torch.testing.assert_close(found, values[:, places].sum(-1))


def test_what_is_joined_has_one_dtype():
    """That of torch, which has positions in int64."""
    huge = torch.tensor([2**30, 5], dtype=torch.int32)
    mod = mod_of("torch.stack([q_idx, huge[kv_idx]]).mul(3).amax() == 3 * 2**30", huge=huge)
    assert evaluate_mod(lambda s, *i: mod(s, *i) * 1.0, torch.zeros(1, 1, 1, 2)).flatten().tolist() == [1.0, 0.0]
    assert evaluate_mod(mod_of("torch.stack([q_idx, score]).sum()"), torch.full((1, 1, 1, 1), 0.75)).item() == 0.75


def test_sizes_of_a_part():
    mod = mod_of(
        "score + t[h].numel() * 1000 + t[h].size(0) * 100 + t[h].size()[1] * 10 + t[h].ndim + t[h].exp().nelement()", t=torch.ones(2, 3, 4)
    )
    assert evaluate_mod(mod, torch.zeros(1, 1, 1, 1)).item() == 12000 + 300 + 40 + 2 + 12


NUMBERS_IN_TENSORS = [
    *("(place[kv_idx] * 2)[n]", "(pairs[kv_idx] * 1)[n - 1, 2]", "(pairs[kv_idx] * 1)[n - 1].sum()", "(place[kv_idx] * 1)[two.max()]"),
    *("place[kv_idx, :n].sum()", "place[kv_idx][:n].sum()", "place[kv_idx, ::n].sum()", "(pairs[kv_idx] * 1)[:, n].sum()"),
    *("(place[kv_idx] * 1).narrow(0, n - 1, 2).sum()", "(place[kv_idx] * 1).select(0, n)", "(place[kv_idx].roll(n) * place[kv_idx]).sum()"),
    *("(pairs[kv_idx] * 1).split(n)[0].sum()", "place[kv_idx].chunk(n)[0].sum()", "place[kv_idx].repeat(n).sum()"),
    *(
        "pairs[kv_idx].flatten().view(n, -1)[0].sum()",
        "(pairs[kv_idx] * 1).flip(n - 1)[0, 0]",
        "pairs[kv_idx].transpose(0, n - 1)[0].sum()",
    ),
    *(
        "torch.stack([place[kv_idx], place[q_idx]], n - 1)[1].sum()",
        "pairs[kv_idx].cumsum(n - 1)[1].sum()",
        "pairs[kv_idx].argmax(n - 1).sum()",
    ),
    *("score.expand(n).sum()", "pairs[kv_idx].softmax(n - 1)[0, 1]", "place[kv_idx].norm(p=n)", "place[kv_idx].norm(n * 1.0)"),
    *(
        "place[kv_idx].max(n).sum()",
        "torch.max(place[kv_idx], n).sum()",
        "pairs[kv_idx].sum(n - 1)[0]",
        "pairs[kv_idx].diagonal(n - 1).sum()",
    ),
]


@pytest.mark.parametrize("expression", NUMBERS_IN_TENSORS)
def test_a_number_in_a_tensor_is_read_at_every_call(expression):
    """As an index, an end of a slice, a size or a dimension of a vector, whether it is another tensor or changed in place."""
    place, pairs = torch.randn(4, 3), torch.randn(4, 2, 3)
    one, changed = torch.tensor(1), torch.tensor(2)
    for n in (one, torch.tensor(2), changed, one, changed.fill_(1)):
        names = {"torch": torch, "place": place, "pairs": pairs, "n": n, "two": torch.stack([torch.zeros_like(n), n])}
        mod = eval(f"lambda score, b, h, q_idx, kv_idx: score + {expression}", names)
        found = evaluate_mod(mod, torch.ones(1, 1, 4, 4))
        wanted = [eval(expression, names, {"score": torch.ones(()), "q_idx": i, "kv_idx": j}) for i in range(4) for j in range(4)]
        torch.testing.assert_close(found.flatten(), 1 + torch.stack(wanted).float(), msg=f"{expression} with {n}")


def test_a_place_in_a_tensor_compiles_nothing():
    table = torch.randn(4, 3)
    graphs = {id(bind(mod_of("score + (table[kv_idx] * 2)[n]", table=table, n=torch.tensor(n)), "score")[0]) for n in range(3)}
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "expression",
    [
        *("score.sum()", "score.mean(0)", "torch.max(score)", "score.amax(-1)", "torch.any(score > 0) * 2.0", "(kv_idx > 1).all() * 2.0"),
        *(
            "kv_idx.sum()",
            "torch.max(score, kv_idx * 1.0)",
            "score.prod()",
            "(score * 2).sum(dtype=torch.int32)",
            "score.sum(0, keepdim=True)",
        ),
    ],
)
def test_a_scalar_is_reduced_to_itself(expression):
    scores = torch.randn(1, 1, 1, 3)
    found = evaluate_mod(mod_of(f"score + {expression}"), scores).flatten()
    for j in range(3):
        score = scores[0, 0, 0, j]
        assert found[j] == (score + eval(expression, {"torch": torch, "score": score, "kv_idx": torch.tensor(j)})).float()


def test_another_length_of_vectors_is_another_kernel_and_other_tensors_are_not():
    def mod(place):
        return lambda score, b, h, q_idx, kv_idx: score - (place[q_idx] - place[kv_idx]).abs().sum(-1)

    first = bind(mod(torch.randn(20, 3)), "score")[0]
    before = cache_info()
    assert bind(mod(torch.randn(30, 3)), "score")[0] is first and cache_info().traces == before.traces
    assert bind(mod(torch.randn(20, 4)), "score")[0] is not first


@pytest.mark.parametrize(
    "expression, message",
    [
        ("score + long[q_idx].sum(-1)", r"a vector of 65 elements of a captured tensor of shape \(50, 65\)"),
        ("score * place[q_idx]", "returns a vector of 3 elements"),
        ("place[q_idx]", r"returns a tensor of shape \(3,\)"),
        ("score + place[q_idx].median()", "Tensor.median is not a supported operation"),
        ("score + (place[q_idx] + table[h, q_idx]).sum()", r"add of vectors of shapes \(3,\) and \(4,\)"),
        ("score + place[q_idx].sum(1)", "sum with dim=1"),
        ("score + (score * long).sum()", r"a part of shape \(50, 65\)"),
        ("weights[place[q_idx].long()]", "returns a vector of 3 elements"),
        ("score + weights[place[q_idx]].sum()", "an index of torch.float32"),
        ("score + weights[[h, h + 1]].sum()", "a tensor is indexed by a list of symbols"),
        ("score + place[q_idx, [0, 3]].sum()", r"an index of \[0, 3\] into a dimension of 3 elements"),
        ("score + place[q_idx, [True, False, True]].sum()", r"an index of \[True, False, True\]"),
        ("score + place[q_idx, torch.tensor([1, 0, 1], dtype=torch.uint8)].sum()", "an index of torch.uint8, which torch takes for a mask"),
        ("score + table[[0, 1], q_idx, [0, 1, 2]].sum()", "torch refuses an index: shape mismatch"),
        ("score + torch.dot(place[q_idx], place[kv_idx].half())", r"a product of torch.float32 and torch.float16"),
        ("score + place[q_idx] @ place[kv_idx].int()", r"a product of torch.float32 and torch.int32"),
        ("score + torch.inner(place[q_idx], place[kv_idx].half())", r"a product of torch.float32 and torch.float16"),
        ("score + torch.einsum('i,i->', place[q_idx], place[kv_idx].half())", "an einsum that sums products of torch.float32 and"),
        ("score + torch.linalg.cross(place[q_idx], place[kv_idx].half()).sum()", "cross of torch.float32 and torch.float16"),
        ("score + torch.linalg.vecdot(place[q_idx], place[kv_idx].half())", "vecdot of torch.float32 and torch.float16"),
        ("score + torch.dot(table[:, q_idx], table[:, q_idx]).sum()", r"dot of shapes \(\d+, 4\) and \(\d+, 4\)"),
        ("score + torch.mv(table[:, q_idx], table[:, q_idx]).sum()", "mv of shapes"),
        ("score + torch.mm(table[:, q_idx], table[0, q_idx]).sum()", "mm of shapes"),
        ("score + torch.outer(table[:, q_idx], place[q_idx]).sum()", "outer of shapes"),
        ("score + table[:, q_idx].amax((0, -2)).sum()", r"amax with dim=\(0, -2\), a dimension twice"),
        ("score + (place[q_idx].int() ** -1).sum()", "an integer to a negative power"),
    ],
)
def test_what_is_refused(expression, message):
    with pytest.raises(ModError, match=f"(?s){message}.*File"):
        bind(mod_of(expression, long=torch.randn(50, 65), **captured("cpu")), "score")


@pytest.mark.parametrize("device", DEVICES)
def test_one_element_is_a_scalar(device):
    """A learned number is often of shape (1,), and torch's compiled kernels take what it makes of a score."""
    q, k, v = torch.randn(3, 1, 1, 20, 16, device=device, generator=torch.Generator(device).manual_seed(0)).unbind()
    weight, bias, row = (torch.rand(shape, device=device).requires_grad_() for shape in ((1,), (1, 1), (20, 1)))
    limit = torch.full((1,), 5, device=device)

    def dense(scores, mask=None):
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v

    scores, i = q @ k.mT / 4, torch.arange(20, device=device)
    cases = [
        (lambda score, b, h, m, n: score * weight, scores * weight),
        (lambda score, b, h, m, n: score + bias * (m - n), scores + bias * (i[:, None] - i)),
        (lambda score, b, h, m, n: torch.where(m >= n, row[n], score), torch.where(i[:, None] >= i, row[:, 0], scores)),
        (lambda score, b, h, m, n: row[n], row[:, 0].expand(20, 20)),
    ]
    for mod, expected in cases:
        outs = flex_attention(q, k, v, mod), dense(expected)
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
        found, wanted = (torch.autograd.grad(out.square().sum(), (weight, bias, row), allow_unused=True) for out in outs)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    near = create_block_mask(lambda b, h, m, n: m - n < limit, None, None, 20, 20, device)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=near), dense(scores, i[:, None] - i < 5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name, function",
    {
        "std": lambda x: x.std(-1),
        "std without correction": lambda x: torch.std(x, -1, correction=0),
        "order 0.5": lambda x: torch.linalg.vector_norm(x, 0.5, -1),
        "order 1.5": lambda x: torch.linalg.vector_norm(x, 1.5, -1),
        "order 2": lambda x: x.norm(dim=-1),
        "order -1": lambda x: torch.linalg.vector_norm(x, -1, -1),
    }.items(),
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_gradients_of_norms_and_deviations_at_0(name, function, device):
    """Where torch has 0: of rows that are all equal, of elements that are 0."""
    rows = torch.tensor([[0.0, 1.0, 2.0], [2.0, 2.0, 2.0], [1.0, 0.0, 3.0], [0.0, 0.0, 0.0]], device=device)
    q, k, v = torch.randn(3, 1, 1, 4, 16, device=device, generator=torch.Generator(device).manual_seed(0)).unbind()
    found, exact = rows.clone().requires_grad_(), rows.double().requires_grad_()
    out = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + function(found[q_idx]) * kv_idx)
    (gradient,) = torch.autograd.grad(out.square().sum(), found)
    scores = q.double() @ k.double().mT / 4 + function(exact)[:, None] * torch.arange(4, device=device)
    (expected,) = torch.autograd.grad((scores.softmax(-1) @ v.double()).square().sum(), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-3)
