"""Texts of the user's that a kernel shows (source lines; names of functions, classes, files, folders, globals) never become code."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import tokenize
import types
from io import StringIO

import pytest
import torch

from flexpress import cache_clear, create_block_mask, evaluate_mod, export, export_cached, flex_attention, printed_kernels
from flexpress.codegen.export import file as exported_file
from flexpress.codegen.mod.errors import RenderError
from flexpress.codegen.run.preview import backward_compilations, decode_compilations, hopper_compilation, preview
from flexpress.codegen.run.preview_masks import evaluate_compilation, mask_compilations
from flexpress.codegen.text import lines, mod_text
from flexpress.codegen.text import render as rendering
from flexpress.codegen.text.lines import one_line
from flexpress.codegen.text.render import render

BREAKS = [chr(c) for c in range(sys.maxunicode + 1) if len(f"a{chr(c)}b".splitlines()) > 1]  # all that Python takes for the end of a line
CONTROLS = [chr(c) for c in (0, 1, 7, 8, 9, 27, 127, 0x80, 0x9F)]
DIRECTIONS = [chr(c) for c in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x061C)]
INVISIBLE = [chr(c) for c in (0xAD, 0x200B, 0x2060, 0xFEFF, 0xA0, 0x3000, 0xD800, 0xE000, 0xE0001, 0x10FFFF)]
PAYLOAD = "import flexpress_was_here"  # what follows the break, at every depth that a template indents by
SPLITS = "".join(f"x{c}{' ' * depth}{PAYLOAD}" for c in BREAKS for depth in (0, 4, 8))


def test_all_line_breaks_are_known():
    assert {"\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"} <= set(BREAKS)


@pytest.mark.parametrize("character", [*BREAKS, *CONTROLS, *DIRECTIONS, *INVISIBLE], ids=lambda c: f"U+{ord(c):04X}")
def test_one_line_is_one_printable_line(character):
    found = one_line(f"before{character}after")
    assert found.isprintable() and len(found.splitlines()) == 1 and found.startswith("before") and found.endswith("after")
    assert found.isascii() and found.encode()


def test_one_line_keeps_what_can_be_read():
    assert one_line("größe = 注 # ok") == "größe = 注 # ok"
    assert one_line("x" * 500) == "x" * 197 + "..."

    class Odd(str):
        def isprintable(self):
            return True

        __str__ = __repr__ = __format__ = lambda self, *_: "\nimport os"

    assert type(one_line(Odd("a\nb"))) is str and one_line(Odd("a\nb")) == "a\\nb"


def check(text: str) -> None:
    """Nothing of the payload is outside comments, in any reading of the text."""
    assert text.replace("\n", "").isprintable() and text.splitlines() == text.split("\n")[:-1]
    for token in tokenize.generate_tokens(StringIO(text).readline):
        assert token.type == tokenize.COMMENT or PAYLOAD not in token.string and token.string != PAYLOAD.split()[1], token
    assert not any(isinstance(node, (ast.Import, ast.ImportFrom)) and "was_here" in ast.unparse(node) for node in ast.walk(ast.parse(text)))


def mod_from(file: str, name: str, line: str = "", kind: str = "score"):
    """A mod whose file, function and source line are what they are said to be; it captures a tensor, so that names stand in signatures."""
    cache_clear()  # a trace serves mods of equal code, whatever their names
    arguments = "score, b, h, q_idx, kv_idx" if kind == "score" else "b, h, q_idx, kv_idx"
    body = "score * slopes[h] + gain * (q_idx - kv_idx)" if kind == "score" else "(q_idx - kv_idx) * ids[q_idx] < gain"
    text = f"def mod({arguments}):\n    return {body}\n"
    scope = {"slopes": torch.ones(2), "ids": torch.ones(40, dtype=torch.int32), "gain": 7}
    exec(compile(text, file, "exec"), scope)
    linecache.cache[file] = (len(text), None, [text.split("\n")[0], f"    return {body}  {line}"], file)
    mod = scope["mod"]
    mod.__name__ = name
    mod.__qualname__ = name
    return mod


TEXTS = {
    "a source line": dict(line=f"# {SPLITS}"),
    "a file's name": dict(file=f"/tmp/place/{SPLITS}.py"),
    "a folder's name": dict(file=f"/tmp/{SPLITS}/mod.py"),
    "a function's name": dict(name=SPLITS),
    "all of them": dict(line=f"# {SPLITS}", file=f"/tmp/{SPLITS}/{SPLITS}", name=SPLITS),
    "quotes and braces": dict(line="# \"\"\" ''' {{ 1 }} {% raw %} \\", file='/tmp/"""/{{x}}.py', name='"""\\'),
    "surrogates": dict(line="# \udcff\ud800", file="/tmp/\udcff/x.py", name="\udcff"),
}


def all_prints(score, mask) -> list[str]:
    """Every kind of kernel with these mods."""
    specs = [
        preview(score, mask),
        hopper_compilation("sm_90", score, mask).spec,
        evaluate_compilation("sm_90", score, "score").spec,
        decode_compilations("sm_90", score, mask)["decode"].spec,
        *(c.spec for c in backward_compilations("sm_90", score, mask, captured=True).values()),
        *(c.spec for c in mask_compilations("sm_90", mask).values()),
    ]
    return [render(s) for s in specs]


@pytest.mark.parametrize("what", TEXTS)
def test_texts_stay_in_comments_of_every_kernel(what):
    given = {"file": "/tmp/place/mod.py", "name": "mod", **TEXTS[what]}
    for text in all_prints(mod_from(**given), mod_from(**given, kind="mask")):
        check(text)
        assert "return score" not in text or "# " in text


@pytest.mark.parametrize("what", TEXTS)
def test_texts_stay_in_comments_of_exported_files(what):
    given = {"file": "/tmp/place/mod.py", "name": "mod", **TEXTS[what]}
    q, mask = torch.randn(1, 2, 40, 16), mod_from(**given, kind="mask")
    check(export(q, q, q, mod_from(**given), mask_mod=mask, backward=True))
    kv_len, cache = torch.tensor([5], dtype=torch.int32), torch.randn(1, 40, 2, 16)
    check(export_cached(q[:, :, :1], cache, cache, kv_len, score_mod=mod_from(**given), mask_mod=mask))


@pytest.mark.parametrize("what", TEXTS)
def test_such_mods_run(what):
    given = {"file": "/tmp/place/mod.py", "name": "mod", **TEXTS[what]}
    q = torch.randn(1, 2, 40, 16)
    mask = create_block_mask(mod_from(**given, kind="mask"), None, None, 40, 40, "cpu")
    out = flex_attention(q, q, q, mod_from(**given), mask)
    plain = flex_attention(
        q,
        q,
        q,
        mod_from("/tmp/place/mod.py", "mod"),
        create_block_mask(mod_from("/tmp/place/mod.py", "mod", kind="mask"), None, None, 40, 40, "cpu"),
    )
    assert torch.equal(out, plain)
    for path in printed_kernels():
        if path.exists():
            check(path.read_text(encoding="utf-8"))
        assert path.name.isprintable() and os.sep not in path.name


def test_names_of_classes_and_captures_stay_in_comments():
    scope: dict = {}
    exec(
        f"def __call__(self, score, b, h, q_idx, kv_idx):\n"
        f"    return score + self.table[{SPLITS!r}][kv_idx] * self.table['number' + {SPLITS!r}]\n",
        scope,
    )
    made = type(SPLITS, (), {"__call__": scope["__call__"]})()
    made.table = {SPLITS: torch.ones(5), "number" + SPLITS: 2.0}
    assert torch.equal(evaluate_mod(made, torch.zeros(1, 1, 3, 5)), torch.full((1, 1, 3, 5), 2.0))
    check(render(evaluate_compilation("sm_90", made, "score").spec))
    check(printed_kernels()[-1].read_text(encoding="utf-8"))


def test_a_real_file_with_odd_lines(tmp_path):
    """The breaks stand in a file that Python reads as one line, as it does U+2028, form feeds in a comment, and so on."""
    for i, character in enumerate(c for c in BREAKS if c not in "\n\r"):
        folder = tmp_path / f"odd{i}"
        folder.mkdir()
        file = folder / "mods.py"
        file.write_text(f"def mod(score, b, h, q_idx, kv_idx):\n    return score * {i + 2}  # {character}    {PAYLOAD}\n", encoding="utf-8")
        module = types.ModuleType("mods")
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)
        assert torch.equal(evaluate_mod(module.mod, torch.ones(1, 1, 1, 2)), torch.full((1, 1, 1, 2), i + 2.0))
        check(printed_kernels()[-1].read_text(encoding="utf-8"))
        check(render(preview(module.mod)))


@pytest.mark.parametrize("forgotten", ["source lines", "names"])
def test_a_print_with_more_than_comments_is_refused(monkeypatch, forgotten):
    """Were a text forgotten to be made one line, rendering would find out: the print is not what it is without the user's texts."""
    monkeypatch.setattr(lines if forgotten == "source lines" else mod_text, "one_line", lambda text: text)
    rendering.environment.cache_clear()
    for indented in [character + " " * depth for character in BREAKS for depth in (0, 4)]:
        bad = f"x{indented}{PAYLOAD}{indented}x = 1 #"
        given = {"line": f"# {bad}", "name": "mod"} if forgotten == "source lines" else {"line": "", "name": bad}
        with pytest.raises(RenderError):
            render(preview(mod_from("/tmp/place/mod.py", **given)))


def test_an_exported_file_with_more_than_comments_is_refused(monkeypatch):
    """Kernels are looked at one by one, and the file as a whole."""
    q = torch.randn(1, 2, 40, 16)
    monkeypatch.setattr(exported_file, "render", lambda spec: render(spec).replace("program_id(0)", f"program_id({spec.mods[0].name!r})"))
    with pytest.raises(RenderError, match="exported file"):
        export(q, q, q, mod_from("/tmp/place/mod.py", "x"))
