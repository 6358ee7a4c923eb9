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
    """A module of examples/, which finds others beside it, also later."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)
