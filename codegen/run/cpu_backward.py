"""The backward pass in C++: which calls it serves, how its work is parted, and the sums that tasks leave."""

from __future__ import annotations

import math

import torch

from ..device.cpp import CppKernel
from ..device.cpp_compiler import refusal
from ..device.kernel import kernel_for
from ..plan.backward import strides
from ..plan.cpu import BLOCK_M, ROWS, TASKS, CpuBackwardPlan, plan_cpu_backward
from ..plan.extras import dropout_numbers
from ..plan.forward import scales
from ..registry import Table
from ..text.mod_text import mod_values
from . import cpu
from .backward_kernels import Call, Sizes
from .block_lists import BlockLists
from .captured import Sums
from .forward_kernels import planned

LARGEST = 1 << 28  # elements of all tasks' gradients of a captured tensor; beyond that tasks run one after another
_plans: dict[tuple, CpuBackwardPlan] = Table("plans of backward kernels in C++", 1024)


class Cpp:
    """The backward kernel for CPUs."""

    name = cpu.Cpp.name

    def fits(self, call: Call) -> str | None:
        return "the forward kernel was another one" if call.case.raw_tops else refusal(call.case.options.backend)

    def worthwhile(self, call: Call) -> str | None:
        return None

    def plan(self, call: Call) -> CpuBackwardPlan:
        return plan_cpu_backward(call.case, call.score, call.mask)

    def prepare(self, call: Call, sizes: Sizes, names: tuple[str, ...], lists: BlockLists | None, transposed: BlockLists | None) -> CppPass:
        return CppPass(planned(_plans, self, call), call, sizes, lists)


class CppPass:
    """One kernel in calls of a kind (see backward_kernels.TwoPass)."""

    name, waits = Cpp.name, True

    def __init__(self, plan: CpuBackwardPlan, call: Call, sizes: Sizes, lists: BlockLists | None) -> None:
        self.plan, self.sizes, self.key, self.kernel = plan, sizes, call.key, kernel_for(plan.spec, CppKernel)
        self.named = call.case.options.backend == Cpp.name
        self.args = [p.name for m in plan.spec.mods if m for p in m.parameters]
        (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv), case = sizes.extents, sizes.shared, call.case
        q_block = lists.q_block if lists else BLOCK_M
        blocks = lists.starts.shape[0] - 1 if lists and lists.starts is not None else -(-Q_LEN // q_block)
        self.tiles = blocks * -(-q_block // BLOCK_M)  # of a head
        of_keys = self.tiles * Z * Hq // (Zkv * Hkv)
        self.parts = max(1, min(of_keys // 4, -(-TASKS // (Zkv * Hkv))))
        self.padded = tuple(-(-d // ROWS) * ROWS for d in (case.d_qk, case.d_v))
        self.numbers = {
            **{"Z": Z, "Hq": Hq, "Zkv": Zkv, "GROUP_SIZE": Hq // Hkv, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "PARTS": self.parts},
            **scales(sizes.scale, plan.spec.flag["SCALE_FIRST"]),
            "SM_SCALE": sizes.scale,
            **dropout_numbers(sizes.dropout_p),
            **(lists.numbers() if lists else {}),
        }

    @property
    def launches(self) -> tuple[CppPass, ...]:
        """What `run` launches."""
        return (self,)

    def run(
        self, tensors: dict[str, torch.Tensor], score, mask, lists: BlockLists | None, transposed: BlockLists | None
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor | None]:
        """Fill DQ, DK and DV among `tensors`, which have the names of parameters. The gradients of captured tensors, and of sinks
        (Z, Hq, n), in n parts."""
        (Zkv, Hkv), KV_LEN = self.sizes.shared, self.sizes.extents[3]
        sums = Sums((self.plan,), score, self.sizes.extents, tensors["Q"].device, lists)
        shapes = ((self.parts, Zkv, Hkv, KV_LEN, width) for width in self.padded)
        dk, dv = (torch.empty(shape, dtype=torch.float32) for shape in shapes)
        gathered, counted, one_copy = self._buffers(sums)
        values = dict(zip(self.args, mod_values(self.plan, score and score[1], mask and mask[1]), strict=True))
        lying = {}
        for name in ("Q", "K", "V", "O", "DO", "DQ", "DK", "DV"):
            lying |= dict(zip(strides(name.lower()), tensors[name].stride(), strict=False))
        given = {**tensors, **(lists.tensors() if lists else {}), **self.numbers, **lying, **values, **gathered, **counted}
        of_sinks = torch.zeros((*self.sizes.extents[:2], self.tiles), dtype=torch.float32) if "SINKS" in tensors else None
        given |= {"DK_SUMS": dk, "DV_SUMS": dv, "D_SINKS": of_sinks, "ONE_COPY": one_copy}
        cpu.run(self.kernel, given, self.named, threads=1 if one_copy else None)
        for captured, _ in self.plan.captured:
            if captured.role in ("atomic", "column"):
                total = gathered[captured.buffer].sum(0)
                like = sums.buffers[captured.buffer]
                sums.buffers[captured.buffer] = total.as_strided(like.shape, like.stride()) if captured.role == "atomic" else total
        return sums.gradients(), of_sinks

    def _buffers(self, sums: Sums) -> tuple[dict[str, torch.Tensor], dict[str, int], bool]:
        """Memory for gradients of captured tensors by the names of parameters, how far apart the tasks' own lie, and whether all have
        one."""
        gathered, spans = sums.tensors(self.plan, self.tiles), {}
        tasks = self.parts * math.prod(self.sizes.shared)
        for captured, _ in self.plan.captured:
            like = gathered[captured.buffer]
            if captured.role in ("row", "head"):
                like.zero_()  # tiles past the end, which a block of the mask may have, write nothing
            elif captured.role == "column":
                gathered[captured.buffer] = torch.zeros((self.parts, *like.shape), dtype=torch.float32)
            elif captured.role == "atomic":
                spans[captured] = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        one_copy = tasks * sum(spans.values()) > LARGEST
        for captured, span in spans.items():
            gathered[captured.buffer] = torch.zeros((1 if one_copy else tasks, span), dtype=torch.float32)
        return gathered, {f"span_{c.name}_{c.load}": span for c, span in spans.items()}, one_copy
