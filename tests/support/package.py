"""The package as it is built and installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.once import once

ROOT = Path(__file__).parent.parent.parent
FOLDERS = {"flexpress": "flexpress", "codegen": "flexpress/codegen", "templates": "flexpress/templates", "mods": "flexpress/mods"}
BESIDE = (".ci", "benchmarks", "docs", "examples", "generated", "tests")
FILES = ("CHANGELOG.md", "LICENSE", "Makefile", "README.md", "constraints.txt")


def built_once(tmp_path_factory) -> Path:
    """A folder with an sdist and a wheel: one build for all tests of a run."""
    return once(tmp_path_factory, "package", _build) / "built"


def _build(folder: Path) -> None:
    """An sdist, built from a copy of the sources so that nothing is left beside them, and a wheel built from the sdist."""
    source, out = folder / "source", folder / "built"
    for part in (*FOLDERS, *BESIDE):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", *FILES):
        shutil.copy(ROOT / name, source)
    said = done(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    assert "Deprecat" not in said


def wheel_in(built: Path) -> Path:
    (file,) = built.glob("flexpress-*.whl")
    return file


def done(*command: str, cwd: Path = ROOT, **environment: str) -> str:
    """What a command that succeeds says."""
    ran = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def third_party() -> list[str]:
    """Where what Flexpress needs is installed. With `python -S` nobody reads the .pth file of an editable installation there."""
    return [path for path in sys.path if path.endswith("-packages")]
