"""Where code stands: folders import downwards only, no files import each other in a circle, and operations are named in the op table."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

import pytest

from flexpress.codegen.mod.table.ops import OPS

ROOT = Path(__file__).parent.parent
BELOW: dict[str, set[str]] = {"codegen": set()}  # what a folder may import beside its own files, from the ground up
for room in (".", "captured", "table", "symbolic", "graphs", "tracing"):
    BELOW[str(Path("codegen/mod", room))] = set(BELOW)
BELOW["codegen/text"] = set(BELOW)
BELOW |= {"codegen/plan": set(BELOW), "codegen/device": set(BELOW)}  # side by side
BELOW["codegen/run"] = set(BELOW)
BELOW["codegen/export"] = set(BELOW)
BELOW["mods"] = set()
FLOORS = "inputs graphs masks calls caches distributed steps operators exporting . flash_attn commands integrations"
for room in FLOORS.split():  # of flexpress/, from the ground up; the dot is for its own files
    BELOW[str(Path("flexpress", room))] = set(BELOW)
ENTRIES = {Path("flexpress", name) for name in ("__init__.py", "__main__.py")}  # which import what users ask for
VERSIONS = Path("flexpress/versions.py")  # which imports nothing
FILES = {path.relative_to(ROOT): path for folder in BELOW for path in (ROOT / folder).glob("*.py")}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A file, parsed once for all tests."""
    return ast.parse(FILES[path].read_text(encoding="utf-8"))


def place_of(name: str) -> Path | None:
    """The file of a module `flexpress.x.y`, None if it is no module."""
    parts = name.split(".")[1:]
    home = parts if parts and parts[0] in ("codegen", "mods") else ["flexpress", *parts]
    path = Path(*home)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p in FILES), None)


def imports_of(path: Path) -> set[Path]:
    """The files that a file imports, whether at once or inside a function."""
    folders = path.parts[:-1]
    home, found = ".".join(folders if folders[0] == "flexpress" else ("flexpress", *folders)), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(home.split(".")[: len(home.split(".")) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if place_of(name) else module for name in names]
        else:
            continue
        found |= {place_of(name) for name in names if name.startswith("flexpress.")}
    return found - {None, path}


IMPORTS = {path: imports_of(path) for path in FILES}


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_imports_what_is_below_it(folder):
    upwards = {
        f"{path} -> {other}"
        for path, others in IMPORTS.items()
        for other in others
        if str(path.parent) == folder and path not in ENTRIES and other != VERSIONS and str(other.parent) not in {folder, *BELOW[folder]}
    }
    assert upwards == set()


@pytest.mark.parametrize("folder", [folder for folder in BELOW if folder not in ("codegen", "mods")])
def test_a_folder_says_what_is_in_it(folder):
    """At the top of its __init__.py, in lines of names and what these hold, blanks between. `rows_*` are all whose names begin so."""
    said = FILES[Path(folder, "__init__.py")].read_text(encoding="utf-8")
    listed = [name for names in re.findall(r"^(?:#     )?([\w*]+(?:, [\w*]+)*)  +\S", said, re.M) for name in names.split(", ")]
    there = {path.stem for path in FILES if str(path.parent) == folder} - {"__init__"}
    assert sorted(there) == sorted(module for module in there for name in listed if fnmatch(module, name))
    assert all(any(fnmatch(module, name) for module in there) for name in listed)


def test_modules_of_text_are_listed_in_the_order_of_imports():
    import flexpress.codegen.text

    listed = re.findall(r"^(\w+)  ", flexpress.codegen.text.__doc__, re.M)
    text = {path for path in FILES if path.parent == Path("codegen/text")}
    imports = {(path.stem, other.stem) for path in text for other in IMPORTS[path] & text}
    assert [pair for pair in imports if listed.index(pair[0]) < listed.index(pair[1])] == []


def test_no_files_import_each_other_in_a_circle():
    left = dict(IMPORTS)
    while True:
        imported = set().union(*left.values())
        ends = {path for path, others in left.items() if not others & left.keys() or path not in imported}
        if not ends:
            break
        left = {path: others for path, others in left.items() if path not in ends}
    assert sorted(map(str, left)) == []


TABLE = [path for path in FILES if str(path.parent) == "codegen/mod/table"]
THE_OP_TABLE = {path for path in TABLE if path.stem in ("op", "ops") or path.stem.startswith("rows_")}
OTHER_NAMES = {  # that are spelled like those of operations
    Path("codegen/mod/operators.py"): set(OPS),  # Python's operators
    Path("codegen/device/stages.py"): {"neg"},  # PTX's instruction
    Path("codegen/device/interpreter_direct.py"): {"where"},  # Triton's function
}


@pytest.mark.parametrize("path", sorted(set(FILES) - THE_OP_TABLE), ids=str)
def test_no_operation_is_named_outside_the_op_table(path):
    """Whoever treats some operations otherwise asks for a trait of their rows."""
    named = {
        node.value
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OPS
    }
    assert named <= OTHER_NAMES.get(path, set())


NO_CALL = {"flexpress/commands/cli.py": 1}  # mods that are bound where there is no call yet


def test_mods_are_bound_for_the_device_of_a_call():
    """A mod may ask for it: a call that binds a mod without it takes what mods say of another device, or of none."""
    without = Counter()
    for path in (path for path in FILES if path.parts[0] == "flexpress"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("bind", "bind_with_origins"):
                without[str(path)] += len(node.args) + len(node.keywords) < 3
    assert {path: count for path, count in without.items() if count} == NO_CALL


def test_tests_are_imported_by_nobody():
    """What two of them share is in tests/support, which imports nothing else of tests."""
    wrong = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            beside = {
                n for n in names if n.startswith("test_") or (path.parent.name == "support" and (ROOT / "tests" / f"{n}.py").exists())
            }
            wrong |= {f"{path.name} imports {name}" for name in beside}
    assert wrong == set()


LONGEST_MODULE, LONGEST_FUNCTION = 350, 55  # lines; of a function but for its docstring


def too_long(path: Path) -> list[str]:
    """What of a file is longer than a reader should have to hold in mind: itself, and functions but for docstrings."""
    text = FILES[path].read_text(encoding="utf-8")
    lengths = [(str(path), len(text.splitlines()), LONGEST_MODULE)]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if ast.get_docstring(node) is None or len(node.body) == 1 else node.body[1]
            described = first.lineno - node.body[0].lineno
            lengths.append((f"{path}: {node.name}", node.end_lineno - node.lineno + 1 - described, LONGEST_FUNCTION))
    return [f"{name} has {length} lines" for name, length, most in lengths if length > most]


def test_nothing_is_asserted():
    """`python -O` leaves assertions out, with whatever they do."""
    assert not [path for path in FILES if any(isinstance(node, ast.Assert) for node in ast.walk(tree_of(path)))]


@pytest.mark.parametrize("path", sorted(FILES), ids=str)
def test_modules_and_functions_are_short(path):
    assert not too_long(path)


MAKERS = (
    "empty",
    "empty_strided",
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "scalar_tensor",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
)
FLOATS = ("empty", "empty_strided", "zeros", "ones", "full", "linspace", "eye", "rand", "randn")  # of the default dtype
PROGRAMS = tuple(f"flexpress/commands/{name}.py" for name in ("cli", "demo", "recipes"))  # which may follow torch's default device


@pytest.mark.parametrize("path", [p for p in FILES if str(p) not in PROGRAMS], ids=str)
def test_tensors_are_made_on_a_device_that_is_named(path):
    """torch's default device and dtype are the user's: a kernel's own memory on another device ends the process, and of another dtype it is
    read as what it is not."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in {f"torch.{name}" for name in MAKERS}:
            continue
        named = {k.arg for k in node.keywords}
        assert {"device", None} & named, f"{path}:{node.lineno} {ast.unparse(node)}: say on which device"
        if ast.unparse(node.func).removeprefix("torch.") in FLOATS:
            assert {"dtype", None} & named, f"{path}:{node.lineno} {ast.unparse(node)}: say of which dtype"


def test_tensors_of_files_are_made_on_a_device_that_is_named():
    for path in (ROOT / "templates").glob("*.jinja"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if any(f"torch.{name}(" in line for name in MAKERS):
                assert "device" in line, (path.name, line)
