"""Random calls whose score_mod has dot products of long rows, and the same mod for dense attention, where rows are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from hypothesis import strategies as st
from torch.autograd import forward_ad

from flexpress import create_block_mask, flex_attention
from flexpress.codegen.mod.graphs.loads import dots_of
from flexpress.codegen.mod.tracing.bind import bind
from support.dense import dense_attention
from support.evaluate import make_mod
from support.tangents import SECOND, random_like, twice_differentiated

QUERIES = ("qr[b, h, q_idx]", "qr[b, h // 2, q_idx // 2]", "by_q[q_idx]", "by_q[places[q_idx]]", "qr[0, h, q_idx - 3]")
KEYS = ("kr[b, kv_idx]", "kr[0, kv_idx // 3 + 1]", "by_k[kv_idx, h]", "spread[b, kv_idx]")
DOTS = ("torch.dot({q}, {k})", "({q} * {k}).sum(-1)", "torch.linalg.vecdot({k}, {q})")
MODS = (
    "score + 0.2 * {d}",
    "score + {d} * 0.1 + torch.tanh({e}) * slopes[h]",
    "score * torch.sigmoid({d} * 0.1)",
    "torch.where(q_idx > kv_idx, score + {d} * 0.1, {e} * 0.2)",
)


@dataclass(kw_only=True)
class DotProblem:
    text: str
    dtype: torch.dtype
    rows: torch.dtype
    heads: tuple[int, int]
    lengths: tuple[int, int]
    width: int
    masked: bool
    deterministic: bool

    def captured(self, device: str) -> dict[str, torch.Tensor]:
        """What the mod reads: some rows are missing, and some are there that no key has."""
        generator, (Q, K) = torch.Generator().manual_seed(self.width), self.lengths

        def random(*shape):
            return torch.randn(shape, generator=generator).to(device, self.rows)

        found = {"qr": random(2, self.heads[0], Q, self.width), "kr": random(K + 5, 2, self.width).transpose(0, 1)}
        found["kr"][:, K:] = float("nan")
        found |= {"by_q": random(Q - 2, self.width), "by_k": random(K, self.heads[0], self.width), "slopes": random(self.heads[0])}
        found["spread"] = random(1, self.lengths[1], self.width)
        found = {name: t.requires_grad_() for name, t in found.items()}
        return found | {"places": torch.arange(Q, device=device, dtype=torch.int32) * 7 % Q}

    def inputs(self, device: str) -> list[torch.Tensor]:
        generator, (Q, K) = torch.Generator().manual_seed(3), self.lengths
        shapes = [(2, self.heads[0], Q, 32), *[(2, self.heads[1], K, 32)] * 2]
        return [torch.randn(s, generator=generator).to(device, self.dtype).requires_grad_() for s in shapes]

    def mod(self, values: dict):
        return make_mod(self.text, "score", values | {"spread": values["spread"].expand(2, self.lengths[1], self.width)})

    def dense_mod(self, values: dict):
        """The mod on whole grids of positions, in float64."""
        values = {**values, "spread": values["spread"].expand(2, self.lengths[1], self.width)}
        functions = {"torch": SimpleNamespace(tanh=torch.tanh, sigmoid=torch.sigmoid, where=torch.where, dot=_dot)}
        functions["torch"].linalg = SimpleNamespace(vecdot=_dot)
        return make_mod(self.text.replace(".float()", ""), "score", {name: _Gathered(t) for name, t in values.items()} | functions)


def _dot(one, other):
    return (one * other).sum(-1)


class _Gathered:
    """A tensor that is indexed by grids, where an index outside reads 0 as in a kernel."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.double() if tensor.is_floating_point() else tensor

    def __getitem__(self, index):
        index = [torch.as_tensor(i, device=self.tensor.device).long() for i in (index if isinstance(index, tuple) else (index,))]
        index = [torch.where(i < 0, i + n, i) for i, n in zip(index, self.tensor.shape, strict=False)]
        inside = torch.stack(torch.broadcast_tensors(*[(i >= 0) & (i < n) for i, n in zip(index, self.tensor.shape, strict=False)])).all(0)
        found = self.tensor[tuple(i.clamp(0, n - 1) for i, n in zip(index, self.tensor.shape, strict=False))]
        return torch.where(inside.reshape(inside.shape + (1,) * (found.ndim - inside.ndim)), found, 0.0)


@st.composite
def dot_problems(draw, device: str) -> DotProblem:
    def dot() -> str:
        read = "{}.float()" if rows != torch.float32 else "{}"  # torch rounds a dot product to its rows' dtype
        q, k = (read.format(draw(st.sampled_from(texts))) for texts in (QUERIES, KEYS))
        return draw(st.sampled_from(DOTS)).format(q=q, k=k)

    rows = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return DotProblem(
        text=draw(st.sampled_from(MODS)).format(d=dot(), e=dot()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        rows=rows,
        heads=draw(st.sampled_from([(2, 2), (4, 2), (4, 1)])),
        lengths=draw(st.sampled_from([(20, 40), (70, 90), (130, 64), (64, 128)])),
        width=draw(st.sampled_from([17, 24, 40, 64])),
        masked=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 40) & (kv_idx - q_idx < 50)


def check_dots(p: DotProblem, device: str) -> None:
    """The output, lse and gradients of everything against dense attention in float64."""
    values, inputs = p.captured(device), p.inputs(device)
    assert dots_of(bind(p.mod(values), "score")[0])
    mask = create_block_mask(near, None, None, *p.lengths, device) if p.masked else None
    out, aux = flex_attention(
        *inputs, p.mod(values), block_mask=mask, enable_gqa=p.heads[0] != p.heads[1], return_lse=True, deterministic=p.deterministic
    )
    exact, lse, _ = dense_attention(*(t.double() for t in inputs), p.dense_mod(values), near if p.masked else None)
    tight = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[p.dtype]
    torch.testing.assert_close(out.double(), exact, atol=tight, rtol=tight)
    torch.testing.assert_close(aux.double(), lse, atol=1e-5, rtol=1e-5)
    leaves = {**dict(zip("qkv", inputs, strict=True)), **{n: t for n, t in values.items() if t.requires_grad and n in p.text}}
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    got, expected = (torch.autograd.grad(o, list(leaves.values()), upstream.to(o.dtype)) for o in (out, exact))
    for (name, leaf), g, e in zip(leaves.items(), got, expected, strict=True):
        loose = 2e-5 if leaf.dtype == p.dtype == torch.float32 == p.rows else 2e-2
        assert (g.double() - e).norm() <= loose * e.norm() + 1e-6, (name, (g.double() - e).norm() / e.norm())


def check_dot_derivatives(p: DotProblem, device: str) -> None:
    """The tangents of the output and lse, and second derivatives in everything, against dense attention in float64."""
    values, inputs = p.captured(device), p.inputs(device)
    mask = create_block_mask(near, None, None, *p.lengths, device) if p.masked else None
    learned = [name for name, t in values.items() if t.requires_grad and name in p.text]
    x = [t.detach() for t in (*inputs, *(values[name] for name in learned))]
    direction = random_like(x, p.width + 1)
    options = {"enable_gqa": p.heads[0] != p.heads[1], "deterministic": p.deterministic}

    def ours(*x):
        mod = p.mod(values | dict(zip(learned, x[3:], strict=True)))
        return flex_attention(*x[:3], mod, block_mask=mask, return_lse=True, **options)

    def dense(*x):
        mod = p.dense_mod(values | dict(zip(learned, x[3:], strict=True)))
        out, lse, _ = dense_attention(*(t.double() for t in x[:3]), mod, near if p.masked else None)
        return out, torch.where(lse.isinf(), 0.0, lse)  # of rows with nothing to attend to

    with forward_ad.dual_level():
        duals = map(forward_ad.unpack_dual, ours(*map(forward_ad.make_dual, x, direction)))
        found = [part.double() for dual in duals for part in (dual.primal, dual.tangent)]
    found[2] = torch.where(found[2].isinf(), 0.0, found[2])
    exact_x, exact_direction = ([t.double() for t in tensors] for tensors in (x, direction))
    (out, lse), (out_t, lse_t) = torch.func.jvp(dense, tuple(exact_x), tuple(exact_direction))
    loose = SECOND[p.dtype] if p.rows == p.dtype == torch.float32 else SECOND[torch.bfloat16]
    for name, got, want in zip(("out", "its tangent", "lse", "its tangent"), found, (out, out_t, lse, lse_t), strict=True):
        assert (got - want).norm() <= loose / 4 * want.norm() + 1e-6, (name, (got - want).norm() / want.norm())

    weights = random_like([out, lse], p.width + 2)
    found = twice_differentiated(ours, x, [weights[0].to(p.dtype), weights[1].float()], direction)
    exact = twice_differentiated(dense, exact_x, weights, exact_direction)
    for name, got, want in zip([*"qkv", *learned, "d_out", "d_lse"], found, exact, strict=True):
        assert (got.double() - want).norm() <= loose * want.norm() + 1e-5, (name, (got.double() - want).norm() / want.norm())
