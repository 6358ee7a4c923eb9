"""What the compiler made of a kernel for a GPU that is not here, from run to run: a kernel that has not changed is not compiled again.

The compiler's answer follows from the kernel's text, its arguments' types, the target, the options and the tools. All of these are in an
entry's name. What is asked of the answer (registers, spills, instructions) is asked anew in every run. Failures are not kept. Where the
printed file lies is another folder in every run, and debuggers' lines of the texts name that of the first.

Entries lie in pytest's own cache (.pytest_cache/d); `pytest --cache-clear` empties it, `--every-kernel` does not look into it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import triton
from triton._C import libtriton

from flexpress.codegen.device import compiler, offline, stages
from flexpress.codegen.device.offline import Made

KEPT = ("ttgir", "ptx")  # the stages' texts that tests read
LIMIT = 256 << 20  # bytes of the folder


def keep(folder: Path) -> None:
    """From now on, offline compilations are looked for in a folder, and put there."""
    offline.made = kept(offline.made, folder)


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Inside, what is kept is not asked for: where it matters that the compiler runs."""
    before, offline.made = offline.made, inspect.unwrap(offline.made)
    try:
        yield
    finally:
        offline.made = before


def kept(make: Callable[..., Made], folder: Path) -> Callable[..., Made]:
    """`make`, which is called as `offline.made`, but once for all runs."""

    @functools.wraps(make)
    def made(source, target: str, options: dict, last: str | None) -> Made:
        file = folder / name_of(source, target, options, last)
        try:
            found = pickle.loads(zlib.decompress(file.read_bytes()))
            os.utime(file)
            return found
        except (OSError, zlib.error, pickle.PickleError, EOFError):
            pass
        found = make(source, target, options, last)
        found = found._replace(texts={name: text for name, text in found.texts.items() if name in KEPT})
        beside = file.with_name(f"{file.name}.{os.getpid()}")  # processes may make the same one
        with contextlib.suppress(OSError):  # then it is compiled again in the next run
            beside.write_bytes(zlib.compress(pickle.dumps(found), 1))
            beside.replace(file)
        return found

    return made


def name_of(source, target: str, options: dict, last: str | None) -> str:
    """All that decides what is made. The printed file's whole text stands for the kernel and all functions that it calls."""
    printed = Path(source.fn.fn.__code__.co_filename).read_text(encoding="utf-8")
    of_source = source.fn.__name__, sorted(source.signature.items()), sorted(source.constants.items()), sorted(source.attrs.items())
    triton_sees = sorted(libtriton.get_cache_invalidating_env_vars().items())
    assembler = compiler.assembler_for(offline.TARGETS[target])
    told = printed, of_source, target, sorted(options.items()), last, triton_sees, assembler, triton.knobs.nvidia.ptxas.path, *_tools()
    return hashlib.sha256(repr(told).encode()).hexdigest()


@functools.cache
def _tools() -> tuple:
    """Triton, by its version and by which file it is, and our own lines around it."""
    binary = os.stat(libtriton.__file__)
    ours = [Path(module.__file__).read_text(encoding="utf-8") for module in (compiler, offline, stages)]
    return triton.__version__, binary.st_size, binary.st_mtime_ns, *ours


def as_compiled_here(monkeypatch) -> None:
    """For a test of every letter: nothing is taken from earlier runs."""
    monkeypatch.setattr(offline, "made", getattr(offline.made, "__wrapped__", offline.made))


def limit(folder: Path, most: int = LIMIT) -> None:
    """Remove what was unused longest, until the folder has at most so many bytes."""
    files = sorted((s.st_mtime, s.st_size, entry.path) for entry in os.scandir(folder) for s in [entry.stat()])
    size = sum(bytes for _, bytes, _ in files)
    for _, bytes, path in files:
        if size <= most:
            break
        Path(path).unlink(missing_ok=True)
        size -= bytes
