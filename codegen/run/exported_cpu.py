"""A file with the kernels of flex_attention in C++: what its template asks for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

from ..device import cpp_build, cpp_compiler
from ..mod.intervals import analyse
from ..plan import cpu, cpu_decode, decode
from ..plan.cpu import CpuBackwardPlan, plan_cpu_backward, plan_cpu_forward
from ..plan.cpu_masks import blocks_spec, cpu_lists_spec
from ..plan.masks import mask_texts
from ..text.cpp import CPP, c_type, captured_numbers, without_comments
from ..text.render import render
from ..text.spec import KernelSpec
from .cpu_backward import LARGEST
from .cpu_decode import FEW, few_plan
from .exported import Exported, Plans
from .exported_attention import Gathered, added, describe_call, describe_mask
from .exported_captures import layouts_for_any, named
from .exported_file import File, called, reserved

TEMPLATES = (
    "exported_cpu.jinja",
    "exported_attention.jinja",
    *(f"_exported_{part}.jinja" for part in ("cpp", "cpp_lists", "masks", "gradients")),
)
_EMBEDDED = (
    cpp_build.CompilerError,
    cpp_build.version_of,
    cpp_build.described,
    cpp_build.bfloat16_flags,
    cpp_build.flags,
    cpp_build.native_cpu,
    cpp_build.whole,
    cpp_build.library,
)
_KINDS = {"float": "f", "int32_t": "i", "int64_t": "q"}
_TEXT = re.compile(r'^(\w+ = r"""\n)(.*?)(?=""")', re.MULTILINE | re.DOTALL)


class CppKernel(NamedTuple):
    """A kernel of the file: its name there, and what it is."""

    name: str
    spec: KernelSpec

    entry = property(lambda self: self.spec.template)

    @property
    def kinds(self) -> str:
        """A letter for each of its arguments."""
        captured = captured_numbers(self.spec.mods)
        return "".join(_KINDS.get(c_type(p, captured), "p") for p in self.spec.parameters)


class CppFile(File):
    """What exported_cpu.jinja asks for. `version` is that of the package that writes the file."""

    template, in_cpp, tma, has_transposed = TEMPLATES[0], True, False, False
    q_unit = 1  # elements of which strides are multiples
    variables = {**File.variables, "DK_SUMS": "dk_sums", "DV_SUMS": "dv_sums"}

    def __init__(self, call: Exported, version: str) -> None:
        plans = Plans(call, "cpu", None)
        own = reserved(*TEMPLATES) | {"FORWARD", "DECODE", "BACKWARD", "BLOCKS", "LISTS"}
        names = named(call.score, call.mask, call.wanted, plans.keys, own)
        super().__init__(*names, call.score, call.mask, version)
        describe_call(self, call)
        found = plans.forward_call(call.backward)
        forward = plan_cpu_forward(found.case, found.score, found.mask)
        specs = {"forward": forward.spec, "decode": few_plan(found).spec}
        self.scale_apart, self.few = forward.scale_apart, FEW
        self.constants = {"TILE_ROWS": cpu_decode.TILE_ROWS, "TASKS": cpu_decode.TASKS}
        self.constants |= {"MIN_SHARE": decode.MIN_SHARE, "FIXED_SHARE": decode.FIXED_SHARE}
        self.divisions = _sources(decode.Rows, decode.Parts, cpu_decode.cpu_rows_of, cpu_decode.cpu_parts_of)
        self.gathered = ()
        if call.backward:
            found = plans.backward_call(True)
            plan = plan_cpu_backward(found.case, found.score, found.mask)
            specs["backward"] = plan.spec
            self._differentiate(plan)
        if call.mask:
            describe_mask(self, call.mask, plans.extents)
            texts = mask_texts(call.mask, plans.extents, "cpu", layouts_for_any, CPP)
            evaluates = not analyse(call.mask[0]).by_rules
            specs["blocks"] = blocks_spec(texts, call.size, starts=False, evaluates=evaluates, whole_queries=False)
            specs["lists"] = cpu_lists_spec(True, False)
        self.kernels = tuple(CppKernel(name.upper(), spec) for name, spec in specs.items())
        self.calls = {name: called(name.upper(), self._arguments(spec), last=self._last(name)) for name, spec in specs.items()}

    def _last(self, name: str) -> str:
        """What a call of a kernel is told beside the kernel's arguments."""
        return "threads=1 if ONE_COPY else None," if name == "backward" and self.spans else ""

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
            return Gathered("", buffer, f"torch.zeros({shapes[role]}, dtype=torch.float32)", lines)
        if role == "atomic":
            made = f"torch.zeros((copies, span_{captured.name}_{captured.load}), dtype=torch.float32)"
            total = f"{buffer}.sum(0).as_strided({tensor}.shape, {tensor}.stride())"
        else:
            made, total = f"torch.empty_strided({tensor}.shape, {tensor}.stride(), dtype={tensor}.dtype).zero_()", buffer
        return Gathered("", buffer, made, (f"d_{tensor} = {f'{before} + ' if more else ''}{total}",))

    def _rendered(self, shown: Callable[[KernelSpec], KernelSpec]) -> str:
        """The text of kernels whose specs are shown so."""
        texts = {f"{kernel.name}_CPP": render(shown(kernel.spec)) for kernel in self.kernels}
        headers = {name: text for name, text in cpp_compiler.headers().items() if any(f'"{name}"' in t for t in texts.values())}
        self.headers = {name: name.upper().replace(".", "_") for name in headers}
        # a string in three quotes holds no three quotes; in a kernel, comments alone may have them
        texts = {self.headers[name]: text for name, text in headers.items()} | texts
        self.texts = tuple((name, text.replace('"""', "'''")) for name, text in texts.items())
        self.title = f"# exported {shown(self.kernels[0].spec).name}".replace("_", " ")
        return super()._rendered(shown)

    def _code(self, text: str) -> str:
        return super()._code(_TEXT.sub(lambda found: found[1] + without_comments(found[2]), text))

    def sources(self) -> tuple[str, ...]:
        """Texts of functions of Flexpress that compile, as they stand."""
        return _sources(*_EMBEDDED)


def _sources(*functions: Callable) -> tuple[str, ...]:
    return tuple(inspect.getsource(f).rstrip() for f in functions)
