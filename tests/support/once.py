"""What takes long and does not change is made once in a run of the tests, whichever of xdist's processes need it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_LIMIT = 400.0  # seconds; whatever is made here ends before


def once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` has filled. One process does, and the others wait; where it fails there, they find what it left."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = base / name, base / f"{name}.made"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + _LIMIT
        while not made.exists() and time.monotonic() < end:
            time.sleep(0.1)
    else:
        try:
            make(folder)
        finally:
            made.touch()
    return folder
