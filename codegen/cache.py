"""Printed kernels on disk and in memory.

A kernel file is named after what it is and keyed by the sha256 of its text without comments, with the versions of triton,
torch and flexpress and the backend. Files are written under another name and renamed, so a reader never sees half of one; a file
that was truncated or edited is written again. The directory belongs to its owner alone.

    FLEXPRESS_CACHE_DIR    where files lie; default $XDG_CACHE_HOME/flexpress or ~/.cache/flexpress
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import stat
import tempfile
import tokenize
import types
import warnings
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
import triton

from .spec import KernelSpec

VERSION = "0.1.0"


@dataclass
class CacheInfo:
    """Counters since the process started (or `cache_clear`)."""

    traces: int = 0  # mods traced
    prints: int = 0  # kernels rendered from a template
    compiles: int = 0  # kernels compiled (GPU) or loaded for the interpreter (CPU)
    hits: int = 0  # calls that found everything ready


INFO = CacheInfo()


@dataclass(frozen=True)
class PrintedKernel:
    """A kernel file and its text."""

    path: Path
    source: str


def without_comments(source: str) -> str:
    """The text with comments and blank lines removed: what decides whether two kernels are the same."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline)
              if t.type not in (tokenize.COMMENT, tokenize.NL)]
    lines: dict[int, list[str]] = {}
    for t in tokens:
        lines.setdefault(t.start[0], []).append(t.string if t.type not in (tokenize.INDENT, tokenize.DEDENT) else "\t")
    return "\n".join(" ".join(parts).rstrip() for parts in lines.values() if any(p.strip() for p in parts))


def key_of(source: str, backend: str) -> str:
    versions = f"{triton.__version__} {torch.__version__} {VERSION} {backend}"
    return hashlib.sha256((versions + "\n" + without_comments(source)).encode()).hexdigest()


@functools.cache
def _directory(configured: str | None) -> Path:
    if configured:
        path = Path(configured).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        path = (Path(base) if base else Path.home() / ".cache") / "flexpress"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path)
        return path
    except OSError as error:
        private = Path(tempfile.mkdtemp(prefix="flexpress-"))
        warnings.warn(f"the kernel cache {path} cannot be used ({error}); kernels of this process go to {private}. "
                      "Set FLEXPRESS_CACHE_DIR to a directory of your own.", stacklevel=4)
        return private


def _check_owner(path: Path) -> None:
    """Kernels are code: refuse a directory that somebody else owns, and close one that others may write to."""
    info = path.stat()
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise PermissionError(f"it belongs to user {info.st_uid}")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        path.chmod(0o700)


def cache_dir() -> Path:
    """Where printed kernels lie."""
    return _directory(os.environ.get("FLEXPRESS_CACHE_DIR"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write under another name and rename: a reader, or a crash in the middle, never sees half of it."""
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_own(path: Path) -> bytes | None:
    """The content of a regular file that belongs to this user; None for a link, somebody else's file or no file."""
    try:
        info = os.lstat(path)
        if not stat.S_ISREG(info.st_mode) or (hasattr(os, "getuid") and info.st_uid != os.getuid()):
            return None
        return path.read_bytes()
    except OSError:
        return None


def store(source: str, spec: KernelSpec) -> PrintedKernel:
    """Put a kernel's text on disk (or find it there) and return the file and the text that it holds."""
    key = key_of(source, spec.backend)
    path = cache_dir() / f"{spec.name[:120]}_{key[:12]}.py"
    found = (read_own(path) or b"").decode("utf-8", "replace")
    if _key_or_none(found, spec.backend) != key:  # else the same code, whatever its comments say
        write_atomically(path, source.encode())
        found = source
    kernel = PrintedKernel(path, found)
    _remember(spec, kernel)
    return kernel


@functools.cache
def _templates_digest() -> str:
    import flexpress.templates

    folder = resources.files(flexpress.templates)
    texts = (f.name + f.read_text(encoding="utf-8") for f in sorted(folder.iterdir(), key=lambda f: f.name)
             if f.name.endswith(".jinja"))
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _index(spec: KernelSpec) -> Path:
    """Where it is noted which file holds the kernel of `spec`: a later process need not print it again."""
    identity = f"{spec!r} {_templates_digest()} {triton.__version__} {torch.__version__} {VERSION}"
    return cache_dir() / f".{hashlib.sha256(identity.encode()).hexdigest()[:24]}.spec"


def _remember(spec: KernelSpec, kernel: PrintedKernel) -> None:
    note = {"file": kernel.path.name, "sha256": hashlib.sha256(kernel.source.encode()).hexdigest()}
    write_atomically(_index(spec), json.dumps(note).encode())


def recall(spec: KernelSpec) -> PrintedKernel | None:
    """The kernel of `spec` if an earlier process printed it and its file is as it was written."""
    try:
        note = json.loads(read_own(_index(spec)) or b"")
        path = cache_dir() / Path(note["file"]).name
        content = read_own(path) or b""
        if hashlib.sha256(content).hexdigest() == note["sha256"]:
            return PrintedKernel(path, content.decode("utf-8"))
    except (ValueError, KeyError, TypeError):
        pass
    return None


def _key_or_none(source: str, backend: str) -> str | None:
    try:
        return key_of(source, backend)
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return None


def load_module(kernel: PrintedKernel) -> types.ModuleType:
    """Import a kernel file for compilation. Triton reads functions from a real file, so the text has one."""
    module = types.ModuleType(f"flexpress_kernel_{kernel.path.stem}")
    module.__file__ = str(kernel.path)
    exec(compile(kernel.source, str(kernel.path), "exec"), module.__dict__)
    return module
