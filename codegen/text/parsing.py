"""Reading Python: printed kernels and users' lines."""

from __future__ import annotations

import ast
import re

# a string, which may hold a #; or a comment
STRING_OR_COMMENT = re.compile(r'''("""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^'\\\n])*\')|#[^\n]*''', re.DOTALL)


def parse(source: str, path: str = "<unknown>", mode: str = "exec"):
    """ast.parse. Until Python 3.11 the interpreter counts the depth of all threads' trees in one number, and raises SystemError where
    two make them by turns (CPython issue 106905); the text is not to blame, so it is parsed again."""
    for _ in range(20):
        try:
            return ast.parse(source, path, mode)
        except SystemError:
            continue
    return ast.parse(source, path, mode)


def without_comments(source: str) -> str:
    """The text of a printed kernel without comments and blank lines. Its strings are in one or three double quotes, or in single ones."""
    lines = STRING_OR_COMMENT.sub(lambda found: found[1] or "", source).split("\n")
    return "\n".join(stripped for line in lines if (stripped := line.rstrip()))
