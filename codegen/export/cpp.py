"""A file with kernels in C++: their texts, what compiles them, and how they are called, for its template."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..device import cpp_build, cpp_compiler
from ..mod.graphs.intervals import analyse
from ..plan import cpu_decode, decode
from ..plan.cpu_masks import blocks_spec, cpu_lists_spec
from ..plan.masks import mask_texts
from ..text.cpp import CPP, c_type, captured_numbers, without_comments
from ..text.render import render
from ..text.spec import KernelSpec
from .captures import layouts_for_any
from .file import File, called

_EMBEDDED = (
    cpp_build.CompilerError,
    cpp_build.CannotLoad,
    cpp_build.CompilerStopped,
    cpp_build.words_of,
    cpp_build.compiler_command,
    cpp_build.missing,
    cpp_build.version_of,
    cpp_build.described,
    cpp_build.bfloat16_flags,
    cpp_build.flags,
    cpp_build.native_cpu,
    cpp_build.whole,
    cpp_build.library,
    cpp_build.outcome,
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


class FileInCpp(File):
    """What the template of a file with kernels in C++ asks for."""

    in_cpp, tma, has_transposed = True, False, False
    q_unit = 1  # elements of which strides are multiples
    variables = {**File.variables, "DK_SUMS": "dk_sums", "DV_SUMS": "dv_sums"}
    spans: Mapping[str, str] = types.MappingProxyType({})  # of shared gradients: a number of the backward kernel's, the tensor

    def hold(self, specs: Mapping[str, KernelSpec]) -> None:
        """The file has these kernels, by name."""
        self.kernels = tuple(CppKernel(name.upper(), spec) for name, spec in specs.items())
        self.calls = {name: called(name.upper(), self._arguments(spec), last=self._last(name)) for name, spec in specs.items()}
        self.constants = {"TILE_ROWS": cpu_decode.TILE_ROWS, "TASKS": cpu_decode.TASKS}
        self.constants |= {"MIN_SHARE": decode.MIN_SHARE, "FIXED_SHARE": decode.FIXED_SHARE}
        self.divisions = _sources(decode.Rows, decode.Parts, cpu_decode.cpu_rows_of, cpu_decode.cpu_parts_of)

    def _last(self, name: str) -> str:
        """What a call of a kernel is told beside the kernel's arguments."""
        return "threads=1 if ONE_COPY else None," if name == "backward" and self.spans else ""

    def _rendered(self, shown: Callable[[KernelSpec], KernelSpec]) -> str:
        """The text of kernels whose specs are shown so."""
        texts = {f"{kernel.name}_CPP": render(shown(kernel.spec)) for kernel in self.kernels}
        headers = {}
        for name, text in cpp_compiler.headers().items():
            if any(f'"{name}"' in t for t in (*texts.values(), *headers.values())):
                headers[name] = text
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


def mask_specs(bound: tuple, extents: tuple, size: tuple[int, int]) -> dict[str, KernelSpec]:
    """The kernels that make block lists of a bound mask_mod, by name."""
    texts = mask_texts(bound, extents, "cpu", layouts_for_any, CPP)
    evaluates = not analyse(bound[0]).by_rules
    blocks = blocks_spec(texts, size, starts=False, evaluates=evaluates, whole_queries=False)
    return {"blocks": blocks, "lists": cpu_lists_spec(True, False)}


def _sources(*functions: Callable) -> tuple[str, ...]:
    return tuple(inspect.getsource(f).rstrip() for f in functions)
