"""Random programs: Python source that calls Flexpress, and how its results are to be compared.

A program follows from (seed, index, device).
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from support import fuzz_inputs
from support.fuzz_features import FEATURES
from support.fuzz_mods import MASK_SYMBOLS, Captures, Writer, mask_source, reference_namespace, score_source
from support.fuzz_reference import Difference, Judged, Problem, judge, solve_mod

HEADER = """import math

import torch
import torch.nn.functional as F

import flexpress
from flexpress import mods
"""


@dataclass
class Program:
    """A program and what its names mean.

    captured, mods, inputs, call   its source, in this order: captured values by name; the mods; input tensors; the calls
    check       from its names after it ran to what was found wrong
    refusals    errors that are right: a pattern for their message, or "" for none
    """

    seed: int
    index: int
    device: str
    kind: str = ""
    captured: Captures = field(default_factory=Captures)
    mods: str = ""
    inputs: list[str] = field(default_factory=list)
    call: list[str] = field(default_factory=list)
    check: Callable[[dict], Judged] | None = None
    refusals: str = r"_mod: index -?\d+ is out of bounds for dimension"  # torch's own, of an index without symbols
    poison: bool = False  # torch.empty gives NaN (and all is deterministic)

    def body(self) -> str:
        values = "".join(f"{name} = {source}\n" for name, source in self.captured.source.items())
        return f'device = "{self.device}"\n{values}\n{self.mods}\n' + "\n".join([*self.inputs, *self.call]) + "\n"

    def text(self) -> str:
        """The program as a file of its own."""
        return "\n".join([f"# seed {self.seed}, index {self.index}: {self.kind}", HEADER, _PRELUDE, "", self.body()])

    def run(self) -> dict:
        """Its names after it ran."""
        name = f"<program {self.seed}.{self.index}.{self.device}>"
        source = HEADER + "from support.fuzz_inputs import *\n" + self.body()
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        names = {"__name__": "program"}
        exec(compile(source, name, "exec"), names)
        return names

    def judged(self) -> Judged:
        return self.check(self.run())


_PRELUDE = inspect.getsource(fuzz_inputs).split("import torch\n", 1)[1]

DTYPES = ("torch.float32", "torch.float32", "torch.bfloat16", "torch.float16")
LENGTHS = {
    "cpu": (1, 2, 5, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 70, 100, 129),
    "cuda": (1, 7, 16, 64, 100, 128, 129, 257, 300, 513, 600, 1025),
}
HEAD_DIMS = {"cpu": (1, 3, 8, 16, 16, 17, 24, 31, 32, 40, 64, 72), "cuda": (8, 16, 31, 40, 64, 64, 72, 80, 96, 128, 128, 192, 256)}
PAIRS = {"cpu": 60_000, "cuda": 6_000_000}  # of a query and a key, over batch and heads
BLOCKS = (16, 32, 48, 64, 128, 256)


def chance(rng: random.Random, share: float) -> bool:
    return rng.random() < share


@dataclass
class Shape:
    B: int
    Hkv: int
    group: int
    M: int
    N: int
    D: int
    Dv: int

    Hq = property(lambda self: self.Hkv * self.group)
    extents = property(lambda self: (self.B, self.Hq, self.M, self.N))


def drawn_shape(rng: random.Random, device: str, small: int) -> Shape:
    """`small` is for shrinking: 1 halves, 2 quarters all that is large."""
    lengths, dims = LENGTHS[device], HEAD_DIMS[device]
    M = rng.choice(lengths)
    N = M if chance(rng, 0.4) else rng.choice(lengths)
    D = rng.choice(dims)
    s = Shape(
        rng.choice((1, 1, 2, 3)),
        rng.choice((1, 1, 2)),
        rng.choice((1, 1, 2, 3, 4, 7)),
        M,
        N,
        D,
        D if chance(rng, 0.6) else rng.choice(dims),
    )
    for _ in range(small):
        s.B, s.Hkv, s.group, s.M, s.N, s.D, s.Dv = (-(-n // 2) for n in (s.B, s.Hkv, s.group, s.M, s.N, s.D, s.Dv))
    while s.B * s.Hq * s.M * s.N > PAIRS[device]:
        name = rng.choice([n for n in ("B", "group", "M", "N") if getattr(s, n) > 1])
        setattr(s, name, getattr(s, name) // 2)
    return s


def with_factory(source: str, captured: Captures, rng: random.Random) -> str:
    """A mod that captures by closure instead of by globals."""
    name = re.match(r"def (\w+)", source)[1]
    used = [n for n in captured.source if re.search(rf"\b{n}\b", source)]
    inner = "".join(f"    {line}\n" for line in source.splitlines())
    return f"def make_{name}({', '.join(used)}):\n{inner}    return {name}\n\n\n{name} = make_{name}({', '.join(used)})\n"


def recipe_source(rng: random.Random, extents: tuple, captured: Captures, name: str = "mask_mod") -> str:
    """A mask as people write them: windows, documents, prefixes, dilation, combined."""
    B, H, M, N = extents
    longest = max(M, N)

    def part() -> str:
        choice = rng.randrange(11)
        w = rng.choice((0, 1, 2, 5, 16, 40, 100))
        if choice < 3:
            return "q_idx >= kv_idx"
        if choice == 3:
            return f"abs(q_idx - kv_idx) <= {w}"
        if choice == 4:
            return f"(q_idx - kv_idx < {w}) & (q_idx >= kv_idx)"
        if choice == 5:
            n = f"d{len(captured.source)}"
            captured.add(
                n,
                f"ascending({longest}, {rng.choice((2, 3, 6))}, {rng.choice(('torch.int32', 'torch.int64', 'torch.int16'))}, "
                f"{rng.randrange(999)}).to(device)",
            )
            return f"{n}[q_idx] == {n}[kv_idx]"
        if choice == 6:
            n = f"d{len(captured.source)}"
            captured.add(n, f"integers(({B},), torch.int32, {rng.randrange(999)}, 0, {N}).to(device)")
            return f"kv_idx < {n}[b]"
        if choice == 7:
            return f"(q_idx >= kv_idx) | (h % 2 == {rng.randrange(2)})"
        if choice == 8:
            return f"(q_idx - kv_idx) % {rng.randint(2, 5)} == 0"
        if choice == 9:
            return f"q_idx + {rng.randint(-20, 40)} >= kv_idx"
        return f"q_idx // {rng.randint(1, 20)} == kv_idx // {rng.randint(1, 20)}"

    text = part()
    for _ in range(rng.choice((0, 0, 1, 2))):
        text = f"({text}) {rng.choice('&&|')} ({part()})"
        if chance(rng, 0.15):
            text = f"~({text})"
    return f"def {name}({', '.join(MASK_SYMBOLS)}):\n    return {text}\n"


def random_mask(rng: random.Random, extents: tuple, captured: Captures, name: str = "mask_mod") -> str:
    if chance(rng, 0.35):
        return recipe_source(rng, extents, captured, name)
    return mask_source(Writer(rng, extents, None, captured, "m"), rng.choice((1, 2, 2, 3, 3, 4)), name)


def block_size(rng: random.Random) -> tuple[int, int]:
    q = rng.choice(BLOCKS)
    return q, q if chance(rng, 0.5) else rng.choice(BLOCKS)


def values_of(p: Program, names: dict) -> dict:
    return {name: names[name] for name in p.captured.source}


def indices(extents: tuple, device) -> list[torch.Tensor]:
    views = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    return [torch.arange(n, device=device).view(view) for n, view in zip(extents, views, strict=True)]


# Kinds


def attention(p: Program, rng: random.Random, small: int, backward: bool | None = None) -> None:
    """flex_attention, forward and often backward."""
    s = drawn_shape(rng, p.device, small)
    cuda, dtype = p.device == "cuda", rng.choice(DTYPES)
    backward = chance(rng, 0.45) if backward is None else backward
    scale = rng.choice((None, None, None, None, 0.3, 0.7, 1.0, 0.0, -0.5, 2.0))
    deviation = s.D**0.5 * abs(s.D**-0.5 if scale is None else scale)
    masked = rng.choice(("", "", "mask_mod", "mask_mod", "made", "made", "made", "torch", "sliced", "adjusted"))
    written, score = [], ""
    if chance(rng, 0.75):
        score = score_source(Writer(rng, s.extents, max(deviation, 0.2), p.captured), rng.choice((1, 1, 2, 2, 3, 4)))
        written.append(score)
    learned = marked_learned(p, rng, score) if backward else []
    options, arguments, reference = drawn_options(p, rng, s, dtype, masked, score), {}, []
    if masked:
        base = recipe_source if masked == "torch" else random_mask
        mask = base(rng, s.extents, p.captured)
        written.append(mask)
        arguments, reference = mask_call(p, rng, s, mask, masked, options)
    p.mods = "\n\n".join(with_factory(w, p.captured, rng) if chance(rng, 0.3) else w for w in written)

    Bkv = 1 if chance(rng, 0.15) else s.B
    shapes = {"q": (s.B, s.Hq, s.M, s.D), "k": (Bkv, s.Hkv, s.N, s.D), "v": (Bkv, s.Hkv, s.N, s.Dv)}
    ending = ".requires_grad_()" if backward else ""
    for name, shape in shapes.items():
        p.inputs.append(
            f'{name} = laid_out({shape}, {dtype}, device, {rng.randrange(10_000)}, "{rng.choice(fuzz_inputs.LAYOUTS)}"){ending}'
        )
    if score:
        arguments["score_mod"] = "score_mod"
    if scale is not None:
        arguments["scale"] = repr(scale)
    if s.group > 1 or chance(rng, 0.3):
        arguments["enable_gqa"] = "True"
    if options:
        arguments["kernel_options"] = repr(options)
    if backward and chance(rng, 0.3):
        arguments["deterministic"] = "True"
    text = "".join(f", {k}={v}" for k, v in arguments.items())
    results = ["out", "lse"]
    if chance(rng, 0.4):
        p.call.append(f"out, aux = flexpress.flex_attention(q, k, v{text}, return_aux=flexpress.AuxRequest(lse=True, max_scores=True))")
        p.call.append("lse, max_scores = aux")
        results.append("max_scores")
    else:
        p.call.append(f"out, lse = flexpress.flex_attention(q, k, v{text}, return_lse=True)")
    with_lse = backward and chance(rng, 0.5)
    if backward:
        results += gradients(p, rng, (s.B, s.Hq, s.M, s.Dv), dtype, learned, with_lse)
    p.poison = not backward or "deterministic" in arguments

    def check(names: dict) -> Judged:
        problem = Problem(
            names["q"],
            names["k"],
            names["v"],
            *indices(s.extents, p.device),
            "\n\n".join([score, *reference]),
            values_of(p, names),
            scale,
            None,
            names.get("d_out"),
            names.get("d_lse"),
            tuple(learned),
            bool(options.get("PRESCALE_QK")),
            options.get("FLOAT32_PRECISION") == "tf32" and cuda,
            cuda and dtype != "torch.float32",
        )
        for name in problem.captured:
            if f"{name}_reference" in names:
                problem.captured[name] = names[f"{name}_reference"]
        problem.captured |= {n: names[n] for n in ("rows", "heads", "batches") if n in names}
        return judge(problem, {name: names[name] for name in results})

    p.check = check


def gradients(
    p: Program,
    rng: random.Random,
    shape: tuple,
    dtype: str,
    learned: list[str],
    with_lse: bool,
    inputs=("q", "k", "v"),
    lse_shape: tuple | None = None,
) -> list[str]:
    """Lines that compute gradients; their names."""
    layout = rng.choice(("contiguous", "heads last", "every other element", "one head"))
    p.call.append(f'd_out = laid_out({shape}, {dtype}, device, {rng.randrange(10_000)}, "{layout}")')
    wanted = [*inputs, *learned]
    if with_lse:
        p.call.append(f"d_lse = floats({lse_shape or shape[:-1]}, torch.float32, {rng.randrange(10_000)}).to(device)")
    outputs, weights = ("(out, lse)", "(d_out, d_lse)") if with_lse else ("out", "d_out")
    names = [f"d{w}" for w in wanted]
    p.call.append(
        f"{', '.join(names)}{',' if len(names) == 1 else ''} = torch.autograd.grad({outputs}, ({', '.join(wanted)},), {weights}, "
        "allow_unused=True)"
    )
    return names


def drawn_options(p: Program, rng: random.Random, s: Shape, dtype: str, masked: str, score: str) -> dict:
    cuda, options = p.device == "cuda", {}
    if chance(rng, 0.1):
        options["PRESCALE_QK"] = True
    if chance(rng, 0.1):
        options["ROWS_GUARANTEED_SAFE"] = True
    if chance(rng, 0.2):
        options["BLOCK_M"] = rng.choice((16, 32, 64) if cuda else (16, 32, 64, 128))
        options["BLOCK_N"] = rng.choice((16, 32, 64) if cuda else (16, 32, 64, 128))
    if chance(rng, 0.1):
        options |= {"num_warps": rng.choice((4, 8)), "num_stages": rng.choice((1, 2, 3))}
    if chance(rng, 0.15):
        options["USE_TMA"] = chance(rng, 0.7)
    if chance(rng, 0.1):
        options["FLOAT32_PRECISION"] = rng.choice(("tf32", "ieee"))
    if chance(rng, 0.15):
        options |= {
            "BLOCK_M1": rng.choice((16, 32)),
            "BLOCK_N1": rng.choice((16, 32)),
            "BLOCK_M2": rng.choice((16, 32)),
            "BLOCK_N2": rng.choice((16, 32)),
        }
    if chance(rng, 0.2):
        options["BACKEND"] = rng.choice(("TRITON", "AUTO", "TRITON_DECODE" if s.M <= 16 else "TRITON", "GLUON" if cuda else "TRITON"))
    elif s.M <= 16 and chance(rng, 0.25):
        options["BACKEND"] = "TRITON_DECODE"
    if not cuda and os.environ.get("FLEXPRESS_CPU") == "cpp":  # which rounds scaled queries no more; another backend is the interpreter
        options = {name: value for name, value in options.items() if name not in ("PRESCALE_QK", "BACKEND")}
    if options.get("BACKEND") == "GLUON":
        p.refusals += "|names HOPPER"
    if options.get("BACKEND") == "TRITON_DECODE":
        p.refusals += "|names DECODE"
    if cuda:
        p.refusals += "|out of resource|shared memory"
    return options


def mask_call(p: Program, rng: random.Random, s: Shape, mask: str, masked: str, options: dict) -> tuple[dict, list[str]]:
    """How a mask is passed, and the source of mask_mod for the reference."""
    tiles = [n for name, n in options.items() if name.startswith("BLOCK_")]
    size = (128, 128) if tiles and max(tiles) > 16 else block_size(rng)
    if masked == "mask_mod":
        return {"mask_mod": "mask_mod"}, [mask]
    uses = {symbol: re.search(rf"\b{symbol}\b", mask.split("\n", 1)[1]) for symbol in "bh"}
    B, H = (n if uses[symbol] or chance(rng, 0.3) else None for symbol, n in (("b", s.B), ("h", s.Hq)))
    if masked == "torch":
        p.call.append("from torch.nn.attention import flex_attention as theirs")
        p.call.append(f"mask = theirs.create_block_mask(mask_mod, {B}, {H}, {s.M}, {s.N}, device=device, BLOCK_SIZE={size})")
        return {"block_mask": "mask"}, [mask]
    separate = "" if chance(rng, 0.75) else ", separate_full_blocks=False"
    if masked == "made":
        p.call.append(f"mask = flexpress.create_block_mask(mask_mod, {B}, {H}, {s.M}, {s.N}, device, {size}{separate})")
        return {"block_mask": "mask"}, [mask]
    if masked == "adjusted":
        p.call.append(
            f"mask = flexpress.create_block_mask(mask_mod, {B}, {H}, {s.M + rng.choice((0, 1, 50))}, {s.N + rng.choice((0, 3, 100))}, "
            f"device, {size}{separate}).adjust({s.M}, {s.N})"
        )
        return {"block_mask": "mask"}, [mask]
    # the rows of some query blocks, in any order, of a longer mask; a shorter last one comes last
    count = -(-s.M // size[0])
    rows = [rng.randrange(count + 2) for _ in range(count)]
    whole = size[0] * (count + 2)
    if s.M % size[0]:
        rows[-1], whole = count + 1, size[0] * (count + 1) + s.M % size[0]
        rows[:-1] = [min(r, count) for r in rows[:-1]]
    batches = [rng.randrange(s.B + 1) for _ in range(s.B)]
    heads = [rng.randrange(s.Hq + 1) for _ in range(s.Hq)]
    places = [q for r in rows for q in range(r * size[0], (r + 1) * size[0])][: s.M]
    text = f"flexpress.create_block_mask(mask_mod, {s.B + 1}, {s.Hq + 1}, {whole}, {s.N}, device, {size}{separate})"
    parts = [f"[{batches}]", f"[:, {heads}]", f"[:, :, {rows}]"]
    rng.shuffle(parts)
    p.call.append(f"mask = {text}{''.join(parts)}")
    for name, values in (("batches", batches), ("heads", heads), ("rows", places)):
        p.call.append(f"{name} = torch.tensor({values}, device=device)  # for the reference")
    outer = "def mask_mod(b, h, q_idx, kv_idx):\n    return whole_mask(batches[b], heads[h], rows[q_idx], kv_idx)\n"
    return {"block_mask": "mask"}, [mask.replace("def mask_mod(", "def whole_mask("), outer]


def huge(p: Program, rng: random.Random, small: int) -> None:
    """Scores of any size, computed without rounding: whole rows of -1e9, of float32's least number, of powers of two."""
    s = drawn_shape(rng, p.device, small)
    dtype, big = (
        rng.choice(DTYPES),
        rng.choice(
            (
                "1e9",
                "-1e9",
                "2.0**30",
                "-2.0**40",
                "2.0**100",
                "torch.finfo(torch.float32).min",
                "-torch.finfo(torch.float32).max / 2",
                "-65504.0",
                "1e4",
                "-2.0**127",
            )
        ),
    )
    condition = rng.choice(("q_idx % 3 == 1", "q_idx % 2 == h % 2", "kv_idx > q_idx", "kv_idx >= 0", "kv_idx % 2 == 0", "b == 0"))
    body = rng.choice(
        (
            f"torch.where({condition}, {big}, score)",
            f"torch.where({condition}, score * 0 + {big}, score)",
            f"({2 ** rng.randint(20, 30)} - h) * ((kv_idx - q_idx) / 4)",
            f"torch.zeros_like(score) + {big}",
            f"torch.where({condition}, {big}, 0.0)",
            f"(kv_idx % 3) * 2.0**{rng.randint(10, 100)}",
            f"torch.maximum(score, torch.where({condition}, {big}, 0.0))",
        )
    )
    score = f"def score_mod({', '.join(('score', *MASK_SYMBOLS))}):\n    return {body}\n"
    mask = recipe_source(rng, s.extents, p.captured) if chance(rng, 0.4) else ""
    p.mods = f"{score}\n\n{mask}"
    for name, shape in (("q", (s.B, s.Hq, s.M, s.D)), ("k", (s.B, s.Hkv, s.N, s.D)), ("v", (s.B, s.Hkv, s.N, s.Dv))):
        p.inputs.append(f"{name} = laid_out({shape}, {dtype}, device, {rng.randrange(10_000)}).requires_grad_()")
    options = {"BACKEND": rng.choice(("TRITON", "AUTO", "TRITON_DECODE" if s.M <= 16 else "AUTO"))}
    p.refusals = "DECODE"
    p.call.append(
        f"out, lse = flexpress.flex_attention(q, k, v, score_mod, enable_gqa=True, return_lse=True{', mask_mod=mask_mod' if mask else ''}, "
        f"kernel_options={options})"
    )
    results = ["out", "lse", *gradients(p, rng, (s.B, s.Hq, s.M, s.Dv), dtype, [], False)]

    def check(names: dict) -> Judged:
        tensors = names["q"], names["k"], names["v"]
        problem = Problem(*tensors, *indices(s.extents, p.device), p.mods, values_of(p, names), d_out=names["d_out"], huge=True)
        return judge(problem, {name: names[name] for name in results})

    p.check = check


def hidden_infinities(p: Program, rng: random.Random, small: int) -> None:
    """Captured tensors that hold inf or NaN where a mask hides them, past the lengths, or where indices never lead."""
    s = drawn_shape(rng, p.device, small)
    dtype, bad = rng.choice(DTYPES), rng.choice(("math.inf", "-math.inf", "math.nan"))
    room = s.N + rng.choice((1, 7, 44, 108))
    end = rng.randint(max(1, s.N // 2), s.N)
    p.captured.add(
        "t0", f"torch.cat([floats(({end},), torch.float32, {rng.randrange(999)}), torch.full(({room - end},), {bad})]).to(device)"
    )
    p.captured.add("t1", f"torch.cat([floats(({s.M},), torch.float32, {rng.randrange(999)}), torch.full((40,), {bad})]).to(device)")
    body = rng.choice(
        (
            "score + t0[kv_idx]",
            "score * t0[kv_idx]",
            "score * t0[kv_idx] + t1[q_idx]",
            "score * t1[q_idx]",
            "torch.tanh(score * t0[kv_idx])",
            f"torch.where(kv_idx < {end}, score * t0[kv_idx], -math.inf)",
            f"score * torch.where(kv_idx < {end}, 1.0, -math.inf)",
            f"score * torch.where(kv_idx - q_idx <= {s.N - s.M}, 2.0, -math.inf)",
            f"score * torch.where(kv_idx - q_idx < {s.N}, 2.0, -math.inf)",
            "torch.minimum(score, t0[kv_idx]) * t1[q_idx]",
            "score / t0[kv_idx]",
            "score * t0[kv_idx] * t0[kv_idx]",
        )
    )
    score = f"def score_mod({', '.join(('score', *MASK_SYMBOLS))}):\n    return {body}\n"
    hides = "where(kv_idx" not in body
    extra = rng.choice(("", " & (q_idx >= kv_idx)", " & (kv_idx % 5 != 3)"))
    mask = f"def mask_mod(b, h, q_idx, kv_idx):\n    return (kv_idx < {end}){extra}\n" if end < s.N or extra else ""
    if not hides and chance(rng, 0.5):
        mask = ""
    p.mods = f"{score}\n\n{mask}"
    learned = [n for n in ("t0", "t1") if n in body and chance(rng, 0.3)]
    for n in learned:
        p.captured.source[n] += ".requires_grad_()"
    for name, shape in (("q", (s.B, s.Hq, s.M, s.D)), ("k", (s.B, s.Hkv, s.N, s.D)), ("v", (s.B, s.Hkv, s.N, s.Dv))):
        p.inputs.append(f"{name} = laid_out({shape}, {dtype}, device, {rng.randrange(10_000)}).requires_grad_()")
    given = ""
    if mask:
        given = ", mask_mod=mask_mod"
        if chance(rng, 0.5):
            p.call.append(f"mask = flexpress.create_block_mask(mask_mod, None, None, {s.M}, {s.N}, device, {block_size(rng)})")
            given = ", block_mask=mask"
    p.call.append(
        f"out, lse = flexpress.flex_attention(q, k, v, score_mod, enable_gqa=True, return_lse=True{given}, "
        f"deterministic={chance(rng, 0.3)})"
    )
    results = ["out", "lse", *gradients(p, rng, (s.B, s.Hq, s.M, s.Dv), dtype, learned, chance(rng, 0.5))]

    def check(names: dict) -> Judged:
        problem = Problem(
            names["q"],
            names["k"],
            names["v"],
            *indices(s.extents, p.device),
            p.mods,
            values_of(p, names),
            None,
            None,
            names["d_out"],
            names.get("d_lse"),
            tuple(learned),
        )
        return judge(problem, {name: names[name] for name in results})

    p.check = check


def evaluated(p: Program, rng: random.Random, small: int) -> None:
    """evaluate_mod of a score_mod or a mask_mod."""
    cuda = p.device == "cuda"
    extents = tuple(rng.choice(n) for n in ((1, 2), (1, 2, 3), (1, 9, 20, 65), (1, 11, 24, 70)))
    if cuda:
        extents = (*extents[:2], extents[2] * 7, extents[3] * 5)
    extents = tuple(-(-n // 2**small) for n in extents)
    if chance(rng, 0.5):
        kind, source = "mask", mask_source(Writer(rng, extents, None, p.captured, "m"), rng.choice((1, 2, 3, 4)))
    else:
        kind, source = "score", score_source(Writer(rng, extents, rng.choice((1.0, 4.0)), p.captured), rng.choice((1, 2, 3, 4)))
    p.mods = with_factory(source, p.captured, rng) if chance(rng, 0.3) else source
    p.inputs.append(f"scores = floats({extents}, torch.float32, {rng.randrange(10_000)}).to(device)")
    p.call.append(f'found = flexpress.evaluate_mod({kind}_mod, scores, "{kind}")')

    def check(names: dict) -> Judged:
        return solve_mod(source, f"{kind}_mod", values_of(p, names), names["scores"], indices(extents, p.device), names["found"])

    p.check = check


def verdicts(p: Program, rng: random.Random, small: int) -> None:
    """The block lists of a mask against its dense picture: of create_block_mask, and those that a call makes by bounds alone."""
    lengths = (1, 16, 20, 64, 127, 128, 129, 200, 260) if p.device == "cpu" else (1, 64, 127, 129, 500, 1000, 2050)
    extents = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3)), *(-(-rng.choice(lengths) // 2**small) for _ in range(2))
    size = tuple(rng.choice((7, 10, 16, 16, 32, 48, 64, 64, 128, 128, 256)) for _ in range(2))
    while math.prod(-(-n // step) for n, step in zip(extents, (1, 1, *size), strict=True)) > (100 if p.device == "cpu" else 5000):
        size = size[0] * 2, size[1] * 2
    source = random_mask(rng, extents, p.captured)
    p.mods = with_factory(source, p.captured, rng) if chance(rng, 0.3) else source
    separate = chance(rng, 0.8)
    p.call.append(
        f"mask = flexpress.create_block_mask(mask_mod, {extents[0]}, {extents[1]}, {extents[2]}, {extents[3]}, device, {size}, "
        f"separate_full_blocks={separate})"
    )
    if chance(rng, 0.2):
        p.call.append(f"dense = flexpress.create_mask(mask_mod, {extents[0]}, {extents[1]}, {extents[2]}, {extents[3]}, device)")

    def check(names: dict) -> Judged:
        mod_names = reference_namespace(values_of(p, names), torch.float64)
        exec(source, mod_names)
        dense = mod_names["mask_mod"](*indices(extents, p.device)).expand(extents)
        wrong = wrong_blocks(names["mask"], dense, size, separate)
        if "dense" in names and not torch.equal(names["dense"], dense):
            at = tuple((names["dense"] != dense).nonzero()[0].tolist())
            wrong.append(Difference("create_mask", f"is {names['dense'][at].item()} at {at}"))
        wrong += wrong_bounds(names["mask_mod"], dense, extents, p.device)
        return Judged(wrong, 1.0, {})

    p.check = check


def varlen(p: Program, rng: random.Random, small: int) -> None:
    """varlen_attention of ragged sequences, with blocks of their own or not, forward and backward."""
    cuda, dtype = p.device == "cuda", rng.choice(DTYPES)
    lengths = (0, 0, 1, 2, 15, 16, 40, 65, 130) if not cuda else (0, 1, 17, 128, 300, 777, 1024)

    def drawn(count: int) -> list[int]:
        found = [rng.choice(lengths) // 2**small for _ in range(count)]
        return found if any(found) else [*found[:-1], 9]

    q_lens = drawn(rng.randint(1, 5))
    cross = chance(rng, 0.5)
    kv_lens = drawn(len(q_lens)) if cross else q_lens
    Hkv, group = rng.choice((1, 2)), rng.choice((1, 2, 3))
    D = rng.choice(HEAD_DIMS[p.device][:9])
    Dv = D if chance(rng, 0.6) else rng.choice(HEAD_DIMS[p.device][:9])
    if sum(q_lens) * sum(kv_lens) * Hkv * group > PAIRS[p.device]:
        Hkv, group = 1, 1
    extents = len(q_lens), Hkv * group, max(q_lens), max(max(kv_lens), 1)
    scale, backward = rng.choice((None, None, 0.3, -0.5)), chance(rng, 0.5)
    score = mask = ""
    if chance(rng, 0.7):
        score = score_source(Writer(rng, extents, 1.0, p.captured), rng.choice((1, 2, 3)))
    learned = marked_learned(p, rng, score) if backward else []
    if chance(rng, 0.7):
        mask = random_mask(rng, extents, p.captured)
    p.mods = "\n\n".join(with_factory(w, p.captured, rng) if chance(rng, 0.3) else w for w in (score, mask) if w)
    T, S, Hq = sum(q_lens), sum(kv_lens), Hkv * group
    ending = ".requires_grad_()" if backward else ""
    for name, shape in (("q", (T, Hq, D)), ("k", (S, Hkv, D)), ("v", (S, Hkv, Dv))):
        p.inputs.append(
            f'{name} = laid_out({shape}, {dtype}, device, {rng.randrange(10_000)}, "{rng.choice(fuzz_inputs.LAYOUTS)}"){ending}'
        )
    kind = rng.choice(("torch.int32", "torch.int64"))
    p.inputs.append(f"cu_q = offsets({q_lens}, device, {kind})")
    if cross:
        p.inputs.append(f"cu_k = offsets({kv_lens}, device, {kind})")
    apart = chance(rng, 0.5)
    if apart:  # blocks begin where sequences do, however short these are
        p.inputs.append("from flexpress.calls import packed_blocks\nusual, packed_blocks.LONG = packed_blocks.LONG, 0")
    text = f"{'cu_k' if cross else None}, {'score_mod' if score else None}, {'mask_mod' if mask else None}"
    options = {"BACKEND": rng.choice(("TRITON", "AUTO"))} if chance(rng, 0.3) else {}
    text += f"{f', scale={scale}' if scale is not None else ''}{f', kernel_options={options}' if options else ''}"
    p.poison = deterministic = backward and chance(rng, 0.3)
    p.call.append(f"out, lse = flexpress.varlen_attention(q, k, v, cu_q, {text}, return_lse=True, deterministic={deterministic})")
    if apart:
        p.call.append("packed_blocks.LONG = usual")
    results = ["out", "lse"]
    if backward:
        results += gradients(p, rng, (T, Hq, Dv), dtype, learned, chance(rng, 0.5), lse_shape=(T, Hq))

    def check(names: dict) -> Judged:
        def heads_first(t):
            return None if t is None else t.transpose(0, 1)[None]

        def places(lens):
            sequence = torch.tensor([i for i, n in enumerate(lens) for _ in range(n)], dtype=torch.int64, device=p.device)
            local = torch.tensor([i for n in lens for i in range(n)], dtype=torch.int64, device=p.device)
            return sequence, local

        (sq, lq), (sk, lk) = places(q_lens), places(kv_lens)
        h = torch.arange(Hq, device=p.device).view(-1, 1, 1)
        d_lse = names.get("d_lse")
        problem = Problem(
            *(heads_first(names[n]) for n in "qkv"),
            sq[:, None],
            h,
            lq[:, None],
            lk,
            "\n\n".join((score, mask)),
            values_of(p, names),
            scale,
            sq[:, None] == sk,
            heads_first(names.get("d_out")),
            None if d_lse is None else d_lse.transpose(0, 1)[None],
            tuple(learned),
        )
        found = {n: names[n] if n[1:] in learned else heads_first(names[n]) for n in results if n != "lse"}
        return judge(problem, {**found, "lse": names["lse"].transpose(0, 1)[None]})

    p.check = check


def cached(p: Program, rng: random.Random, small: int) -> None:
    """cached_attention: prefill and decoding, contiguous and paged, float8, any positions."""
    cuda, dtype = p.device == "cuda", rng.choice(DTYPES)
    B, ragged = rng.randint(1, 4), chance(rng, 0.5)
    q_lens = [rng.choice((0, 1, 1, 2, 5, 17, 150) if cuda else (0, 1, 1, 2, 5, 17)) for _ in range(B)]
    if not ragged:
        q_lens = [max(q_lens) or 1] * B
    room = rng.choice((0, 1, 30, 100, 700) if cuda else (0, 1, 30, 70, 300)) // 2**small
    kv_lens = [n + rng.randint(0, room) for n in q_lens]
    if not any(q_lens):
        q_lens[0], kv_lens[0] = 1, kv_lens[0] + 1
    M, N = max(q_lens), max(kv_lens)
    Hkv, group = rng.choice(((1, 1), (2, 1), (1, 4), (2, 3), (1, 12), (4, 2)))
    D, Dv, fp8 = rng.choice((16, 20, 64)), rng.choice((16, 24)), chance(rng, 0.25)
    page_size, located = rng.choice((0, 0, 1, 5, 16, 64)), chance(rng, 0.5)
    Hq, extents = Hkv * group, (B, Hkv * group, N + 8, N + 8)
    shifted = chance(rng, 0.25)  # queries need not be the last positions
    starts = [kv - q + (rng.randint(0, 4) if shifted else 0) for q, kv in zip(q_lens, kv_lens, strict=True)]
    starts = [min(s, N + 8 - q) for s, q in zip(starts, q_lens, strict=True)]
    score = mask = ""
    if chance(rng, 0.6):
        score = score_source(Writer(rng, extents, 1.0, p.captured), rng.choice((1, 2, 3)))
    if chance(rng, 0.5):
        mask = random_mask(rng, extents, p.captured)
    p.mods = "\n\n".join(w for w in (score, mask) if w)
    p.inputs.append(f'q = laid_out({(B, Hq, M, D)}, {dtype}, device, {rng.randrange(10_000)}, "{rng.choice(fuzz_inputs.LAYOUTS)}")')
    cast = ".to(torch.float8_e4m3fn)" if fp8 else ""
    for name, size in (("k", D), ("v", Dv)):
        p.inputs.append(f"{name} = laid_out({(B, Hkv, N + 8, size)}, {dtype}, device, {rng.randrange(10_000)}){cast}")
    seed = rng.randrange(10_000)
    p.inputs.append(f"k_cache, table = in_cache(k, {kv_lens}, {page_size}, {seed}, {located})")
    p.inputs.append(f"v_cache, table = in_cache(v, {kv_lens}, {page_size}, {seed}, {located})")
    p.inputs.append(f"kv_len = torch.tensor({kv_lens}, dtype=torch.int32, device=device)")
    arguments = {"kv_len": "kv_len", "batch_invariant": str(chance(rng, 0.3))}
    if page_size:
        arguments["page_table"] = "table"
    elif located:
        arguments["cache_loc"] = "table"
    if ragged:
        p.inputs.append(f"cu_q = offsets({q_lens}, device)")
        arguments |= {"cu_seqlens_q": "cu_q", "max_q_len": str(M)}
    if shifted:
        p.inputs.append(f"q_offset = torch.tensor({starts}, dtype=torch.int32, device=device)")
        arguments["q_offset"] = "q_offset"
    if fp8:
        for name in "kv":
            p.inputs.append(f"{name}_scale = floats(({Hkv},), torch.float32, {rng.randrange(999)}).abs().to(device) + 0.5")
            arguments[f"{name}_scale"] = f"{name}_scale"
    scale = rng.choice((None, None, 0.3, -0.5))
    if scale is not None:
        arguments["scale"] = repr(scale)
    for name, source in (("score_mod", score), ("mask_mod", mask)):
        if source:
            arguments[name] = name
    if shifted:
        p.refusals += "|positions go from|names pages from -1"  # past the room of a cache, or past a sequence's pages
    query = f"packed(q, {q_lens})" if ragged else "q"
    p.call.append(
        f"out, lse = flexpress.cached_attention({query}, k_cache, v_cache, {', '.join(f'{k}={v}' for k, v in arguments.items())}, "
        "return_lse=True)"
    )
    p.poison = True

    def check(names: dict) -> Judged:
        def of_sequences(values):
            return torch.tensor(values, device=p.device).view(-1, 1, 1, 1)

        local = torch.arange(M, device=p.device)[:, None]
        n = torch.arange(N + 8, device=p.device)
        b = torch.arange(B, device=p.device).view(-1, 1, 1, 1)
        h = torch.arange(Hq, device=p.device).view(-1, 1, 1)
        reference = mask or "def mask_mod(b, h, q_idx, kv_idx):\n    return kv_idx <= q_idx\n"
        k, v = names["k"], names["v"]
        if fp8:
            k, v = (t.double() * names[f"{n}_scale"].double()[None, :, None, None] for n, t in (("k", k), ("v", v)))
        problem = Problem(
            names["q"],
            k,
            v,
            b,
            h,
            local + of_sequences(starts),
            n,
            "\n\n".join((score, reference)),
            values_of(p, names),
            scale,
            (n < of_sequences(kv_lens)) & (local < of_sequences(q_lens)),
        )
        out, lse = names["out"], names["lse"]
        if ragged:
            outs, rows = out.split(q_lens), lse.split(q_lens)
            out, lse = torch.zeros((B, Hq, M, Dv), dtype=out.dtype, device=p.device), torch.full((B, Hq, M), -torch.inf, device=p.device)
            for i, length in enumerate(q_lens):
                out[i, :, :length], lse[i, :, :length] = outs[i].transpose(0, 1), rows[i].transpose(0, 1)
        return judge(problem, {"out": out, "lse": lse})

    p.check = check


def updated(p: Program, rng: random.Random, small: int) -> None:
    """update_cache: keys, values and queries turned by RoPE, and written to their places."""
    B, ragged, D = rng.randint(1, 4), chance(rng, 0.5), rng.choice((8, 20, 64))
    counts = [rng.choice((0, 1, 2, 5, 33)) for _ in range(B)]
    p.call.append("from support.caches import Update, check_update")
    dtype = rng.choice(DTYPES)
    case = {
        "counts": counts if ragged else [max(counts)] * B,
        "offsets": [rng.randint(0, 40) for _ in range(B)],
        "ragged": ragged,
        "D_QK": D,
        "D_V": rng.choice((D, 12)),
        "Hkv": rng.randint(1, 3),
        "Hq": rng.randint(1, 4),
        "page_size": rng.choice((0, 1, 7, 16)),
        "located": chance(rng, 0.5),
        "given": chance(rng, 0.5),
        "rope_dim": rng.choice((0, 2, D // 4 * 2, D)),
        "interleaved": chance(rng, 0.5),
        "tail": chance(rng, 0.5),
        "query": chance(rng, 0.5),
        "strided": chance(rng, 0.5),
        "fp8": chance(rng, 0.3),
        "seed": rng.randrange(10_000),
    }
    p.call.append(f"check_update(Update(**{case}, dtype={dtype}), device)  # raises AssertionError")
    p.check = lambda names: Judged([], 1.0, {})


def flash(p: Program, rng: random.Random, small: int) -> None:
    """The functions of flash_attn, with a bias, and gradients of all."""
    s = drawn_shape(rng, p.device, small)
    dtype, causal, scale = rng.choice(DTYPES), chance(rng, 0.5), rng.choice((None, None, 0.3))
    form, backward = rng.choice(("", "kvpacked", "qkvpacked")), chance(rng, 0.5)
    if form == "qkvpacked":
        s.N, s.group = s.M, 1
    ending = ".requires_grad_()" if backward else ""
    layouts = [rng.choice(fuzz_inputs.LAYOUTS[:5]) for _ in range(3)]

    def tensor(shape, layout):  # laid_out has heads before positions
        order = "(0, 2, 1, 3)" if len(shape) == 4 else "(0, 3, 1, 2, 4)"
        inner = (shape[0], shape[2], shape[1], shape[3]) if len(shape) == 4 else (shape[0], shape[2] * shape[3], shape[1], shape[4])
        text = f'laid_out({inner}, {dtype}, device, {rng.randrange(10_000)}, "{layout}")'
        return f"{text}.permute{order}" if len(shape) == 4 else f"{text}.unflatten(1, {shape[2:4]}).permute{order}"

    texts = {
        "": (("q", (s.B, s.M, s.Hq, s.D)), ("k", (s.B, s.N, s.Hkv, s.D)), ("v", (s.B, s.N, s.Hkv, s.D))),
        "kvpacked": (("q", (s.B, s.M, s.Hq, s.D)), ("kv", (s.B, s.N, 2, s.Hkv, s.D))),
        "qkvpacked": (("qkv", (s.B, s.M, 3, s.Hq, s.D)),),
    }[form]
    if form:
        layouts = ["contiguous" if len(shape) == 5 else layout for (_, shape), layout in zip(texts, layouts, strict=False)]
    for (name, shape), layout in zip(texts, layouts, strict=False):
        p.inputs.append(f"{name} = {tensor(shape, layout)}{ending}")
    bias, score = rng.choice(("", "1h1n", "1hmn", "bhmn", "11mn", "b11n", "1hm1", "1111")), ""
    if bias:
        shape = tuple({"b": s.B, "h": s.Hq, "m": s.M, "n": s.N, "1": 1}[c] for c in bias)
        source = f"floats({shape}, {rng.choice((dtype, 'torch.float32'))}, {rng.randrange(10_000)}).to(device)"
        p.captured.add("bias", f"turned({source})" if chance(rng, 0.4) else source)
        if backward:
            p.captured.source["bias"] += ".requires_grad_()"
        index = ", ".join({"b": "b", "h": "h", "m": "q_idx", "n": "kv_idx", "1": "0"}[c] for c in bias)
        score = f"def score_mod(score, b, h, q_idx, kv_idx):\n    return score + bias[{index}]\n"
    mask = "def mask_mod(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n" if causal else ""
    names_ = [name for name, _ in texts]
    p.call.append(f"from flexpress.flash import flash_attn_{form}{'_' * bool(form)}func")
    p.call.append(f"out = flash_attn_{form}{'_' * bool(form)}func({', '.join(names_)}, {'bias' if bias else None}, {causal}, {scale})")
    results, learned = ["out"], ["bias"] if bias and backward else []
    if backward:
        results += gradients(p, rng, (s.B, s.M, s.Hq, s.D), dtype, learned, False, tuple(names_))

    def check(names: dict) -> Judged:
        def parts(t, count):
            return [x.transpose(1, 2) for x in (t.unbind(2) if count > 1 else (t,))]

        def apart(prefix):
            found = {}
            for name in names_:
                t = names[prefix + name]
                found |= {prefix + n: x for n, x in zip(name, parts(t, len(name)), strict=True)}
            return found

        tensors = apart("")
        d_out = names["d_out"].transpose(1, 2) if backward else None
        problem = Problem(
            tensors["q"],
            tensors["k"],
            tensors["v"],
            *indices(s.extents, p.device),
            "\n\n".join((score, mask)),
            values_of(p, names),
            scale,
            None,
            d_out,
            None,
            tuple(learned),
        )
        found = {"out": names["out"].transpose(1, 2)}
        if backward:
            found |= apart("d") | {f"d{n}": names[f"d{n}"] for n in learned}
        return judge(problem, found)

    p.check = check


def marked_learned(p: Program, rng: random.Random, score: str) -> list[str]:
    """The names of captured tensors in a score_mod that are to get gradients."""
    learned = []
    if not score or "half()" in score or "bfloat16()" in score:
        return learned  # autograd rounds gradients on their way back through a cast, kernels do not
    for name, value in p.captured.value.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and re.search(rf"\b{name}\b", score) and chance(rng, 0.85):
            p.captured.source[name] += ".requires_grad_()"
            learned.append(name)
    return learned


def true_status(dense: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """int8 (B, H, rows, columns): 0 empty, 1 partial, 2 full. Rows past the end do not count; past the last column, no block is
    full."""
    B, H, M, N = dense.shape
    rows, columns = -(-M // size[0]), -(-N // size[1])

    def blocks(fill_rows: bool):
        padded = torch.zeros((B, H, rows * size[0], columns * size[1]), dtype=torch.bool, device=dense.device)
        padded[:, :, :M, :N] = dense
        if fill_rows:
            padded[:, :, M:, :N] = True
        return padded.reshape(B, H, rows, size[0], columns, size[1])

    return blocks(False).any(5).any(3).to(torch.int8) + blocks(True).all(5).all(3).to(torch.int8) * blocks(False).any(5).any(3).to(
        torch.int8
    )


def listed(counts: torch.Tensor, indices_: torch.Tensor | None, columns: int) -> torch.Tensor:
    """The blocks in a list as a dense picture."""
    dense = torch.zeros((*counts.shape, columns + 1), dtype=torch.bool, device=counts.device)
    if indices_ is not None:
        past = torch.arange(indices_.shape[-1], device=counts.device) >= counts[..., None]
        dense.scatter_(-1, torch.where(past, columns, indices_).long(), True)
    return dense[..., :columns]


def wrong_blocks(mask, dense: torch.Tensor, size: tuple[int, int], separate: bool) -> list[Difference]:
    """Lists that kernels walk for a BlockMask, both ways, that do not say what its dense picture does."""
    truth = true_status(dense, size)
    rows, columns = truth.shape[-2:]
    if mask._partial_where_cut and mask.shape[-2] % size[0]:  # mask_mod is asked there, as what it captures may change
        truth = torch.cat([truth[..., :-1, :], truth[..., -1:, :].clamp(max=1)], -2)
    made = {"kv": (mask.as_lists(), columns, truth), "q": (mask.as_transposed_lists(), rows, truth.transpose(-1, -2))}
    wrong = []
    for axis, (lists, width, status) in made.items():
        partial = listed(lists.kv_num_blocks, lists.kv_indices, width)
        full = torch.zeros_like(partial)
        if separate:
            full = listed(lists.full_kv_num_blocks, lists.full_kv_indices, width)
        found = partial.to(torch.int8) + 2 * full.to(torch.int8)
        expected = status if separate else status.clamp(max=1)
        if not torch.equal(found, expected):
            at = tuple((found != expected).nonzero()[0].tolist())
            wrong.append(
                Difference(
                    f"{axis}_indices",
                    f"block {at} is {_STATUS[found[at].item()]}, not {_STATUS[expected[at].item()]}; "
                    f"{int((found != expected).sum())} of {found.numel()} blocks are wrong",
                )
            )
    return wrong


_STATUS = {0: "empty", 1: "partial", 2: "full", 3: "in both lists"}


def wrong_bounds(mask_mod, dense: torch.Tensor, extents: tuple, device: str) -> list[Difference]:
    """Blocks that bounds of a mask_mod call empty or full and that are not, in the lists that a call makes."""
    from flexpress.codegen.mod.graphs.wide import in_wide_integers
    from flexpress.codegen.mod.tracing.bind import bind
    from flexpress.codegen.run.masks import automatic_lists
    from flexpress.inputs.plain_arguments import resolve_device

    wrong = []
    truth, bound = true_status(dense, (128, 128)), in_wide_integers(bind(mask_mod, "mask"), extents)
    for transposed in (False, True):
        lists = automatic_lists(bound, extents, resolve_device(device), (128, 128), transposed=transposed)
        status = truth.transpose(-1, -2) if transposed else truth
        partial = listed(lists.kv_num_blocks, lists.kv_indices, status.shape[-1])
        found = partial.to(torch.int8) + 2 * listed(lists.full_kv_num_blocks, lists.full_kv_indices, status.shape[-1]).to(torch.int8)
        bad = (found != 1) & (found != status)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            wrong.append(
                Difference(
                    "mask_mod=",
                    f"bounds call block {at} of the {'transposed ' * transposed}lists {_STATUS[found[at].item()]}; "
                    f"it is {_STATUS[status[at].item()]}",
                )
            )
    return wrong


KINDS: dict[str, tuple[Callable, float]] = {
    "verdicts": (verdicts, 30),
    "evaluate": (evaluated, 25),
    "attention": (attention, 30),
    "huge": (huge, 3),
    "hidden infinities": (hidden_infinities, 3),
    "varlen": (varlen, 8),
    "cached": (cached, 8),
    "update": (updated, 3),
    "flash": (flash, 4),
    **FEATURES,
}


def program(seed: int, index: int, device: str, kinds: tuple[str, ...] = (), small: int = 0) -> Program:
    """The program of an index; `small` makes it smaller."""
    rng = random.Random(f"{seed} {index}")
    names = list(kinds or KINDS)
    kind = rng.choices(names, [KINDS[k][1] for k in names])[0]
    p = Program(seed, index, device, kind)
    KINDS[kind][0](p, rng, small)
    return p


def programs(seed: int, count: int, device: str, kinds: tuple[str, ...] = ()):
    return (program(seed, i, device, kinds) for i in itertools.islice(itertools.count(), count))
