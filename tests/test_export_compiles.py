"""The kernels of exported files, as they stand in the files, compile for GPUs that are not here."""

from __future__ import annotations

import re

import pytest
import torch

from flexpress import export, export_cached
from flexpress.codegen.device.offline import Compiled, compile_for, compile_function
from flexpress.codegen.export.file import File
from flexpress.mods import alibi, alibi_slopes, causal, document, relative_bias, sliding_window, softcap
from support.exported import load

SLOW = ("forward", "decode_parts", "hopper_backward")  # which are compared with a call's, on one target


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The last file that was written, with its kernels; and as a module."""
    files = []
    plain = File._rendered
    monkeypatch.setattr(File, "_rendered", lambda file, shown: files.append(file) or plain(file, shown))
    return lambda: (files[-1], load(tmp_path / "exported.py"))


def check(file: File, module, target: str, compared: tuple[str, ...] = SLOW) -> None:
    """Every kernel of the file passes Triton; what is made of those that are large is what is made of a call's kernels."""
    for kernel in (*file.kernels, *file.gluon):
        made = kernel.on_target
        function = getattr(module, kernel.entry)
        # a launch finds a compiled kernel again whatever numbers are
        numbers = {parameter.name for parameter in made.spec.parameters if parameter.is_number}
        assert numbers == {parameter.name for parameter in function.params if parameter.do_not_specialize}
        compiled = compile_function(function, made.spec, target, made.constants, made.num_warps, made.num_stages, "ttgir")
        if target == "sm_90" and kernel.name in compared:
            same = compile_for(made.spec, target, made.constants, made.num_warps, made.num_stages, "ttgir")
            assert without_places(compiled, kernel.entry) == without_places(same, made.spec.template)
        if kernel in file.gluon:
            assert getattr(module, kernel.table).kernel is function
            continue
        launch = getattr(module, kernel.table)["cuda"]
        options = {"num_warps": made.num_warps, "num_stages": made.num_stages}
        assert (launch.kernel, launch.constants, launch.options) == (function, tuple(made.constants.values()), options)


def without_places(compiled: Compiled, entry: str) -> str:
    """Triton's module, without lines of files, and with the kernel's name as KERNEL."""
    text = re.sub(r"^#loc.*\n| loc\(.*?\)+", "", compiled.assembly["ttgir"], flags=re.M)
    assert f"@{entry}(" in text and "tt." in text
    return re.sub(rf"@{entry}\b", "@KERNEL", text)


def meta(*shapes, dtype=torch.bfloat16):
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_attention_with_gradients_compiles(written, tmp_path, target):
    q, k, v = meta((2, 8, 500, 128), (2, 2, 500, 128), (2, 2, 500, 128))
    slopes = alibi_slopes(8).requires_grad_()
    path = tmp_path / "exported.py"
    text = export(q, k, v, alibi(slopes), enable_gqa=True, mask_mod=sliding_window(64), target=target, path=path)
    check(*written(), target)
    assert ("desc_k.load" in text) == (target in ("sm_90", "sm_100"))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_sinks_compile(written, tmp_path, target):
    """On two: a file's kernels are for each target what they are above, and what sinks add is the same for all."""
    q, k, v = meta((2, 64, 500, 64), (2, 8, 500, 64), (2, 8, 500, 64))
    sinks = torch.zeros(64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    export(q, k, v, mask_mod=sliding_window(128), sinks=sinks, enable_gqa=True, target=target, path=tmp_path / "exported.py")
    check(*written(), target)


def test_gathers_and_zones_compile(written, tmp_path):
    q, k, v = meta((2, 8, 500, 64), (2, 8, 500, 64), (2, 8, 500, 80), dtype=torch.float16)
    table, ids = torch.zeros(8, 999, requires_grad=True), torch.zeros(500, dtype=torch.int32)
    export(q, k, v, relative_bias(table), mask_mod=document(ids, causal), target="sm_90", path=tmp_path / "exported.py")
    check(*written(), "sm_90", ("hopper_forward_with_rows",))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_paged_decode_compiles(written, tmp_path, target):
    q, k, v = torch.empty(2, 8, 1, 128).bfloat16(), *torch.empty(2, 8, 16, 2, 128).bfloat16()
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    export_cached(q, k, v, lengths, page_table=table, score_mod=softcap(20.0), target=target, path=tmp_path / "exported.py")
    check(*written(), target)


def test_ragged_queries_compile(written, tmp_path):
    q, k, v = torch.empty(5, 8, 128).bfloat16(), *torch.empty(2, 8, 16, 2, 128).bfloat16()
    table, lengths, starts = torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32), torch.tensor([0, 2, 5]).int()
    where = {"page_table": table, "cu_seqlens_q": starts}
    export_cached(q, k, v, lengths, **where, score_mod=softcap(20.0), target="sm_90", path=tmp_path / "exported.py")
    check(*written(), "sm_90")
