"""A call of flex_attention that nobody makes, as its kernels would see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device import offline
from ..gpus import architecture
from ..mod.graphs.wide import in_wide_integers
from ..mod.tracing.bind import bind
from ..plan.extras import ORDINARY, Extras
from ..plan.forward import Blocks, Mod, Options
from ..plan.tangent import Moved, TangentCase
from . import backward, backward_kernels, forward, forward_kernels, tangent
from .call import keys_of

TARGETS = ("cpu", *offline.TARGETS)
EXTENTS = (4, 16, 4096, 4096)  # B, H, Q_LEN and KV_LEN


@dataclass(frozen=True)
class Imagined:
    """A call of flex_attention without memory.

    dtype                "float16", "bfloat16", "float32", or "float8_e4m3fn" for a forward pass
    use_tma              as the option USE_TMA: None is what the newest GPUs get, and no TMA elsewhere
    block_size           of the block mask, if there is a mask_mod; its full blocks are listed apart (separate_full), and none reaches past
                         KV_LEN (interior); blocks begin where a tensor says (starts), or lie in a longer sequence (shifted)
    transposed           q, k and v lie in memory as (B, H, D, S), so the head dim is strided
    values_in_keys       v is the first columns of k, where kernels read it with them
    output_max           max_scores are asked for
    output_rows          gradients are wanted
    captured             in a backward pass: of the floating-point tensors that score_mod captures, too
    whole                in a backward pass: Q_LEN and KV_LEN are whole blocks
    extras               sinks, scales, the output's dtype
    options              the other kernel_options

    Raises ModError for a mod that cannot be traced.
    """

    score_mod: Callable | None = None
    mask_mod: Callable | None = None
    dtype: str = "bfloat16"
    head_dim: int = 128
    head_dim_v: int | None = None
    use_tma: bool | None = None
    block_size: tuple[int, int] = (128, 128)
    separate_full: bool = True
    interior: bool = True
    starts: bool = False
    shifted: bool = False
    scale_is_positive: bool = True
    transposed: bool = False
    values_in_keys: bool = False
    output_max: bool = False
    output_rows: bool = False
    captured: bool = False
    deterministic: bool = False
    lse_gradient: bool = False
    whole: bool = True
    extras: Extras = ORDINARY
    options: Options = Options()

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16", "float32", "float8_e4m3fn"):
            raise ValueError(f"dtype must be float16, bfloat16, float32 or float8_e4m3fn, got {self.dtype!r}")

    @functools.cached_property
    def bound(self) -> tuple[tuple | None, tuple | None]:
        """score_mod and mask_mod."""
        return tuple(
            in_wide_integers(bind(mod, kind), EXTENTS) if mod is not None else None
            for mod, kind in ((self.score_mod, "score"), (self.mask_mod, "mask"))
        )

    @property
    def keys(self) -> tuple[Mod | None, Mod | None]:
        """What of them changes a kernel."""
        return keys_of(*self.bound, EXTENTS)

    def forward(self, target: str) -> forward_kernels.Call:
        """The forward pass as its kernels see it."""
        outputs = {"output_max": self.output_max, "output_rows": self.output_rows, "extras": self.extras, "aligned_captures": True}
        return forward.case_of(self.tensors()[:3], self._scale, self.keys, self._blocks, self._options, *machine_of(target), **outputs)

    def backward(self, target: str, **changes) -> backward_kernels.Call:
        """The backward pass; `changes` of its BackwardCase."""
        score, captured = self.bound[0], frozenset()
        if self.captured and score:
            captured = frozenset(i for i, t in enumerate(score[1][: len(score[0].tensors)]) if t.is_floating_point())
        details = backward.Details(self._options, self.deterministic, self.lse_gradient, captured, extras=self.extras)
        call = backward.case_of(self.tensors(), self._scale, self.keys, self._blocks, details, *machine_of(target))
        return call._replace(case=call.case._replace(**{"whole": self.whole and not self.starts, **changes}))

    def tangent(self, target: str) -> tuple[TangentCase, str, str, Moved | None, Mod | None]:
        """Tangents of gradients, in a direction in which all moves, as plans take them."""
        q, k, v, do = self.tensors()
        named = {"q": q, "k": k, "v": v, "qt": q, "kt": k, "vt": v, "do": do, "o": do, "ot": do, "dq": q, "dk": k, "dv": v}
        score, captured = self.bound[0], self.backward(target).case.captured
        details = dict(captured=captured, wanted=captured, deterministic=self.deterministic, lse_gradient=self.lse_gradient)
        aligned = tangent.geometry_of(named).aligned
        precision = self._options.float32_precision
        case = TangentCase(
            q.dtype, q.shape[3], v.shape[3], aligned, self._blocks, precision, statistics=True, extras=self.extras, **details
        )
        tangents = tuple(t if i in captured else None for i, t in enumerate(score[1][: len(score[0].tensors)])) if score else ()
        return case, *machine_of(target), tangent.with_tangents(case, score, tangents, EXTENTS)[0], self.keys[1]

    @property
    def _scale(self) -> float:
        return 1.0 if self.scale_is_positive else -1.0

    @property
    def _blocks(self) -> Blocks | None:
        return Blocks(self.separate_full, *self.block_size, self.interior, self.starts, self.shifted) if self.mask_mod else None

    @property
    def _options(self) -> Options:
        return self.options if self.use_tma is None else self.options._replace(use_tma=self.use_tma)

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and dO."""
        B, H, Q_LEN, KV_LEN = EXTENTS
        d_v, found = self.head_dim if self.head_dim_v is None else self.head_dim_v, []
        for length, width in ((Q_LEN, self.head_dim), (KV_LEN, self.head_dim), (KV_LEN, d_v), (Q_LEN, d_v)):
            shape = (B, H, width, length) if self.transposed else (B, H, length, width)
            tensor = torch.empty(shape, dtype=getattr(torch, self.dtype), device="meta")
            found.append(tensor.transpose(2, 3) if self.transposed else tensor)
        if self.dtype == "float8_e4m3fn":
            found[2] = found[2].transpose(2, 3).contiguous().transpose(2, 3)  # as calls lay them out
        if self.values_in_keys:
            found[2] = found[1][..., :d_v]
        return found


def machine_of(target: str) -> tuple[str, str]:
    """The backend, and the row of the tile tables, for one of TARGETS."""
    return backend_for(target), architecture_for(target)


def backend_for(target: str) -> str:
    """ "cpu", "cuda" or "hip". ValueError for what is not one of TARGETS."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    return "cpu" if target == "cpu" else offline.TARGETS[target].backend


def architecture_for(target: str) -> str:
    """The row of the tile tables for one of TARGETS."""
    capability = divmod(offline.TARGETS[target].arch, 10) if backend_for(target) == "cuda" else None
    return architecture(backend_for(target), capability)
