"""`python -m flexpress cache`, and the limit of the folder, beside processes that use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from flexpress import cache_clear, flex_attention, mods
from flexpress.codegen.device import binary, contents, folder
from flexpress.commands import cli
from support.dense import dense_attention, relative_error
from support.devices import DEVICES


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXPRESS_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.delenv("FLEXPRESS_CACHE_MIB", raising=False)
    cache_clear()
    yield tmp_path / "kernels"
    cache_clear()


def shown(capsys, *arguments: str, code: int = 0) -> str:
    assert cli.main(["cache", *arguments]) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def attend(device: str = "cpu") -> None:
    q = torch.randn(1, 2, 20, 16, device=device)
    flex_attention(q, q, q, mods.alibi(torch.rand(2, device=device)), mask_mod=mods.causal)


@pytest.mark.parametrize("device", DEVICES)
def test_list_says_what_each_kernel_is(capsys, place, device):
    assert shown(capsys, "list") == "KERNEL  MODS  TARGET  SIZE  AGE  USED  NAME\n"
    attend(device)
    head, *rows = shown(capsys, "list").splitlines()
    (row,) = (row for row in rows if row.startswith("forward"))
    target = "cpu" if device == "cpu" else "sm_\\d+"
    assert re.fullmatch(rf"forward +alibi\+causal +{target} +[\d.]+ KiB +\d+ s +\d+ s +forward_alibi_causal_d16_fp32_\w{{12}}", row)
    (name,) = (path.stem for path in place.glob("forward_*.py"))
    assert row.endswith(name) and any(row.startswith("block_lists") for row in rows)
    entry = next(e for e in contents.entries() if e.name == name)
    assert entry.bytes == sum(path.stat().st_size for path in entry.files) and all(path.parent == place for path in entry.files)


def test_compiled_code_tells_its_target_and_the_last_used_comes_first(capsys, place):
    attend()
    metadata = json.dumps({"name": "forward", "target": {"backend": "cuda", "arch": 90, "warp_size": 32}}).encode()
    amd = metadata.replace(b"90", b'"gfx942"')
    for arch, content in enumerate((metadata, amd)):
        binary._write(f"kernel_00000000000a.00000000000{arch}", binary.Compiled(content, b"code" * 999, "cubin", {}))
    for path in place.glob("kernel_*"):
        os.utime(path, (time.time() - 3 * 86400,) * 2)
    rows = shown(capsys, "list").splitlines()
    assert re.fullmatch(r"- +- +gfx942, sm_90 +8\.\d KiB +- +3 d +kernel_00000000000a", rows[-1])


def test_a_kernel_of_an_earlier_version_has_a_line(capsys, place):
    """Its note names a file and no more; other files have none."""
    attend()
    for path in place.glob(".*.spec"):
        note = json.loads(path.read_text())
        path.write_text(json.dumps({"file": note["file"], "sha256": note["sha256"]}))
    (place / f".{'0' * 24}.spec").write_text("[1]")
    (place / f".{'1' * 24}.spec").write_text(json.dumps({"file": 3}))
    rows = shown(capsys, "list").splitlines()
    assert any(re.fullmatch(r"- +- +- +.* forward_alibi_causal_d16_fp32_\w+", row) for row in rows)
    assert any(row.endswith("(notes of no kernel)") for row in rows)


def test_names_of_mods_are_one_line(capsys):
    def mod(score, b, h, q_idx, kv_idx):
        return score * 2

    mod.__name__ = "two\nlines\x1b[2K"
    q = torch.randn(1, 1, 20, 16)
    flex_attention(q, q, q, mod)
    text = shown(capsys, "list")
    assert "\x1b" not in text and len(text.splitlines()) == 2


def test_show_prints_one(capsys, place):
    attend()
    (path,) = place.glob("forward_*.py")
    for name in (path.name, path.stem, "forward", "alibi"):
        assert shown(capsys, "show", name) == path.read_text()
    (place / "cpu_forward_other_0123456789ab.cpp").write_text("// a kernel in C++")
    assert shown(capsys, "show", "cpu_forward") == "// a kernel in C++"
    assert "no kernel in " in shown(capsys, "show", "nothing", code=2)
    assert re.match(
        r"2 kernels have 'causal' in their names: block_lists_causal_\w+, forward_alibi_\w+;", shown(capsys, "show", "causal", code=2)
    )


def test_clear_removes_what_is_ours_and_says_so(capsys, place):
    attend()
    others = [place / name for name in ("notes.txt", "kernel.py", ".profile", "data.json")]
    for path in others:
        path.write_text("somebody else's")
    left, written = place / ".flexpress-abcd1234.tmp", place / ".flexpress-efgh5678.tmp"
    for path in (left, written):
        path.write_bytes(b"half")
    os.utime(left, (time.time() - 7200,) * 2)
    others.append(written)  # another process is about to rename it
    files = set(place.iterdir()) - set(others)
    kernels = len(list(place.glob("*_*.py")))
    text = shown(capsys, "clear")
    assert re.fullmatch(rf"removed {kernels} kernels \({len(files)} files, [\d.]+ KiB\) from {re.escape(str(place))}\n", text)
    assert sorted(place.iterdir()) == sorted(others)
    assert shown(capsys, "clear").startswith("removed 0 kernels (0 files, 0 B)")
    attend()  # what is loaded goes on
    cache_clear()
    attend()
    assert list(place.glob("forward_*.py"))


def test_size_says_how_much_there_is_and_may_be(capsys, place, monkeypatch):
    attend()
    held = sum(path.stat().st_size for path in place.iterdir())
    text = shown(capsys, "size")
    assert re.fullmatch(
        rf"\d+ kernels, {held / 1024:.0f} KiB of at most 1.0 GiB \(FLEXPRESS_CACHE_MIB\), in {re.escape(str(place))}\n", text
    )
    monkeypatch.setenv("FLEXPRESS_CACHE_MIB", "1.5")
    assert "of at most 1.5 MiB" in shown(capsys, "size")


@pytest.mark.parametrize("bad", ["much", "-1", "nan", "inf"])
def test_a_bad_limit_is_a_warning_that_names_the_variable(monkeypatch, bad):
    monkeypatch.setenv("FLEXPRESS_CACHE_MIB", bad)
    with pytest.warns(UserWarning, match=f"FLEXPRESS_CACHE_MIB='{bad}' is no size: set it to a number of MiB"):
        assert folder.limit() == 1 << 30


def test_where_nothing_can_be_kept(capsys, monkeypatch):
    monkeypatch.setattr(folder, "path", lambda: None)
    assert "kernels stay in memory" in shown(capsys, "size") and "kernels stay in memory" in shown(capsys, "clear")
    assert shown(capsys, "list").count("\n") == 1


_USER = """
import torch, flexpress, sys
from flexpress import mods
q = torch.randn(1, 1, 20, 16)
for i in range(20):
    flexpress.cache_clear()
    out = flexpress.flex_attention(q, q, q, mods.softcap(3.0), mask_mod=mods.causal)
    assert torch.isfinite(out).all()
"""


def test_clearing_and_eviction_beside_other_processes(place):
    """One clears, one writes to a folder that is always too full, two use it."""
    environment = {**os.environ, "FLEXPRESS_CACHE_MIB": "0.01"}
    users = [subprocess.Popen([sys.executable, "-c", _USER], env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    number = 0
    while any(user.poll() is None for user in users):
        number += 1
        name = f"kernel_{number:012x}.{number:012x}"
        binary._write(name, binary.Compiled(b"{}", bytes(4000), "cubin", {}))
        found = binary._read(name)
        assert found is None or found.code == bytes(4000)
        if number % 5 == 0:
            contents.clear()
        contents.entries()
        time.sleep(0.002)
    for user in users:
        error = user.communicate()[1]
        assert user.returncode == 0 and error == "", error
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    cache_clear()
    assert relative_error(flex_attention(q, k, v, mask_mod=mods.causal), dense_attention(q, k, v, mask_mod=mods.causal)[0]) < 2e-6


def test_looking_is_no_use(capsys, place):
    """What is listed is not taken for used: it would stay in a full folder instead of what runs."""
    attend()
    metadata = json.dumps({"name": "forward", "target": {"backend": "cuda", "arch": 90, "warp_size": 32}}).encode()
    binary._write("kernel_00000000000a.000000000000", binary.Compiled(metadata, b"code", "cubin", {}))
    for path in place.iterdir():
        os.utime(path, (time.time() - 3 * 86400,) * 2)
    before = {path: path.stat().st_mtime for path in place.iterdir()}
    for _ in range(2):
        rows = shown(capsys, "list").splitlines()[1:]
        assert rows and all(" 3 d " in row for row in rows)
    assert {path: path.stat().st_mtime for path in place.iterdir()} == before


@pytest.mark.parametrize("damaged", [{"mods": 3}, {"mods": None}, {"made": "yesterday"}, {"template": 3, "backend": None}])
def test_a_damaged_note_is_no_error(capsys, place, damaged):
    attend()
    (note, *_) = sorted(place.glob(".*.spec"))
    note.write_text(json.dumps({**json.loads(note.read_text()), **damaged}))
    assert json.loads(note.read_text())["file"].removesuffix(".py") in shown(capsys, "list")
