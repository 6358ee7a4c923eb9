"""A file with the kernels of flex_attention in C++: what its template asks for."""

from __future__ import annotations

from ..plan import cpu
from ..plan.cpu import CpuBackwardPlan, plan_cpu_backward, plan_cpu_forward
from ..plan.decode import MAX_QUERIES
from ..run.cpu_backward import LARGEST
from ..run.cpu_decode import few_plan
from .attention import Gathered, added, describe_call, describe_mask
from .captures import named, sinks_of
from .cpp import FileInCpp, mask_specs
from .kernels import Exported, Plans


class CppFile(FileInCpp):
    """What exported_cpu.jinja asks for. `version` is the package's; captures have no names in `reserved`."""

    template = "exported_cpu.jinja"

    def __init__(self, call: Exported, version: str, reserved: frozenset[str]) -> None:
        plans = Plans(call, "cpu", None)
        names = named(call[:2], call.origins, call.wanted, plans.keys, reserved, sinks_of(call.sinks))
        super().__init__(names, call.score, call.mask, version)
        describe_call(self, call)
        found = plans.forward_call(call.backward)
        forward = plan_cpu_forward(found.case, found.score, found.mask)
        specs = {"forward": forward.spec, "decode": few_plan(plans.forward_call(False)).spec}
        self.scale_apart, self.few = forward.scale_apart, MAX_QUERIES
        self.gathered = ()
        if call.backward:
            found = plans.backward_call(True)
            plan = plan_cpu_backward(found.case, found.score, found.mask)
            specs["backward"] = plan.spec
            self._differentiate(plan)
        if call.mask:
            describe_mask(self, call.mask, plans.extents)
            specs |= mask_specs(call.mask, plans.extents, call.size)
        self.hold(specs)

    def _differentiate(self, plan: CpuBackwardPlan) -> None:
        """What the backward pass asks for."""
        self.backward_scale_apart = plan.spec.flag["SCALE_FIRST"]
        self.q_tile, self.tiles_of_block = (self.q_block, -(-self.q_block // cpu.BLOCK_M)) if self.mask else (cpu.BLOCK_M, 1)
        self.tasks, self.largest = cpu.TASKS, LARGEST
        self.padded = tuple(-(-d // cpu.ROWS) * cpu.ROWS for d in (self.d_qk, self.d_v))
        shared = [(c, self.of_score[load.attr]) for c, load in plan.captured if c.role == "atomic"]
        self.spans = {f"span_{c.name}_{c.load}": tensor for c, tensor in shared}
        found: list[Gathered] = []
        for captured, load in plan.captured:
            tensor = self.of_score[load.attr]
            more = any(one.lines[-1].startswith(f"d_{tensor} =") for one in found)
            found.append(self._gathered(captured, load, tensor, more))
        self.gathered = tuple(found)

    def _gathered(self, captured, load, tensor: str, more: bool) -> Gathered:
        """The gradient of a captured tensor; `more`: others of the tensor were added up before."""
        shapes = {"row": "(Z, Hq, Q_LEN)", "column": "(PARTS, Z, Hq, KV_LEN)", "head": "(Z, Hq, tiles)"}
        buffer, role, before = captured.buffer, captured.role, f"d_{tensor}" if more else ""
        if role in shapes:
            total = f"{buffer}.sum(0)" if role == "column" else buffer
            lines = added(self, captured, load, total, before=before)
            return Gathered("", buffer, f'torch.zeros({shapes[role]}, dtype=torch.float32, device="cpu")', lines)
        if role == "atomic":
            made = f'torch.zeros((copies, span_{captured.name}_{captured.load}), dtype=torch.float32, device="cpu")'
            total = f"{buffer}.sum(0).as_strided({tensor}.shape, {tensor}.stride())"
        else:
            made, total = f'torch.empty_strided({tensor}.shape, {tensor}.stride(), dtype={tensor}.dtype, device="cpu").zero_()', buffer
        return Gathered("", buffer, made, (f"d_{tensor} = {f'{before} + ' if more else ''}{total}",))
