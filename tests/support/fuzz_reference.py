"""The fuzzer's reference: dense attention in float64, whose mods torch runs on tensors of indices, and what a kernel may be off by.

The tolerance comes from data. The same problem is computed again as a kernel would, with its roundings (q, k, v, weights, output and
gradients in their dtype, all else in float32), and with noise on every operation of the mods that rounds: `samples`. Beside that goes a
bound from the roundings alone, to first order. A result must be within a few times both, element by element; its norm within about twice
that of the samples' errors, which is what finds errors that are small and everywhere.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from flexpress.codegen.mod.table.ops import OPS
from support.evaluate import EPS, LARGEST, SMALLEST, default_dtype
from support.evaluate import Noise as AnyNoise
from support.fuzz_mods import in_working_precision, reference_namespace

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half an ulp of 1
MASKED = -math.inf


_FORMULAS = SimpleNamespace(relu=torch.relu, **{name: OPS[name].expand for name in ("gelu", "silu", "softplus", "logsigmoid")})


class Noise(AnyNoise):
    """Noise on what float32 rounds; what it has exactly stays. On any device.

    A GPU contracts `x * y - z` to one operation: what is added may be a product that was not rounded. A fast tanh is off by
    up to 2**-11 of its value, and by the same wherever its operand is the same: such errors do not average out over a row.
    """

    TANH = 2.0**-11

    def __init__(self, seed: int, device: torch.device, approximate: bool) -> None:
        super().__init__(seed)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.contracts, self.approximate = device.type == "cuda", approximate

    def numbers(self, value):
        """From -1 to 1."""
        numbers = torch.rand(value.shape, generator=self.generator, dtype=value.dtype, device=self.generator.device) * 2 - 1
        return numbers.to(value.device)

    def blurred(self, value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        noise = self.numbers(value)
        value = torch.where(value.abs() > LARGEST, value.sign() * math.inf, value)
        off = value * (1 + noise * self.AMOUNT) + noise * SMALLEST
        return torch.where(value.isfinite() & (value.float().double() != value), off, value)

    def unrounded(self, value):
        """A value that may be a product, as it was before it was rounded."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return torch.where(value.isfinite(), value * (1 + self.numbers(value) * EPS), value)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        alpha = (kwargs or {}).get("alpha", 1)
        if alpha != 1 and isinstance(args[1], torch.Tensor) and args[1].is_floating_point():  # two operations that round
            kwargs, args = {}, (args[0], self.blurred(args[1] * alpha))
        if self.contracts and name in ("add", "sub", "rsub"):
            args = tuple(map(self.unrounded, args))
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self.approximate and name == "tanh":
            sign = 1 if torch.rand((), generator=self.generator, device=self.generator.device) < 0.5 else -1
            result = result * (1 + sign * self.TANH * (1 + self.numbers(result)) / 2)
        return result


@dataclass
class Problem:
    """Attention of (Z, Hq, M, D) queries to (Z or 1, Hkv, N, D) keys and their values.

    b, h, m, n  int64 indices that broadcast to (Z, Hq, M, N): what the mods are told
    base        bool, broadcasting too: which pairs there are at all; None: all
    mods        source of score_mod and mask_mod ("" where there is none); `captured` what they read, by name
    d_out, d_lse, learned   for gradients: of the output, of lse or None, and the names in `captured` of tensors that want gradients
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    b: torch.Tensor
    h: torch.Tensor
    m: torch.Tensor
    n: torch.Tensor
    mods: str = ""
    captured: dict = field(default_factory=dict)
    scale: float | None = None
    base: torch.Tensor | None = None
    d_out: torch.Tensor | None = None
    d_lse: torch.Tensor | None = None
    learned: tuple[str, ...] = ()
    prescaled: bool = False
    tf32: bool = False
    huge: bool = False  # scores are exact however large: what is rounded is their distance from the largest

    @property
    def on_gpu(self) -> bool:
        return self.q.is_cuda

    @property
    def approximate(self) -> bool:
        """Do kernels take faster spellings than float32's?"""
        return self.on_gpu and self.q.dtype != torch.float32

    def mod(self, name: str, precision: torch.dtype, leaves: dict | None = None, formulas: bool = False) -> Callable | None:
        """score_mod or mask_mod, None if there is none. `formulas`: what kernels write in other operations is written so."""
        if f"def {name}(" not in self.mods:
            return None
        namespace = reference_namespace(self.captured, precision)
        if leaves:
            namespace |= reference_namespace(leaves, precision)
        if formulas:
            namespace["F"] = _FORMULAS
        exec(in_working_precision(self.mods), namespace)
        return namespace[name]


@dataclass
class Answer:
    """out, lse, max_scores and gradients (dq, dk, dv, then learned tensors) by name, and what bounds need of the way to them."""

    found: dict[str, torch.Tensor]
    visible: torch.Tensor
    parts: dict[str, torch.Tensor] = field(default_factory=dict)


def solve(p: Problem, sample: int | None = None) -> Answer:
    """The exact answer; or a sample of what a kernel may make of it: 0 plain, others with noise."""
    exact = sample is None
    dtype = p.q.dtype
    T = torch.float64 if exact else torch.float32
    scale = p.q.shape[-1] ** -0.5 if p.scale is None else p.scale
    generator = torch.Generator(device=p.q.device).manual_seed(sample or 0)

    def rounded(t):
        return t if exact else t.to(dtype).to(T)

    def short(t):  # as tensor cores take it
        if exact or not p.tf32 or dtype != torch.float32:
            return t
        return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)

    Z, Hq, M, _ = p.q.shape
    group = Hq // p.k.shape[1]
    q, k, v = (t.detach().to(T) for t in (p.q, p.k, p.v))
    k, v = (t.expand(Z, -1, -1, -1).repeat_interleave(group, 1) for t in (k, v))
    if p.prescaled:  # scores are those of the queries times scale in their dtype, in the backward pass, too
        raw = short((p.q.detach().float() * scale).to(dtype).to(T)) @ short(k).transpose(-1, -2)
    else:
        raw = (short(q) @ short(k).transpose(-1, -2)) * scale
    if sample:
        size = (q.abs() @ k.abs().transpose(-1, -2)) * abs(scale) / math.sqrt(q.shape[-1])
        ulps = 2.0 if p.approximate else 1.0  # tensor cores cut off what they add
        raw = raw + torch.randn(raw.shape, generator=generator, device=raw.device) * ulps * 2.0**-23 * (size + raw.abs())
    shape = raw.shape
    mask_mod, score_mod = p.mod("mask_mod", T), p.mod("score_mod", T)
    with warnings.catch_warnings(), default_dtype(T):
        warnings.simplefilter("ignore")
        visible = torch.ones((), dtype=torch.bool, device=raw.device) if p.base is None else p.base
        if mask_mod is not None:
            visible = visible & mask_mod(p.b, p.h, p.m, p.n)
    visible = visible.expand(shape)
    s = raw if score_mod is None else run_mod(p, "score_mod", raw, (p.b, p.h, p.m, p.n), sample).to(T).expand(shape)
    s = torch.where(visible, s, MASKED)
    highest = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*shape[:3], 1), MASKED)
    e = (s - torch.where(highest == MASKED, 0.0, highest)).exp()
    total = e.sum(-1, keepdim=True)
    divisor = torch.where(total == 0, 1.0, total)
    weight = 1.0
    if sample:  # a kernel's weights are rounded when the largest of a row is anything near 1
        weight = torch.exp2(-torch.rand(divisor.shape, generator=generator, device=raw.device, dtype=T))
    out = (short(rounded(e * weight)) @ short(v)) / (divisor * weight)
    lse = torch.where(total == 0, MASKED, highest + divisor.log())
    answer = Answer({"out": rounded(out), "lse": lse.squeeze(-1), "max_scores": highest.squeeze(-1)}, visible)
    if exact:
        answer.parts = {"s": s, "P": e / divisor, "raw": raw, "q": q, "k": k, "v": v}
    if p.d_out is None:
        return answer

    d_out = p.d_out.to(T)
    P = e / divisor
    delta = (d_out * rounded(out)).sum(-1, keepdim=True)
    if p.d_lse is not None:
        delta = delta - p.d_lse.to(T).unsqueeze(-1)
    dP = short(d_out) @ short(v).transpose(-1, -2)
    dS = torch.where(P > 0, P * (dP - delta), 0.0)
    d_raw, learned = derivatives(p, raw, dS, visible & (s > MASKED), sample)
    short_dS = short(rounded(d_raw))
    found = {
        "dq": short_dS @ short(k) * scale,
        "dk": short_dS.transpose(-1, -2) @ short(q) * scale,
        "dv": short(rounded(P)).transpose(-1, -2) @ short(d_out),
    }
    for name in ("dk", "dv"):
        found[name] = summed(found[name], p.k)
    if not exact:
        learned = {name: g.to(p.captured[name[1:]].dtype).to(g.dtype) for name, g in learned.items()}
    answer.found |= {name: rounded(g) for name, g in found.items()} | learned
    if exact:
        answer.parts |= {"dP": dP, "delta": delta, "dS": dS, "d_raw": d_raw, "d_out": d_out, "scale": torch.tensor(float(scale))}
    return answer


def summed(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient of repeated heads and batch entries, for those that there are."""
    Z, Hq = gradient.shape[:2]
    gradient = gradient.reshape(Z, like.shape[1], Hq // like.shape[1], *gradient.shape[2:]).sum(2)
    return gradient.sum(0, keepdim=True) if like.shape[0] == 1 else gradient


def run_mod(p: Problem, name: str, raw: torch.Tensor, index: tuple, sample: int | None, leaves: dict | None = None) -> torch.Tensor:
    """The scores that score_mod makes of `raw`: with noise on float64 for a sample other than 0."""
    precision = torch.float32 if sample == 0 else torch.float64
    mod = p.mod(name, precision, leaves, formulas=bool(sample))
    with default_dtype(precision), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not sample:
            return mod(raw.to(precision), *index)
        with Noise(sample, raw.device, p.approximate):
            return mod(raw.to(precision), *index)


def derivatives(p: Problem, raw: torch.Tensor, dS: torch.Tensor, seen: torch.Tensor, sample: int | None) -> tuple:
    """Gradients of the raw scores and of learned tensors (by name, "d" before it), from those of the scores.

    Of pairs that count alone: what is hidden has a gradient of zero, whatever its derivative is.
    """
    if "def score_mod(" not in p.mods:
        return dS, {}
    leaves = {
        name: p.captured[name].detach().float().to(torch.float32 if sample == 0 else torch.float64).requires_grad_() for name in p.learned
    }
    index = tuple(i.expand(raw.shape)[seen] for i in (p.b, p.h, p.m, p.n))
    precision = torch.float32 if sample == 0 else torch.float64
    inner = raw.detach()[seen].to(precision).requires_grad_()
    with torch.enable_grad():
        s = run_mod(p, "score_mod", inner, index, sample, leaves).expand(inner.shape)
        wanted = [inner, *leaves.values()]
        if s.requires_grad and inner.numel() and sample and p.on_gpu:  # create_graph: gradients are added in new tensors
            with Noise(sample, raw.device, p.approximate):
                found = torch.autograd.grad(s, wanted, dS[seen].to(s.dtype), allow_unused=True, create_graph=True)
        elif s.requires_grad and inner.numel():
            found = torch.autograd.grad(s, wanted, dS[seen].to(s.dtype), allow_unused=True)
        else:
            found = [None] * len(wanted)
    found = [torch.zeros_like(t) if g is None else g.detach() for t, g in zip(wanted, found, strict=True)]
    d_raw = torch.zeros_like(dS)
    d_raw[seen] = found[0].to(dS.dtype)
    return d_raw, {f"d{name}": g.to(dS.dtype) for name, g in zip(leaves, found[1:], strict=True)}


def bounds(p: Problem, answer: Answer) -> dict[str, torch.Tensor]:
    """By how much roundings alone may change each element, to first order, all but those inside the mods."""
    a, dtype = answer.parts, p.q.dtype
    u, f = UNIT[dtype] if dtype != torch.float32 or not p.tf32 else 2.0**-10, 2.0**-24
    P, s, q, k, v = a["P"], a["s"], a["q"], a["k"], a["v"]
    scale = abs(p.q.shape[-1] ** -0.5 if p.scale is None else p.scale)
    size = torch.where(s > MASKED, s, 0.0)
    top = torch.where(answer.found["max_scores"] > MASKED, answer.found["max_scores"], 0.0).unsqueeze(-1)
    size, top = (torch.where(s > MASKED, size - top, 0.0).abs(), top * 0) if p.huge else (size.abs(), top.abs())
    products = (q.abs() @ k.abs().transpose(-1, -2)) * scale
    E_s = f * (6 * size + 6 * top + 4 * products + 8)
    if p.tf32 and dtype == torch.float32:
        E_s = E_s + u * products / math.sqrt(q.shape[-1]) * 4
    E_lse = (P * E_s).sum(-1, keepdim=True) + f * (4 * top + 8)
    E_P = P * (E_s + E_lse)
    out = answer.found["out"]

    def spread(weights, values):
        return ((weights**2) @ (values**2)).sqrt()

    half = u if dtype != torch.float32 or p.tf32 else 4 * f
    one_by_one = f / 8 if p.on_gpu else 0.0  # a term of a sum that is added up in order: alike terms err alike
    rows, columns = q.shape[2] * (q.shape[1] // p.k.shape[1]), k.shape[2]
    E_out = E_P @ v.abs() + (2 * f + one_by_one * columns) * (P @ v.abs()) + half * (3 * spread(P, v) + out.abs())
    found = {
        "out": E_out,
        "lse": E_lse.squeeze(-1) + f * 8 * (1 + answer.found["lse"].abs().nan_to_num(0, 0, 0)),
        "max_scores": (E_s.amax(-1) if E_s.shape[-1] else E_lse.squeeze(-1)) + f * 8,
    }
    if p.d_out is None:
        return found
    dP, delta, dS, d_out = (a[name] for name in ("dP", "delta", "dS", "d_out"))
    E_delta = E_P @ v.abs()
    E_delta = (d_out.abs() * (E_delta + 4 * f * (P @ v.abs()))).sum(-1, keepdim=True)
    E_delta = E_delta + 2 * half * ((d_out * (out.abs() + spread(P, v))) ** 2).sum(-1, keepdim=True).sqrt()
    E_dP = 4 * f * (d_out.abs() @ v.abs().transpose(-1, -2))
    if p.tf32:
        E_dP = E_dP + 3 * u * spread(d_out, v.transpose(-1, -2))
    E_dS = E_P * (dP - delta).abs() + P * (E_dP + E_delta + 4 * f * (dP.abs() + delta.abs()))
    E_raw, _ = derivatives(p, a["raw"], E_dS, answer.visible & (s > MASKED), None)
    E_raw, d_raw = E_raw.abs(), a["d_raw"]
    found["dq"] = scale * (E_raw @ k.abs() + 3 * half * spread(d_raw, k)) + half * answer.found["dq"].abs()
    found["dq"] = found["dq"] + scale * one_by_one * columns * (d_raw.abs() @ k.abs())
    found["dk"] = scale * (E_raw.transpose(-1, -2) @ q.abs() + 3 * half * spread(d_raw.transpose(-1, -2), q))
    found["dk"] = found["dk"] + scale * one_by_one * rows * (d_raw.abs().transpose(-1, -2) @ q.abs())
    found["dv"] = E_P.transpose(-1, -2) @ d_out.abs() + 3 * half * spread(P.transpose(-1, -2), d_out)
    found["dv"] = found["dv"] + (4 * f + one_by_one * rows) * (P.transpose(-1, -2) @ d_out.abs())
    for name in ("dk", "dv"):
        found[name] = summed(found[name], p.k) + half * answer.found[name].abs()
    for name in p.learned:  # errors of positions add up like random numbers
        sums = []
        for seed in range(3):
            generator = torch.Generator(device=dS.device).manual_seed(seed)
            sign = torch.randint(0, 2, dS.shape, generator=generator, device=dS.device) * 2.0 - 1
            change = sign * (E_dS + half * dS.abs() + 4 * f * dS.abs())
            sums.append(derivatives(p, a["raw"], change, answer.visible & (s > MASKED), None)[1][f"d{name}"].abs())
        common = derivatives(p, a["raw"], E_dS, answer.visible & (s > MASKED), None)[1][f"d{name}"].abs()
        largest = torch.stack(sums).amax(0)
        mean = largest.square().mean().sqrt() if largest.numel() else 0.0
        own = UNIT.get(p.captured[name].dtype, f)
        found[f"d{name}"] = 2 * largest + mean + common + (own + 8 * f) * answer.found[f"d{name}"].abs() + 1e-30
    return found


def meaningful(name: str, exact: Answer, shape: torch.Size) -> torch.Tensor:
    """Which elements of a gradient have no part in a row whose softmax is NaN, as that of a visible inf or NaN is."""
    lost = exact.found["lse"].isnan() | (exact.found["lse"] == math.inf)
    if name == "dq":
        return ~lost.unsqueeze(-1)
    if name in ("dk", "dv"):
        groups = lost.any(-1)
        groups = groups.reshape(groups.shape[0], shape[1], -1).any(-1)
        return ~(groups if shape[0] > 1 else groups.any(0, keepdim=True))[..., None, None].expand(shape)
    return ~lost.any()


def shared_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(d for d, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if stride == 0 and n > 1)


@dataclass
class Difference:
    """What is wrong with a result: where, how much, and how much would be allowed."""

    name: str
    what: str


@dataclass
class Judged:
    differences: list[Difference]
    compared: float  # the share of elements with a tolerance
    worst: dict[str, tuple[float, float]]  # of every result, its largest error by element and by norm, in shares of what is allowed


ELEMENT, NORM, SAMPLES = 2.0, 1.25, {"cpu": 3, "cuda": 6}


def judge(p: Problem, results: dict[str, torch.Tensor | None]) -> Judged:
    """Compare results (out, lse, max_scores, dq, dk, dv, and "d" + name of learned tensors) with the reference."""
    exact = solve(p)
    samples = [solve(p, i) for i in range(SAMPLES[p.q.device.type])]
    allowed = bounds(p, exact)
    differences, shares, worst = [], [], {}
    for name, got in results.items():
        want, bound = exact.found[name], allowed[name]
        shared = shared_dims(p.captured[name[1:]]) if name[1:] in p.learned else ()
        if got is None:
            if want.any():
                differences.append(Difference(name, "is None"))
            continue
        if got.shape != want.shape:
            differences.append(Difference(name, f"has shape {tuple(got.shape)}, not {tuple(want.shape)}"))
            continue
        got = got.detach().double()
        others = [x.found[name].double() for x in samples]
        if shared:  # elements in one place: what they have together
            got, want, bound, *others = (t.sum(shared, keepdim=True) for t in (got, want, bound, *others))
        others = torch.stack(others)
        # a gradient of NaN or infinity is nobody's: no kernel has to agree on it
        certain = (others.isfinite() == want.isfinite()).all(0)
        if name not in ("out", "lse", "max_scores"):
            certain &= want.isfinite() & meaningful(name, exact, want.shape)
        errors = (others - want).abs().nan_to_num(0.0, 0.0, 0.0).amax(0)
        if errors.ndim == 4:
            errors = errors.amax(-1, keepdim=True).expand(want.shape)
        tolerance = ELEMENT * errors + bound + 1e-30
        limit = torch.finfo(p.q.dtype).max
        certain &= (want.abs() < 0.9 * limit) | want.isinf()
        certain &= tolerance.isfinite() | ~want.isfinite()
        same = (got == want) | (got.isnan() & want.isnan()) | ((got - want).abs() <= tolerance)
        bad = ~same & certain
        shares.append(certain.double().mean().item() if certain.numel() else 1.0)
        finite = certain & want.isfinite() & got.isfinite()
        ratio = torch.where(finite, (got - want).abs() / tolerance, 0.0)
        norm = torch.where(finite, got - want, 0.0).norm().item()
        usual = max((torch.where(finite, o - want, 0.0).norm().item() for o in others), default=0.0)
        few = max(int(finite.sum()), 1)
        alike = 0.25 if p.on_gpu else 0.05  # the part of errors that all elements have in common
        norm_allowed = NORM * usual + torch.where(finite, bound, 0.0).norm().item() * (alike + 0.8 / math.sqrt(few))
        own = UNIT[p.q.dtype] if p.huge and name == "out" else EPS  # the largest weight of all rows alike is near 1, and so rounded alike
        norm_allowed += own * torch.where(finite, want, 0.0).norm().item() + 1e-30
        worst[name] = (ratio.max().item() if ratio.numel() else 0.0, norm / norm_allowed)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            differences.append(
                Difference(
                    name,
                    f"{int(bad.sum())} of {bad.numel()} elements are wrong, the first at {at}: {got[at].item():.9g}, "
                    f"not {want[at].item():.9g} +- {tolerance[at].item():.2g}; the largest error is "
                    f"{(got - want).abs()[bad].nan_to_num(math.inf).max().item():.3g}",
                )
            )
        elif norm > norm_allowed:
            differences.append(
                Difference(
                    name,
                    f"has an error of norm {norm:.3g} (relative {norm / max(want[finite].norm().item(), 1e-30):.2e}), "
                    f"where {norm_allowed:.3g} is due",
                )
            )
    return Judged(differences, min(shares, default=1.0), worst)


def solve_mod(source: str, name: str, captured: dict, scores: torch.Tensor, index: list, found: torch.Tensor) -> Judged:
    """Compare what evaluate_mod found with the mod's values in float64; of a mask_mod exactly."""
    p = Problem(scores, scores, scores, *index, source, captured)
    if name == "mask_mod":
        mask = p.mod(name, torch.float64)(*index).expand(scores.shape)
        wrong = mask != found
        if not wrong.any():
            return Judged([], 1.0, {})
        at = tuple(wrong.nonzero()[0].tolist())
        return Judged([Difference("mask_mod", f"is {found[at].item()} at {at}; {int(wrong.sum())} of {wrong.numel()} are wrong")], 1.0, {})
    exact = run_mod(p, name, scores, tuple(index), None).expand(scores.shape).double()
    samples = torch.stack([run_mod(p, name, scores, tuple(index), i).expand(scores.shape).double() for i in range(SAMPLES["cpu"] + 1)])
    errors = (samples - exact).abs().nan_to_num(0, 0, 0).amax(0)
    tolerance = 2 * ELEMENT * errors + 2.0**-21 * exact.abs() + 2.0**-23 * scores.abs().double() + 1e-37
    got = found.double()
    certain = (samples.isfinite() == exact.isfinite()).all(0)
    bad = ~((got == exact) | (got.isnan() & exact.isnan()) | ((got - exact).abs() <= tolerance)) & certain
    sure = (tolerance < 1e-2 * (1 + exact.abs())).double().mean().item()
    if not bad.any():
        return Judged([], sure, {})
    at = tuple(bad.nonzero()[0].tolist())
    return Judged(
        [
            Difference(
                "score_mod",
                f"is {got[at].item():.9g} at {at} of score {scores[at].item():.9g}, not {exact[at].item():.9g} +- "
                f"{tolerance[at].item():.2g}; {int(bad.sum())} of {bad.numel()} are wrong",
            )
        ],
        sure,
        {},
    )
