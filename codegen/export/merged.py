"""Printed kernels in one file: what several of them have in common is there once, and what only shares a name gets another."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from ..text.parsing import STRING_OR_COMMENT, parse


class Print(NamedTuple):
    """A printed kernel that goes into a file.

    text       as render gives it
    entry      what its entry point, the last function, is called in the file
    suffixes   of what it defines by names that others have: the first that nobody has yet
    """

    text: str
    entry: str
    suffixes: tuple[str, ...]


class Merged(NamedTuple):
    """Import statements; glossaries, as comments, and definitions in their order; and what each Print's entry point is called."""

    imports: tuple[str, ...]
    sections: tuple[str, ...]
    entries: tuple[str, ...]


class Definitions:
    """The functions, classes and constants of a file, by name."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.variants: dict[str, list[str]] = {}  # that share a name in prints

    def add(self, body: str, old: str, name: str, suffixes: tuple[str, ...], names: dict[str, str]) -> tuple[str, list[str]]:
        """What a definition is called in the file, and its text if it is not there yet."""
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


def merge(prints: list[Print], definitions: Definitions) -> Merged:
    """The definitions of some prints beside those that the file has, each print with the glossary of the first of its kind."""
    imports: dict[str, None] = {}
    glossaries: set[str] = set()
    sections: list[str] = []
    entries = []
    for text, entry, suffixes in prints:
        tree, lines = parse(text), text.split("\n")
        imports |= dict.fromkeys(ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
        docstring = ast.get_docstring(tree) or ""
        if docstring.split("\n")[0] not in glossaries:
            glossaries.add(docstring.split("\n")[0])
            sections.append("\n".join([lines[0], "#", *(f"# {line}".rstrip() for line in docstring.split("\n"))]))
        defined = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign))]
        names: dict[str, str] = {}  # in the print -> in the file
        constants: list[str] = []
        for node in defined:
            is_constant, name = isinstance(node, ast.Assign), _name_of(node)
            if constants and not is_constant:
                sections.append("\n".join(constants))
                constants = []
            new = entry if node is defined[-1] else name
            names[name], added = definitions.add(_text_of(node, lines), name, new, suffixes, names)
            (constants if is_constant else sections).extend(added)
        entries.append(names[_name_of(defined[-1])])
    return Merged(tuple(imports), tuple(sections), tuple(entries))


def _name_of(node: ast.FunctionDef | ast.ClassDef | ast.Assign) -> str:
    return node.targets[0].id if isinstance(node, ast.Assign) else node.name


def _text_of(node: ast.FunctionDef | ast.ClassDef | ast.Assign, lines: list[str]) -> str:
    """A definition with its decorators, or, of a constant, with the comment above it."""
    first = node.lineno - 1
    if isinstance(node, ast.Assign):
        while lines[first - 1].startswith("#"):
            first -= 1
    else:
        first = min([first, *(decorator.lineno - 1 for decorator in node.decorator_list)])
    return "\n".join(lines[first : node.end_lineno])


def renamed(text: str, names: dict[str, str]) -> str:
    """Code in which some names are others. Comments, strings and attributes stay as they are."""
    changed = {old: new for old, new in names.items() if old != new and old in text}
    if not changed:
        return text
    pattern = rf"{STRING_OR_COMMENT.pattern}|(?<![.\w])(?P<name>{'|'.join(changed)})\b"
    return re.sub(pattern, lambda found: changed[found["name"]] if found["name"] else found[0], text, flags=re.DOTALL)
