"""Compiling one kernel in C++. Exported files have these functions as they stand, so they need torch and nothing of
Flexpress, and none has a decorator.

CXX                  the compiler, or a command such as "ccache g++", as for torch's own extensions
FLEXPRESS_CXXFLAGS   more flags, behind ours
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


class CompilerError(RuntimeError):
    """There is no C++ compiler, or it does not compile a kernel."""


class CannotLoad(CompilerError):
    """What it makes is no library that this process can load."""


class CompilerStopped(CompilerError):
    """The compiler was killed, or there was no room for it. It says nothing of the kernel, and of the next time."""


def words_of(variable: str, otherwise: str = "") -> list[str]:
    """What an environment variable holds, split as a shell does. Raises ValueError if a quote is open."""
    text = os.environ.get(variable) or otherwise
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{variable} is {text!r}: {str(error).lower()}; quote its words as in a shell") from None


def compiler_command() -> tuple[str, ...] | None:
    """The compiler's path, and the words that CXX has behind it; None if there is no such program."""
    name, *others = words_of("CXX", "c++") or ["c++"]
    path = shutil.which(name)
    return (path, *others) if path else None


def missing() -> str:
    """What to do where there is no compiler."""
    named = os.environ.get("CXX")
    told = f"CXX is {named!r}, which is no program here; name one" if named else "install g++ or clang++, or set CXX to one"
    return f"there is no C++ compiler; {told}"


def version_of(command: tuple[str, ...], start=subprocess.Popen) -> str:
    """A compiler's first line about itself; "" if it does not run."""
    try:
        with tempfile.TemporaryFile() as said:  # no pipe: see outcome
            process = start([*command, "--version"], stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.DEVNULL)
            try:
                process.wait(60)
            except BaseException:
                process.kill()
                process.wait()
                raise
            said.seek(0)
            return said.read().decode("utf-8", "replace").split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return ""


def described() -> str:
    """What Linux says of this CPU."""
    if not os.path.exists("/proc/cpuinfo"):
        return ""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n")
    return " ".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "vendor_id", "CPU part"))}))


def bfloat16_flags() -> list[str]:
    """How bfloat16 is multiplied faster than float32: by AMX through oneDNN's brgemm, or by AMD's vdpbf16ps, which does twice the work of a
    float32 multiply-add (Intel's does half of it)."""
    known = described()
    if "avx512_bf16" not in known:
        return []
    return ["-DFAST_BFLOAT16", "-DBRGEMM"] if "amx_bf16" in known else ["-DFAST_BFLOAT16"] if "AuthenticAMD" in known else []


def flags() -> list[str]:
    """What kernels are compiled with."""
    arm, apple = platform.machine() in ("arm64", "aarch64"), sys.platform == "darwin"
    found = ["-std=gnu++17", "-O3", "-mcpu=native" if arm else "-march=native", "-fPIC", "-shared"]
    # g++ 12 loses roundings to half precision where the CPU has instructions for sums of such numbers, which no kernel wants
    found += [] if arm else ["-mprefer-vector-width=512", "-mno-avx512fp16"]
    # integers wrap around as torch's do; a * b + c is one operation; no function sets errno or traps
    found += ["-fwrapv", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
    found += ["-fexpensive-optimizations"]  # without which g++ makes none of vectors below -O2
    found += bfloat16_flags()
    found += ["-Xpreprocessor", "-fopenmp", "-lomp"] if apple else ["-fopenmp"]  # torch's own library, which the process has loaded
    libraries = Path(torch.__file__).parent / "lib"
    return [*found, f"-L{libraries}", "-ltorch_cpu", "-lc10", *words_of("FLEXPRESS_CXXFLAGS")]


def native_cpu() -> str:
    """What -march=native means here."""
    # no platform.processor(): it reads from a pipe that a fork takes along, and Python 3.11 holds a lock meanwhile
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {described()}"


def whole(source: str, headers: dict[str, str]) -> str:
    """A print with the headers that it includes: one file. `headers`: their texts by name."""
    for name, text in headers.items():
        source = source.replace(f'#include "{name}"\n', f'#line 1 "{name}"\n' + text.replace("#pragma once\n", ""))
    return source


def library(compiler: tuple[str, ...] | None, source: str, name: str, start=subprocess.Popen) -> bytes:
    """The shared library that the compiler makes of a whole print, in a process by `start`. Raises CompilerError if there is no compiler,
    or if it fails."""
    if compiler is None:
        raise CompilerError(missing())
    called = shlex.join(compiler)
    try:
        with tempfile.TemporaryDirectory(prefix="flexpress-") as place:
            made = Path(place, "kernel.so")
            status, said = outcome([*compiler, "-x", "c++", "-", *flags(), "-o", str(made)], source, place, start)
            if status == 0 and made.exists():
                return made.read_bytes()
    except OSError as error:
        never = isinstance(error, PermissionError) or error.errno == errno.ENOEXEC or error.filename == compiler[0]
        kind = CompilerError if never else CompilerStopped
        raise kind(f"{called} does not run, or has no room for files (TMPDIR says where): {error}") from error
    # what the driver tells of the compiler, the assembler and the linker, which it runs
    no_room = "No space left on device", "Disk quota exceeded", "out of memory", "memory exhausted", "Cannot allocate memory"
    if status < 0 or any(words in said for words in ("signal terminated program", *no_room)):
        raise CompilerStopped(f"{called} was killed, or had no room, while it compiled {name}: {said[:400] or f'signal {-status}'}")
    raise CompilerError(f"{called} does not compile {name}:\n{said[:4000] or 'it says nothing, and writes no file'}")


def outcome(command: list[str], source: str, place: str, start=subprocess.Popen) -> tuple[int, str]:
    """A command's status and what it says. It has a session of its own: Ctrl-C is not for it, and if it is not waited for, all of it ends.
    What it writes on the way lies in `place`, too. It reads and writes files: the end of a pipe that a fork has taken along stays open, and
    whoever waits for its end waits for the child."""
    given, told = Path(place, "source"), Path(place, "said")
    given.write_bytes(source.encode("utf-8", "replace"))
    with given.open("rb") as read, told.open("wb") as written:
        files = {"stdin": read, "stdout": subprocess.DEVNULL, "stderr": written}
        environment = {**os.environ, "TMPDIR": place, "LC_ALL": "C"}
        process = start(command, **files, cwd=place, env=environment, start_new_session=True)
    try:
        process.wait()
    except BaseException:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, told.read_bytes().decode("utf-8", "replace")
