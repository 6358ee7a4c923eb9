"""The two errors of Flexpress: one for a mod that cannot be traced, one for a kernel that cannot be made.

Wrong arguments raise the usual ``ValueError`` / ``TypeError`` / ``NotImplementedError`` from the front door instead.
"""

from __future__ import annotations

import re

from .expr import SourceLine


class ModError(ValueError):
    """A score_mod or mask_mod that Flexpress cannot turn into a kernel; the message shows the user's own line."""


class RenderError(RuntimeError):
    """A template printed text that is not Python: a bug in Flexpress, with the template and the line named."""


def mod_error(problem: str, remedy: str, source: SourceLine | None, kind: str) -> ModError:
    """What is wrong with a mod of this kind, its line, and what to do."""
    where = f'\n  File "{source.file}", line {source.line}\n    {source.text}' if source else ""
    return ModError(f"{kind}_mod: {problem}{where}" + (f"\n{remedy}" if remedy else ""))


def call_problem(error: Exception, name: str) -> str:
    """What Python says of arguments that a function of ours does not take, with the name that the mod called it by."""
    return re.sub(r"^\S+\(\) (?=got|missing|takes)", f"{name}() ", str(error))
