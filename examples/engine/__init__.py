"""A small engine for a Llama: what a server of language models is made of. ../generate.md explains the parts, ../generate.py runs it.

llama.py      the model but for attention
checks.py     what may be asked for
scheduler.py  which request computes which of its tokens: no tensors
prefixes.py   which pages hold which tokens, so that equal beginnings are computed once
drafts.py     tokens that may come next
steps.py      a step's tensors, caches, kernels and CUDA graphs
server.py     requests in, tokens out
text.py       where an answer ends
dense.py      the same model without all that
"""

from .dense import dense_attention, wrong_tokens
from .drafts import PromptLookup
from .llama import Config, Llama
from .scheduler import Request, Scheduler
from .server import Engine
from .text import Answer

__all__ = ["Answer", "Config", "Engine", "Llama", "PromptLookup", "Request", "Scheduler", "dense_attention", "wrong_tokens"]
