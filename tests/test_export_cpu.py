"""Exported files with kernels in C++: they run without flexpress, and compute the library's bits."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flexpress import create_block_mask, export, flex_attention
from flexpress.mods import alibi, alibi_slopes, causal, document, relative_bias, sliding_window
from support.dense import assert_as_accurate, dense_attention, relative_error
from support.exported import captured_of, imports_of, load, run_alone, saved, tensors, undecided

pytestmark = pytest.mark.usefixtures("in_cpp")


def assert_same(found, library) -> None:
    """The same bits, of tensors in a list."""
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, library, strict=True))


def gradients(out, lse, inputs, seed: int = 0):
    """Of a loss of out and lse."""
    generator = torch.Generator().manual_seed(seed)
    d_out, d_lse = (torch.randn(t.shape, generator=generator).to(t.dtype) for t in (out, lse))
    return torch.autograd.grad((out * d_out).sum() + (lse.clamp(min=-9) * d_lse).sum(), inputs)


def test_plain(tmp_path):
    """Few queries, which have a kernel of their own, and others; a head dim of the values that is another."""
    q, k, v = tensors("cpu", D_V=48)
    path, module = saved(tmp_path, q, k, v)
    for Q_LEN, KV_LEN in ((1, 7), (3, 1500), (129, 33)):
        q, k, v = tensors("cpu", Z=3, Hq=6, Hkv=2, Q_LEN=Q_LEN, KV_LEN=KV_LEN, D_V=48)
        found = module.attention(q, k, v, scale=0.3, return_lse=True)
        assert_as_accurate(found[0], q, k, v, scale=0.3)
        library = flex_attention(q, k, v, scale=0.3, enable_gqa=True, return_lse=True)
        assert_same(found, library)
        assert found[0].stride() == library[0].stride()
    with pytest.raises(NotImplementedError, match="no backward kernels"):
        module.attention(q.requires_grad_(), k, v)
    assert "error" in run_alone(path)


def test_alibi_and_a_window_with_gradients(tmp_path):
    """Of tails, heads that share keys, and what score_mod captures."""
    q, k, v = tensors("cpu", Hq=4, Hkv=2, Q_LEN=150, KV_LEN=170, grad=True)
    slopes = alibi_slopes(4, "cpu").requires_grad_()
    path, module = saved(tmp_path, q, k, v, score_mod=alibi(slopes), mask_mod=sliding_window(64), enable_gqa=True)
    for length, window in ((90, 64), (256, 100), (9, 3)):
        q, k, v = tensors("cpu", Z=1, Hq=4, Hkv=2, Q_LEN=length, KV_LEN=length, grad=True)
        inputs, mods = (q, k, v, slopes), (alibi(slopes), sliding_window(window))
        found = module.attention(q, k, v, slopes=slopes, window=window, return_lse=True)
        library = flex_attention(q, k, v, score_mod=mods[0], mask_mod=mods[1], enable_gqa=True, return_lse=True)
        exact = dense_attention(q, k, v, *mods)[:2]
        assert_same(found, library)
        mine, theirs, right = (gradients(*results, inputs) for results in (found, library, exact))
        assert_same(mine, theirs)
        assert all(relative_error(one, other) < 1e-5 for one, other in zip((*found, *mine), (*exact, *right), strict=True))
    lists = module.create_block_lists(q, k, window=3)
    again = module.attention(q, k, v, slopes=slopes, window=3, lists=lists, return_lse=True)
    assert_same([*again, *gradients(*again, inputs)], [*found, *mine])
    assert "gradient of slopes" in run_alone(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_document_mask_of_16_bits(tmp_path, dtype):
    q, k, v = tensors("cpu", Q_LEN=300, KV_LEN=300, dtype=dtype, grad=True)
    ids = torch.arange(300, dtype=torch.int32) // 70
    path, module = saved(tmp_path, q, k, v, mask_mod=document(ids, causal))
    other = (torch.arange(170, dtype=torch.int32) // 33) % 3
    inputs = [t[:, :, :170].detach().requires_grad_() for t in (q, k, v)]
    found = module.attention(*inputs, ids=other, return_lse=True)
    library = flex_attention(*inputs, mask_mod=document(other, causal), return_lse=True)
    assert_as_accurate(found[0], *inputs, mask_mod=document(other, causal))
    assert_same([*found, *gradients(*found, inputs)], [*library, *gradients(*library, inputs)])
    assert "error" in run_alone(path)


def test_a_mask_that_is_evaluated(tmp_path):
    """By a block mask, in blocks of its size; each head has another."""

    def mask_mod(b, h, q_idx, kv_idx):
        return undecided(b, h, q_idx + h, kv_idx)

    q, k, v = tensors("cpu", Hkv=2, Q_LEN=140, KV_LEN=260, grad=True)
    mask = create_block_mask(mask_mod, None, 4, 140, 260, device="cpu", BLOCK_SIZE=(32, 64))
    _, module = saved(tmp_path, q, k, v, block_mask=mask, enable_gqa=True)
    found = module.attention(q, k, v, return_lse=True)
    library = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
    assert_same([*found, *gradients(*found, (q, k, v))], [*library, *gradients(*library, (q, k, v))])
    assert module.create_block_lists(q, k).kv[0].shape == (1, 4, 5)


def test_gradients_of_what_is_captured_in_every_way(tmp_path):
    """Elements by head and distance, by query, by key, and one for every position; one tensor is read in two ways."""
    length = 70
    q, k, v = tensors("cpu", Z=2, Hq=2, Hkv=2, Q_LEN=length, KV_LEN=length, D=16, grad=True)
    generator = torch.Generator().manual_seed(1)
    shapes = {"table": (2, 2 * length - 1), "rows": (2, length), "columns": (length // 2 + 1,), "bias": (2, 2, length, length)}
    held = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    near, (_, rows, columns, bias) = relative_bias(held["table"]), held.values()

    def mod(score, b, h, q_idx, kv_idx):
        score = near(score, b, h, q_idx, kv_idx) * 0.5 + rows[h, q_idx] + rows[1 - h, kv_idx]
        return score + columns[kv_idx // 2] * rows[h, q_idx] + bias[b, h, q_idx, kv_idx]

    _, module = saved(tmp_path, q, k, v, score_mod=mod)
    inputs = q, k, v, *held.values()
    found = module.attention(q, k, v, **captured_of(module, **held), return_lse=True)
    library, exact = flex_attention(q, k, v, mod, return_lse=True), dense_attention(q, k, v, mod)[:2]
    mine, theirs, right = (gradients(*results, inputs) for results in (found, library, exact))
    assert_same([*found, *mine], [*library, *theirs])
    assert all(relative_error(one, other) < 2e-5 for one, other in zip(mine, right, strict=True))


def strange(score, b, h, q_idx, kv_idx):
    # fmt: off
    return score + q_idx * float(r"""1""") \
        + 1
    # fmt: on


def test_a_users_lines_are_comments(tmp_path):
    """Whatever quotes and backslashes they hold."""
    q, k, v = tensors("cpu", Q_LEN=20, KV_LEN=20)
    path, module = saved(tmp_path, q, k, v, strange)
    assert "return score + q_idx * float(r'''1''') \\|\n" in path.read_text()
    assert_same([module.attention(q, k, v)], [flex_attention(q, k, v, strange)])


def test_a_file_needs_torch_alone_and_passes_the_linter(tmp_path):
    q, k, v = tensors("cpu", grad=True)
    kinds = {"a": {}, "b": {"score_mod": alibi(alibi_slopes(4)), "mask_mod": undecided}, "c": {"mask_mod": causal, "backward": False}}
    for name, options in kinds.items():
        text = export(q, k, v, **options, path=tmp_path / f"{name}.py")
        assert {n.split(".")[0] for n in imports_of(text)} - set(sys.stdlib_module_names) == {"torch"}
        assert text == export(q, k, v, **options)
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_code_is_compiled_once_and_kept_for_its_user_alone(tmp_path, monkeypatch):
    path, _ = saved(tmp_path, *tensors("cpu", Z=1, Q_LEN=40, KV_LEN=40), mask_mod=causal)
    folder = tmp_path / "cache" / "own"
    seen = []
    for _ in range(2):
        run_alone(path, FLEXPRESS_EXPORTED_DIR=str(folder))
        seen.append({file.name: file.stat().st_mtime_ns for file in folder.iterdir()})
    assert seen[0] == seen[1]
    assert sorted(name.rpartition("_")[0] for name in seen[0]) == ["cpu_blocks", "cpu_forward", "cpu_lists"]
    if os.name == "posix":
        assert {stat.S_IMODE(place.stat().st_mode) & 0o077 for place in (folder, *folder.iterdir())} == {0}
        folder.chmod(0o777)
        monkeypatch.setenv("FLEXPRESS_EXPORTED_DIR", str(folder))
        _, module = saved(tmp_path, *tensors("cpu", Z=1, Q_LEN=40, KV_LEN=40), overwrite=True)
        with pytest.raises(RuntimeError, match="others may write to it.*set FLEXPRESS_EXPORTED_DIR"):
            module.attention(*tensors("cpu", Z=1, Q_LEN=40, KV_LEN=40))
        folder.chmod(0o700)
        folder.parent.chmod(0o777)  # where others could put another folder in its place
        with pytest.raises(RuntimeError, match=f"others may write to {re.escape(str(folder.parent.resolve()))}"):
            module.attention(*tensors("cpu", Z=1, Q_LEN=40, KV_LEN=40))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file's path, what it was called with and what that gave, and the library that it has kept."""
    call, folder = tensors("cpu", Z=1, Q_LEN=40, KV_LEN=40), tmp_path / "cache"
    monkeypatch.setenv("FLEXPRESS_EXPORTED_DIR", str(folder))
    path, module = saved(tmp_path, *call)
    right = module.attention(*call)
    (library,) = folder.iterdir()
    return path, call, right, library


def test_a_library_of_another_user_is_not_loaded(tmp_path, kept):
    path, call, right, library = kept
    elsewhere = tmp_path / library.name
    os.replace(library, elsewhere)
    library.symlink_to(elsewhere)  # as anybody can make a link to a file of theirs
    assert torch.equal(load(path).attention(*call), right)
    assert not library.is_symlink()


def test_a_library_that_was_cut_short_is_made_anew(kept):
    """As a machine leaves it that was switched off; in the middle, where the loader would end the process."""
    path, call, right, library = kept
    whole = library.read_bytes()
    for length in (0, 100, len(whole) // 2):
        library.unlink()  # this process has the file that it was loaded from
        library.write_bytes(whole[:length])
        assert torch.equal(load(path).attention(*call), right)
        (library,) = library.parent.iterdir()
        assert len(library.read_bytes()) == len(whole)


@pytest.mark.parametrize(
    "name, value, message", [("CXX", "no-such-compiler", "no C\\+\\+ compiler"), ("FLEXPRESS_CXXFLAGS", "--no-such", "no-such")]
)
def test_a_compiler_that_is_missing_or_fails_is_an_error(tmp_path, monkeypatch, name, value, message):
    q, k, v = tensors("cpu", Z=1, Q_LEN=20, KV_LEN=20)
    _, module = saved(tmp_path, q, k, v)
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("FLEXPRESS_EXPORTED_DIR", str(tmp_path / "cache"))
    with pytest.raises(module.CompilerError, match=message):
        module.attention(q, k, v)
    assert not list((tmp_path / "cache").glob("*"))


def test_the_target_follows_from_the_call(monkeypatch):
    """Tensors on a CPU, BACKEND, and whether the interpreter is asked for."""

    def needs_triton(**options):
        return "import triton" in export(*tensors(options.pop("device", "cpu"), Q_LEN=20), **options)

    assert not needs_triton() and not needs_triton(target="cpu", kernel_options={"BACKEND": "CPP"})
    assert needs_triton(kernel_options={"BACKEND": "PORTABLE"}) and needs_triton(target="sm_80")
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")
    assert needs_triton() and not needs_triton(target="cpu") and not needs_triton(kernel_options={"BACKEND": "CPP"})
    for message, options in (
        ("has no kernels for target 'cpu'", {"target": "cpu", "kernel_options": {"BACKEND": "PORTABLE"}}),
        ("has no kernels for target 'sm_90'", {"target": "sm_90", "kernel_options": {"BACKEND": "CPP"}}),
        ("layout 'kernels' is for kernels in Triton", {"target": "cpu", "layout": "kernels", "path": "a"}),
    ):
        with pytest.raises(ValueError, match=message):
            export(*tensors("cpu"), **options)


def test_a_scale_that_scores_are_not_left_without(tmp_path):
    """As small as one that kernels would fold into a number that is 0 then."""
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    export(q, k, v, mask_mod=causal, scale=0.5, target="cpu", path=tmp_path / "usual.py")
    with pytest.raises(ValueError, match="scale must be a number above 1e-20, got 1e-50"):
        load(tmp_path / "usual.py").attention(q, k, v, scale=1e-50)
    export(q, k, v, mask_mod=causal, scale=1e-50, target="cpu", path=tmp_path / "small.py")
    small = load(tmp_path / "small.py")
    for scale in (1e-50, 1e-20, 0.0, -0.3):
        torch.testing.assert_close(small.attention(q, k, v, scale=scale), flex_attention(q, k, v, mask_mod=causal, scale=scale))
    with pytest.raises(ValueError, match="scale must be a number of at most 1e-20, got 0.5"):
        small.attention(q, k, v, scale=0.5)


def test_wide_heads_have_gradients_too(tmp_path):
    """Those of the portable kernels end at 256."""
    q, k, v = tensors("cpu", Z=1, Hq=1, Hkv=1, Q_LEN=40, KV_LEN=40, D=320, D_V=272, grad=True)
    _, module = saved(tmp_path, q, k, v)
    found, library = module.attention(q, k, v, return_lse=True), flex_attention(q, k, v, return_lse=True)
    assert_same([*found, *gradients(*found, (q, k, v))], [*library, *gradients(*library, (q, k, v))])


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
@pytest.mark.parametrize("names", ["b status tiles check", "kv_idx kv_indices stride_kn positions", "d_out inputs kv_lists ctx"])
def test_names_that_a_file_uses_itself(names, target, tmp_path):
    """What is captured has a name of its own, whatever the file defines, and kernels and launches call theirs."""
    learned, near, scale, rows = names.split()
    scope: dict = {}
    exec(
        f"def score_of({learned}, {scale}):\n    return lambda s, z, hq, m, n: s * {scale} + {learned}[hq] * (m - n)\n"
        f"def mask_of({near}, {rows}):\n    return lambda z, hq, m, n: (m - n < {near}) & (n <= m + {rows}[hq])\n",
        scope,
    )
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    slopes, more = torch.randn(2, requires_grad=True), torch.tensor([0, 2])
    score, mask = scope["score_of"](slopes, 0.5), scope["mask_of"](7, more)
    export(q, k, v, score, mask_mod=mask, target=target, path=tmp_path / "file.py")
    attention = load(tmp_path / "file.py").attention
    taken = {p.name.removeprefix("captured_").rstrip("_"): p.name for p in inspect.signature(attention).parameters.values()}
    given = {taken[name]: value for name, value in ((learned, slopes), (near, 7), (scale, 0.5), (rows, more))}
    results = []
    for out in (attention(q, k, v, **given), flex_attention(q, k, v, score, mask_mod=mask)):
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, slopes))))
    for found, want in zip(*results, strict=True):
        assert relative_error(found, want) < 1e-4


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_what_kernels_cannot_read_or_follow_is_refused(target, tmp_path):
    """Signs that are still to be turned, tangents, gradients of gradients, and calls that are recorded."""
    q, k, v = tensors("cpu")
    slopes = torch.randn(q.shape[1], 2)[:, 0]
    path = tmp_path / "file.py"
    export(q, k, v, lambda s, b, h, m, n: s + slopes[h] * (m - n), backward=True, target=target, path=path)
    attention = load(path).attention
    negative = torch.randn(len(slopes), dtype=torch.complex64).conj().imag
    for given, name in ((dict(query=torch._neg_view(q)), "query"), (dict(slopes=negative), "slopes")):
        with pytest.raises(ValueError, match=f"{name} has a sign that is still to be turned"):
            attention(**{"query": q, "key": k, "value": v, "slopes": slopes} | given)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="key has a tangent"):
        attention(q, torch.autograd.forward_ad.make_dual(k, k), v, slopes=slopes)

    def run(query):
        return attention(query, k, v, slopes=slopes)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
    ways = (lambda: make_fx(run)(q), lambda: torch.jit.trace(run, q), lambda: torch.func.grad(lambda x: run(x).sum())(q), lambda: run(fake))
    for way in ways:
        with pytest.raises(NotImplementedError, match="query has no memory of its own"):
            way()
    x = q.clone().requires_grad_()
    once, again = (torch.autograd.grad(run(x).square().sum() + x.pow(3).sum(), x, create_graph=graph)[0] for graph in (False, True))
    assert torch.equal(once, again)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(again.sum(), x)


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_hooks_that_lay_out_saved_tensors_anew(target, tmp_path):
    q, k, v = tensors("cpu", Q_LEN=48, KV_LEN=48, grad=True)
    bias, table, learned = torch.randn(48, 48).t(), torch.randn(48, 1).expand(48, 3), torch.randn(48).requires_grad_()
    path = tmp_path / "file.py"
    export(q, k, v, lambda s, b, h, i, j: s + bias[i, j] + table[j, 2] * learned[i], backward=True, target=target, path=path)
    attention = load(path).attention

    def gradients(pack, unpack=lambda t: t):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = attention(q, k, v, bias=bias, table=table, learned=learned)
        return torch.autograd.grad(out.square().sum(), (q, k, v, learned))

    expected = gradients(lambda t: t)
    for pack in (lambda t: t.detach().clone(memory_format=torch.contiguous_format), unaligned):
        for one, other in zip(gradients(pack), expected, strict=True):
            assert torch.equal(one, other)

    def freed(tensor):
        tensor = tensor.detach().clone()
        tensor.untyped_storage().resize_(0)
        return tensor

    with pytest.raises(NotImplementedError, match="what attention saved has no memory"):
        gradients(freed)
    for given, name in (((q, freed(k), v), "key"), ((q, k, freed(v)), "value")):
        with pytest.raises(NotImplementedError, match=f"{name} has no memory"):
            attention(*given, bias=bias, table=table, learned=learned)
    with pytest.raises(NotImplementedError, match="bias has no memory"):
        attention(q, k, v, bias=freed(bias), table=table, learned=learned)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose address is no multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)
