"""What README.md and docs/ name is there, and what they quote is what is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "benchmarks", "examples", "generated")
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """The names by which headings can be linked to: lower case, without punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE)
    text = text_of(page)
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, target
    for script in re.findall(r"\bpython ((?:tests|benchmarks|examples)/\w+\.py)", text):
        assert (ROOT / script).exists(), script


def test_files_that_are_touched_exist():
    """docs/how_to.md names files in its tables; NAME stands for what is added."""
    for cell in re.findall(r"^\| (`[^|]+) \|", text_of("docs/how_to.md"), re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cell):
            assert "NAME" in name or (ROOT / name).exists(), name


@pytest.mark.parametrize("before, rows", [("It needs no driver of its own:", 4), ("## A public argument of flex_attention", 4)])
def test_a_candidate_and_an_argument_touch_few_files(before, rows):
    """A row of the table is a file, or two of tests."""
    table = text_of("docs/how_to.md").split(before, 1)[1].strip().split("\n\n")[0].splitlines()
    assert len(table) - 2 <= rows


def test_readme_and_design_are_short():
    assert len(text_of("README.md").splitlines()) <= 90
    assert len(text_of("docs/design.md").encode()) <= 10_000


def test_readme_quotes_what_its_program_prints(tmp_path):
    program, quoted = re.findall(r"^```python\n(.*?)^```", text_of("README.md"), re.DOTALL | re.MULTILINE)
    program = program.replace('"cuda"', '"cpu"').replace("4096", "64")  # as the interpreter can do it
    program += "import flexpress\nprint(*flexpress.printed_kernels(), sep='\\n')\n"
    script = tmp_path / "work" / "attend.py"
    script.parent.mkdir()
    script.write_text(program, encoding="utf-8")
    environment = {**os.environ, "FLEXPRESS_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (kernel,) = (line for line in done.stdout.splitlines() if "/forward_alibi_causal_" in line)
    printed = Path(kernel).read_text(encoding="utf-8")
    assert quoted in printed, f"README.md quotes what is no longer printed; print it anew from\n{printed}"
