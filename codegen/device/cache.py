"""Printed kernels on disk and in memory.

A kernel file is named after what it is and keyed by the sha256 of its text without comments, with the versions of triton,
torch and flexpress and the backend. Files are written under another name and renamed, so a reader never sees half of one; a file
that was truncated or edited is written again. What was compared is what is used: no file is read twice. See folder.py for where they lie.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
import types
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
import triton

from ..text import cpp, parsing
from ..text.render import language_of
from ..text.spec import KernelSpec
from ..version import VERSION
from . import folder, stages


@dataclass(frozen=True)
class PrintedKernel:
    """A kernel file and its text."""

    path: Path
    source: str


def key_of(source: str, backend: str) -> str:
    if backend == "cpp":
        versions, text = f"{VERSION} {_templates_digest()}", cpp.without_comments(source)  # with the headers; device/cpp.py knows the rest
    else:
        versions, text = f"{triton.__version__} {torch.__version__} {VERSION} {backend}", parsing.without_comments(source)
    return hashlib.sha256((versions + "\n" + text).encode()).hexdigest()


def _backend(spec: KernelSpec) -> str:
    return "cpp" if language_of(spec) is cpp.CPP else spec.backend


def cache_dir() -> Path | None:
    """Where printed kernels lie; None if they stay in memory, because no folder can be written to."""
    return folder.path()


def store(source: str, spec: KernelSpec) -> PrintedKernel:
    """Put a kernel's text on disk (or find it there) and return the file and the text that it holds."""
    key = key_of(source, _backend(spec))
    name = folder.file_name(spec.name, key[:12]) + f".{language_of(spec).suffix}"
    place, found = folder.path(), (folder.read(name) or b"").decode("utf-8", "replace")
    if key_of(found, _backend(spec)) != key:  # else the same code, whatever its comments say
        place, found = folder.write(name, source.encode()), source
    kernel = PrintedKernel((place or Path("<memory>")) / name, found)
    _remember(spec, kernel)
    return kernel


@functools.cache
def _templates_digest() -> str:
    import flexpress.templates

    folder = resources.files(flexpress.templates)
    files = (f for f in sorted(folder.iterdir(), key=lambda f: f.name) if f.name.endswith((".jinja", ".h")))
    texts = (f.name + f.read_text(encoding="utf-8") for f in files)
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _index(spec: KernelSpec) -> str:
    """The file that notes which other one holds the kernel of `spec`: a later process need not print it again."""
    identity = f"{spec!r} {_templates_digest()} {triton.__version__} {torch.__version__} {VERSION}"
    return f".{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}.spec"


def _remember(spec: KernelSpec, kernel: PrintedKernel) -> None:
    note = {
        "file": kernel.path.name,
        "sha256": hashlib.sha256(kernel.source.encode()).hexdigest(),
        **{"template": spec.template, "mods": spec.mod_names, "backend": spec.backend, "made": time.time()},
    }
    folder.write(_index(spec), json.dumps(note).encode())


def recall(spec: KernelSpec) -> PrintedKernel | None:
    """The kernel of `spec` if an earlier process printed it and its file is as it was written."""
    try:
        place, note = folder.path(), folder.note(_index(spec))
        name = Path(note["file"]).name
        content = folder.read(name) or b""
        if place and hashlib.sha256(content).hexdigest() == note["sha256"]:
            return PrintedKernel(place / name, content.decode("utf-8"))
    except (ValueError, KeyError, TypeError):
        pass
    return None


def load_module(kernel: PrintedKernel) -> types.ModuleType:
    """Import a kernel for compilation."""
    return stages.load_module(str(kernel.path), kernel.source)
