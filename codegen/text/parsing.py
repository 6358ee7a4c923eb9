"""Parsing Python in several threads at once."""

from __future__ import annotations

import ast


def parse(source: str, path: str = "<unknown>", mode: str = "exec"):
    """ast.parse. Until Python 3.11 the interpreter counts the depth of all threads' trees in one number, and raises SystemError where
    two make them by turns (CPython issue 106905); the text is not to blame, so it is parsed again."""
    for _ in range(20):
        try:
            return ast.parse(source, path, mode)
        except SystemError:
            continue
    return ast.parse(source, path, mode)
