"""The API reference, from docstrings: `make docs` writes it to build/docs, with pdoc.

    python docs/reference.py [FOLDER]

Docstrings are plain text, to be read in an editor. Arguments stand in columns, and pdoc reads Markdown, in which columns would flow
together: `markdown` makes tables of them. Exit code 1 if a public name has no docstring or is not on its page.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
import sys
import textwrap
import types
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = (
    "flexpress",
    "flexpress.mods",
    "flexpress.flash",
    "flexpress.flash_attn",
    "flexpress.flash_attn.flash_attn_interface",
    "flexpress.flash_attn.bert_padding",
    "flexpress.integrations.transformers",
    "flexpress.integrations.torch",
    "flexpress.distributed",
    "flexpress.sequences",
    "flexpress.serving",
    "flexpress.serving_ops",
)

_COLUMNS = re.compile(r"(\S.*?) {2,}(\S.*)")  # a name, or several, and what is said of it
_NAMES = re.compile(r"[\w*]+(, [\w*]+)*")
_IDENTIFIER = re.compile(r"`[^`]*`|\b[A-Za-z]\w*_\w+\b")
_GOOGLE = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)


def markdown(docstring: str) -> str:
    """A docstring as Markdown: columns as tables, indented lines as code, names with an underscore as code."""
    text = inspect.cleandoc(docstring).replace("``", "`")
    if _GOOGLE.search(text):  # pdoc knows this form; an example behind its last section would be a part of that
        body, blank, last = text.rpartition("\n\n")
        example = blank and all(line.startswith("    ") for line in last.splitlines()) and _GOOGLE.search(body)
        return f"{body}\n\n{_code(last)}" if example else text
    return "\n\n".join(_part(part) for part in re.split(r"\n\s*\n", text) if part.strip())


def _part(part: str) -> str:
    """One of the parts between blank lines."""
    lines = part.splitlines()
    if all(line.startswith("    ") for line in lines):
        return _code(part)
    if not any(_COLUMNS.fullmatch(line) for line in lines if not line.startswith(" ")):
        return _prose(part)
    before: list[str] = []
    rows: list[list[str]] = []
    after: list[str] = []
    for line in lines:
        match = _COLUMNS.fullmatch(line)
        if after or not (match or _NAMES.fullmatch(line) or line.startswith(" ")):
            (after if rows else before).append(line)  # a sentence right above or below the columns
        elif line.startswith(" "):
            (rows[-1] if rows else before).append(line.strip())
        else:
            rows.append(list(match.groups()) if match else [line, ""])
    table = ["| | |", "|---|---|"]
    table += [f"| {_names(name)} | {_prose(' '.join(words).strip()).replace('|', '&#124;')} |" for name, *words in rows]
    return "\n\n".join(filter(None, (_prose("\n".join(before)), "\n".join(table), _prose("\n".join(after)))))


def _names(text: str) -> str:
    """`key, value`, or what else stands in the first column."""
    return ", ".join(f"`{name}`" for name in text.split(", ")) if _NAMES.fullmatch(text) else _prose(text)


def _code(part: str) -> str:
    text = textwrap.dedent(part)
    try:
        ast.parse(text)
        kind = "python"
    except SyntaxError:
        kind = "text"
    return f"```{kind}\n{text}\n```"


def _prose(text: str) -> str:
    """Text in which nothing is Markdown but what is between backticks."""

    def marked(match: re.Match) -> str:
        found = match[0]
        return found if found.startswith("`") else f"`{found}`"

    pieces = re.split(r"(`[^`]*`)", _IDENTIFIER.sub(marked, text))
    return "".join(piece if piece.startswith("`") else re.sub(r"([*\[\]])", r"\\\1", html.escape(piece, quote=False)) for piece in pieces)


def shown(name: str) -> types.ModuleType:
    """A module as the reference is to show it: operators of torch.library as the functions that they were made of."""
    import torch

    module = import_module(name)
    operators = {key: op for key, op in vars(module).items() if isinstance(op, torch.library.CustomOpDef) and not key.startswith("_")}
    if not operators:
        return module
    copy = types.ModuleType(name, module.__doc__)
    copy.__file__ = module.__file__
    for key, op in operators.items():
        setattr(copy, key, op._init_fn)
    copy.__all__ = list(operators)
    return copy


def write(folder: Path) -> list[str]:
    """Write the pages; what is missing on them, a line each."""
    import pdoc

    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"flexpress {import_module('flexpress').__version__}")
    modules = {name: pdoc.doc.Module(shown(name)) for name in MODULES}
    missing = []
    for module in modules.values():
        for doc in _documented(module):
            if not doc.docstring and doc.kind != "variable" and not re.search(r"\b_", doc.qualname):
                missing.append(f"{doc.fullname} has no docstring")
            doc.docstring = markdown(doc.docstring)
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in modules.items():
        page = pdoc.render.html_module(module, modules)
        path = folder / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
        public = getattr(module.obj, "__all__", [])
        missing += [f"{name}.{n} is not on its page" for n in public if f'id="{n}"' not in page and f"{name}.{n}" not in MODULES]
    (folder / "index.html").write_text(pdoc.render.html_index(modules), encoding="utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(modules), encoding="utf-8")
    return missing


def _documented(namespace):
    """A module or class of pdoc's, and what it shows of itself. What a class has of a base of ours counts as its own: bases have no
    page."""
    yield namespace
    for doc in namespace.members.values():
        if doc.taken_from[0].startswith("flexpress") and doc.kind != "module":
            if namespace.kind == "class":
                doc.taken_from = (doc.modulename, doc.qualname)
            if doc.kind == "class":
                yield from _documented(doc)
            else:
                yield doc


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    missing = write(folder)
    print(*missing, f"{folder / 'index.html'}", sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
