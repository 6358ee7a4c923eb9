"""Launches of exported files, through Triton's own compiler and without a GPU: they compile what the library compiles, and that once."""

from __future__ import annotations

import os
import sys
from unittest import mock

import pytest
import torch
import triton

from flexpress.codegen.device.compiler import newer_assembler
from flexpress.codegen.device.offline import compile_function
from flexpress.codegen.export.file import File
from flexpress.mods import alibi, alibi_slopes, causal
from support.dense import dense_attention, relative_error
from support.exported import load, saved, tensors
from support.fake_driver import fake_driver
from support.kept import as_compiled_here
from support.tritons import PINNED


@pytest.fixture
def written(monkeypatch):
    """The last file that was written."""
    files, plain = [], File._rendered
    monkeypatch.setattr(File, "_rendered", lambda file, shown: files.append(file) or plain(file, shown))
    return files


def on_target(module) -> None:
    """Have a file take the CPU for a Hopper GPU."""
    module.is_hopper, module.multiprocessors, module.FEW_KEYS = lambda _: True, lambda _: 3, 0
    for value in vars(module).values():
        if isinstance(value, dict) and set(value) == {"cuda", "cpu"}:
            value["cpu"] = value["cuda"]


def problem(**options):
    return tensors("cpu", dtype=torch.bfloat16, D=64, **{"Z": 1, "Hq": 2, "Hkv": 2, "Q_LEN": 200, "KV_LEN": 200, **options})


def test_it_compiles_what_the_library_compiles(monkeypatch, tmp_path, written):
    """To the letter: in Gluon and in Triton, with the same assembler in mind. And once, whatever lengths are.

    With other Tritons than the pinned one without the backward pass, whose kernel takes longest: what launches one is the same for all."""
    as_compiled_here(monkeypatch)
    q, k, v = problem(grad=True)
    _, module = saved(tmp_path, q, k, v, mask_mod=causal)
    lists = [module.create_block_lists(t, t) for t in (q, q[:, :, :140])]
    driver = fake_driver(monkeypatch, tmp_path)
    on_target(module)
    for known, length in zip(lists, (200, 140), strict=True):
        out = module.attention(*(t[:, :, :length] for t in (q, k, v)), lists=known)
        if PINNED:
            out.sum().backward()
    grids = {"hopper_forward_with_rows": (3, 1, 1)} | ({"hopper_delta": (8, 1, 1), "hopper_backward": (3, 1, 1)} if PINNED else {})
    names = list(grids)
    assert [(name, grid) for grid, name, _ in driver.launches] == [*grids.items()] * 2
    assert driver.cache_configs == dict.fromkeys(names, 0)  # all cache that shared memory leaves, as the library's kernels have
    kernels = {kernel.name: kernel for kernel in (*written[-1].kernels, *written[-1].gluon)}
    for name in names:
        made, launch = kernels[name].on_target, getattr(module, name.upper())
        launch = launch["cuda"] if isinstance(launch, dict) else launch
        (compiled,) = launch.compiled.values()
        last = "ttgir" if name == "hopper_backward" else "ptx"  # what follows is the same for both in Gluon, and takes longest
        same = compile_function(launch.kernel, made.spec, "sm_90", made.constants, made.num_warps, made.num_stages, last)
        assert compiled.asm[last] == same.assembly[last]
    tool = newer_assembler(90)
    assert module.assembler() == (tool.path, tool.version)
    assert triton.knobs.nvidia.ptxas.path.endswith("/ptxas") and "TRITON_PTXAS_PATH" not in os.environ  # as before


class Compiled:
    """In place of a compiled kernel."""

    run, function = None, 1

    def __init__(self, n_spills: int = 0) -> None:
        self.n_spills, self.launches = n_spills, []

    def __getitem__(self, grid: tuple):
        return lambda *arguments: self.launches.append((grid, arguments))


@pytest.fixture
def hopper_with(monkeypatch, tmp_path):
    """A file, as a module on a Hopper GPU, whose kernel for Hopper Triton compiles so, with what counts that."""

    def made(q, k, v, compiled, *mods, **options):
        _, module = saved(tmp_path, q, k, v, *mods, overwrite=True, **options)
        fake_driver(monkeypatch, tmp_path)
        module.is_hopper, module.multiprocessors, module.FEW_KEYS = lambda _: True, lambda _: 3, 0
        module.HOPPER_FORWARD.kernel.warmup = warmup = mock.Mock(side_effect=compiled)
        return module, warmup

    return made


def test_an_address_of_no_whole_16_bytes_is_compiled_apart(hopper_with):
    slopes, found = alibi_slopes(2), [Compiled(), Compiled()]
    module, warmup = hopper_with(*problem(), list(found), alibi(slopes))
    for given in (slopes, torch.ones(3)[1:], slopes.clone(), torch.ones(3)[1:]):
        module.attention(*problem(), slopes=given)
    assert warmup.call_count == 2 and [len(one.launches) for one in found] == [2, 2]
    assert {grid for one in found for grid, _ in one.launches} == {(3, 1, 1)}


def test_one_that_spills_or_does_not_compile_is_not_used(hopper_with):
    q, k, v = problem(Q_LEN=130, KV_LEN=100)
    exact = dense_attention(q, k, v)[0]
    compiled = Compiled(n_spills=257)  # words
    module, warmup = hopper_with(q, k, v, [compiled])
    for _ in range(2):
        assert relative_error(module.attention(q, k, v), exact) <= 1e-2
    assert warmup.call_count == 1 and not compiled.launches

    module, warmup = hopper_with(q, k, v, RuntimeError("another Gluon"))
    with pytest.warns(UserWarning, match="hopper_forward does not compile with Triton .* takes its place. another Gluon"):
        assert relative_error(module.attention(q, k, v), exact) <= 1e-2
    assert relative_error(module.attention(q, k, v), exact) <= 1e-2
    assert warmup.call_count == 1


def test_one_that_is_asked_for_may_spill_but_must_compile(hopper_with):
    q, k, v = problem(Q_LEN=10)
    compiled = Compiled(n_spills=257)
    module, _ = hopper_with(q, k, v, [compiled], kernel_options={"BACKEND": "HOPPER"})
    module.attention(q, k, v)
    assert len(compiled.launches) == 1
    module, _ = hopper_with(q, k, v, RuntimeError("another Gluon"), kernel_options={"BACKEND": "HOPPER"})
    with pytest.raises(RuntimeError, match="another Gluon"):
        module.attention(q, k, v)


def test_a_triton_without_gluon(monkeypatch, tmp_path):
    q, k, v = problem(Z=1, Q_LEN=130, KV_LEN=70)
    path, _ = saved(tmp_path, q, k, v)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    module = load(path, "without")
    assert "gluon" in module.WITHOUT_HOPPER and module.HOPPER_FORWARD is None
    module.is_hopper, module.multiprocessors, module.FEW_KEYS = lambda _: True, lambda _: 3, 0
    assert relative_error(module.attention(q, k, v), dense_attention(q, k, v)[0]) <= 1e-2
    path, _ = saved(tmp_path, q, k, v, kernel_options={"BACKEND": "HOPPER"}, overwrite=True)
    module = load(path, "without")
    module.is_hopper = lambda _: True
    with pytest.raises(NotImplementedError, match="these kernels for Hopper need another Triton than .*gluon"):
        module.attention(q, k, v)


def test_portable_kernels_are_compiled_once(monkeypatch, tmp_path):
    q, k, v = problem()
    _, module = saved(tmp_path, q, k, v, kernel_options={"BACKEND": "PORTABLE"})
    driver = fake_driver(monkeypatch, tmp_path)
    module.FORWARD["cpu"] = module.FORWARD["cuda"]
    for length in (200, 130):
        module.attention(q[:, :, :length], k, v)
    assert [(name, grid) for grid, name, _ in driver.launches] == [("forward", (4, 1, 1)), ("forward", (4, 1, 1))]
    (compiled,) = module.FORWARD["cuda"].compiled.values()
    assert compiled.metadata.enable_fp_fusion and compiled.metadata.ptx_version is not None
