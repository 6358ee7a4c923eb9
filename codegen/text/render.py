"""Rendering: a KernelSpec becomes the text of a kernel file. One environment, strict, one pass, no post-processing."""

from __future__ import annotations

import functools
import textwrap
from importlib import resources
from pathlib import Path

import jinja2

from ..mod.errors import RenderError
from . import cpp, parsing
from .cpp import CPP, comment, fields, type_name
from .language import Language
from .languages import GLUON, TRITON
from .lines import one_line
from .parameters import signature
from .spec import KernelSpec, without_texts
from .spelling import literal_text
from .template_code import TemplateCode

LANGUAGES: dict[str, Language] = {language.name: language for language in (TRITON, GLUON, CPP)}


def language_of(spec: KernelSpec) -> Language:
    """What a kernel is printed in."""
    return LANGUAGES[spec.flag.get("LANGUAGE", TRITON.name)]


def _load_template(name: str) -> str | None:
    import flexpress.templates

    source = resources.files(flexpress.templates) / name
    return source.read_text(encoding="utf-8") if source.is_file() else None


@functools.cache
def environment() -> jinja2.Environment:
    import flexpress.templates

    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    filters = {"py": python_literal, "names": quoted_names, "comment": comment}
    folder = resources.files(flexpress.templates)
    code = TemplateCode(folder, f"{options} {sorted(filters)} strict") if isinstance(folder, Path) else None
    env = jinja2.Environment(loader=jinja2.FunctionLoader(_load_template), undefined=jinja2.StrictUndefined, bytecode_cache=code, **options)
    env.filters |= filters
    return env


@functools.cache
def _helpers(**words: str):
    return environment().get_template("_helpers.jinja").make_module(words)


def quoted_names(names: tuple[str, ...], indent: int, width: int = 110) -> str:
    """A list of strings, wrapped and indented."""
    text = ", ".join(f'"{n}"' for n in names)
    return textwrap.fill(text, width, break_long_words=False, subsequent_indent=" " * indent)


def python_literal(value) -> str:
    """Jinja prints `inf` and `true`; kernels need Python."""
    return literal_text(value) if isinstance(value, (int, float)) else repr(value)


def render(spec: KernelSpec) -> str:
    """The text of the kernel that `spec` describes. Raises RenderError if a template prints something that is not Python, or if a text
    of the user's, which belongs into comments, would be more than a comment."""
    text, without = _text(spec), _text(without_texts(spec))
    code = cpp.without_comments if language_of(spec) is CPP else parsing.without_comments
    same = code(text) == code(without)  # nothing of the user's is in the code, or it would not be the same without the user's texts
    if language_of(spec) is CPP:
        same = same and not any(line.endswith(("\\", "??/")) for line in text.split("\n"))
    elif same:
        _check_syntax(text, spec.template)
    if not text.replace("\n", "").isprintable() or not same:
        raise RenderError(
            f"templates/{file_of(spec)} printed a source line or a name of the mod's as code. This is an error in "
            "Flexpress, and the kernel is not used; please report the mod"
        )
    return text


def file_of(spec: KernelSpec) -> str:
    """The name of a kernel's template."""
    return f"{spec.template}.{'cpp' if language_of(spec) is CPP else 'py'}.jinja"


def _text(spec: KernelSpec) -> str:
    language = language_of(spec)
    words = {"jit": language.jit, "tl": language.module}
    library = _helpers(**words)
    helpers = tuple(dict.fromkeys(h for m in spec.mods if m for h in m.helpers))
    texts = [getattr(library, h)().strip() for h in helpers]
    names = {"score_mod" if m.kind == "score" else "mask_mod": m.name for m in spec.mods if m}
    context = {
        "numbers": tuple(p.name for p in spec.parameters if p.is_number),
        "parameters": tuple(p.name for p in spec.parameters if p.is_number and not p.is_captured),
        "signature": _signature(spec, language, names),
        **spec.flag,
        "score_mod": None,
        "mask_mod": None,
        "verdict_mod": None,
        "mod": next(filter(None, spec.mods), None),
        **{f"{m.kind}_mod": m for m in spec.mods if m},
        "helpers": texts,
        **words,
        "title": spec.name.replace("_", " "),
        "entry": spec.template,
        "element": type_name(spec.flag["DTYPE"]) if language is CPP and "DTYPE" in spec.flag else "",
        "libdevice": any(m.libdevice for m in spec.mods if m) or any("libdevice." in t for t in texts),
    }
    return environment().get_template(file_of(spec)).render(context)


def _signature(spec: KernelSpec, language: Language, mods: dict[str, str]) -> str:
    if language is CPP:
        return fields(spec.parameters, spec.mods, spec.flag["WRITTEN"])
    return signature(spec.parameters, mods, language.module)


def _check_syntax(text: str, template: str) -> None:
    try:
        compile(text, template, "exec", dont_inherit=True)  # no tree, which takes twice as long
    except (SyntaxError, ValueError) as error:
        line = text.split("\n")[(getattr(error, "lineno", None) or 1) - 1]
        raise RenderError(
            f"templates/{template}.py.jinja printed a line that is not Python ({error}):\n    {one_line(line.strip())}"
        ) from error
