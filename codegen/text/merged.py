"""Printed kernels in one file: what several of them have in common is there once, and what only shares a name gets another."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import NamedTuple


class Print(NamedTuple):
    """A printed kernel that goes into a file.

    text       as render gives it
    entry      what its entry point, the last function, is called in the file
    suffixes   of functions whose names others have: the first that nobody has yet
    """

    text: str
    entry: str
    suffixes: tuple[str, ...]


class Merged(NamedTuple):
    """Import statements; glossaries, as comments, and functions in their order; and what each Print's entry point is called."""

    imports: tuple[str, ...]
    sections: tuple[str, ...]
    entries: tuple[str, ...]


def merge(prints: list[Print]) -> Merged:
    """The functions of some prints, each with the glossary of the first print of its kind."""
    imports: dict[str, None] = {}
    glossaries: set[str] = set()
    sections: list[str] = []
    functions = _Functions()
    entries = []
    for text, entry, suffixes in prints:
        tree, lines = ast.parse(text), text.split("\n")
        imports |= dict.fromkeys(ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
        docstring = ast.get_docstring(tree) or ""
        if docstring.split("\n")[0] not in glossaries:
            glossaries.add(docstring.split("\n")[0])
            sections.append("\n".join([lines[0], "#", *(f"# {line}".rstrip() for line in docstring.split("\n"))]))
        defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        names: dict[str, str] = {}  # in the print -> in the file
        for node in defined:
            body = "\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno])
            names[node.name], added = functions.add(body, node.name, entry if node is defined[-1] else node.name, suffixes, names)
            sections += added
        entries.append(names[defined[-1].name])
    return Merged(tuple(imports), tuple(sections), tuple(entries))


class _Functions:
    """The functions of a file, by name."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.variants: dict[str, list[str]] = {}  # that share a name in prints

    def add(self, body: str, old: str, name: str, suffixes: tuple[str, ...], names: dict[str, str]) -> tuple[str, list[str]]:
        """What a function is called in the file, and its text if it is not there yet."""
        known = self.variants.setdefault(name, [])
        for variant in known:
            if self.texts[variant] == renamed(body, {**names, old: variant}):
                return variant, []
        possible = [f"{name}_{suffix}" for suffix in suffixes] if known else [name]
        chosen = next((p for p in possible if p not in self.texts), None)
        if chosen is None:
            raise ValueError(f"two kernels define {possible[-1]}")
        known.append(chosen)
        self.texts[chosen] = renamed(body, {**names, old: chosen})
        return chosen, [self.texts[chosen]]


def renamed(text: str, names: dict[str, str]) -> str:
    """Code in which some names are others. Comments and strings stay as they are."""
    lines = text.split("\n")
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        new = names.get(token.string, token.string)
        if token.type == tokenize.NAME and new != token.string:
            (row, start), (_, end) = token.start, token.end
            lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    return "\n".join(lines)
