"""Evaluating a mod on its own: what a score_mod makes of given scores, or a mask_mod of every position.

For looking at a mod and for tests. It goes the way of every mod (trace, lower, print, launch), so the numbers
are those that an attention kernel computes with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..compiling import runs_uncompiled
from ..device.cpp import CppKernel
from ..device.cpp_compiler import by_either
from ..device.devices import backend_of
from ..device.kernel import Kernel, kernel_for
from ..mod.captured.tensors import check_values, read_captured, readable
from ..mod.expr import INDEX_BOUND, ModGraph
from ..mod.graphs.wide import in_wide_integers
from ..mod.tracing.bind import bind
from ..plan.masks import SYMBOL_NAMES
from ..registry import INFO, Table
from ..text.cpp import CPP
from ..text.languages import TRITON
from ..text.layouts import layouts_of
from ..text.mod_text import ModText, mod_text
from ..text.parameters import Parameter, constants, numbers, pointer
from ..text.snippet import Target
from ..text.spec import KernelSpec

_TILE = 64
_PRECISIONS = ("float16", "bfloat16", "float32")

_plans: dict[tuple, tuple[Kernel, ModText]] = Table("evaluate plans", 1024)


@runs_uncompiled
def evaluate_mod(mod: Callable, scores: torch.Tensor, kind: str = "score", *, precision: str = "float32") -> torch.Tensor:
    """`mod` at every position of `scores`, by a printed kernel: a debugging aid, attention never needs it.

    mod        score_mod(score, b, h, q_idx, kv_idx), or with kind="mask" mask_mod(b, h, q_idx, kv_idx)
    scores     float32 (B, H, Q_LEN, KV_LEN), on a CPU or a GPU; for a mask_mod only shape and device count
    precision  "float16", "bfloat16" or "float32": compute as in attention on tensors of this dtype, whose
               kernels take a faster spelling of some operations where its error stays below the dtype's own
               rounding

    Returns float32 (score_mod) or bool (mask_mod) of the same shape. Raises ModError if the mod cannot be
    traced, ValueError or TypeError for other arguments.

        evaluate_mod(lambda score, b, h, q_idx, kv_idx: score * 2, torch.ones(1, 1, 3, 5))  # 3 x 5 twos
    """
    check_values("evaluate_mod")
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores must be a torch.Tensor (B, H, Q_LEN, KV_LEN), got {type(scores).__name__}")
    scores = readable("scores", scores)
    if scores.dim() != 4 or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 (B, H, Q_LEN, KV_LEN), got {scores.dtype} {tuple(scores.shape)}")
    if scores.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"scores are on {scores.device}; kernels run on CUDA or ROCm GPUs ('cuda') and on 'cpu'")
    if kind not in ("score", "mask"):
        raise ValueError(f"kind is {kind!r}; write 'score' or 'mask'")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}; write one of {', '.join(map(repr, _PRECISIONS))}")
    bound = in_wide_integers(bind(mod, kind, scores.device), tuple(scores.shape))
    read_captured(bound, scores.device, f"{kind}_mod")
    scores = scores.detach().contiguous()
    result = torch.empty_like(scores, dtype=torch.float32 if kind == "score" else torch.bool)
    if result.numel():
        by_either(lambda in_cpp: fill(result, bound, scores, precision, in_cpp=in_cpp), scores.device)
    return result


def fill(result: torch.Tensor, bound: tuple[ModGraph, list], scores: torch.Tensor | None, precision: str, *, in_cpp: bool) -> None:
    """Write what a bound mod gives at every position into `result`, (B, H, Q_LEN, KV_LEN) and not empty. scores: as evaluate_mod has them;
    None for a mask_mod."""
    Z, H, Q_LEN, KV_LEN = result.shape
    kernel, text = _plan(bound, tuple(result.shape), result.device, precision, in_cpp)
    values = {"scores": scores, "result": result, "Z": Z, "H": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN, **text.named(bound[1])}
    if isinstance(kernel, CppKernel):
        kernel.call(values)
        return
    grid = (Z * H * -(-Q_LEN // _TILE) * -(-KV_LEN // _TILE),)
    kernel.launch(grid, kernel.spec.arguments(values), result.device, (_TILE, _TILE), num_warps=4, num_stages=1)


def _plan(
    bound: tuple[ModGraph, list], extents: tuple[int, int, int, int], device: torch.device, precision: str, in_cpp: bool
) -> tuple[Kernel, ModText]:
    graph, captured = bound
    exact = max(extents[2:]) <= INDEX_BOUND
    layouts = layouts_of(graph, captured, extents)
    key = (graph, layouts, device, precision, exact, in_cpp)
    plan = _plans.get(key)
    if plan is not None:
        INFO.hits += 1
        return plan
    backend = backend_of(device.type)
    target = Target(backend, precision, exact, CPP if in_cpp else TRITON)
    text = mod_text(graph, layouts, SYMBOL_NAMES, target, tile="[TILE_M, TILE_N]")
    kernel = kernel_for(cpu_evaluate_spec(text), CppKernel) if in_cpp else kernel_for(evaluate_spec(text, backend))
    plan = _plans[key] = kernel, text
    return plan


def evaluate_spec(text: ModText, backend: str) -> KernelSpec:
    """The KernelSpec of evaluate."""
    parameters = (*_tensors(text), *numbers("H", "Q_LEN", "KV_LEN"), *text.parameters, *constants("TILE_M", "TILE_N"))
    return KernelSpec("evaluate", (text,), (), backend, parameters)


def cpu_evaluate_spec(text: ModText) -> KernelSpec:
    """The KernelSpec of cpu_evaluate."""
    flags = (("LANGUAGE", CPP.name), ("WRITTEN", ("result",)))
    return KernelSpec("cpu_evaluate", (text,), flags, "cpu", (*_tensors(text), *numbers("Z", "H", "Q_LEN", "KV_LEN"), *text.parameters))


def _tensors(text: ModText) -> list[Parameter]:
    shape = "[Z, H, Q_LEN, KV_LEN], contiguous"
    scores = [pointer("scores", "float32", shape)] if text.kind == "score" else []
    return [*scores, pointer("result", "float32" if text.kind == "score" else "bool", f"{shape}; written")]
