"""Compiled templates beside their sources: found again by the next process, and made anew where anything is different."""

from __future__ import annotations

import sys

import jinja2
import pytest

from flexpress.codegen.text.template_code import TemplateCode


def rendered(folder, made_with="options", compiled=True) -> str:
    """By an environment that may, or may not, compile."""
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), bytecode_cache=TemplateCode(folder, made_with))
    if not compiled:
        env.compile = None
    return env.get_template("a.py.jinja").render(x=2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "a.py.jinja").write_text("{{ x + 1 }}")
    assert rendered(tmp_path) == "3"
    return tmp_path


def test_what_was_compiled_is_found(folder):
    assert [path.name for path in (folder / "__pycache__").iterdir()] == [f"a.py.jinja.{sys.implementation.cache_tag}.pyc"]
    assert rendered(folder, compiled=False) == "3"


@pytest.mark.parametrize("different", ["text", "options", "cut off", "something else", "gone"])
def test_what_is_different_is_compiled_anew(folder, different):
    (file,) = (folder / "__pycache__").iterdir()
    made_with, expected = "options", "3"
    if different == "text":
        (folder / "a.py.jinja").write_text("{{ x + 2 }}")
        expected = "4"
    elif different == "options":
        made_with = "others"
    elif different == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9] if different == "cut off" else b"text")
    with pytest.raises(TypeError):
        rendered(folder, made_with, compiled=False)
    assert rendered(folder, made_with) == expected == rendered(folder, made_with, compiled=False)


def test_where_nothing_can_be_written_all_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "a.py.jinja").write_text("{{ x + 1 }}")
    (tmp_path / "__pycache__").write_text("a file")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert rendered(tmp_path) == rendered(tmp_path) == "3"
    (tmp_path / "__pycache__").unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert rendered(tmp_path) == "3" and len(list(tmp_path.iterdir())) == 1
