"""Random programs of the fuzzer that cross features: transforms of torch.func in each other; dropout, sinks and statistics of the
probabilities with masks of every form, torch.compile and checkpoints.

What they compute is compared with dense attention in float64, and may be off by a few times what dense attention in the dtype of the call
is. Mods are of a list, so that kernels are compiled once for many programs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves

import flexpress
from flexpress.codegen.plan.extras import DROPOUT_STEPS
from support.dense import positions
from support.fuzz_inputs import LAYOUTS
from support.fuzz_reference import Difference, Judged

SCORES = {  # what a mod captures: a float tensor `s` of this shape, and int `n` of shape (B,)
    "none": ((), None),
    "heads": (("H",), "score - s[h] * (q_idx - kv_idx)"),
    "batch": (("B", "H"), "torch.tanh(score * s[b, h]) + s[b, h] * kv_idx * 0.1"),
    "rows": (("M",), "score * s[q_idx] + n[b] * 0.1"),
    "pairs": (("H", "M", "N"), "score + s[h, q_idx, kv_idx] * score"),
    "distance": (("H", "M + N"), "score + s[h, q_idx - kv_idx + N]"),
    "number": ((), "torch.where(kv_idx % 3 == 1, score * s, score + s * s)"),
    "wrapped": (("max(N, 1)",), "score + s[-1 - kv_idx] * 2 + s[0]"),
    "gated": (("B", "M"), "score * torch.sigmoid(s[b, q_idx]) + (n[b] - q_idx) * 0.05"),
    "vectors": (("M + N", "3"), "score - (s[q_idx] - s[kv_idx]).pow(2).sum(-1) * 0.3"),
    "dots": (("M + N", "20"), "score + (s[q_idx] * s[kv_idx]).sum(-1) * 0.2"),
    "still": (("N",), "score + torch.floor(s[kv_idx] * 3) * 0.3 + s[kv_idx].detach()"),
    "square": ((), "score * score * 0.2 + b * h * 0.1"),
    "hidden": (("M",), "torch.where((kv_idx + q_idx + b) % 4 == 0, -float('inf'), score * s[q_idx])"),
}
UNREAD = ("none", "square")  # scores without s
MASKS = {
    "none": None,
    "causal": "q_idx >= kv_idx",
    "lengths": "kv_idx < n[b]",
    "late": "kv_idx < q_idx - 3 - 2 * h",
    "window": "(q_idx - kv_idx < 5) & (q_idx >= kv_idx)",
    "mixed": "(kv_idx <= q_idx + n[b]) & ((kv_idx + h) % 5 != 0)",
    "nothing": "kv_idx < 0 * b",
    "rows": "(n[b] + q_idx) % 3 != 0",
}
FLOORS = {"torch.float32": 3e-5, "torch.float16": 1e-2, "torch.bfloat16": 6e-2}
CANCELS = 0.2  # of captured tensors in 16 bits: many positions add what nearly cancels to few elements


def drawn_sizes(rng: random.Random, long: float) -> dict[str, int]:
    """Lengths and numbers of heads; `long`: how often more than one block."""
    Hkv, group = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))
    lengths = (1, 2, 5, 9, 17) if rng.random() > long else (17, 33, 40, 70)
    M = rng.choice(lengths)
    N = M if rng.random() < 0.4 else rng.choice(lengths)
    sizes = {"B": rng.choice((1, 2, 3)), "Hkv": Hkv, "H": Hkv * group, "M": M, "N": N}
    return sizes | {"D": rng.choice((3, 4, 8, 16)), "Dv": rng.choice((4, 5, 8))}


def drawn_shapes(rng: random.Random, sizes: dict[str, int], score: str) -> dict[str, tuple[int, ...]]:
    """Of q, k, v, s and n; keys and values are of one batch entry at times."""
    Z = 1 if rng.random() < 0.2 else sizes["B"]
    rows = {"q": (sizes["B"], sizes["H"], sizes["M"], sizes["D"]), "k": (Z, sizes["Hkv"], sizes["N"], sizes["D"])}
    s = tuple(eval(n, {}, sizes) for n in SCORES[score][0])
    return rows | {"v": (*rows["k"][:3], sizes["Dv"]), "s": s, "n": (sizes["B"],)}


def mods_text(score: str, mask: str, N: int) -> str:
    """Factories score_of(s, n) and mask_of(s, n)."""
    lines = [f"N = {N}", ""]
    for name, symbols, text in (("score", "score, b, h, q_idx, kv_idx", SCORES[score][1]), ("mask", "b, h, q_idx, kv_idx", MASKS[mask])):
        inner = [f"    def {name}_mod({symbols}):", f"        return {text}", ""]
        lines += ["", f"def {name}_of(s, n):", *(inner if text else []), f"    return {f'{name}_mod' if text else None}", ""]
    return "\n".join(lines) + "\n"


def dense_extras(q, k, v, score_mod, mask_mod, *, sinks=None, kept=None, p=0.0, scale=None, precision=torch.float64):
    """out, lse, max_scores, entropy, top_index and column_sums of dense attention in a precision, differentiable in the first two."""
    wide = torch.promote_types(precision, torch.float32)
    k, v = (t.to(precision).expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q.to(precision) @ k.mT).to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    where = positions(scores.shape, q.device)
    if score_mod is not None:
        scores = score_mod(scores, *where).to(wide).expand(scores.shape)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*where).expand(scores.shape), -torch.inf)
    highest = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    top = scores.argmax(-1).masked_fill(highest == -torch.inf, -1) if scores.shape[-1] else torch.full(highest.shape, -1)
    sink = None if sinks is None else sinks.to(wide)[:, None]
    base = (highest if sink is None else torch.maximum(highest, sink)).detach()
    base = torch.where(base == -torch.inf, 0.0, base)
    weights = (scores - base[..., None]).exp()
    total = weights.sum(-1) if sink is None else weights.sum(-1) + (sink - base).exp()
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    P = weights / total[..., None]
    factors = 1.0 if kept is None else kept / (1 - p) if p < 1 else 0.0
    out = (P * factors).to(precision) @ v
    P = P.detach()
    return out, torch.where(seen, base + total.log(), -torch.inf), highest, torch.special.entr(P).sum(-1), top, P.sum(-2)


def compared(found, exact, rough, floor: float, allowed: float = 4.0) -> Judged:
    """Is every tensor of `found` as near to `exact` as `rough` is, or nearly? What is None there may be 0 here."""
    leaves = [tree_leaves(t, is_leaf=lambda x: x is None) for t in (found, exact, rough)]
    differences, worst = [], {}
    for i, (got, want, other) in enumerate(zip(*leaves, strict=True)):
        name = f"number {i}"
        if got is None or want is None:
            if any(t is not None and t.any() for t in (got, want)):
                differences.append(Difference(name, f"is {'None' if got is None else 'something'} here alone"))
            continue
        if got.shape != want.shape:
            differences.append(Difference(name, f"has shape {tuple(got.shape)}, not {tuple(want.shape)}"))
            continue
        got, want, other = (t.detach().double() for t in (got, want, other))
        if got.isnan().any() or got.isposinf().any() or not torch.equal(got.isneginf(), want.isneginf()):
            differences.append(Difference(name, f"has {int((~got.isfinite()).sum())} infinities or NaN, not {int(want.isneginf().sum())}"))
            continue
        sure = want.isfinite() & other.isfinite()
        got, want, other = (torch.where(sure, t, 0.0) for t in (got, want, other))
        size = max(want.norm().item(), 0.3 * max(want.numel(), 1) ** 0.5)
        error, limit = (got - want).norm().item() / size, max(allowed * (other - want).norm().item() / size, floor)
        worst[name] = (error / limit, error / limit)
        if error > limit:
            differences.append(Difference(name, f"of shape {tuple(got.shape)} is off by {error:.2e} of itself, {limit:.2e} is allowed"))
    return Judged(differences, 1.0, worst)


DROPOUTS = (0.1, 0.5, 0.25, 0.9, 0.003, 1.0, 1 / 128)


# Transforms

_TRANSFORMS = """from torch.func import grad, grad_and_value, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map


def finite(found):
    return tree_map(lambda t: torch.where(t.isinf(), 0.0, t), found)


def total(found):
    # a number of all results, in which each element has a weight of its own
    weight = lambda t: torch.arange(t.numel(), device=t.device).reshape(t.shape).cos()
    return sum((t * weight(t)).sum() + 0.1 * t.pow(2).sum() for t in tree_leaves(finite(found)))


def replaced(x, places, values):
    return [dict(zip(places, values)).get(i, t) for i, t in enumerate(x)]


"""


def _mapped(rng: random.Random, inner: str, shapes: dict[str, tuple[int, ...]]) -> str:
    """vmap over some of the arguments, whose shapes get a dimension anywhere."""
    size, dims = rng.choice((1, 2, 3)), []
    some = [name for name in shapes if rng.random() < 0.5] or ["q"]
    for name, shape in shapes.items():
        dim = rng.randint(0, len(shape)) if name in some else None
        if dim is not None:
            shapes[name] = (*shape[:dim], size, *shape[dim:])
            dim -= len(shapes[name]) if rng.random() < 0.2 else 0
        dims.append(dim)
    return f"lambda *x: vmap({inner}, in_dims={tuple(dims)})(*x)"


def _differentiated(rng: random.Random, kind: str, inner: str, moving: int) -> str:
    """A derivative in some of the first `moving` arguments."""
    wanted = tuple(sorted(rng.sample(range(moving), rng.randint(1, moving))))
    if kind in ("grad", "grad_and_value"):
        return f"lambda *x: {kind}(lambda *y: total({inner}(*y)), argnums={wanted})(*x)"
    if kind == "jacrev":
        return f"lambda *x: jacrev(lambda *y: tree_map(lambda t: t.flatten()[:3], {inner}(*y)), argnums={wanted[:1]})(*x)"
    if kind == "vjp":
        weights = f"tree_map(torch.cos, finite(tree_map(torch.detach, {inner}(*x))))"
        return f"lambda *x: vjp(lambda *y: finite({inner}(*replaced(x, {wanted}, y))), *[x[i] for i in {wanted}])[1]({weights})"
    given = f"tuple(x[i] for i in {wanted}), tuple(x[i].cos() for i in {wanted})"
    return f"lambda *x: jvp(lambda *y: {inner}(*replaced(x, {wanted}, y)), {given})"


def transforms(p, rng: random.Random, small: int) -> None:
    """vmap over anything, and up to two derivatives, in any order."""
    sizes = drawn_sizes(rng, 0.0 if small else 0.1)
    score, mask = rng.choice(list(SCORES)), rng.choice(list(MASKS))
    shapes = drawn_shapes(rng, sizes, score)
    moving = 3 if score in UNREAD else 4
    lines, orders, maps = [f"f0 = lambda *x: attend(*x){rng.choice(('', '', '[:1]', '[1:]'))}"], 0, 0
    for i in range(rng.choice((1, 2, 2, 3, 3, 4))):
        kinds = ["vmap"] * (4 if maps < 2 else 0)
        kinds += ["grad", "grad", "vjp", "jvp", "grad_and_value", *["jacrev"] * (sizes["M"] <= 5)] if orders < 2 else []
        kind = rng.choice(kinds)
        maps, orders = maps + (kind == "vmap"), orders + (kind != "vmap")
        text = _mapped(rng, f"f{i}", shapes) if kind == "vmap" else _differentiated(rng, kind, f"f{i}", moving)
        lines.append(f"f{i + 1} = {text}")
    body = "".join(f"    {line}\n" for line in lines)
    p.mods = f"{_TRANSFORMS}{mods_text(score, mask, sizes['N'])}\n\ndef program(attend, x):\n{body}    return f{len(lines) - 1}(*x)\n"
    for name, shape in shapes.items():
        values = f"torch.int64, {rng.randrange(999)}, 0, {sizes['N']}" if name == "n" else f"torch.float32, {rng.randrange(999)}"
        p.inputs.append(
            f"{name} = {'integers' if name == 'n' else 'floats'}({shape}, {values}).to(device){' * 0.5' if name == 's' else ''}"
        )
    dropout, more = rng.choice((0.0, 0.0, rng.choice(DROPOUTS))), ""
    if dropout:
        p.inputs.append(f"seed = torch.tensor([{rng.randrange(-(1 << 63), 1 << 63)}], device=device)")
        more = f", dropout_p={dropout}, dropout_seed=seed"
    call = f"flexpress.flex_attention(q, k, v, score_of(s, n), mask_mod=mask_of(s, n), enable_gqa=True, return_lse=True{more})"
    p.call += [f"attend = lambda q, k, v, s, n: {call}", "found = program(attend, (q, k, v, s, n))"]
    p.refusals = "this would be a third|forward mode over forward mode"

    def check(names: dict) -> Judged:
        dropped = {}
        if dropout:
            kept = flexpress.dropout_mask(names["seed"], tuple(sizes[name] for name in ("B", "H", "M", "N")), dropout)
            dropped = {"kept": kept, "p": round(dropout * DROPOUT_STEPS) / DROPOUT_STEPS}

        def dense(precision: torch.dtype):
            def attend(q, k, v, s, n):
                return dense_extras(q, k, v, names["score_of"](s, n), names["mask_of"](s, n), **dropped, precision=precision)[:2]

            return names["program"](attend, [names[n].to(precision) if n != "n" else names[n] for n in shapes])

        return compared(names["found"], dense(torch.float64), dense(torch.float32), 1e-4 if orders > 1 else 3e-5)

    p.check = check


# Dropout, sinks, statistics

SIZES = ((128, 128), (16, 16), (32, 16), (16, 64), (64, 32), (48, 16))


def _mask_argument(p, rng: random.Random, mask: str, sizes: dict[str, int]) -> str:
    """How a mask is passed; lines that make a block mask go to the program."""
    where = rng.choice(("", "flexpress", "flexpress", "torch.nn.attention.flex_attention"))
    if not where or 0 in (sizes["B"], sizes["M"], sizes["N"]):
        return "mask_mod=mask_of(s, n)"
    B = sizes["B"] if "b" in MASKS[mask] or rng.random() < 0.3 else None
    H = sizes["H"] if "h)" in MASKS[mask] or "* h" in MASKS[mask] or rng.random() < 0.3 else None
    separate = ", separate_full_blocks=False" if where == "flexpress" and rng.random() < 0.3 else ""
    p.inputs.append("import torch.nn.attention.flex_attention")
    extents = f"{B}, {H}, {sizes['M']}, {sizes['N']}"
    p.inputs.append(f"mask = {where}.create_block_mask(mask_of(s, n), {extents}, device, {rng.choice(SIZES)}{separate})")
    return "block_mask=mask"


def _options(rng: random.Random, few: bool) -> dict:
    options: dict = {}
    if few and rng.random() < 0.3:
        return {"BACKEND": "DECODE"}
    if rng.random() < 0.2:
        options |= {"BLOCK_M": 16, "BLOCK_N": 16}
    if rng.random() < 0.15:
        options |= dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16)
    if rng.random() < 0.15:
        options |= {rng.choice(("PRESCALE_QK", "USE_TMA")): True}
    return options


def extras(p, rng: random.Random, small: int) -> None:
    """Dropout, sinks and statistics, forward and backward, in eager mode, in torch.compile and in checkpoints."""
    sizes = drawn_sizes(rng, 0.0 if small else 0.4)
    sizes |= {name: 0 for name in ("B", "M", "N") if rng.random() < 0.03}
    score, mask, dtype = (
        rng.choice(list(SCORES)),
        rng.choice(list(MASKS)),
        rng.choice((*["torch.float32"] * 3, "torch.bfloat16", "torch.float16")),
    )
    dropout, with_sinks = rng.choice((0.0, rng.choice(DROPOUTS), rng.choice(DROPOUTS))), rng.random() < 0.4
    looks, scale = not with_sinks and rng.random() < 0.4, rng.choice((None, None, 0.4, -0.3))
    shapes, learned = drawn_shapes(rng, sizes, score), [name for name in ("q", "k", "v", "s", "sinks") if rng.random() < 0.8]
    s_dtype = rng.choice(("torch.float32", "torch.float32", "torch.bfloat16", "torch.float16"))
    p.mods = mods_text(score, mask, sizes["N"])
    for name in "qkv":
        layout = rng.choice(LAYOUTS) if min(shapes[name]) else "contiguous"
        p.inputs.append(f'{name} = laid_out({shapes[name]}, {dtype}, device, {rng.randrange(9999)}, "{layout}")')
    p.inputs.append(f"s = floats({shapes['s']}, {s_dtype}, {rng.randrange(999)}, 0.5).to(device)")
    n_dtype = rng.choice(("torch.int64", "torch.int32", "torch.int16", "torch.uint8"))
    p.inputs.append(f"n = integers({shapes['n']}, {n_dtype}, {rng.randrange(999)}, 0, {sizes['N']}).to(device)")
    arguments, names = [f"scale={scale}", "enable_gqa=True"], ["q", "k", "v", "s", "n"]
    if with_sinks:
        step = rng.choice((1, 1, 2))
        p.inputs.append(f"sinks = floats(({step * sizes['H']},), {rng.choice(('torch.float32', dtype))}, 7, 2.0).to(device)[::{step}]")
        p.inputs += ["sinks[0] = -torch.inf"] * (rng.random() < 0.1)
        arguments, names = [*arguments, "sinks=sinks"], [*names, "sinks"]
    if dropout:
        p.inputs.append(f"seed = torch.tensor([{rng.randrange(-(1 << 63), 1 << 63)}], device=device)")
        arguments, names = [*arguments, f"dropout_p={dropout}", "dropout_seed=seed"], [*names, "seed"]
    if mask != "none":
        arguments.append(_mask_argument(p, rng, mask, sizes))
        names += ["mask"] * (arguments[-1] == "block_mask=mask")
    options = _options(rng, sizes["M"] <= 16 and not dropout)
    arguments += [f"kernel_options={options}"] * bool(options) + ["deterministic=True"] * (rng.random() < 0.3)
    asked = "lse=True, max_scores=True" + ", entropy=True, top_index=True, column_sums=True" * looks
    arguments.append(f"return_aux=flexpress.AuxRequest({asked})")
    learned = [name for name in learned if name in names and not (name == "s" and score in UNREAD)]
    p.inputs += [f"{name}.requires_grad_()" for name in learned]
    given = ", ".join(names)
    p.call.append(f"def attend({given}):\n    return flexpress.flex_attention(q, k, v, score_of(s, n), {', '.join(arguments)})\n\n")
    wrapped = {
        "plain": f"attend({given})",
        "twice": f"(attend({given}), attend({given}))[1]",
        "checkpoint": f"checkpoint(attend, {given}, use_reentrant=False)",
        **{name: f'torch.compile(attend, backend="{name}", fullgraph=True)({given})' for name in ("eager", "aot_eager")},
    }
    p.call += ["from torch.utils.checkpoint import checkpoint", "torch._dynamo.reset()"]
    p.call.append(f"out, aux = {wrapped[rng.choice(('plain', 'plain', *wrapped))]}")
    p.call.append(f"d_out = laid_out({(*shapes['q'][:3], sizes['Dv'])}, {dtype}, device, 5, 'heads last')")
    p.call.append(f"d_lse = floats({shapes['q'][:3]}, torch.float32, 6).to(device) * {rng.choice((0, 1))}")
    asked = f"(out, aux.lse), ({', '.join(learned)},), (d_out, d_lse), allow_unused=True"
    p.call.append(f"grads = torch.autograd.grad({asked})" if learned else "grads = ()")
    p.refusals = "DECODE|PRESCALE_QK"

    def check(names: dict) -> Judged:
        def dense(precision: torch.dtype) -> list:
            wide = torch.promote_types(precision, torch.float32)
            x = {name: names[name].detach().to(wide if name in ("s", "sinks") else precision) for name in ("q", "k", "v", "s")}
            x |= {"sinks": names["sinks"].detach().to(wide)} if with_sinks else {}
            x = {name: t.requires_grad_(name in learned) for name, t in x.items()}
            kept = flexpress.dropout_mask(names["seed"], (*shapes["q"][:3], sizes["N"]), dropout) if dropout else None
            more = {"kept": kept, "p": round(dropout * DROPOUT_STEPS) / DROPOUT_STEPS, "scale": scale, "sinks": x.get("sinks")}
            mods = names["score_of"](x["s"], names["n"]), names["mask_of"](x["s"].detach(), names["n"])
            out, lse, *others = dense_extras(x["q"], x["k"], x["v"], *mods, **more, precision=precision)
            wanted = [x[name] for name in learned]
            still = 0 * sum(t.sum() for t in wanted if t.isfinite().all())  # so that all have a gradient
            outputs, weights = (out + still, torch.where(lse.isinf(), 0.0, lse) + still), (names["d_out"], names["d_lse"])
            weights = [w.to(o.dtype) for w, o in zip(weights, outputs, strict=True)]
            return [out, lse, *others, *(torch.autograd.grad(outputs, wanted, weights, allow_unused=True) if wanted else ())]

        aux, exact, rough = names["aux"], dense(torch.float64), dense(getattr(torch, dtype[6:]))
        statistics = [aux.entropy, aux.top_index, aux.column_sums] if looks else exact[3:6]
        rough[4] = exact[4]
        if looks and (aux.top_index != exact[4]).float().mean() < 0.1:  # of scores that are about equal any may be the top
            statistics[1] = exact[4]
        floor = max(FLOORS[dtype], {"torch.float32": 0.0}.get(s_dtype, FLOORS[s_dtype]))
        floor = CANCELS if dtype != "torch.float32" and "s" in learned else floor
        return compared([names["out"], aux.lse, aux.max_scores, *statistics, *names["grads"]], exact, rough, floor)

    p.check = check


FEATURES: dict[str, tuple[Callable, float]] = {"transforms": (transforms, 4), "extras": (extras, 6)}
