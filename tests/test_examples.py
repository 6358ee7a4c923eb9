"""The examples run, and what their pages quote is what is printed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_minimal_runs():
    done = subprocess.run(
        [sys.executable, "examples/minimal.py"], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "=== manual attention ===" in done.stdout and "=== flexpress ===" in done.stdout
    assert float(re.search(r"largest difference (\S+)", done.stdout)[1]) < 1e-5
    printed = Path(done.stdout.splitlines()[-1]).read_text(encoding="utf-8")
    committed = (ROOT / "generated" / "forward_plain_d64_fp32.py").read_text(encoding="utf-8")
    assert printed == committed, "examples/minimal.md explains another kernel than the one that ran"


def quoted_lines(page: Path) -> list[str]:
    """The lines of code in a page's python fences."""
    fences = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line for fence in fences for line in fence.splitlines() if line.strip()]


def code_lines(kernel: str) -> list[str]:
    """The lines of a kernel that are neither blank nor comments nor docstrings."""
    lines = kernel.splitlines()
    for node in ast.walk(ast.parse(kernel)):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def matches(quoted: str, line: str) -> bool:
    """Is `line` what is quoted? A quotation may end in `...`."""
    return line.startswith(quoted[:-3]) if quoted.endswith("...") else line == quoted


@pytest.mark.parametrize("page, kernel", [("minimal.md", "forward_plain_d64_fp32.py")])
def test_page_quotes_the_printed_kernel(page, kernel):
    printed = code_lines((ROOT / "generated" / kernel).read_text(encoding="utf-8"))
    quoted = quoted_lines(ROOT / "examples" / page)
    stale = [q for q in quoted if not any(matches(q, line) for line in printed)]
    if stale:
        text = "\n".join(stale)
        pytest.fail(f"examples/{page} quotes what generated/{kernel} no longer has:\n{text}", pytrace=False)
    missing = [line for line in printed if not any(matches(q, line) for q in quoted)]
    if missing:
        text = "\n".join(missing)
        pytest.fail(f"examples/{page} does not explain what generated/{kernel} has:\n{text}", pytrace=False)
