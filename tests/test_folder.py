"""The folder of kernels: whatever befalls it, calls go on with at most one warning; and nobody else can put code there."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import stat
import tempfile
import time
import warnings
from pathlib import Path

import kills
import pytest
import torch

from flexpress import cache_clear, cache_dir, cache_info, evaluate_mod, printed_kernels
from flexpress.codegen.device import arguments, binary, cache, compiler, folder
from support.fresh_mods import score_mod, score_of

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes as POSIX has them")
_numbers = iter(range(10**6))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty folder's path, and a place for temporary files."""
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("FLEXPRESS_CACHE_DIR", str(tmp_path / "kernels"))
    cache_clear()
    yield tmp_path / "kernels"
    cache_clear()


def check_new_mod(mod=None) -> list[str]:
    """Right results from a kernel that nobody has printed; the warnings."""
    number, scores = next(_numbers), torch.randn(1, 1, 3, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = evaluate_mod(mod or score_mod(number), scores)
    if mod is None:
        assert torch.allclose(found, score_of(number, scores), atol=1e-5)
    return [str(w.message) for w in caught]


def fails(monkeypatch, folder_path, code: int, name: str, function=os) -> None:
    """From now on a function that writes fails in a folder. (Modes do not stop root, who may be running this.)"""
    real = getattr(function, name)

    def refuse(*args, **kwargs):
        if str(kwargs.get("dir", "")).startswith(str(folder_path)) or any(str(a).startswith(str(folder_path)) for a in args):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(function, name, refuse)


FAULTS = {
    "read-only": lambda place, monkeypatch: fails(monkeypatch, place, errno.EROFS, "mkstemp", tempfile),
    "disk full": lambda place, monkeypatch: fails(monkeypatch, place, errno.ENOSPC, "replace"),
    "no permission": lambda place, monkeypatch: fails(monkeypatch, place, errno.EACCES, "mkstemp", tempfile),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_folder_that_cannot_be_written_to_is_left_with_one_warning(place, monkeypatch, fault, when):
    if when == "later":
        assert check_new_mod() == [] and cache_dir() == place
    FAULTS[fault](place, monkeypatch)
    (warning,) = check_new_mod()
    assert str(place) in warning and "cannot be used" in warning and "FLEXPRESS_CACHE_DIR" in warning
    assert check_new_mod() == []
    assert cache_dir() == place.parent / "tmp" / f"flexpress-{os.getuid()}"
    assert printed_kernels()[-1].parent == cache_dir() and printed_kernels()[-1].exists()
    assert not place.exists() or not list(place.glob(".*.tmp"))


def test_kernels_stay_in_memory_where_nothing_can_be_written(place, monkeypatch):
    fails(monkeypatch, place.parent, errno.EROFS, "mkstemp", tempfile)
    (warning,) = check_new_mod()
    assert "stay in memory" in warning
    assert check_new_mod() == [] and cache_dir() is None and list(place.iterdir()) == []


def test_a_disk_that_fills_up_twice_is_one_warning(place, monkeypatch):
    fails(monkeypatch, place, errno.ENOSPC, "replace")
    assert len(check_new_mod()) == 1
    fails(monkeypatch, place.parent, errno.ENOSPC, "replace")
    assert check_new_mod() == [] and check_new_mod() == [] and cache_dir() is None


def test_a_kernel_in_memory_compiles_for_a_gpu(place, monkeypatch):
    """Triton asks for the text of a function by the name of its file."""
    fails(monkeypatch, place.parent, errno.EROFS, "mkstemp", tempfile)
    spec, text = _printed()
    with pytest.warns(UserWarning, match="stay in memory"):
        kernel = cache.store(text, spec)
    module = cache.load_module(kernel)
    assert "tl.store(" in module.evaluate.src and not os.path.exists(module.__file__)


def test_a_folder_that_a_cleaner_removes_is_made_anew(place):
    assert check_new_mod() == []
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    assert check_new_mod() == [] and len(list(place.glob("*.py"))) == 1 and stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_folder_that_a_cleaner_removes_between_writing_and_renaming(place, monkeypatch):
    def replace(source, target, replaced=[]):  # noqa: B006 - what it has done once
        if not replaced:
            replaced.append(shutil.rmtree(place))
        return renamed(source, target)

    renamed = os.replace
    monkeypatch.setattr(os, "replace", replace)
    assert check_new_mod() == [] and len(list(place.glob("*.py"))) == 1


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FLEXPRESS_CACHE_DIR", "relative/kernels")
    monkeypatch.chdir(tmp_path / "here")
    assert check_new_mod() == []
    monkeypatch.chdir(tmp_path / "there")
    assert check_new_mod() == []
    assert cache_dir() == tmp_path / "here" / "relative" / "kernels" and list((tmp_path / "there").iterdir()) == []


def test_a_user_without_a_home_has_a_cache(monkeypatch, tmp_path):
    for name in ("FLEXPRESS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert len(check_new_mod()) == 1 and check_new_mod() == [] and cache_dir().parent == tmp_path / "tmp"


@pytest.mark.parametrize("name", ["注" * 100, "é" * 200, "x" * 300, "\U00010330" * 120, "a" + "注" * 60])
def test_names_in_any_alphabet_fit_into_file_names(place, name):
    mod = score_mod(next(_numbers))
    mod.__name__ = mod.__qualname__ = name
    assert check_new_mod(mod) == []
    (path,) = printed_kernels()
    assert path.exists() and len(os.fsencode(path.name)) <= 143


@pytest.mark.parametrize("bad", [b"caf\xe9", b"\xff\xfe\n", b"~nobody-at-all/x"])
def test_folders_with_impossible_names_are_left(tmp_path, monkeypatch, bad):
    configured = os.fsdecode(bad) if bad.startswith(b"~") else os.fsdecode(os.fsencode(tmp_path) + b"/" + bad)
    monkeypatch.setenv("FLEXPRESS_CACHE_DIR", configured)
    (warning,) = check_new_mod()
    assert "~/.cache" not in warning
    assert warning.isprintable() and check_new_mod() == [] and cache_dir().parent == tmp_path / "tmp"


@pytest.mark.parametrize("kind", ["directory", "fifo", "link to a directory", "dangling link"])
def test_something_else_in_a_files_place(place, kind):
    """Under every name that a kernel's files have; nothing hangs, and a link's target is not written to."""
    number, scores = next(_numbers), torch.randn(1, 1, 3, 5)
    evaluate_mod(score_mod(number), scores)
    cache_clear()
    for path in list(place.iterdir()):
        path.unlink()
        if kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(place.parent / ("tmp" if "directory" in kind else "nowhere"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = evaluate_mod(score_mod(number), scores)
    assert torch.allclose(found, score_of(number, scores), atol=1e-5) and len(caught) == (kind == "directory")
    assert not (place.parent / "nowhere").exists()


@pytest.mark.parametrize("where", ["the folder", "above"])
def test_a_file_in_the_folders_place(tmp_path, monkeypatch, where):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXPRESS_CACHE_DIR", str(tmp_path / "file" / ("below" if where == "above" else "")))
    assert len(check_new_mod()) == 1 and check_new_mod() == [] and (tmp_path / "file").read_text() == ""


def test_a_shared_folder_keeps_its_mode_and_gets_a_private_one_in_it(place):
    place.mkdir()
    place.chmod(0o1777)
    assert check_new_mod() == []
    assert stat.S_IMODE(place.stat().st_mode) == 0o1777 and cache_dir() == place / f"flexpress-{os.getuid()}"
    assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700 and printed_kernels()[0].parent == cache_dir()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o700, 0o711])
def test_a_folder_that_is_there_keeps_its_mode(place, mode):
    place.mkdir()
    place.chmod(mode)
    assert check_new_mod() == [] and cache_dir() == place and stat.S_IMODE(place.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o773, 0o722])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_is_not_used_where_others_could_put_files(place, mode, above):
    """Others may write to the folder, or to one above it, and rename what is in it."""
    deep = place / "a" / "b"
    deep.mkdir(parents=True)
    (place, place / "a", deep)[2 - above].chmod(mode)
    os.environ["FLEXPRESS_CACHE_DIR"] = str(deep)  # the fixture's value comes back
    (warning,) = check_new_mod()
    assert "others may write" in warning and cache_dir().parent.name == "tmp" and list(deep.iterdir()) == []
    assert stat.S_IMODE((place, place / "a", deep)[2 - above].stat().st_mode) == mode


def test_a_link_leads_to_a_folder_that_is_checked(place, tmp_path):
    for name, mode in (("safe", 0o700), ("open", 0o777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    place.symlink_to(tmp_path / "safe")
    assert check_new_mod() == [] and cache_dir() == tmp_path / "safe"
    place.unlink()
    place.symlink_to(tmp_path / "open")
    cache_clear()
    assert len(check_new_mod()) == 1 and list((tmp_path / "open").iterdir()) == []


def test_a_folder_of_another_user_is_not_used(place, monkeypatch):
    place.mkdir(mode=0o700)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 4321)
    (warning,) = check_new_mod()
    assert "belongs to user" in warning and list(place.iterdir()) == []


@pytest.mark.parametrize("kind", [".py", ".spec", ".json", ".metadata.json", ".cubin"])
@pytest.mark.parametrize("how", ["another user's", "others may write", "link"])
def test_files_that_others_may_have_written_are_not_read(place, monkeypatch, kind, how):
    kills.record(1)
    number = next(_numbers)
    evaluate_mod(score_mod(number), torch.ones(1, 1, 3, 5))
    (path,) = [p for p in place.iterdir() if p.name.endswith(kind) and (kind != ".json" or "metadata" not in p.name)]
    assert folder.read(path.name) == path.read_bytes()
    content = path.read_bytes()
    if how == "link":
        path.rename(place.parent / path.name)
        path.symlink_to(place.parent / path.name)
    elif how == "others may write":
        path.chmod(0o666)
    else:
        real, other = os.fstat, path.stat().st_ino
        monkeypatch.setattr(os, "fstat", lambda handle: _of_another(real(handle), other))
    assert path.read_bytes() == content and folder.read(path.name) is None
    if kind in (".py", ".spec"):
        cache_clear()
        evaluate_mod(score_mod(number), torch.ones(1, 1, 3, 5))
        assert cache_info().prints == 1
    else:
        assert binary._read("kernel_000000000001.000000000001") is None


def _of_another(info: os.stat_result, inode: int) -> os.stat_result:
    fields = list(info)
    if info.st_ino == inode:
        fields[stat.ST_UID] += 1
    return os.stat_result(fields)


def _printed():
    """The spec and the text of a kernel."""
    from flexpress.codegen.run.preview_masks import evaluate_compilation
    from flexpress.codegen.text.render import render

    spec = evaluate_compilation("sm_90", score_mod(next(_numbers)), "score").spec
    return spec, render(spec)


def test_what_was_compared_is_what_is_loaded(place, monkeypatch):
    """A file that changes after it was read changes nothing: neither Python nor Triton reads it again."""
    spec, text = _printed()
    path = cache.store(text, spec).path
    real = folder.read

    def read(name, counts=True):
        content = real(name, counts)
        if content is not None:
            (place / name).write_bytes(b"raise SystemExit('not what was compared')\n" * 50)
        return content

    monkeypatch.setattr(folder, "read", read)
    found = cache.recall(spec)
    assert found.source == text and "not what" in path.read_text()
    assert "not what" not in cache.load_module(found).evaluate.src
    monkeypatch.setattr(folder, "read", real)
    kills.record(5)
    monkeypatch.setattr(folder, "read", read)
    assert binary._read("kernel_000000000005.000000000005") == kills.compiled(5)


@pytest.mark.parametrize("owner, name", [("cache", "VERSION"), ("triton", "__version__"), ("torch", "__version__")])
def test_another_version_prints_and_compiles_anew(place, monkeypatch, owner, name):
    number, scores = next(_numbers), torch.ones(1, 1, 3, 5)
    evaluate_mod(score_mod(number), scores)
    (before,) = printed_kernels()
    text = before.read_text()
    key = cache.key_of(text, "cuda")
    monkeypatch.setattr(cache if owner == "cache" else getattr(cache, owner), name, "0.0.1+other")
    assert cache.key_of(text, "cuda") != key
    cache_clear()
    evaluate_mod(score_mod(number), scores)
    (after,) = printed_kernels()
    assert cache_info().prints == 1 and after != before, "compiled code is found by the file's name, which holds the versions"


def test_other_templates_print_anew(place, monkeypatch):
    number, scores = next(_numbers), torch.ones(1, 1, 3, 5)
    evaluate_mod(score_mod(number), scores)
    for digest, prints in ((cache._templates_digest(), 0), ("of templates that have changed", 1)):
        monkeypatch.setattr(cache, "_templates_digest", lambda digest=digest: digest)
        cache_clear()
        evaluate_mod(score_mod(number), scores)
        assert cache_info().prints == prints


def test_a_note_that_is_too_deep_is_none(place):
    """JSON nested so that reading it ends in RecursionError."""
    number = next(_numbers)
    assert check_new_mod(score_mod(number)) == []
    for path in place.iterdir():
        if path.suffix in (".spec", ".json"):
            path.write_text("[" * 100_000)
    cache_clear()
    assert check_new_mod(score_mod(number)) == []


def test_a_print_that_was_edited_is_not_used(place):
    """Also where it is still Python, and the note beside it is whole."""
    spec, text = _printed()
    path = cache.store(text, spec).path
    assert cache.recall(spec).source == text
    path.write_text(text + "x = 1\n")
    assert cache.recall(spec) is None


def test_variants_of_compiled_code_are_named_by_all_that_changes_it(monkeypatch):
    names, target = [], binary.GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(binary, "_read", lambda name: names.append(name) or b"")
    monkeypatch.setattr(binary, "Binary", lambda *_: None)
    ones = torch.ones(9)

    def name(*args, stem="kernel", constants=(64,), target=target, **options) -> str:
        monkeypatch.setattr(binary, "current_target", lambda: target)
        binary.obtain(stem, arguments.describe(args)[0], constants, {"num_warps": 4, "num_stages": 2} | options, 0, None)
        return names[-1]

    base = name(1, ones)
    assert base == name(2**31 - 1, ones * 2) == name(-(2**31), ones[4:])
    others = [
        name(2**31, ones),
        name(1.0, ones),
        name(1, ones.half()),
        name(1, ones[1:]),
        name(1, ones, stem="other"),
        name(1, ones, constants=(128,)),
        name(1, ones, num_warps=8),
        name(1, ones, num_stages=3),
        name(1, ones, target=binary.GPUTarget("cuda", 80, 32)),
    ]
    assert len({base, *others}) == 1 + len(others) and others[0] == name(-(2**31) - 1, ones)


def test_the_key_knows_the_backend_and_the_code_and_nothing_else():
    text = _printed()[1]
    assert cache.key_of(text, "cuda") != cache.key_of(text, "hip")
    assert cache.key_of(text, "cuda") == cache.key_of("# a comment\n\n" + text.replace("):\n", "):  # another\n", 1), "cuda")
    assert cache.key_of(text, "cuda") != cache.key_of(text + "x = 1\n", "cuda")
    strings = '"# a"', '"# b"', "'# \\' b'", '"""a # "\n# b"""'
    keys = {cache.key_of(f"{text}x = {string}  # {i}\n", "cuda") for i in range(2) for string in strings}
    assert len(keys) == 4, "what is in a string is no comment"


def test_the_folder_holds_so_much_and_what_was_used_last_stays(place, monkeypatch):
    monkeypatch.setenv("FLEXPRESS_CACHE_MIB", "1")
    place.mkdir()
    others = [place / name for name in ("notes.txt", "kernel.py", ".profile", "data.json", "x.cubin", ".flexpress-mine")]
    for path in others:
        path.write_bytes(b"not Flexpress's" * 1000)
    for number in range(30):  # 96 kB each
        kills.record(number)
        for path in place.glob(f"kernel_{number:012x}.*"):
            os.utime(path, (time.time() - 7200 + number,) * 2)
        assert binary._read("kernel_000000000000.000000000000") is not None or number > 8
        if number % 2 == 0 and binary._read("kernel_000000000001.000000000001"):
            for path in place.glob("kernel_000000000001.*"):  # in use
                os.utime(path)
    left = {path.name.split(".")[0] for path in place.glob("kernel_*")}
    assert sum(path.stat().st_size for path in place.glob("kernel_*")) <= (1 << 20) + 200_000
    assert {"kernel_00000000001d", "kernel_000000000001"} <= left and "kernel_000000000002" not in left
    assert all(path.exists() for path in others)
    assert check_new_mod() == []


def test_what_is_read_counts_as_used(place):
    kills.record(3)
    path = place / "kernel_000000000003.000000000003.cubin"
    os.utime(path, (time.time() - 10 * 86400,) * 2)
    assert binary._read("kernel_000000000003.000000000003") is not None
    assert time.time() - path.stat().st_mtime < 60


def test_temporary_files_of_the_killed_are_swept_when_they_are_old(place):
    place.mkdir()
    old, young, foreign = (place / name for name in (".flexpress-abcd1234.tmp", ".flexpress-efgh5678.tmp", ".other.tmp"))
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    check_new_mod()
    assert not old.exists() and young.exists() and foreign.exists()


def test_folders_of_the_killed_are_swept_when_they_are_old(place, monkeypatch):
    """Where compilers write."""
    temporary = Path(tempfile.gettempdir())
    old, young, foreign, linked = (
        temporary / name for name in ("flexpress-abcd12_4", "flexpress-efgh5678", "flexpress-report", "flexpress-ijkl0000")
    )
    for path in (old, young, foreign):
        path.mkdir()
        (path / "kernel.so").write_bytes(b"half")
    linked.symlink_to(foreign)
    for path in (old, foreign, linked):
        os.utime(path, (time.time() - 7200,) * 2, follow_symlinks=False)
    check_new_mod()
    assert not old.exists() and young.exists() and (foreign / "kernel.so").exists() and linked.is_symlink()


def test_killed_processes_leave_no_half_files(tmp_path):
    """A few of `python tests/kills.py --n 300`, in a process without other threads."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, kills.__file__, "--n", "12"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(kills.__file__).exists() and done.stdout.startswith("12 kills")


def test_amd_kernels_are_loaded_from_what_was_compared(place):
    """Triton's own launcher takes files: it gets copies in a folder that was made for them, and that is gone afterwards."""
    import json

    from triton.backends.compiler import GPUTarget

    spec, text = _printed()
    function = cache.load_module(cache.store(text, spec)).evaluate
    source = compiler.ast_source(function, (*[(torch.float32, True)] * 2, *["i32"] * 3), (64, 64))
    metadata, code, extension = compiler.compile_source(source, GPUTarget("hip", "gfx942", 64), {"num_warps": 4, "num_stages": 1})
    compiled = binary.Compiled(json.dumps(metadata, default=vars).encode(), code, extension, source.signature)
    binary._write("kernel_00000000000a.00000000000a", compiled)
    assert binary._read("kernel_00000000000a.00000000000a") == compiled
    assert binary._triton_kernel(compiled, (64, 64)).kernel == code and list((place.parent / "tmp").iterdir()) == []
