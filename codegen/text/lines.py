"""Text from outside that a printed kernel shows."""

from __future__ import annotations

import os

from ..mod.expr import SourceLine

_LIMIT = 200  # characters


def one_line(text: object, limit: int = _LIMIT) -> str:
    """A text from outside (a line of the user's file, the name of a function, class, file or folder) as one printable line.

    A kernel's text is cut into lines, by Python and by templates, and whatever begins a line is code. So every character that is not
    printable, and with them all that any tool takes for the end of a line or for a change of direction, is written as an escape; long
    texts are cut.
    """
    text = str.__str__(text) if isinstance(text, str) else str(text)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def provenance(source: SourceLine) -> str:
    """`folder/file.py:12: the user's line`, one printable line, short enough to read and free of machine paths."""
    parts = source.file.replace(os.sep, "/").split("/")
    return one_line(f"{'/'.join(parts[-2:])}:{source.line}: {source.text}").rstrip()
