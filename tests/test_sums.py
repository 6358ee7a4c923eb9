"""score_mods that add to the score: what is recognised, and that the Hopper kernels' statements for them, run by torch, are right."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress import mods
from flexpress.codegen.mod.expr import walk
from flexpress.codegen.mod.graphs.compute import compute
from flexpress.codegen.mod.graphs.sums import as_sum
from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.run.preview import hopper_compilation
from flexpress.codegen.text.render import render
from support.evaluate import make_mod
from support.fake_gluon import fused, limits
from support.hopper_backward import planned

Q_LEN, KV_LEN, BATCH, HEAD = 200, 300, 1, 3
CAPTURED = {
    "slopes": torch.rand(4) * 0.3,
    "half": torch.rand(4).bfloat16(),
    "by_q": torch.randn(2, Q_LEN),
    "by_k": torch.randn(2, KV_LEN),
    "by_h": torch.randn(4),
    "table": torch.randn(Q_LEN, KV_LEN),
    "padding": torch.arange(KV_LEN) < 250,
    "signed": (torch.arange(KV_LEN) % 256 - 128).to(torch.int8),
    "unsigned": (torch.arange(KV_LEN) % 256).to(torch.uint8),
    "short": (torch.arange(KV_LEN) * 200 - 30000).to(torch.int16),
    "WIDTH": 3,
    "SCALE": 0.7,
}
TERMS = [
    "slopes[h] * (kv_idx - q_idx)",
    "(q_idx - kv_idx) * half[h]",
    "(kv_idx - q_idx) / WIDTH",
    "(kv_idx - q_idx) * (slopes[h] * SCALE)",
    "(kv_idx - q_idx)",
    "-(q_idx - kv_idx) * 0.5",
    "by_k[b, kv_idx] * slopes[h]",
    "-by_k[1, kv_idx]",
    "torch.where(padding[kv_idx], 0.0, -5.0)",
    "torch.tanh(by_k[b, kv_idx])",
    "kv_idx * 0.25",
    "signed[kv_idx]",
    "unsigned[kv_idx]",
    "short[kv_idx]",
    "(padding[kv_idx] | padding[0]) * 1",
    "((kv_idx - q_idx) - unsigned[kv_idx] % 3)",
]


@st.composite
def sums(draw) -> str:
    """The score with terms around it."""
    text = "score"
    for term in draw(st.lists(st.sampled_from(TERMS), max_size=4)):
        text = draw(st.sampled_from([f"({text} + {term})", f"({term} + {text})", f"({text} - {term})"]))
    return text


def positions() -> dict:
    return {
        "b": torch.tensor(BATCH),
        "h": torch.tensor(HEAD),
        "q_idx": torch.arange(Q_LEN, dtype=torch.int32)[:, None],
        "kv_idx": torch.arange(KV_LEN, dtype=torch.int32)[None, :],
    }


def scores_of(mod, scores: torch.Tensor) -> torch.Tensor:
    graph, found = bind(mod, "score")
    count = len(graph.tensors)
    tensors = [t.double() if t.is_floating_point() else t for t in found[:count]]
    return compute(graph.result, {"score": scores, **positions()}, tensors, found[count:]).double()


@given(sums())
def test_the_parts_add_up(text):
    graph, found = bind(make_mod(text, "score", CAPTURED), "score")
    count = len(graph.tensors)
    tensors = [t.double() if t.is_floating_point() else t for t in found[:count]]
    terms, where, scores = as_sum(graph), positions(), torch.randn(Q_LEN, KV_LEN, dtype=torch.float64)
    for part, hidden in ((terms.key, {"q_idx"}), (terms.rate, {"q_idx", "kv_idx"})):
        assert part is None or not {"score", *hidden} & {n.attr for n in walk(part) if n.op == "symbol"}
    key, rate = (
        0.0 if part is None else compute(part, {"score": scores, **where}, tensors, found[count:]) for part in (terms.key, terms.rate)
    )
    exact = compute(graph.result, {"score": scores, **where}, tensors, found[count:])
    torch.testing.assert_close(scores + key + rate * (where["kv_idx"] - where["q_idx"]), exact.expand(scores.shape), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "score + score",
        "score * 2",
        "-score",
        "1.0 - score",
        "q_idx * 1.0",
        "torch.tanh(score)",
        "score.bfloat16() + 1",
        "score + slopes[h] * torch.abs(kv_idx - q_idx)",
        "score + table[q_idx, kv_idx]",
        "score + (kv_idx > q_idx)",
        "torch.where(kv_idx > q_idx, score, score - 1)",
        "score + (slopes[h] * (kv_idx - q_idx)).bfloat16()",
        "score + (kv_idx - q_idx) * (kv_idx - q_idx)",
        "score + (kv_idx - q_idx) * 2000000",
        "score + 2 * (by_q[b, q_idx] + by_k[b, kv_idx])",
        "score + by_q[b, q_idx]",
        "score + by_h[h]",
        "score + (kv_idx - q_idx + 3)",
        "score + 1e9",
        "score + (by_k[b, kv_idx] - by_q[b, q_idx])",
        "score + (kv_idx - q_idx).to(torch.int8)",
        "score + (kv_idx.to(torch.int16) - q_idx.to(torch.int16))",
    ],
)
def test_what_is_no_sum(text):
    assert as_sum(bind(make_mod(text, "score", CAPTURED), "score")[0]) is None


# The statements of printed kernels, run by torch: layouts mean nothing to it, and copies and products are left out


def _load(pointer, mask=True, other=0):
    at, values = torch.as_tensor(pointer[1]).long(), pointer[0].flatten()
    inside = torch.as_tensor(mask) & (at >= 0) & (at < len(values))
    return torch.where(inside, values[at.clamp(0, len(values) - 1)], torch.tensor(other, dtype=values.dtype))


class Pointer(tuple):
    def __add__(self, offset):
        return Pointer((self[0], self[1] + offset))


class Buffer:
    """Of shared memory, holding one block's values."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def index(self, _):
        return self

    def reshape(self, _):
        return self

    def load(self, _):
        return self.values


class Buffers(tuple):
    def __new__(cls, *values: torch.Tensor):
        return super().__new__(cls, map(Buffer, values))

    def index(self, i):
        return self[i]


GL = SimpleNamespace(
    arange=lambda low, high, layout: torch.arange(low, high, dtype=torch.int32),
    float32=torch.float32,
    int32=torch.int32,
    load=_load,
    where=lambda c, x, y: torch.where(c, *(torch.as_tensor(v, dtype=torch.float32) for v in (x, y))),
    exp2=torch.exp2,
    constexpr=int,
    maximum=torch.maximum,
    minimum=lambda x, y: x.clamp(max=y),
    max=lambda x, d: x.max(d).values,
    sum=lambda x, d: x.sum(d),
    fma=fused,
    abs=torch.abs,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
)
SCALE, TO_LOG2 = 0.3, math.log2(math.e)


def defined(text: str, name: str, namespace: dict) -> None:
    """A function of a printed kernel."""
    found = re.search(rf"^def {name}\(.*?(?=^@|^def |^[A-Z]|\Z)", text, re.S | re.M)
    if found:
        exec(found[0], namespace)


def arguments(text, found: list) -> dict:
    values = dict(zip(text.args, text.values(found), strict=True))
    return {k: Pointer((v, 0)) if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def run(lines, values: dict) -> None:
    exec("\n".join(lines), values)


MODS = {
    text: make_mod(text, "score", CAPTURED)
    for text in [
        "score",
        "score + kv_idx * 0.25",
        "score - by_k[b, kv_idx] * 2",
        "score - (q_idx - kv_idx) * 0.5 + by_k[b, kv_idx]",
        "score + torch.where(padding[kv_idx], 0.0, float('-inf'))",
        "score + slopes[h] * (kv_idx - q_idx) * SCALE",
    ]
}
MODS["alibi"] = mods.alibi(CAPTURED["slopes"])


@pytest.mark.parametrize("name", MODS)
def test_statements_of_the_forward_kernel(name):
    """Two tiles of 128 queries, the second with padding rows, through blocks of 128 keys from the last one on."""
    products = torch.randn(Q_LEN, KV_LEN)
    exact = scores_of(MODS[name], products.double() * SCALE)
    weights, lse = torch.softmax(exact, 1), torch.logsumexp(exact, 1)
    plan = hopper_compilation("sm_90", MODS[name], None)
    text, mod = render(plan.spec), plan.spec.mods[0]
    stages = mod.staged("q_idx", "kv_idx")
    values = {
        "gl": GL,
        "BLOCK_N": 128,
        "COLUMNS": None,
        "z": BATCH,
        "h": HEAD,
        "KV_LEN": KV_LEN,
        "SM_SCALE": SCALE,
        "TO_LOG2": TO_LOG2,
        "EDGE": True,
        **arguments(mod, bind(MODS[name], "score")[1]),
    }
    if plan.spec.flag["SUM_IS_RAW"]:
        values["TO_LOG2"] = TO_LOG2 * SCALE
    values["HUGE"], values["STEP"] = limits(values["TO_LOG2"], text)
    values["distances_between"] = lambda start, rows: (start + torch.arange(128) - rows[:, None]).float()
    defined(text, "fold_scores", values)
    parameters = re.sub(r"#.*", "", re.search(r"def fold_scores\((.*?)\):", text, re.S)[1]).replace("\n", " ").split(",")
    parameters = [p.split("=")[0].split(":")[0].strip() for p in parameters if p.strip()]
    for first in (0, 128):
        rows = torch.arange(first, first + 128, dtype=torch.int32).clamp(max=Q_LEN - 1)
        values.update(rows=rows, upper_m=rows, m=rows[:, None], m_i=torch.full((128,), -math.inf), l_i=torch.zeros(128))
        values["shift_i"] = values["m_i"]
        run(stages.once, values)
        found = torch.zeros(128, 384)
        for start in (256, 128, 0):
            values.update(start_n=start, offs_n=start + torch.arange(128, dtype=torch.int32), qk=torch.zeros(128, 128))
            values["n"] = values["offs_n"][None, :]
            run(stages.ahead, values)
            here = products[rows.long(), start : start + 128]
            values["qk"][:, : here.shape[1]] = here
            p, alpha, values["m_i"], values["shift_i"], values["l_i"] = values["fold_scores"](*(values[p] for p in parameters))
            found *= alpha[:, None]
            found[:, start : start + 128] = p
        torch.testing.assert_close((found / values["l_i"][:, None])[:, :KV_LEN].double(), weights[rows.long()], rtol=1e-4, atol=3e-6)
        found = (values["shift_i"] + torch.log2(values["l_i"])) / math.log2(math.e)
        torch.testing.assert_close(found.double(), lse[rows.long()], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", MODS)
def test_statements_of_the_backward_kernel(name):
    """Weights of every block of 64 queries, for both consumers' 64 keys, from lse."""
    products = torch.randn(Q_LEN, KV_LEN)
    exact = scores_of(MODS[name], products.double() * SCALE)
    weights = torch.softmax(exact, 1)
    plan = planned((MODS[name], None), {"raw_tops": True})
    to_log2 = TO_LOG2 * SCALE if plan.fused.flag["SUM_IS_RAW"] else TO_LOG2
    tops, shares = exact.amax(1) * TO_LOG2 / to_log2, torch.log2(weights.amax(1))
    text, mod = render(plan.fused), plan.score
    stages = mod.staged("kv_idx", "q_idx")
    body = text[text.index("# softmax and the derivative") :]
    body = body[: body.index("weights = ")].replace("\n    ", "\n")
    values = {
        "gl": GL,
        "BLOCK_M": 64,
        "QUERIES": None,
        "z": BATCH,
        "h": HEAD,
        "Q_LEN": Q_LEN,
        "KV_LEN": KV_LEN,
        "SM_SCALE": SCALE,
        "TO_LOG2": to_log2,
        "EDGE": True,
        "slot": 0,
        "warpgroup_mma_wait": lambda _, deps: deps[0],
        **arguments(mod, bind(MODS[name], "score")[1]),
    }
    for first in range(0, KV_LEN, 64):
        keys = first + torch.arange(64, dtype=torch.int32)
        values.update(keys=keys, n=keys[:, None])
        run(stages.once, values)
        for start in range(0, Q_LEN, 64):
            rows = (start + torch.arange(64, dtype=torch.int32)).clamp(max=Q_LEN - 1)
            producers = {**values, "rows": rows, "m": rows}
            run(stages.apart, producers)
            here, expected = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.float64)
            part = products[start : start + 64, first : first + 64].T
            here[: part.shape[0], : part.shape[1]] = part
            expected[: part.shape[0], : part.shape[1]] = weights[start : start + 64, first : first + 64].T
            top, share = torch.full((64,), math.inf), torch.zeros(64)
            top[: part.shape[1]], share[: part.shape[1]] = tops[start : start + 64], shares[start : start + 64]
            values.update(
                start_m=start,
                qk=here,
                shared=SimpleNamespace(tops=Buffers(top, share), **{handed: Buffer(producers[handed]) for handed, _ in stages.handed}),
            )
            exec(body, values)
            torch.testing.assert_close(values["p"].double(), expected, rtol=1e-4, atol=1e-5)
            assert "slope" not in values  # the derivative is 1
