"""What gets installed: every module and template, under `flexpress` and nowhere else."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import mutants
import pytest

import flexpress
from flexpress import versions
from support.package import BESIDE, FILES, FOLDERS, ROOT, built_once, third_party, wheel_in


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist and a wheel."""
    return built_once(tmp_path_factory)


@pytest.fixture(scope="module")
def wheel_file(built) -> Path:
    """A wheel."""
    return wheel_in(built)


@pytest.fixture(scope="module")
def wheel(wheel_file) -> set[str]:
    """The paths inside a wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        return set(archive.namelist())


_CALL = """
import sys, torch, flexpress
from flexpress import codegen, mods, templates
print(*(module.__path__[0] for module in (flexpress, codegen, mods, templates)), len(flexpress.__path__), sep="\\n")
assert not any(name.startswith("__editable__") for name in sys.modules), "installed after all"
q = torch.randn(1, 1, 4, 16)
assert torch.allclose(flexpress.flex_attention(q, q, q, mask_mod=mods.causal)[0, 0, 0], q[0, 0, 0], atol=1e-5)
"""


def imported_from(folder: Path, place: Path) -> list[str]:
    """What _CALL prints where `folder` is what Python starts in, and nothing but what flexpress needs is installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(third_party()), "FLEXPRESS_CACHE_DIR": str(place / "kernels")}
    done = subprocess.run([sys.executable, "-S", "-c", _CALL], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_clone_works_where_nothing_is_installed(tmp_path):
    assert imported_from(ROOT, tmp_path) == [str(ROOT / name) for name in ("flexpress", "codegen", "mods", "templates")] + ["2"]


def test_an_installed_wheel_finds_its_own_files(wheel_file, tmp_path):
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(tmp_path / "site")
    home = tmp_path / "site" / "flexpress"
    assert imported_from(tmp_path / "site", tmp_path) == [
        str(place) for place in (home, *(home / n for n in ("codegen", "mods", "templates")))
    ] + ["1"]


def test_wheel_has_every_module_and_template(wheel):
    wanted = {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".jinja")
    }
    assert wanted <= wheel, f"not in the wheel: {sorted(wanted - wheel)}"
    assert {"flexpress/templates/forward.py.jinja", "flexpress/py.typed"} <= wheel


def test_wheel_has_nothing_outside_the_package(wheel):
    assert {path for path in wheel if not path.startswith(("flexpress/", "flexpress-"))} == set()
    assert {path.partition("/")[0] for path in wheel} - {"flexpress"} == {next(p.partition("/")[0] for p in wheel if ".dist-info/" in p)}


def test_an_sdist_has_what_builds_tests_and_documents(built):
    (file,) = built.glob("flexpress-*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = [path for folder in (*FOLDERS, *BESIDE) for path in (ROOT / folder).rglob("*")]
    wanted = {str(path.relative_to(ROOT)) for path in folders if path.suffix in (".py", ".jinja", ".md", ".typed")}
    assert wanted | {"pyproject.toml", *FILES} <= names and not any("__pycache__" in name for name in names)


def test_metadata_says_what_the_package_is(wheel_file):
    (said,) = importlib.metadata.distributions(path=[str(wheel_file)])
    told = said.metadata
    assert said.version == flexpress.__version__ and wheel_file.name.split("-")[1] == flexpress.__version__
    assert told["License-Expression"] == "MIT" and told["Author"] and told["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in told.get_all("Classifier") and told["Summary"] and told["Keywords"]
    assert told["Description-Content-Type"] == "text/markdown" and told.get_payload().startswith("# Flexpress")
    assert {re.match(r"[\w-]+", line)[0] for line in said.requires if "extra ==" not in line} == {"torch", "triton", "jinja2", "numpy"}
    for url in told.get_all("Project-URL"):
        assert re.fullmatch(r"[^,]+, https://\S+", url)


def test_the_changelog_ends_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions_told = re.findall(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert versions_told[0][0] == flexpress.__version__
    assert versions_told == sorted(versions_told, reverse=True)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_folder_codegen_is_not_a_package_of_its_own():
    done = subprocess.run([sys.executable, "-c", "import codegen"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "ImportError: this folder is the package flexpress.codegen; import it by that name" in done.stderr


def test_a_package_that_is_missing_too_old_or_too_new_is_told_in_words(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ImportError, match="flexpress needs triton: .*; install triton>=3.6$"):
        patch.setitem(sys.modules, "triton", None)
        versions.check_versions()
    for name, version in (("torch", "2.9.1+cpu"), ("triton", "3.5.1")):
        with monkeypatch.context() as patch, pytest.raises(ImportError, match=f"{re.escape(version)} is too old; install {name}>="):
            patch.setattr(importlib.import_module(name), "__version__", version)
            versions.check_versions()
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"triton 3.10.0 is newer than what was tested \(3.6 to 3.9\)"):
        patch.setattr(importlib.import_module("triton"), "__version__", "3.10.0")
        versions.check_versions()


def test_versions_are_those_that_pip_is_told():
    (asked,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    major, minor = versions.NEWEST_TRITON
    for name, minimum in versions.MINIMUM.items():
        bound = f",<{major}.{minor + 1}" if name == "triton" else ""
        assert f'"{name}>={versions.written(minimum)}{bound}"' in asked


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.breaks)
def test_every_mutant_has_its_place(mutant):
    """One that no longer occurs, or that cannot be imported, would prove nothing."""
    text = (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    ((begin, end),) = mutants.places(text, mutant.old)
    if mutant.file.endswith(".py"):
        ast.parse(text[:begin] + mutant.new + text[end:])
