"""Greedy generation by a small engine: continuous batching, a paged cache with shared prompts, speculation. generate.md explains the parts.

    python examples/generate.py
    python examples/generate.py --config config.json --weights model.safetensors --dtype bfloat16 --page-size 64 --pages 512
    python examples/generate.py --smollm2 --ask "Why is the sky blue?" --new 100        # real weights: make weights
    python examples/generate.py --smollm2 --requests 200 --systems 4 --prompt 400 --new 128 --page-size 64 --chunk 1024

Without --ask random prompts, or with --smollm2 pieces of this project's pages; by default a random model; on a GPU if there is one. Exit
status 1 if a request is lost, or if the dense model in float64 makes other tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import torch

from engine import Answer, Config, Engine, Llama, PromptLookup, Request, wrong_tokens
from flexpress import OutOfPages


def smollm2() -> tuple[Llama, Any, frozenset[int]]:
    """SmolLM2-135M-Instruct in float32, its tokenizer, and the tokens that end an answer."""
    from smollm2 import load

    model, tokenizer = load("eager", "cpu")
    ends = model.generation_config.eos_token_id
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    return Llama.of(Config.of(model.config.to_dict()), weights), tokenizer, frozenset([ends] if isinstance(ends, int) else ends or ())


def random_prompts(args: argparse.Namespace, config: Config) -> list[Request]:
    """Of random tokens, behind one of so many system prompts."""
    draw = random.Random(args.seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(config.vocab_size) for _ in range(count)]

    systems = [tokens(args.system) for _ in range(args.systems)] or [[]]
    return [
        Request(systems[i % len(systems)] + tokens(draw.randint(1, args.prompt)), draw.randint(1, args.new)) for i in range(args.requests)
    ]


def text_prompts(args: argparse.Namespace, tokenizer: Any, ends: frozenset[int]) -> list[Request]:
    """Pieces of random lengths of this project's pages, each behind one of so many system prompts, in the words of a chat."""
    draw, pages = random.Random(args.seed), sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    ids = [tokenizer(page.read_text(encoding="utf-8"))["input_ids"] for page in pages]
    longest = sorted(ids, key=len, reverse=True)[: args.systems]
    systems = [f"You answer questions about this page. {tokenizer.decode(text[: args.system])}" for text in longest] or [""]
    source = sum(ids, [])
    requests = []
    for i in range(args.requests):
        count = draw.randint(1, args.prompt)
        first = draw.randrange(max(1, len(source) - count))
        question = f"Say in other words: {tokenizer.decode(source[first : first + count])}"
        wanted = draw.randint(1, args.new)
        requests.append(Request(chat(tokenizer, question, systems[i % len(systems)]), wanted, Answer(tokenizer, ends, tuple(args.stop))))
    return requests


def chat(tokenizer: Any, question: str, system: str = "") -> list[int]:
    """The tokens of a chat whose answer is to come."""
    said = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]


def ask(engine: Engine, args: argparse.Namespace, tokenizer: Any, ends: frozenset[int]) -> list[Request]:
    """Answers every question. The first one's is written as it comes, the others behind it."""

    def write(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    requests = []
    for i, question in enumerate(args.ask):
        answer = Answer(tokenizer, ends, tuple(args.stop), write if i == 0 else None)
        requests.append(Request(chat(tokenizer, question), args.new, answer))
        engine.submit(requests[-1])
    while any(not r.reason for r in requests) and engine.step():
        pass
    for i, request in enumerate(requests):
        answer = request.stop
        assert isinstance(answer, Answer)
        answer.close()
        print((f"\n\n{args.ask[i]}\n{answer.text}" if i else "") + f"\n[{len(request.made)} tokens, {request.reason}]")
    return requests


def load(engine: Engine, requests: list[Request], rate: float, seed: int) -> None:
    """Requests come at random times, `rate` a second on average, or all at once. Returns when all are done."""
    draw, start = random.Random(seed), time.perf_counter()
    times = list(accumulate(draw.expovariate(rate) if rate else 0.0 for _ in requests))
    come = 0
    while True:
        now = time.perf_counter() - start
        while come < len(requests) and times[come] <= now:
            engine.submit(requests[come])
            come += 1
        if not engine.step():
            if come == len(requests):
                return
            time.sleep(max(0.0, times[come] - now))


def spread(seconds: list[float]) -> str:
    """Mean, median and 99th percentile, in ms."""
    if len(seconds) < 2:
        return " ".join(f"{1000 * s:.2f}" for s in seconds) or "-"
    cuts = quantiles(seconds, n=100)
    return f"{1000 * mean(seconds):.2f} {1000 * cuts[49]:.2f} {1000 * cuts[98]:.2f}"


def report(engine: Engine, requests: list[Request], wrong: int | None) -> dict[str, Any]:
    """What is printed: name and value."""
    made = sum(len(r.made) for r in requests)
    first, last = min(r.times[0] for r in requests), max(r.times[-1] for r in requests)
    drafts = {"drafted tokens": engine.drafted, "of these right": engine.accepted} if engine.scheduler.draft else {}
    return {
        "requests": len(requests),
        "requests lost": len(lost(requests)),
        "prompt tokens": sum(len(r.prompt) for r in requests),
        "of these found in pages": engine.scheduler.tokens_found,
        "generated tokens": made,
        "seconds": f"{last - first:.2f}",
        "tokens per second": f"{made / (last - first):.1f}",
        "ms per output token, mean p50 p99": spread([(r.times[-1] - r.times[1]) / (len(r.made) - 1) for r in requests if len(r.made) > 1]),
        "ms to first token, mean p50 p99": spread([r.times[1] - r.times[0] for r in requests]),
        "steps": engine.steps,
        "steps with a request waiting": engine.steps_waited,
        "requests preempted": sum(r.preempted for r in requests),
        "pages at most": f"{engine.peak_pages} of {engine.pool.num_pages}",
        **drafts,
        "tokens unlike float64, dense": "not checked" if wrong is None else wrong,
    }


_start = time.perf_counter()


def said(line: str) -> None:
    """Where time goes before an answer, on stderr."""
    print(f"{time.perf_counter() - _start:7.1f} s: {line}", file=sys.stderr, flush=True)


def lost(requests: list[Request]) -> list[Request]:
    """Those that have no end, or another number of tokens than they wanted without a reason."""
    return [
        r for r in requests if not r.reason or not r.made or len(r.made) > r.wanted or (r.reason == "length" and len(r.made) < r.wanted)
    ]


def whole_number(least: int) -> Callable[[str], int]:
    """Reads an argument of at least so much."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return read


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a Llama's config.json; a tiny model if left out")
    parser.add_argument("--weights", nargs="+", default=[], help="its safetensors files; random weights if left out")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct, which `make weights` installs")
    parser.add_argument("--ask", nargs="+", default=[], metavar="QUESTION", help="answer these, with --smollm2")
    parser.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="answers end before such a text, with --smollm2")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--float8", action="store_true", help="keys and values are stored as e4m3, with scales")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, help="CUDA graphs; by default on a GPU")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, help="ask the dense model; by default up to 50M weights")
    parser.add_argument("--verbose", action="store_true", help="say where time goes on a CPU, too, and compile ahead there")
    parser.add_argument("--rate", type=float, default=0.0, help="requests that come in a second, on average; 0: all at once (default 0)")
    for name, default, least, meaning in (
        ("requests", 6, 1, "how many"),
        ("systems", 0, 0, "system prompts, which requests share in turn"),
        ("system", 100, 0, "tokens of a system prompt"),
        ("prompt", 40, 1, "tokens of a prompt behind that, at most"),
        ("new", 12, 1, "tokens to make, at most"),
        ("draft", 0, 0, "tokens that a step may verify of a request, drafted by prompt lookup; 0: no drafts"),
        ("sequences", 64, 1, "requests that run at a time"),
        ("chunk", 16, 1, "tokens of prompts and drafts in a step"),
        ("pages", 8, 1, "of the cache; with --smollm2 as many as all that run may need"),
        ("page-size", 16, 1, "tokens of a page"),
        ("seed", 0, 0, "of all"),
    ):
        shown = None if name == "pages" else default
        parser.add_argument(f"--{name}", type=whole_number(least), default=shown, help=f"{meaning} (default {default})")
    args = parser.parse_args()
    if (args.ask or args.stop) and not args.smollm2:
        parser.error("--ask and --stop need words: pass --smollm2")
    if args.graphs and not torch.cuda.is_available():
        parser.error("--graphs needs a GPU, and there is none")
    if not args.rate >= 0:
        parser.error(f"--rate is {args.rate}; it must be at least 0")
    for file in [*([args.config] if args.config else []), *args.weights]:
        if not Path(file).is_file():
            parser.error(f"there is no file {file}")
    return args


def main() -> int:
    args, device = arguments(), "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer: Any = None
    ends: frozenset[int] = frozenset()
    if args.smollm2:
        model, tokenizer, ends = smollm2()
    else:
        config = Config.read(args.config) if args.config else Config()
        model = read(config, args.weights) if args.weights else Llama.random(config, args.seed)
    model = model.to(device, getattr(torch, args.dtype))
    said(f"{model.parameters() / 1e6:.0f}M weights are on {device}") if device == "cuda" or args.verbose else None

    def prompts() -> list[Request]:
        return text_prompts(args, tokenizer, ends) if args.smollm2 else random_prompts(args, model.config)

    asked = [Request(chat(tokenizer, question), args.new) for question in args.ask] or prompts()
    longest = max(len(r.prompt) + r.wanted for r in asked)
    fill = min(args.sequences, len(asked)) * -(-longest // args.page_size)  # pages of all that run, at full length
    engine = Engine(
        model,
        num_pages=args.pages or (fill if args.smollm2 else 8),
        page_size=args.page_size,
        max_sequences=args.sequences,
        chunk=args.chunk,
        max_length=longest,
        draft=PromptLookup() if args.draft else None,
        nodes=args.draft + 1,
        float8=args.float8,
        graphs=args.graphs,
    )
    if args.float8:
        engine.calibrate(asked[0].prompt)
    if device == "cuda" or args.verbose:
        engine.compile(said)
    try:
        if args.ask:
            requests = ask(engine, args, tokenizer, ends)
        else:
            for _ in range(2 if device == "cuda" else 1):  # the first run loads the kernels, and captures graphs
                engine.forget()
                requests, begun = prompts(), time.perf_counter()
                load(engine, requests, args.rate, args.seed)
                if device == "cuda" or args.verbose:
                    said(f"{len(requests)} requests answered in {engine.steps} steps, {time.perf_counter() - begun:.1f} s")
    except OutOfPages as why:
        print(
            f"a request needs {why.wanted} pages of {args.page_size} tokens, but there are {why.num_pages}: pass --pages", file=sys.stderr
        )
        return 2
    check = model.parameters() <= 50e6 if args.check is None else args.check
    exact = model.to(dtype=torch.float64) if check else None
    stored = engine.tensors.stored if args.float8 else None
    wrong = sum(wrong_tokens(model, r, stored, exact) for r in requests) if check else None
    print("\n".join(f"{name:34}{value:>24}" for name, value in report(engine, requests, wrong).items()))
    return int(bool(wrong) or bool(lost(requests)))


def read(config: Config, files: list[str]) -> Llama:
    """A model with the weights of safetensors files."""
    from safetensors.torch import load_file

    return Llama.of(config, {name: weight for file in files for name, weight in load_file(file).items()})


if __name__ == "__main__":
    raise SystemExit(main())
