"""Compiled templates, kept as Python keeps its compiled modules: in __pycache__ beside their sources, where that can be written.

What Jinja takes without is in docs/process.md. Whoever can write there can write the package, so what is found is run as Python's
own compiled modules are.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import jinja2


class TemplateCode(jinja2.BytecodeCache):
    """The compiled templates of a folder.

    made_with   what changes a template's code beside its text and Jinja: the environment's options
    """

    def __init__(self, folder: Path, made_with: str) -> None:
        self.folder, self.made_with = folder, f"{jinja2.__version__} {made_with}"

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        return name

    def get_source_checksum(self, source: str) -> str:
        return hashlib.sha256(f"{self.made_with}\n{source}".encode()).hexdigest()

    def _place(self, bucket) -> Path:
        return Path(importlib.util.cache_from_source(str(self.folder / f"{bucket.key}.py")))

    def load_bytecode(self, bucket) -> None:
        try:
            bucket.bytecode_from_string(self._place(bucket).read_bytes())
        except Exception:  # noqa: BLE001 - absent, cut off, or of something else
            bucket.reset()

    def dump_bytecode(self, bucket) -> None:
        if sys.dont_write_bytecode:
            return
        place = self._place(bucket)
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            file, name = tempfile.mkstemp(dir=place.parent)
            try:
                with os.fdopen(file, "wb") as stream:
                    stream.write(bucket.bytecode_to_string())
                os.chmod(name, 0o644)
                os.replace(name, place)
            except OSError:
                os.unlink(name)
                raise
