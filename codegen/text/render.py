"""Rendering: a KernelSpec becomes the text of a kernel file. One environment, strict, one pass, no post-processing."""

from __future__ import annotations

import functools
import textwrap
from importlib import resources
from pathlib import Path

import jinja2

from ..mod.errors import RenderError
from .cpp import CPP, comment
from .language import Language
from .languages import GLUON, TRITON
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
    text, without, language = _text(spec), _text(without_texts(spec)), language_of(spec)
    # nothing of the user's is in the code, or it would not be the same without the user's texts
    same = language.without_comments(text) == language.without_comments(without) and not language.runs_on(text)
    if same:
        language.check_syntax(text, spec.template)
    if not text.replace("\n", "").isprintable() or not same:
        raise RenderError(
            f"templates/{file_of(spec)} printed a source line or a name of the mod's as code. This is an error in "
            "Flexpress, and the kernel is not used; please report the mod"
        )
    return text


def file_of(spec: KernelSpec) -> str:
    """The name of a kernel's template."""
    language = language_of(spec)
    return f"{spec.template}.{language.suffix}.jinja"


def _text(spec: KernelSpec) -> str:
    language = language_of(spec)
    words = {"jit": language.jit, "tl": language.module}
    library = _helpers(**words)
    helpers = tuple(dict.fromkeys(h for m in spec.mods if m for h in m.helpers))
    texts = [getattr(library, h)().strip() for h in helpers]
    context = {
        "numbers": tuple(p.name for p in spec.parameters if p.is_number),
        "parameters": tuple(p.name for p in spec.parameters if p.is_number and not p.is_captured),
        "signature": language.signature(spec.parameters, spec.mods, spec.flag.get("WRITTEN", ())),
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
        "element": language.element(spec.flag.get("DTYPE", "")),
        "libdevice": any(m.libdevice for m in spec.mods if m) or any("libdevice." in t for t in texts),
    }
    return environment().get_template(file_of(spec)).render(context)
