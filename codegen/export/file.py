"""A file of exported kernels: their prints in one text, and the launches, for its template."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..device import interpreter_numbers
from ..mod.errors import RenderError
from ..mod.expr import ModGraph
from ..run.preview import Compilation
from ..text.parameters import Parameter
from ..text.parsing import parse, without_comments
from ..text.render import environment, render
from ..text.spec import KernelSpec, without_texts
from ..text.spelling import literal_text
from .captures import APART, Names
from .captures import PREFIX as _PREFIX
from .merged import Definitions, Print, merge
from .torch_text import TorchText, torch_text

_VARIABLES = {  # what files call the tensors that kernels know by these names
    **{"Q": "query", "K": "key", "V": "value", "O": "out", "LSE": "lse", "ROWS": "row_values", "DO": "d_out", "DLSE": "d_lse"},
    **{"TOPS": "tops", "DELTA": "delta", "DQ": "dq", "DK": "dk", "DV": "dv"},
    **{"DQ_SUM": "dq_sum", "DONE": "done", "COUNTER": "counter"},
    **{"SINKS": "sinks", "D_SINKS": "parts_of_sinks"},
    **{"KV_LENS": "kv_len", "PAGES": "page_table", "KV_LOCS": "cache_loc", "K_SCALES": "k_scale", "V_SCALES": "v_scale"},
    **{"PART": "part", "PART_SHARE": "part_share", "PART_MAX": "part_max", "PART_COUNT": "part_count"},
}


_SYMBOLS = "b", "h", "q_idx", "kv_idx"


@dataclass(frozen=True)
class Kernel:
    """A kernel of the file: its name and grid there, what it is on the target and in the interpreter, and how its entry points are called.

    suffix   of its functions whose names other kernels have
    called   the name of its launch among the file's `calls`; "" for a kernel that is launched as another one is
    """

    name: str
    grid: str
    on_target: Compilation
    on_cpu: Compilation
    suffix: str = ""
    called: str = ""
    entry: str = ""
    cpu_entry: str = ""

    table = property(lambda self: self.name.upper())
    constants = property(lambda self: tuple(self.on_target.constants.values()))
    cpu_constants = property(lambda self: tuple(self.on_cpu.constants.values()))
    num_warps = property(lambda self: self.on_target.num_warps)
    num_stages = property(lambda self: self.on_target.num_stages)


@dataclass(frozen=True)
class GluonKernel:
    """A kernel of the file that is written in Gluon: its name and grid there, what it is, and what its entry point is called."""

    name: str
    grid: str
    on_target: Compilation
    suffix: str
    entry: str = ""

    table = property(lambda self: self.name.upper())


class File:
    """What a template asks for of any exported file. Subclasses add what theirs asks for.

    captured             arguments of the file's functions          of_score, of_mask    the names of what each mod captures
    own_captured, mask_captured   what attention and create_block_lists check: their arguments, and what formulas make of those
    pinned, mask_pinned  what must be as in the example
    score_text, mask_text   the mods in torch
    variables            what the file calls the tensors that kernels know by other names
    """

    template = ""
    in_cpp = False
    gluon: tuple[GluonKernel, ...] = ()
    variables = _VARIABLES

    def __init__(self, names: Names, score: tuple | None, mask: tuple | None, version: str) -> None:
        self.captured, self.of_score, self.of_mask, self.version = names.captured, names.of_score, names.of_mask, version
        self.mask = mask is not None
        self.score_text = None if score is None else _in_torch(score[0], names.of_score)
        self.mask_text = None if mask is None else _in_torch(mask[0], names.of_mask)
        texts = [text for text in (self.score_text, self.mask_text) if text]
        self.symbols_of_mods = unpacked(line for text in texts for line in (*text.lines, *text.results))
        self._pass_on(names)

    def _pass_on(self, names: Names) -> None:
        """What is captured, as functions take and hand on."""
        captured = names.captured
        own = [c for c in captured if not c.given]
        taken = [c for c in own if not c.formula]
        of_mask = [c for c in captured if c.name in self.of_mask and (c.is_tensor or not c.given)]
        roots = {root for c in of_mask for root in c.roots}
        self.own_captured, self.pinned, self.mask_pinned = own, [*names.pinned[0], *names.pinned[1]], names.pinned[1]
        self.mask_captured = [c for c in own if c in of_mask or c.name in roots]
        self.taken, self.derived = taken, [c for c in own if c.formula]
        self.arguments = listed(c.name for c in own if c.of_kernels)
        self.parameters = listed(c.parameter for c in taken)
        self.mask_arguments = listed(c.name for c in of_mask)
        self.mask_parameters = ", ".join(c.parameter for c in self.mask_captured if not c.formula)
        self.example = listed(f"{c.name}={c.name if c.is_tensor else literal_text(c.value)}" for c in taken)
        self.numbers = tuple(c.name for c in own if not c.is_tensor and c.of_kernels)
        self.saved = listed(c.name for c in captured if c.is_tensor)

    @functools.cached_property
    def text(self) -> str:
        """The file. Raises RenderError if a text of the user's would be more than a comment."""
        found = self._rendered(lambda spec: spec)
        tree = parse(found)
        if not found.replace("\n", "").isprintable() or self._code(found) != self._code(self._rendered(without_texts)):
            raise RenderError("an exported file would hold a source line or a name of the mod's as code; please report the mod")
        twice = [name for name, count in Counter(_defined(tree.body)).items() if count > 1]
        if twice:
            raise RenderError(f"an exported file would define {', '.join(twice)} twice; please report the mod")
        return found

    def _rendered(self, shown: Callable[[KernelSpec], KernelSpec]) -> str:
        """The text of kernels whose specs are shown so. Subclasses set what the template asks for of these first."""
        text = environment().get_template(self.template).render(file=self, version=self.version)
        return re.sub(r"\n{4,}", "\n\n\n", re.sub(r"[ \t]+\n", "\n", text)).rstrip("\n") + "\n"

    def _code(self, text: str) -> str:
        """A file's text without comments."""
        return without_comments(text)

    def _arguments(self, spec: KernelSpec) -> list[str]:
        return [self._expression(spec, p) for p in spec.parameters if p.type != "constexpr"]

    def _expression(self, spec: KernelSpec, parameter: Parameter) -> str:
        """A kernel's argument."""
        if parameter.is_descriptor:
            rows, columns = parameter.type.split(":")[2].split("x")
            if rows.isdigit():
                return f"gluon_descriptor({self.variables[parameter.of]}, {rows}, {columns})"
            return f"descriptor({self.variables[parameter.of]}, launch.constants[{('BLOCK_M', 'BLOCK_N').index(rows)}], {columns})"
        if parameter.is_captured:
            return self._captured(spec, parameter.name)
        if spec.template in ("block_status", "cpu_blocks") and parameter.name in ("num_blocks", "num_full"):
            return f"counts[{int(parameter.name == 'num_full')}]"
        return self.variables.get(parameter.name, parameter.name)

    def _captured(self, spec: KernelSpec, name: str) -> str:
        for text in filter(None, spec.mods):
            names = self.of_score if text.kind == "score" else self.of_mask
            for parameter, (what, index, dim) in zip(text.args, text.recipe, strict=True):
                if parameter == name:
                    found = next(c for c in self.captured if c.name == names[index])
                    unit = found.unit if what == "vectors" else 1
                    ends = {"value": "", "size": f".shape[{dim}]", "stride": f".stride({dim})", "vectors": f".stride({dim}) // {unit}"}
                    return found.name + ends[what]
        raise KeyError(name)


class TritonFile(File):
    """What the template of a file with kernels in Triton, and for Hopper in Gluon, asks for."""

    libdevice, named_tuples = False, True

    def __init__(self, kernels: tuple[Kernel, ...], *of_file) -> None:
        self.kernels = kernels
        super().__init__(*of_file)

    def _rendered(self, shown: Callable[[KernelSpec], KernelSpec]) -> str:
        """The text of kernels whose specs are shown so."""
        definitions = Definitions()
        merged = merge(self._prints(shown), definitions)
        self.imports, self.sections = merged.imports, merged.sections
        self.libdevice = any("libdevice" in line for line in merged.imports)
        self.kernels = tuple(
            replace(kernel, entry=entry, cpu_entry=cpu_entry)
            for kernel, entry, cpu_entry in zip(self.kernels, merged.entries[::2], merged.entries[1::2], strict=True)
        )
        in_gluon = [Print(render(shown(k.on_target.spec)), k.name, (k.suffix,)) for k in self.gluon]
        merged = merge(in_gluon, definitions)
        self.gluon_imports, self.gluon_sections = merged.imports, merged.sections
        self.gluon = tuple(replace(kernel, entry=entry) for kernel, entry in zip(self.gluon, merged.entries, strict=True))
        self.title = f"# exported {shown(self.kernels[0].on_target.spec).name}".replace("_", " ")
        self.calls = {kernel.called: self._launch(kernel) for kernel in self.kernels if kernel.called}
        self.calls |= {kernel.name: _launched(kernel.grid, self._arguments(kernel.on_target.spec)) for kernel in self.gluon}
        return super()._rendered(shown)

    def _prints(self, shown: Callable[[KernelSpec], KernelSpec]) -> list[Print]:
        prints = []
        for kernel in self.kernels:
            others = (f"{kernel.suffix}_cpu",) if kernel.suffix else ()
            prints.append(Print(render(shown(kernel.on_target.spec)), kernel.name, (kernel.suffix or kernel.name,)))
            prints.append(Print(render(shown(kernel.on_cpu.spec)), kernel.name, ("cpu", *others)))
        return prints

    def _launch(self, kernel: Kernel) -> str:
        """The statement that launches a kernel, on either device."""
        on_target, on_cpu = self._arguments(kernel.on_target.spec), self._arguments(kernel.on_cpu.spec)
        if on_target != on_cpu:
            raise ValueError(f"{kernel.name} takes other arguments in the interpreter: {on_target} and {on_cpu}")
        return _launched(kernel.grid, on_target)

    def sources(self, *others: Callable) -> tuple[str, ...]:
        """Texts of functions of Flexpress that are in the file as they stand: of the interpreter's numbers, and others."""
        functions = [getattr(interpreter_numbers, name) for name in ("mend", "_widened", "_narrowed", "_float8", "argument")]
        functions += [interpreter_numbers.Libdevice, interpreter_numbers._applied] if self.libdevice else []
        return tuple(inspect.getsource(f).rstrip() for f in (*others, *functions))


def _launched(grid: str, arguments: list[str]) -> str:
    return called("launch", arguments, first=f"({grid},),")


def called(function: str, arguments: list[str], first: str = "", last: str = "") -> str:
    """The call of a function, with lines of arguments before and after the others."""
    whole = ", ".join(argument.replace(" ", "\0") for argument in arguments)  # an argument stays on one line
    lines = [line.replace("\0", " ") for line in textwrap.wrap(whole, 100, break_long_words=False)]
    lines = [first, *lines[:-1], lines[-1] + ("," if last else ""), last]
    return "\n".join([f"{function}(", *(f"    {line}" for line in lines if line), ")"])


def _defined(body: list[ast.stmt]) -> list[str]:
    """What statements define by name: functions, classes and constants."""
    found = []
    for node in body:
        if isinstance(node, ast.Try):
            found += _defined(node.body)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return found


def listed(names: Iterable[str]) -> str:
    """Names as arguments after others."""
    return "".join(f", {name}" for name in names)


def unpacked(lines: Iterable[str]) -> str:
    """The targets for b, h, q_idx and kv_idx, of which some lines need some; nothing if they need none."""
    words = frozenset(re.findall(r"\w+", " ".join(lines)))
    names = [name if name in words else "_" for name in _SYMBOLS]
    return ", ".join(names) if set(names) != {"_"} else ""


def _in_torch(graph: ModGraph, names: tuple[str, ...]) -> TorchText:
    count = len(graph.tensors)
    return torch_text((graph.result,), names[:count], names[count:], graph.kind, "float64")


def beside(make: Callable[[frozenset[str]], File]) -> File:
    """A file whose captures have names that nothing else in it has. `make`: the file, by the names that they cannot have."""
    first = make(APART)
    return make(_others(first._rendered(lambda spec: spec)))


def _others(text: str) -> frozenset[str]:
    """What a file whose captures are named APART calls everything else: what it defines, and what is near a capture."""
    found = {"score", *_SYMBOLS}  # which a file names where a mod needs them
    for node in ast.parse(text).body:
        names = set(_names_in(node))
        if any(_PREFIX in name for name in names):
            found |= names
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        else:
            found |= names
    return frozenset(name.replace(_PREFIX, "") for name in found if not name.startswith(_PREFIX))  # of d_x as well, the gradient of x


def _names_in(node: ast.AST) -> Iterable[str]:
    """The names in a statement."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, (ast.arg, ast.keyword)) and part.arg:
            yield part.arg
        elif isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            yield part.name
        elif isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0]
