"""The kernels in C++ as candidates: which calls they serve, and each in calls of a kind."""

from __future__ import annotations

import torch

from ..device import cpp_compiler
from ..device.cpp import CppKernel
from ..device.kernel import kernel_for
from ..mod.captured.tensors import LOWEST, check_address
from ..plan.cpu import CpuPlan, plan_cpu_forward
from ..plan.extras import extra_numbers
from ..plan.forward import scales
from ..registry import Table
from ..text.mod_text import mod_values
from .block_lists import BlockLists
from .call import NOT_CACHED
from .cpu_decode import division, few_plan, in_elements, is_few
from .forward_kernels import Call, planned
from .launch import Unusable

_plans: dict[tuple, CpuPlan] = Table("plans of kernels in C++", 1024)


def run(kernel: CppKernel, values: dict[str, object], named: bool, threads: int | None = None) -> None:
    """Call a kernel. Where the compiler fails, CompilerError if the user `named` these kernels, else Unusable: the interpreter serves."""
    try:
        kernel.call(values, threads)
    except cpp_compiler.CompilerError as why:
        if named:
            raise
        cpp_compiler.give_up(why)
        raise Unusable(str(why)) from why


class Cpp:
    """The forward kernels for CPUs: one for few queries, one for others."""

    name = "CPP"

    def fits(self, call: Call) -> str | None:
        if call.backend != "cpu":
            return "the tensors are not on a CPU"
        return cpp_compiler.refusal(call.case.options.backend)

    def worthwhile(self, call: Call) -> str | None:
        return None

    def plan(self, call: Call) -> CpuPlan:
        return few_plan(call) if is_few(call) else plan_cpu_forward(call.case, call.score, call.mask)

    def prepare(self, call: Call, names: tuple[str, ...], lists: BlockLists | None) -> CppRunner:
        return CppRunner(few_plan(call) if is_few(call) else planned(_plans, self, call), call, names, lists)


class CppRunner:
    """One kernel in calls of a kind (see forward_kernels.Runner)."""

    raw, waits = False, True

    def __init__(self, plan: CpuPlan, call: Call, names: tuple[str, ...], lists: BlockLists | None) -> None:
        self.plan, self.kernel, self.names = plan, kernel_for(plan.spec, CppKernel), names
        self.named = call.case.options.backend == Cpp.name
        self.captured = [p.name for m in plan.spec.mods if m for p in m.parameters]
        self.numbers = {"Z": call.extents[0], **in_elements(call.geometry, call.case.dtype), **scales(call.scale, plan.scale_apart)}
        self.numbers |= {**(lists.numbers() if lists else {}), **extra_numbers(call.case.extras, *call.extras)}
        self.room = 0  # for parts of keys
        if is_few(call):
            divided, self.room = division(call.extents, call.geometry, call.case.d_v, lists, NOT_CACHED)
            self.numbers |= divided

    @property
    def launches(self) -> tuple[CppRunner, ...]:
        """What `run` launches."""
        return (self,)

    def run(
        self, tensors: list[torch.Tensor], addresses: list[int] | None, score: list | None, mask: list | None, lists: BlockLists | None
    ) -> None:
        """Fill the outputs among `tensors`."""
        values = mod_values(self.plan, score, mask)
        for tensor in (t for t in (*tensors, *values) if isinstance(t, torch.Tensor) and t.data_ptr() < LOWEST):
            check_address(tensor)
        named = zip(self.names, (*tensors, *(lists.tables if lists else ())), strict=True)
        part = torch.empty(self.room, dtype=torch.float32, device="cpu")
        run(self.kernel, {**self.numbers, **dict(named), **dict(zip(self.captured, values, strict=True)), "PART": part}, self.named)
