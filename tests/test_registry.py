"""Caches in memory: all are bounded, listed in one place and forgotten together."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as torch_masks

from flexpress import cache_clear, create_block_mask, evaluate_mod, flex_attention, mods, rope_table, update_cache
from flexpress.codegen import registry
from flexpress.codegen.registry import Bounded, CacheSize, Table, remembered
from support.fresh_mods import mask_mod, score_mod

PACKAGES = [Path(__file__).parent.parent / name for name in ("codegen", "flexpress", "mods")]
# what a process has one of, or one a device: no cache of what calls bring
CONSTANT = {
    "render.environment",
    "render._helpers",
    "cache._templates_digest",
    "devices.backend_of",
    "devices.capability_of",
    "devices.multiprocessors",
    "compiler.newer_assembler",
    "cuda._driver",
    "cuda._lets_kernels_begin_early",
    "counters._spare",
    "cuda.shared_limit",
    "cores._quota",
    "nodes._dtype_cache",  # by operation and dtypes
    "interpreter_patches._numpy_dtypes",  # by dtype
    "spelling.read_spelling",  # by spelling, as the op table and templates have them
    "registry._caches",
    "serving._known",
}


def module_level_caches() -> set[str]:
    """Empty dicts, lists and sets that modules and classes begin with, and functions with functools' caches."""
    found = set()
    for path in (file for package in PACKAGES for file in package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for scope in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
            for node in scope.body:
                value = getattr(node, "value", None)
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
                empty = (
                    isinstance(value, ast.Dict)
                    and not value.keys
                    or (
                        isinstance(value, ast.Call)
                        and not value.args
                        and ast.unparse(value.func).split(".")[-1]
                        in ("dict", "OrderedDict", "defaultdict", "set", "WeakKeyDictionary", "WeakValueDictionary")
                    )
                )
                if target is not None and empty:
                    found.add(f"{path.stem}.{ast.unparse(target)}")
                if any(
                    "cache" in ast.unparse(d).split("(")[0].split(".")[-1] and "property" not in ast.unparse(d)
                    for d in getattr(node, "decorator_list", ())
                ):
                    found.add(f"{path.stem}.{node.name}")
    return found


def test_no_module_has_a_cache_of_its_own():
    """A dict that grows with calls is a Table, and a function that remembers is `remembered`."""
    assert module_level_caches() - CONSTANT == set()


def kept_by_inner_functions() -> set[str]:
    """Empty dicts, lists and sets that a function begins with and a function inside it fills: they live as long as that one does."""
    found = set()
    for path in (file for package in PACKAGES for file in package.rglob("*.py")):
        for outer in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(outer, ast.FunctionDef):
                continue
            own = {
                ast.unparse(target)
                for node in outer.body
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else [])
                if ast.unparse(node.value or target) in ("{}", "[]", "set()", "dict()")
            }
            inner = [node for node in ast.walk(outer) if isinstance(node, ast.FunctionDef) and node is not outer]
            for node in (n for function in inner for n in ast.walk(function)):
                stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
                called = isinstance(node, ast.Attribute) and node.attr in ("add", "append", "extend", "setdefault", "update")
                if (stored or called) and ast.unparse(node.value) in own:
                    found.add(f"{path.stem}.{outer.name}.{ast.unparse(node.value)}")
    return found


def test_no_function_keeps_a_cache_for_itself():
    assert kept_by_inner_functions() == set()


def test_interpreted_calls_leave_nothing_behind():
    q = torch.randn(1, 1, 16, 16)
    cache_clear()
    flex_attention(q, q, q, mask_mod=mods.causal)
    before = list(registry.sizes())
    for _ in range(3):
        flex_attention(q, q, q, mask_mod=mods.causal)
    assert list(registry.sizes()) == before and next(s for s in before if s.name == "block types of the interpreter").entries > 5


def test_every_cache_is_bounded_and_cache_clear_forgets_all():
    cache_clear()
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (30, 40, 40))
    mask = create_block_mask(mask_mod(5), None, None, 30, 40, "cpu")
    flex_attention(q, k, v, score_mod(1), mask).sum().backward()
    flex_attention(q, k, v, mask_mod=mods.causal)
    flex_attention(q[:, :, :1], *(torch.randn(1, 2, 600, 16) for _ in range(2)))
    foreign = torch_masks.create_block_mask(mods.causal, None, None, 30, 40, "cpu")
    flex_attention(q, k, v, block_mask=foreign)
    evaluate_mod(score_mod(2), torch.ones(1, 1, 2, 2))
    kv = torch.zeros(1, 8, 1, 16)
    update_cache(torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 16), kv, kv.clone(), torch.ones(1, dtype=torch.int32), rope=None)
    rope_table(4, 8)
    sizes = list(registry.sizes())
    filled = {size.name for size in sizes if size.entries}
    assert {
        "forward plans",
        "backward plans",
        "backward calls",
        "decode plans",
        "mask plans",
        "block lists",
        "evaluate plans",
        "kernels",
        "checked inputs",
        "geometries",
        "analyses of masks",
        "block types of the interpreter",
        "scalar types of the interpreter",
    } <= filled
    assert all(0 <= size.entries <= size.limit <= 4096 for size in sizes)
    cache_clear()
    assert {size.name for size in registry.sizes() if size.entries} == set()
    assert vars(registry.INFO) == dict.fromkeys(vars(registry.INFO), 0)


def test_a_table_holds_so_much_and_the_oldest_goes():
    table = Bounded(3)
    for i in range(10):
        table[i % 5] = i
        assert len(table) <= 3
    assert list(table.values()) == [7, 8, 9] and table.get(0) is None
    table[4] = "other"  # known: nothing goes
    assert len(table) == 3 and table.setdefault(4, 0) == "other" and table.setdefault(9, 1) == 1 and len(table) == 3


def test_reading_a_table_is_reading_a_dict():
    assert Bounded.get is dict.get and Bounded.__getitem__ is dict.__getitem__ and Bounded.__contains__ is dict.__contains__


def test_threads_may_fill_a_table_together():
    table, failures = Bounded(8), []

    def fill(me: int):
        try:
            for i in range(3000):
                table[me, i % 50] = i
                table.get((me + 1, i % 50))
                if i % 1000 == 0:
                    table.clear()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=fill, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(table) <= 8 + 6


def test_names_are_taken_once(monkeypatch):
    monkeypatch.setattr(registry, "_caches", {})
    table = Table("of a test", 2)

    @remembered("by a test", 2)
    def double(n):
        return 2 * n

    table["a"] = double(3)
    assert list(registry.sizes()) == [CacheSize("by a test", 1, 2), CacheSize("of a test", 1, 2)]
    registry.clear()
    assert [size.entries for size in registry.sizes()] == [0, 0]
    with pytest.raises(ValueError, match="two caches"):
        Table("of a test", 3)


def test_kernels_of_many_mods_are_bounded(monkeypatch):
    """With room for four, results stay right and no more than four are held."""
    from flexpress.codegen.device import kernel
    from flexpress.codegen.run import evaluate
    from support.fresh_mods import score_of

    cache_clear()
    for table in (kernel._kernels, evaluate._plans):
        monkeypatch.setattr(table, "limit", 4)
    scores = torch.randn(1, 1, 2, 2)
    for number in (*range(100, 112), *range(100, 103)):
        assert torch.allclose(evaluate_mod(score_mod(number), scores), score_of(number, scores), atol=1e-5)
        assert len(kernel._kernels) <= 4 and len(evaluate._plans) <= 4
    cache_clear()
