"""What type checkers and `help` see of the public names. tests/check_types.py, which `make lint` runs, has mypy read them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import flexpress
from flexpress import distributed, flash, flash_attn, mods, sequences, serving
from flexpress.graphs import in_graph

PUBLIC = {
    **{f"flexpress.{name}": getattr(flexpress, name) for name in flexpress.__all__},
    **{f"flexpress.mods.{name}": getattr(mods, name) for name in mods.__all__},
    **{f"flexpress.flash.{name}": getattr(flash, name) for name in flash.__all__},
    **{f"flexpress.distributed.{name}": getattr(distributed, name) for name in distributed.__all__},
    **{f"flexpress.flash_attn.{name}": getattr(flash_attn, name) for name in flash_attn.__all__},
    **{f"flexpress.sequences.{name}": getattr(sequences, name) for name in sequences.__all__},
    "flexpress.serving.AttentionRegistry": serving.AttentionRegistry,
    "flexpress.serving.AttentionDescriptor": serving.AttentionDescriptor,
}


def functions_of(name: str, value) -> dict[str, object]:
    """A public function itself, or the functions, methods and properties that a public class has of its own or of ours."""
    if inspect.isfunction(value):
        return {name: value}
    found = {}
    for base in reversed(value.__mro__ if inspect.isclass(value) else ()):
        if base.__module__.startswith("flexpress"):
            for part, member in vars(base).items():
                member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                if inspect.isfunction(member) and (not part.startswith("_") or part in ("__init__", "__getitem__")):
                    found[f"{name}.{part}"] = member
    return found


FUNCTIONS = {path: function for name, value in PUBLIC.items() for path, function in functions_of(name, value).items()}


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_public_function_is_annotated(path):
    signature = inspect.signature(FUNCTIONS[path])
    bare = [
        p.name
        for i, p in enumerate(signature.parameters.values())
        if p.annotation is p.empty and not (i == 0 and p.name in ("self", "cls")) and p.name != "_compile"
    ]
    generated = path.endswith("__init__") and FUNCTIONS[path].__qualname__.startswith("__create_fn__")
    assert not bare and (signature.return_annotation is not signature.empty or generated)


def test_the_functions_that_are_looked_at_are_many():
    assert len(FUNCTIONS) > 100 and "flexpress.BlockMask.adjust" in FUNCTIONS and "flexpress.BlockMask.kv_indices" in FUNCTIONS


def test_the_typed_program_uses_every_public_name():
    text = (Path(__file__).parent / "typed_use.py").read_text(encoding="utf-8")
    names = [path.rpartition(".")[2] for path in PUBLIC]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("name", sorted(in_graph.CALL.functions))
def test_what_torch_compile_may_meet_keeps_its_signature(name):
    function = next(f for f in FUNCTIONS.values() if f"{f.__module__}.{f.__name__}" == name)
    signature = inspect.signature(function)
    assert signature == inspect.signature(function.__wrapped__) and "args" not in signature.parameters
    assert function.__doc__ == function.__wrapped__.__doc__
