"""What is kept of compilations from run to run is what the compiler would make now."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace

import pytest

from flexpress.codegen.device.offline import Made
from support.kept import kept, limit, name_of


def source_of(folder, text: str = "def kernel(x):\n    return x\n", signature: str = "*fp32", constant: int = 16):
    """What Triton would take, with a kernel in a file."""
    folder.mkdir(exist_ok=True)
    file = folder / "print.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("print", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = SimpleNamespace(fn=module.kernel, __name__="kernel")
    return SimpleNamespace(fn=function, signature={"x": signature}, constants={(0,): constant}, attrs={})


@pytest.fixture
def compiler(tmp_path):
    """A compiler that counts: `made`, which keeps what it makes, and the targets that it was asked for."""
    asked = []

    def make(source, target, options, last):
        asked.append(target)
        return Made({"ptx": "instructions", "llir": "long"}, 1024, 255, 8, ("a warning",))

    (tmp_path / "kept").mkdir()
    return SimpleNamespace(made=kept(make, tmp_path / "kept"), asked=asked, folder=tmp_path / "kept")


def test_an_unchanged_kernel_is_compiled_once(compiler, tmp_path):
    """Wherever its file lies."""
    for place in ("here", "there", "here"):
        found = compiler.made(source_of(tmp_path / place), "sm_90", {"num_warps": 4}, None)
        assert found == Made({"ptx": "instructions"}, 1024, 255, 8, ("a warning",))
    assert compiler.asked == ["sm_90"]


def test_whatever_decides_the_code_is_asked_for(tmp_path, monkeypatch):
    given = {"target": "sm_90", "options": {"num_warps": 4}, "last": None}
    sources = {}, {"text": "def kernel(x):\n    return 1\n"}, {"signature": "*bf16"}, {"constant": 32}
    names = {name_of(source_of(tmp_path, **other), **given) for other in sources}
    others = {"target": "sm_80"}, {"options": {"num_warps": 8}}, {"last": "ttgir"}
    names |= {name_of(source_of(tmp_path), **given | other) for other in others}
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    names |= {name_of(source_of(tmp_path), **given)}
    assert len(names) == 8


@pytest.mark.parametrize("damaged", [b"", b"no such thing", None])
def test_what_is_damaged_is_made_again(compiler, tmp_path, damaged):
    source = source_of(tmp_path / "here")
    first = compiler.made(source, "sm_90", {}, None)
    (file,) = compiler.folder.iterdir()
    file.write_bytes(file.read_bytes()[:-9] if damaged is None else damaged)
    assert compiler.made(source, "sm_90", {}, None) == first == compiler.made(source, "sm_90", {}, None)
    assert compiler.asked == ["sm_90", "sm_90"]


def test_what_was_unused_longest_goes(tmp_path):
    for age, name in enumerate("abc"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    limit(tmp_path, 200)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
