"""examples/engine as a package, from where tests are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def engine(part: str = "") -> ModuleType:
    """The package, or a part of it."""
    return example("engine" + (f".{part}" if part else ""))


def example(name: str) -> ModuleType:
    """A module of examples/, whose other modules it finds beside it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
