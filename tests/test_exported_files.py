"""Exported files as files: their arguments and errors, how they are written, and what others say of them."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
import triton.language as tl

from flexpress import BlockMask, create_block_mask, export, export_cached, flex_attention
from flexpress.codegen.export.merged import Definitions
from flexpress.codegen.mod.errors import RenderError
from flexpress.exporting import exported_files
from flexpress.mods import alibi, alibi_slopes, causal, document, sliding_window
from support.dense import relative_error
from support.exported import assert_equal, imports_of, load, run_alone, saved, tensors, undecided


def test_a_block_mask_stands_for_its_mask_mod(tmp_path):
    q, k, v = tensors("cpu", Q_LEN=200, KV_LEN=130)
    mask = create_block_mask(sliding_window(50), None, None, 200, 130, device="cpu", BLOCK_SIZE=(64, 128))
    _, module = saved(tmp_path, q, k, v, block_mask=mask)
    assert_equal(module.attention(q, k, v), flex_attention(q, k, v, block_mask=mask))
    assert module.create_block_lists(q, k).kv[0].shape == (1, 1, 4)
    other = BlockMask(
        (200, 130), *(t[..., :1] if t.dim() == 4 else t.clamp(max=1) for t in (mask.kv_num_blocks, mask.kv_indices)), BLOCK_SIZE=(64, 128)
    )
    with pytest.raises(ValueError, match="pass its mask_mod|other lists"):
        export(q, k, v, block_mask=other)


@pytest.mark.parametrize(
    "path, error, words",
    [
        (5, TypeError, "path must be a str or a Path, got int"),
        (b"x.py", TypeError, "path must be a str or a Path, got bytes"),
        ("", ValueError, "path must name the file"),
        ("a\0b", ValueError, "path must name the file"),
    ],
)
def test_paths_that_no_file_can_have(path, error, words):
    q, k, v = tensors("cpu")
    with pytest.raises(error, match=words):
        export(q, k, v, path=path)
    with pytest.raises(error, match=words):
        export_cached(q[:, :, :1], k.transpose(1, 2), v.transpose(1, 2), torch.ones(q.shape[0], dtype=torch.int32), path=path)


def test_a_file_may_have_the_longest_name(tmp_path):
    path = tmp_path / ("x" * 252 + ".py")
    export(*tensors("cpu"), path=path)
    assert path.is_file()


def test_an_index_outside_reads_zero_as_in_the_library(tmp_path):
    """The example's tensor has fewer heads than the query; later ones may, too."""
    q, k, v = tensors("cpu", Z=1, Q_LEN=20, KV_LEN=20)
    for scale in (-0.3, 0.0):
        slopes = torch.tensor([1.0, 2.0])
        _, module = saved(tmp_path, q, k, v, alibi(slopes), scale=scale, overwrite=True)
        assert_equal(module.attention(q, k, v, slopes=slopes), flex_attention(q, k, v, alibi(slopes), scale=scale))


def test_one_tensor_of_two_mods_is_one_argument():
    q, k, v = tensors("cpu")
    ids = torch.zeros(150, dtype=torch.int32)
    lambda_ = 2.0

    def score(score, b, h, q_idx, kv_idx):
        return score * lambda_ + ids[kv_idx]

    def mask(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    (attention,) = (line for line in export(q, k, v, score, mask_mod=mask).splitlines() if line.startswith("def attention("))
    assert attention.count("ids") == 1 and "captured_lambda=2.0" in attention


def test_no_captured_name_hides_one_of_the_files(tmp_path):
    """Whatever they are called: as the file's own variables, as Python's words, as each other's gradients."""
    q, k, v = tensors("cpu", Z=1, Hq=2, Hkv=2, Q_LEN=20, KV_LEN=20, D=16)
    names = ["query", "out", "launch", "torch", "class", "d_out", "b", "score_0", "device", "max", "lists", "scale", "tiles", "grad_x_0"]
    held = {name: torch.rand(2).requires_grad_() for name in names}

    def mod(score, b, h, q_idx, kv_idx):
        for value in held.values():
            score = score * value[h]
        return score

    _, module = saved(tmp_path, q, k, v, mod)
    own = ("query", "key", "value", "scale", "return_lse")
    taken = [name for name in inspect.signature(module.attention).parameters if name not in own]
    assert len(taken) == len(names)
    out = module.attention(q, k, v, **dict(zip(taken, held.values(), strict=True)))
    assert_equal(out, flex_attention(q, k, v, mod))
    found, librarys = (torch.autograd.grad(o.square().sum(), list(held.values())) for o in (out, flex_attention(q, k, v, mod)))
    assert all(relative_error(mine, theirs) <= 1e-3 for mine, theirs in zip(found, librarys, strict=True))


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize(
    "batch, lengths", [(2, (4096, 4096)), (2, (8192, 8192)), (2, (1, 1 << 22)), (2, (1 << 20, 300)), (1 << 14, (900, 900))]
)
def test_a_demo_needs_little_memory(target, batch, lengths):
    """It makes tensors of all scores in float64."""
    q, k = (torch.empty(batch, 16, length, 16, device="meta") for length in lengths)
    (line,) = re.findall(r"^    Q_LEN, KV_LEN = (\d+, \d+)$", export(q, k, k, target=target), re.M)
    Q_LEN, KV_LEN = map(int, line.split(", "))
    assert 100 << 20 < batch * 16 * Q_LEN * KV_LEN * 8 <= 200 << 20 or batch > 2
    assert 0 < Q_LEN <= lengths[0] and 0 < KV_LEN <= lengths[1]
    assert lengths[0] < 128 or Q_LEN % 128 == 0 or lengths[0] == Q_LEN or batch > 2


def test_no_name_is_defined_twice(monkeypatch):
    monkeypatch.setattr(Definitions, "add", lambda self, body, old, name, *_: (name, [body]))
    with pytest.raises(RenderError, match="would define .*forward.* twice"):
        export(*tensors("cpu", grad=True))


def test_errors_of_an_exported_file(tmp_path):
    q, k, v = tensors("cpu")
    bias = torch.zeros(4, 150, 152)[:, :, :150]
    _, module = saved(tmp_path, q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])
    attention, wide = module.attention, torch.zeros(4, 150, 152)
    for error, message, arguments, given in (
        (TypeError, r"query has dtype torch.float64; .* Convert with query.to", (q.double(), k, v), bias),
        (ValueError, r"key must be a tensor \(batch, heads, length, 32\)", (q, k[..., :16], v), bias),
        (ValueError, "strides .* Pass value.contiguous", (q, k, torch.randn(2, 4, 150, 33)[..., :32]), bias),
        (ValueError, "no multiple of the 4 heads", (q[:, :3], k, v), bias),
        (ValueError, "same batch, heads and length", (q, k, v[:, :, :100]), bias),
        (TypeError, "bias must be a tensor of torch.float32 with 3 dimensions", (q, k, v), bias[0]),
        (ValueError, r"bias has shape \(2, 150, 150\)", (q, k, v), wide[:2, :, :150]),
        (ValueError, "bias has stride 22650 in dimension 0", (q, k, v), torch.zeros(4, 150, 151)),
        (NotImplementedError, "no backward kernels", (q.clone().requires_grad_(), k, v), bias),
    ):
        with pytest.raises(error, match=message):
            attention(*arguments, bias=given)
    with pytest.raises(ValueError, match="scale must be a number above 1e-20"):
        attention(q, k, v, bias=bias, scale=-1.0)
    assert attention(q, k, v, bias=wide).shape == q.shape


def test_errors_of_export(tmp_path):
    q, k, v = tensors("cpu")
    strided = torch.randn(2, 4, 32, 150).transpose(2, 3)
    for error, message, options in (
        (ValueError, "contiguous head dims", {"query": strided}),
        (ValueError, "target must be one of sm_80", {"target": "sm_70"}),
        (ValueError, "BACKEND", {"kernel_options": {"BACKEND": "HOPPER"}}),
        (TypeError, "scale as a number", {"scale": torch.ones(())}),
        (ValueError, "layout must be one of", {"layout": "wheel"}),
        (ValueError, "needs a path", {"layout": "kernels"}),
        (ValueError, "the folder's name", {"layout": "kernels", "path": tmp_path / "My Kernel"}),
    ):
        with pytest.raises(error, match=message):
            export(**{"query": q, "key": k, "value": v, **options})
    path = tmp_path / "there.py"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export(q, k, v, path=path)
    assert path.read_text() == "mine"
    assert export(q, k, v, path=path, overwrite=True) == path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["there.py"]  # nothing temporary
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="no file that could be written anew"):
        export(q, k, v, path=tmp_path / "pipe", overwrite=True)
    assert (tmp_path / "pipe").is_fifo()


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "there.py"
    path.write_text("mine")
    monkeypatch.setattr(exported_files.os, "replace", mock.Mock(side_effect=OSError("no")))
    with pytest.raises(OSError, match="no"):
        export(*tensors("cpu"), path=path, overwrite=True)
    assert path.read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["there.py"]


def test_a_file_is_the_same_whenever_it_is_written():
    """In another process, whose sets have another order."""
    lines = (
        "import torch; from flexpress import export; from flexpress.mods import alibi, sliding_window",
        "q = torch.empty(2, 4, 64, 32)",
        "text = export(q, q, q, alibi(torch.ones(4).requires_grad_()), mask_mod=sliding_window(7))",
    )
    scope: dict = {}
    exec("\n".join(lines), scope)
    code, environment = "\n".join((*lines, "print(text, end='')")), {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == scope["text"] and "class Attention(" in done.stdout


def test_a_file_passes_the_linter(tmp_path):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    q, k, v = tensors("cpu", grad=True)
    ids = torch.zeros(9, dtype=torch.int32)
    kinds = {
        "a": {},
        "b": {"score_mod": alibi(alibi_slopes(4)), "mask_mod": undecided},
        "c": {"mask_mod": document(ids), "backward": False},
    }
    for name, options in kinds.items():
        export(q, k, v, **options, path=tmp_path / f"{name}.py")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_kernel_for_hugging_face(tmp_path):
    """As kernels imports it: from a path, under a name that is nobody else's; every file is as its digest says."""
    q, k, v = tensors("cpu")
    export(q, k, v, mask_mod=causal, path=tmp_path / "my-attention", layout="kernels")
    variant = tmp_path / "my-attention" / "build" / "torch-universal"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "my-attention" and metadata["id"].isidentifier()
    files = {str(p.relative_to(variant)): p.read_bytes() for p in variant.rglob("*") if p.is_file() and p.name != "metadata.json"}
    assert metadata["digest"]["files"] == {n: base64.b64encode(hashlib.sha256(b).digest()).decode() for n, b in files.items()}
    spec = importlib.util.spec_from_file_location(metadata["id"], variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {metadata["id"]: module}):
        spec.loader.exec_module(module)
        assert_equal(module.attention(q, k, v), flex_attention(q, k, v, mask_mod=causal))
    older = load(variant / "my_attention" / "__init__.py", "my_attention")
    assert older.__all__ == module.__all__ and torch.equal(older.attention(q, k, v), module.attention(q, k, v))
    imported = {n.split(".")[0] for text in files.values() for n in imports_of(text.decode())}
    assert imported - set(sys.stdlib_module_names) <= {"torch", "triton", "numpy", ""}


def test_the_interpreter_leaves_triton_as_it_was(tmp_path):
    q, k, v = tensors("cpu", Z=1, Hq=1, Hkv=1, Q_LEN=9, KV_LEN=9)
    _, module = saved(tmp_path, q, k, v)
    before = {name: value for name, value in vars(tl).items() if callable(value)}
    module.attention(q, k, v)
    assert {name: value for name, value in vars(tl).items() if callable(value)} == before
    assert "TRITON_INTERPRET" not in os.environ or os.environ["TRITON_INTERPRET"] != "1"


@pytest.mark.parametrize("set_to", ["0", "1"])
def test_a_file_runs_with_and_without_tritons_variable(tmp_path, set_to):
    path, _ = saved(
        tmp_path, *tensors("cpu", Z=1, Hq=2, Hkv=1, Q_LEN=20, KV_LEN=20, dtype=torch.bfloat16), enable_gqa=True, mask_mod=causal
    )
    assert "error" in run_alone(path, TRITON_INTERPRET=set_to)
