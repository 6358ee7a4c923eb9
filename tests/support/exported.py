"""Exported files in a process that cannot import flexpress."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from flexpress import export
from support.dense import relative_error

WITHOUT = """
import importlib.abc, json, os, runpy, signal, sys, traceback
class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flexpress", "jinja2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
try:
    import flexpress
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("flexpress is there")
import torch
for line in sys.stdin:
    path, environment, *files = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(300)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(os.path.dirname(path))
        for standard, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), standard)
        sys.argv, failed = [path], True
        try:
            runpy.run_path(path, run_name="__main__")
            failed = False
        except SystemExit as end:
            failed = end.code not in (None, 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(failed)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def run_alone(path: Path, **environment: str) -> str:
    """What the file's demo prints in a process of its own, where flexpress and jinja2 cannot be imported."""
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    files = path.with_suffix(".stdout"), path.with_suffix(".stderr")
    print(json.dumps([str(path), {**known, **environment}, *map(str, files)]), file=_without().stdin, flush=True)
    status = int(_without().stdout.readline())
    said, errors = (file.read_text() for file in files)
    assert status == 0, said + errors
    return said


@functools.cache
def _without() -> subprocess.Popen:
    """A process that has imported torch, which takes longer than most demos, and forks for each file; it ends with this one."""
    return subprocess.Popen([sys.executable, "-I", "-c", WITHOUT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def load(path: Path, name: str = "exported"):
    """The file as a module of this process."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def tensors(device, Z=2, Hq=4, Hkv=4, Q_LEN=150, KV_LEN=150, D=32, D_V=None, dtype=None, grad=False):
    """query, key and value."""
    generator = torch.Generator().manual_seed(0)
    shapes = (Z, Hq, Q_LEN, D), (Z, Hkv, KV_LEN, D), (Z, Hkv, KV_LEN, D_V or D)
    made = [torch.randn(s, generator=generator).to(device, dtype or DTYPES[device]) for s in shapes]
    return [t.requires_grad_(grad) for t in made]


def cache(device, Z=3, Hq=8, Hkv=2, Q_LEN=1, S=16, pages=24, N=50, D=32, D_V=None, dtype=None):
    """query, k_cache, v_cache, kv_len and page_table (or caches of N * S positions for N sequences, without)."""
    generator = torch.Generator().manual_seed(0)
    dtype = dtype or DTYPES[device]
    shapes = (Z, Hq, Q_LEN, D), (N, S, Hkv, D), (N, S, Hkv, D_V or D)
    q, k, v = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    room = S * pages if pages else S
    kv_len = torch.linspace(Q_LEN, room, Z).to(device, torch.int32)
    table = torch.randint(N, (Z, pages), generator=generator).to(device, torch.int32) if pages else None
    return q, k, v, kv_len, table


def ragged(query: torch.Tensor, counts: list[int], after: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries (Z, Hq, Q_LEN, D), `counts` of each sequence, as (T, Hq, D) with tokens of no sequence after them; cu_seqlens_q."""
    parts = [q[:, :n].transpose(0, 1) for q, n in zip(query, counts, strict=True)]
    starts = torch.tensor([0, *counts]).cumsum(0)
    return torch.cat([*parts, query.new_ones((after, query.shape[1], query.shape[3]))]), starts.to(query.device, torch.int32)


def first_positions(kv_len: torch.Tensor, q_len: int) -> torch.Tensor:
    """q_offset: of the first sequence's queries position 0, of the next ones' some between that and their last positions."""
    share = torch.arange(len(kv_len), device=kv_len.device) / max(len(kv_len), 1)
    return ((kv_len - q_len).clamp(min=0) * share).to(torch.int32)


def some_sinks(heads: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """No sink at all, some of usual scores, one above them all."""
    sinks = torch.linspace(-3, 3, heads, device=device)
    sinks[0], sinks[-1] = -torch.inf, 50.0
    return sinks.to(dtype)


def saved(tmp_path: Path, *arguments, **options):
    """An exported file, and it as a module."""
    path = tmp_path / "kernels_to_own.py"
    text = export(*arguments, path=path, **options)
    assert path.read_text(encoding="utf-8") == text
    return path, load(path)


def assert_equal(found: torch.Tensor, library: torch.Tensor) -> None:
    """The same numbers, but for the order of sums in another tile."""
    assert relative_error(found, library) <= {torch.float32: 2e-6}.get(library.dtype, 1e-2)


def undecided(b, h, q_idx, kv_idx):
    """Bounds do not decide it: blocks are evaluated."""
    return torch.sin(q_idx.float() * kv_idx.float()) > 0.2


def captured_of(module, **named):
    """The arguments that a module's attention names so, or nearly so."""
    taken = inspect.signature(module.attention).parameters
    return {next(p for p in taken if p.rstrip("_").removeprefix("captured_") == name): value for name, value in named.items()}


def imports_of(text: str) -> list[str]:
    """The modules that a file imports; "" for relative ones."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("" if node.level else node.module)
    return found
