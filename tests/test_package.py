"""What gets installed: every module and template, under `flexpress` and nowhere else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"flexpress": "flexpress", "codegen": "flexpress/codegen", "templates": "flexpress/templates", "mods": "flexpress/mods"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """The paths inside a wheel, built from a copy of the sources so that nothing is left beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("flexpress-*.whl")
    with zipfile.ZipFile(file) as archive:
        return set(archive.namelist())


def test_wheel_has_every_module_and_template(wheel):
    wanted = {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".jinja")
    }
    assert wanted <= wheel, f"not in the wheel: {sorted(wanted - wheel)}"
    assert "flexpress/templates/forward.py.jinja" in wheel


def test_wheel_has_nothing_outside_the_package(wheel):
    assert {path for path in wheel if not path.startswith(("flexpress/", "flexpress-"))} == set()
    assert {path.partition("/")[0] for path in wheel} - {"flexpress"} == {next(p.partition("/")[0] for p in wheel if ".dist-info/" in p)}


def test_the_folder_codegen_is_not_a_package_of_its_own():
    done = subprocess.run([sys.executable, "-c", "import codegen"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: this folder is the package flexpress.codegen; import it by that name" in done.stderr


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.breaks)
def test_every_mutant_has_its_place(mutant):
    """One that no longer occurs would prove nothing."""
    assert len(mutants.places((mutants.ROOT / mutant.file).read_text(encoding="utf-8"), mutant.old)) == 1
