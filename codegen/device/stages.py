"""Triton's compiler, stage by stage and without its cache: from a jitted function and its argument types to a GPU's code.

Triton's just-in-time call hashes its whole installation before it compiles (0.4 s). Here its stages are run one after another.
Nothing of this file needs torch or the rest of the package: processes that compile beside this one (workers.py) load it alone, in 0.3 s.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import pickle
import re
import select
import signal
import subprocess
import tempfile
import time
import types
from pathlib import Path
from typing import NamedTuple

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import ptx_get_version
from triton.compiler import ASTSource, make_backend
from triton.runtime.errors import PTXASError

_LOOK_AGAIN = 5.0  # seconds after which a process without work looks whether that which asks is there


class Request(NamedTuple):
    """A variant of a printed kernel that is to be compiled: all that decides its code.

    text, path, entry   the printed file and where it lies, and the name of the kernel in it
    signature, constants, attributes   as ASTSource takes them
    target, options     GPUTarget's fields, and num_warps and num_stages
    assembler           path and version; None: Triton's own choice
    environment         os.environ, which Triton reads
    """

    text: str
    path: str
    entry: str
    signature: dict[str, str]
    constants: dict
    attributes: dict
    target: tuple
    options: dict
    assembler: tuple[str, str] | None
    environment: dict[str, str]


def load_module(path: str, text: str) -> types.ModuleType:
    """Import a printed kernel for compilation. Triton asks for the functions' text by the file's name: it gets the text that is here,
    whatever the file holds by now."""
    module = types.ModuleType(f"flexpress_kernel_{Path(path).stem}")
    module.__file__ = path
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # no time: never read again
    try:
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)  # annotations are types there, not strings as here
    finally:
        linecache.cache.pop(path, None)
    return module


def load_code_generator() -> None:
    """What Triton imports at its first compilation in a process, Gluon among it: 0.1 s."""
    import triton.compiler.code_generator  # noqa: F401


def is_gluon(function) -> bool:
    """Is a jitted function written in Gluon?"""
    return getattr(function, "is_gluon", lambda: False)()


def source_class(function) -> type[ASTSource]:
    """What Triton wraps a jitted function in to compile it."""
    if not is_gluon(function):
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def lowered(
    source: ASTSource,
    target: GPUTarget,
    options: dict,
    assembler: tuple[str, str] | None,
    texts: dict | None = None,
    last: str | None = None,
) -> tuple:
    """Metadata, the module after all stages but the assembler's, that stage or None, and the binary's extension.

    texts   takes what each stage makes, by name ("ttgir", "ptx", ...); NVIDIA's assembler, the last stage, is then left out
    last    the stage to stop after, with texts; None: all
    """
    backend = make_backend(target)
    # Products and sums are fused, whatever a Triton's default is. Checks of overflow, which Triton would leave out again, are not made.
    # Kernels in Gluon have few registers to spare: Triton 3.9 can order instructions for that, and has to, as it computes more addresses.
    # Older ones know no such option, and pass over it
    ours = {"enable_fp_fusion": True, "sanitize_overflow": False, "sched4reg": is_gluon(source.fn)}
    options = {**ours, **options, **source.parse_options()}
    options["launch_pdl"] = options.get("launch_pdl", False) and target.backend == "cuda" and target.arch >= _BEGINS_EARLY
    if assembler:  # else PTX is written for the assembler that TRITON_PTXAS_PATH names, which torch.compile may set at any time
        options["ptx_version"] = ptx_get_version(assembler[1])
    parsed = backend.parse_options(options)
    stages: dict = {}
    backend.add_stages(stages, parsed, source.language)
    if assembler:
        stages["cubin"] = lambda ptx, _: _assembled(ptx, *assembler, parsed.ptx_options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata = {"target": target, **vars(parsed)}
    module = source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    assemble = stages.pop("cubin", None)
    names = list(stages)
    for name in names[names.index(source.ext) : names.index(last) + 1 if last else None]:
        module = stages[name](module, metadata)
        if name == "ptx":
            module = _begun_early(_wrapping(module)) if parsed.launch_pdl else _wrapping(module)
        if texts is not None:
            texts[name] = module if isinstance(module, bytes) else str(module)
    return metadata, module, assemble if texts is None else None, backend.binary_ext


def _assembled(ptx: str, path: str, version: str, options: str | None) -> bytes:
    """The cubin. From 13 on the assembler gets the option that Triton gives it, too, since 3.7, against a fault of its."""
    arch = re.search(r"\.target (\w+)", ptx)[1]
    allocate = ["--regAllocOptLevel=2"] if int(version.split(".")[0]) >= 13 else []
    with tempfile.TemporaryDirectory(prefix="flexpress-") as place:
        source, cubin = Path(place, "kernel.ptx"), Path(place, "kernel.cubin")
        source.write_text(ptx)
        command = [path, "-lineinfo", *allocate, *(options or "").split(), f"--gpu-name={arch}", source, "-o", cubin]
        said = Path(place, "said")
        with said.open("wb") as written:  # no pipe, whose end a fork would take along
            done = subprocess.run(command, stdout=written, stderr=subprocess.STDOUT)
        if done.returncode:
            raise PTXASError(f"{path} ended with {done.returncode}: {said.read_text(errors='replace')}")
        return cubin.read_bytes()


_BEGINS_EARLY = 90  # the architecture from which on kernels may
_ENTRY = re.compile(r"\.visible \.entry [^{]*\{")


def _begun_early(ptx: str) -> str:
    """PTX of a kernel that is launched before the one before has ended (programmatic dependent launch): first of all it waits for that
    end, then it lets the next one begin. This is done here as LLVM may move loads across what a kernel's own language has for it."""
    return _ENTRY.sub(lambda found: f"{found[0]}\n\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;", ptx)


_NEG_OR_ABS = re.compile(r"\b(neg|abs)\.s16(\s+)(%\w+), (%\w+);")


def _wrapping(ptx: str) -> str:
    """PTX in which -x and abs(x) of int16 wrap around. The assembler takes them in 32 bits, and leaves the wrap out where int32 comes next:
    -(-32768) would be 32768. LLVM writes them for x * -1, ~x + 1 and the like, so no spelling in the kernel's own language avoids them."""

    def written(found: re.Match) -> str:
        name, space, to, of = found.groups()
        negated = f"not.b16{space}{to}, {of};\n\tadd.s16{space}{to}, {to}, 1;"
        return negated if name == "neg" else f"{negated}\n\tmax.s16{space}{to}, {to}, {of};"

    return _NEG_OR_ABS.sub(written, ptx)


def metadata_text(metadata: dict) -> bytes:
    """As JSON, which is what is kept of it."""
    return json.dumps(metadata, default=vars).encode()


def compiled(request: Request) -> tuple[bytes, bytes, str]:
    """Metadata as JSON, the GPU's code and what such code is called ("cubin", "hsaco")."""
    os.environ.clear()
    os.environ.update(request.environment)
    function = getattr(load_module(request.path, request.text), request.entry)
    source = source_class(function)(function, request.signature, request.constants, request.attributes)
    metadata, module, assemble, extension = lowered(source, GPUTarget(*request.target), request.options, request.assembler)
    return metadata_text(metadata), assemble(module, metadata) if assemble else module, extension


def send(file: int, message) -> None:
    """Write a message to a pipe."""
    content = pickle.dumps(message)
    content = memoryview(len(content).to_bytes(8, "little") + content)
    while content:
        content = content[os.write(file, content) :]


def receive(file: int):
    """The next message of a pipe. EOFError at its end."""
    return pickle.loads(_read(file, int.from_bytes(_read(file, 8), "little")))


def _read(file: int, size: int) -> bytes:
    parts = []
    while size:
        parts.append(os.read(file, size))
        if not parts[-1]:
            raise EOFError
        size -= len(parts[-1])
    return b"".join(parts)


def serve() -> None:
    """Compile what comes by stdin, each kernel in a fork of this process, and answer by stdout: its number, what `compiled` returns, or why
    there is nothing, and the seconds that took. The first answer has no number. Ends, and all that it began with it, when nobody asks any
    more."""
    load_code_generator()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of its own, at the end
    with tempfile.TemporaryDirectory(prefix="flexpress-") as tempfile.tempdir:
        try:
            _serve(os.getppid())
        finally:
            os.killpg(0, signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()


def _serve(parent: int) -> None:
    questions, answers, lock = 0, os.dup(1), tempfile.TemporaryFile()  # noqa: SIM115 - for as long as this runs
    os.dup2(2, 1)  # whatever else is printed
    _answer(lock, answers, (None, "all is loaded", 0.0))
    numbers: dict[int, int] = {}  # of kernels, by the fork that compiles them
    while os.getppid() == parent:  # else it has ended, and a fork of its that no Python knows of has kept the pipe
        asked, _, _ = select.select([questions], [], [], 0.05 if numbers else _LOOK_AGAIN)
        for process in list(numbers):
            ended, status = os.waitpid(process, os.WNOHANG)
            number = numbers.pop(process) if ended else None
            if ended and status:
                _answer(lock, answers, (number, f"a process that compiles has ended with {os.waitstatus_to_exitcode(status)}", 0.0))
        if asked:
            try:
                number, request = receive(questions)
            except EOFError:
                return
            try:
                process = os.fork()
            except OSError as error:
                _answer(lock, answers, (number, f"{type(error).__name__}: {error}", 0.0))
                continue
            if process == 0:
                ends = 1
                try:
                    ends = _compile_one(lock, answers, number, request)
                finally:
                    os._exit(ends)
            numbers[process] = number


def _compile_one(lock, answers: int, number: int, request: tuple) -> int:
    """In a fork. Returns how it ends: with 0 once it has answered."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    start = time.perf_counter()
    try:
        answer = compiled(Request(*request))
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    _answer(lock, answers, (number, answer, time.perf_counter() - start))
    return 0


def _answer(lock, file: int, message) -> None:
    """One process at a time."""
    import fcntl  # which Windows lacks, as it lacks forks

    fcntl.lockf(lock, fcntl.LOCK_EX)
    send(file, message)
    fcntl.lockf(lock, fcntl.LOCK_UN)
