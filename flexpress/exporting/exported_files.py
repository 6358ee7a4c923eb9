"""Where exported kernels are written: one file, or the folder of a kernel for the Hugging Face package kernels."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

LAYOUTS = ("file", "kernels")


def check_path(path) -> None:
    """Raise TypeError or ValueError for a path that no file can have. Asked before anything is printed."""
    if path is None:
        return
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(name, str):
        raise TypeError(f"path must be a str or a Path, got {type(path).__name__}")
    if not name or "\0" in name:
        raise ValueError(f"path must name the file, or with layout='kernels' the folder, to write, got {name!r}")


def write(text: str, path: str | os.PathLike | None, layout: str, overwrite: bool) -> None:
    """Write exported kernels, if there is a path. Raises ValueError for a layout or a name, FileExistsError for what is there already."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if path is None:
        if layout != "file":
            raise ValueError(f"layout {layout!r} needs a path, the folder to write")
        return
    path = Path(path)
    files = {path: text} if layout == "file" else _as_kernel(text, path)
    for file in files:
        if file.exists() and not file.is_file():
            raise FileExistsError(f"{file} is there already, and no file that could be written anew; choose another path")
        above = next(folder for folder in file.absolute().parents if folder.exists())
        if not above.is_dir():
            raise NotADirectoryError(f"{file} cannot be written: {above} is a file, and no folder; choose another path")
    there = [str(file) for file in files if os.path.lexists(file)]
    if there and not overwrite:
        raise FileExistsError(f"{there[0]} is there already; choose another path, or pass overwrite=True")
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        _replace(file, content)


def _replace(file: Path, content: str) -> None:
    """Write under another name and rename: nobody sees half a file."""
    handle, temporary = tempfile.mkstemp(prefix=".flexpress-", suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as opened:
            opened.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # as if it were opened in place
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _as_kernel(text: str, folder: Path) -> dict[Path, str]:
    """The files of a kernel named after the folder, the metadata last."""
    name = folder.name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"the folder's name names the kernel: it must be lower-case letters, digits, - and _, got {folder.name!r}")
    variant = folder / "build" / "torch-universal"
    identity = f"_{name}_{hashlib.sha256(text.encode()).hexdigest()[:7]}"
    public = re.findall(r"^(?:def|class) (attention|create_block_lists|BlockLists|reference)\b", text, re.M)
    exported = "".join(f'    "{each}",\n' for each in sorted(public))
    names = ", ".join(sorted(public))
    files = {
        "_kernels.py": text,
        "_ops.py": f'"""A name that no other version of this kernel has. Kernels in Triton register no operators of torch."""\n\n'
        f'namespace = "{identity}"\n\n\ndef add_op_namespace_prefix(op_name: str) -> str:\n    """The full name of an operator."""\n'
        f'    return f"{{namespace}}::{{op_name}}"\n',
        "__init__.py": f'"""Attention kernels printed by Flexpress."""\n\nfrom ._kernels import {names}\n\n__all__ = [\n{exported}]\n',
        f"{name}/__init__.py": _COMPATIBLE,
    }
    digests = {file: base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for file, content in sorted(files.items())}
    metadata = {"name": name.replace("_", "-"), "id": identity, "version": 0, "license": "MIT", "python-depends": []}
    metadata |= {"backend": {"type": "cuda"}, "digest": {"algorithm": "sha256", "files": digests}}
    files["metadata.json"] = json.dumps(metadata, indent=2) + "\n"
    return {variant / file: content for file, content in files.items()}


_COMPATIBLE = '''"""The kernel under its own name, for older versions of the package kernels."""

import importlib.util
import sys
from pathlib import Path

_place = Path(__file__).parent.parent / "__init__.py"
_name = f"{__name__}_{hash(str(_place.absolute())) & sys.maxsize:x}"
_spec = importlib.util.spec_from_file_location(_name, _place)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_name] = _module
_spec.loader.exec_module(_module)
globals().update({name: getattr(_module, name) for name in _module.__all__})
__all__ = list(_module.__all__)
'''
