"""The kernels for Hopper in a file of its own: which of them it holds, why not the others, and what its template asks for."""

from __future__ import annotations

import math
from dataclasses import replace

from ..mod.graphs.loads import dots_of
from ..plan import hopper_backward, hopper_forward
from ..plan.backward import STATS_ALIGNMENT, delta_rows
from ..plan.hopper_backward import HopperBackwardPlan
from ..run import backward_kernels, forward_kernels
from ..run.preview import Compilation
from ..text.spec import KernelSpec
from .file import GluonKernel
from .kernels import Plans


class HopperPart:
    """The part of a file for Hopper: kernels in Gluon, and, in Triton, what goes before the backward one.

    without, without_backward   why there are none; why there is none for the backward pass
    backward                    where the forward kernel leaves scores without scale (is_raw), there is another after the portable one
    """

    def __init__(self, plans: Plans) -> None:
        self.call = call = plans.call
        named, candidate = call.options.backend, forward_kernels.Hopper()
        self.required = named == candidate.name
        self.forward = self.backward = self.without_backward = None
        self.deltas: dict[str, dict[str, Compilation]] = {}  # by name: on the target and on a CPU
        self.fused: dict[str, HopperBackwardPlan] = {}  # by name
        fitting = plans.forward_call(call.backward)
        self.without = f"BACKEND is {named}" if named not in (None, candidate.name) else candidate.fits(fitting)
        if not self.without and fitting.score and dots_of(fitting.score[0]):
            self.without = "dot products of rows of captured tensors: files have the portable kernels for them"
        if self.without:
            if self.required:
                raise ValueError(f"kernel_options['BACKEND'] names {named}, but {self.without}; leave BACKEND out")
            return
        self.forward = candidate.plan(plans.forward_call(False))
        self.forward_with_rows = candidate.plan(fitting) if call.backward else None
        self._describe()
        if call.backward:
            self._differentiate(plans)

    @property
    def is_raw(self) -> bool:
        """Does the forward kernel leave the largest scores of rows without scale?"""
        return bool(self.forward.spec.flag["SUM_IS_RAW"])

    @property
    def kernels(self) -> tuple[GluonKernel, ...]:
        """Those in Gluon, in the order of the file."""
        if self.forward is None:
            return ()
        tiles = f"min(triton.cdiv(Q_LEN, {self.forward.tile.BLOCK_M}) * HEADS, multiprocessors(device))"
        found = [GluonKernel("hopper_forward", tiles, _compiled(self.forward.spec), "hopper")]
        if self.call.backward:
            found.append(GluonKernel("hopper_forward_with_rows", tiles, _compiled(self.forward_with_rows.spec), "with_rows"))
        for name, plan in self.fused.items():
            work = f"max(tiles * Zkv * Hkv, triton.cdiv(Q_LEN, {plan.fused.flag['DQ_ROWS']}) * Z * Hq)"
            found.append(GluonKernel(name, f"min({work}, multiprocessors(device))", _compiled(plan.fused), name.removeprefix("hopper_")))
        return tuple(found)

    def _describe(self) -> None:
        """What the template asks for of the forward pass."""
        call = self.call
        self.half_tile, self.tile = hopper_forward.ROWS, 2 * hopper_forward.ROWS
        kind = max(call.d_qk, call.d_v), bool(call.mask)
        self.fewest_keys, self.few_keys = hopper_forward.FEW_KEYS, hopper_forward.few_keys(*kind)
        self.gains_alone = hopper_forward.gains_alone(*kind)
        self.scale_apart = self.forward.scale_apart
        self.row_bytes = (call.d_qk + call.d_v) * call.dtype.itemsize
        uneven = bool(call.mask) and hopper_forward.is_uneven(call.mask)
        self.heads = hopper_forward.head_group(bool(call.mask), uneven)
        self.heads_backward = hopper_backward.head_group(bool(call.mask))
        self.cached = hopper_forward.UNEVEN_BYTES if uneven else hopper_forward.L2_BYTES
        self.cached_backward = hopper_backward.LISTED_BYTES if call.mask else hopper_backward.L2_BYTES
        self.spill_limit = "None" if self.required else hopper_forward.SPILL_LIMIT

    def _differentiate(self, plans: Plans) -> None:
        """What it asks for of the backward pass."""
        call, candidate = self.call, backward_kernels.Hopper()
        self.without_backward = candidate.fits(plans.backward_call(False))
        if self.without_backward:
            return
        for suffix, raw in (("", self.is_raw), ("_scaled", False)) if self.is_raw else (("", False),):
            self.fused[f"hopper_backward{suffix}"] = candidate.plan(plans.backward_call(False, raw))
            for name, with_lse in ((f"hopper_delta{suffix}", False), (f"hopper_delta{suffix}_with_lse", True)):
                spec, constants = candidate.plan(plans.backward_call(with_lse, raw)).delta, {"BLOCK_M": delta_rows(call.d_v)}
                pair = Compilation("sm_90", spec, constants), Compilation("cpu", replace(spec, backend="cpu"), constants)
                self.deltas[name] = dict(zip(("on_target", "on_cpu"), pair, strict=True))
        self.backward = self.fused["hopper_backward"]
        self.stats_step = math.lcm(STATS_ALIGNMENT, call.size[0] if call.mask else 1)
        self.backward_scale_apart, self.key_tile = self.backward.scale_apart, self.backward.tile.BLOCK_N
        self.backward_row_bytes = call.d_qk * (call.dtype.itemsize + 4) + call.d_v * call.dtype.itemsize


def _compiled(spec: KernelSpec) -> Compilation:
    return Compilation("sm_90", spec, {})
