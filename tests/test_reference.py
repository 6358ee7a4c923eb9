"""docs/reference.py: docstrings as Markdown, and that all public names have one. The pages themselves are made by `make docs`."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

import flexpress

PATH = Path(__file__).parent.parent / "docs" / "reference.py"
SPEC = importlib.util.spec_from_file_location("reference", PATH)
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


def test_columns_become_a_table():
    text = """Does it.

    q, k      (B, H, S, D), any
              strides
    cu[0]     x < y | z
    full_kv_indices
    Returns q * 2 and k_2.

        f(q)
    """
    assert reference.markdown(text) == (
        "Does it.\n\n| | |\n|---|---|\n"
        "| `q`, `k` | (B, H, S, D), any strides |\n| cu\\[0\\] | x &lt; y &#124; z |\n| `full_kv_indices` |  |\n\n"
        "Returns q \\* 2 and `k_2`.\n\n```python\nf(q)\n```"
    )


def test_what_is_no_table_stays():
    assert reference.markdown("One `a*b`.\nTwo: a_b, `c_d`.") == "One `a*b`.\nTwo: `a_b`, `c_d`."
    assert reference.markdown("One.\n\n    out = sum_j x . y\n      z\n\nTwo.") == "One.\n\n```text\nout = sum_j x . y\n  z\n```\n\nTwo."


def test_an_example_behind_sections_is_code():
    text = "One.\n\nRaises:\n    TypeError: no.\n\n    f(q)"
    assert reference.markdown(text) == "One.\n\nRaises:\n    TypeError: no.\n\n```python\nf(q)\n```"
    assert reference.markdown("One.\n\nArgs:\n    x: an ``int``.") == "One.\n\nArgs:\n    x: an `int`."


@pytest.mark.parametrize(
    "function", [flexpress.flex_attention, flexpress.cached_attention, flexpress.update_cache, flexpress.varlen_attention]
)
def test_every_argument_of_a_call_has_a_row_or_a_word(function):
    """Arguments that another function describes are named in words."""
    text = reference.markdown(function.__doc__)
    said = [name for name in inspect.signature(function).parameters if f"`{name}`" in text or name in text]
    same = set(inspect.signature(flexpress.cached_attention).parameters) if function is flexpress.update_cache else set()
    assert set(inspect.signature(function).parameters) - set(said) <= same and text.count("\n| `") >= 4


def test_public_modules_are_in_the_reference():
    assert {"flexpress", "flexpress.mods", "flexpress.flash"} <= set(reference.MODULES)
    for name in reference.MODULES:
        module = reference.shown(name)
        own = [value for key, value in vars(module).items() if not key.startswith("_") and getattr(value, "__module__", None) == name]
        assert module.__doc__ and all(value.__doc__ for value in own)
