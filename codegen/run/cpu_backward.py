"""The backward pass in C++: which calls it serves, how its work is parted, and the sums that tasks leave."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..device.cpp import CppKernel
from ..device.cpp_compiler import refusal
from ..device.kernel import kernel_for
from ..plan.backward import strides
from ..plan.cpu import BLOCK_M, ROWS, TASKS, CpuBackwardPlan, plan_cpu_backward
from ..plan.extras import dropout_numbers
from ..plan.forward import scales
from ..registry import Table
from ..text.layouts import reach_of
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
        case = call.case
        self.parting = parted(sizes.extents, sizes.shared, (case.d_qk, case.d_v), lists)
        self.numbers = {
            **self.parting.numbers,
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
        sums = Sums((self.plan,), score, self.sizes.extents, tensors["Q"].device, lists)
        buffers = Buffers(self.plan, self.parting, sums)
        values = dict(zip(self.args, mod_values(self.plan, score and score[1], mask and mask[1]), strict=True))
        lying = {}
        for name in ("Q", "K", "V", "O", "DO", "DQ", "DK", "DV"):
            lying |= dict(zip(strides(name.lower()), tensors[name].stride(), strict=False))
        given = {**tensors, **(lists.tensors() if lists else {}), **self.numbers, **lying, **values, **buffers.named}
        of_sinks = (
            torch.zeros((*self.sizes.extents[:2], self.parting.tiles), dtype=torch.float32, device="cpu") if "SINKS" in tensors else None
        )
        cpu.run(self.kernel, {**given, "D_SINKS": of_sinks}, self.named, threads=1 if buffers.one_copy else None)
        buffers.add_up()
        return sums.gradients(), of_sinks


class Parting(NamedTuple):
    """How the work of a backward pass is parted.

    tiles    of queries, of a head
    parts    of them, of each head of keys
    shapes   of the sums of dK and dV
    numbers  sizes by the names of parameters
    """

    tiles: int
    parts: int
    shapes: tuple[tuple[int, ...], ...]
    numbers: dict[str, int]


def parted(extents: tuple[int, int, int, int], shared: tuple[int, int], head_dims: tuple[int, int], lists: BlockLists | None) -> Parting:
    """By sizes alone: (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv), (D_QK, D_V)."""
    (Z, Hq, Q_LEN, KV_LEN), (Zkv, Hkv) = extents, shared
    q_block = lists.q_block if lists else BLOCK_M
    blocks = lists.starts.shape[0] - 1 if lists and lists.starts is not None else -(-Q_LEN // q_block)
    tiles = blocks * -(-q_block // BLOCK_M)
    parts = max(1, min(tiles * Z * Hq // (Zkv * Hkv) // 4, -(-TASKS // (Zkv * Hkv))))
    shapes = tuple((parts, Zkv, Hkv, KV_LEN, -(-d // ROWS) * ROWS) for d in head_dims)
    numbers = {"Z": Z, "Hq": Hq, "Zkv": Zkv, "GROUP_SIZE": Hq // Hkv, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "PARTS": parts}
    return Parting(tiles, parts, shapes, numbers)


class Buffers:
    """What tasks add to, and the host adds up behind them.

    named      memory by the names of parameters, and how far apart the tasks' own lies
    one_copy   do all tasks have the same, so that they must run one after another?
    """

    def __init__(self, plan: CpuBackwardPlan, parting: Parting, sums: Sums) -> None:
        self.plan, self.sums = plan, sums
        gathered, spans = sums.tensors(plan, parting.tiles), {}
        tasks = math.prod(parting.shapes[0][:3])
        for captured, _ in plan.captured:
            like = gathered[captured.buffer]
            if captured.role in ("row", "head"):
                like.zero_()  # tiles past the end, which a block of the mask may have, write nothing
            elif captured.role == "column":
                gathered[captured.buffer] = torch.zeros((parting.parts, *like.shape), dtype=torch.float32, device="cpu")
            elif captured.role == "atomic":
                spans[captured] = 1 + reach_of(like.shape, like.stride())
        self.one_copy = tasks * sum(spans.values()) > LARGEST
        for captured, span in spans.items():
            gathered[captured.buffer] = torch.zeros((1 if self.one_copy else tasks, span), dtype=torch.float32, device="cpu")
        dk, dv = (torch.empty(shape, dtype=torch.float32, device="cpu") for shape in parting.shapes)
        self.gathered = gathered
        self.named = {"DK_SUMS": dk, "DV_SUMS": dv, "ONE_COPY": self.one_copy, **gathered}
        self.named |= {f"span_{c.name}_{c.load}": span for c, span in spans.items()}

    def add_up(self) -> None:
        """Give `sums` what tasks have left."""
        buffers = self.sums.buffers
        for captured, _ in self.plan.captured:
            if captured.role in ("atomic", "column"):
                total, like = self.gathered[captured.buffer].sum(0), buffers[captured.buffer]
                buffers[captured.buffer] = total.as_strided(like.shape, like.stride()) if captured.role == "atomic" else total
