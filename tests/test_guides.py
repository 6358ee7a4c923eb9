"""The code on the pages for users runs, block after block, where there is a GPU and where there is none."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from support.devices import DEVICES

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("from_torch", "serving")


def run(page: str, device: str, monkeypatch) -> dict:
    """The names that a page's Python leaves."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    module = types.ModuleType(f"guide_{page}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # torch's compiler looks it up
    names = vars(module)
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        code = match[1] if device == "cuda" else match[1].replace('"cuda"', '"cpu"')
        first = text.count("\n", 0, match.start(1))
        exec(compile("\n" * first + code, DOCS / f"{page}.md", "exec"), names)  # errors name the page's line
    return names


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_from_torch(device, capsys, monkeypatch):
    names = run("from_torch", device, monkeypatch)
    torch.testing.assert_close(names["second"], names["attend"](50))
    assert "forward" in capsys.readouterr().out and not torch.allclose(names["first"], names["second"])


@pytest.mark.parametrize("device", DEVICES)
def test_serving(device, monkeypatch):
    names = run("serving", device, monkeypatch)
    assert names["out"].shape == (17, 8, 64) and names["prefilled"].shape == (2, 8, 20, 64) and names["decoded"].shape == (2, 8, 1, 64)
    assert names["both"].shape == (23, 8, 64) and names["mixed"].shape == (6, 8, 64)
    assert names["kv_len"].tolist() == [21, 21] and names["pool"].free_pages == 64 - 2 - 1
    assert names["answers"].shape == (4, 8, 1, 64) and names["verified"].shape == (2, 8, 4, 64)
    assert [names["pool"].length(s) for s in names["running"]] == [20 + 1 + 3, 3 + 1 + 1]
    for out in map(names.get, ("out", "prefilled", "decoded", "both", "mixed", "answers", "verified")):
        assert out.isfinite().all() and (out.abs().amax(-1) > 0).all()


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_code_are_run(page):
    assert len(re.findall(r"^```python", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)) >= 3
