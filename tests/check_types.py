"""The types of the public names, by mypy: the library's own, and tests/typed_use.py as a user's program. `make lint` runs it.

mypy knows a package by its folder, and the sources of flexpress.codegen lie beside flexpress/ and not in it, so it is shown the
layout that gets installed, made of links.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYOUT = ROOT / "build" / "typed"  # stays, as mypy remembers what it read in it


def lay_out() -> None:
    """build/typed/flexpress, with a link for each file and folder of the package; old ones go."""
    package = LAYOUT / "flexpress"
    package.mkdir(parents=True, exist_ok=True)
    parts = [*(ROOT / "flexpress").glob("*"), *(ROOT / name for name in ("codegen", "mods", "templates"))]
    for link in package.iterdir():
        link.unlink()
    for part in parts:
        if part.name != "__pycache__":
            (package / part.name).symlink_to(os.path.relpath(part, package), target_is_directory=part.is_dir())


def main() -> int:
    lay_out()
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    environment = {**os.environ, "MYPYPATH": str(LAYOUT)}
    return subprocess.run([*command, "-p", "flexpress", *sys.argv[1:]], env=environment).returncode or (
        subprocess.run(
            [*command, "--strict", "--follow-imports", "silent", str(ROOT / "tests" / "typed_use.py")], env=environment
        ).returncode
    )


if __name__ == "__main__":
    sys.exit(main())
