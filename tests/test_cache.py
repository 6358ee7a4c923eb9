"""What compiles and what does not, and a disk cache that survives crashes, edits and other processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
import torch

import flexpress
from flexpress import cache_clear, cache_info, create_block_mask, flex_attention, mods
from flexpress.codegen.device import cache
from support.dense import dense_attention, relative_error
from support.devices import DEVICES

OFFSET = 1


pytestmark = pytest.mark.usefixtures("own_directory")


def made_by(call) -> tuple[int, int, int]:
    """Traces, prints and compiles that `call` costs."""
    before = cache_info()
    call()
    after = cache_info()
    return after.traces - before.traces, after.prints - before.prints, after.compiles - before.compiles


def qkv(device, length=40, B=1, H=2, D=16):
    return tuple(torch.randn(B, H, length, D, device=device) for _ in range(3))


@pytest.mark.parametrize("device", DEVICES)
def test_what_compiles(device):
    """A new length, batch size, window, slope tensor or fresh lambda of the same code: nothing. New code: one kernel."""

    def run(length=40, B=1, window=8, slopes=None, strided=False):
        slopes = torch.rand(2, device=device) if slopes is None else slopes
        q, k, v = qkv(device, length, B)
        mask = create_block_mask(mods.sliding_window(window), None, None, length, length, device)
        return flex_attention(q, k, v, mods.alibi(slopes), mask)

    assert made_by(run)[0] == 2  # two mods
    assert made_by(run) == (0, 0, 0)
    assert made_by(lambda: run(length=41)) == (0, 0, 0)
    assert made_by(lambda: run(length=128)) == (0, 0, 0)
    assert made_by(lambda: run(length=129, B=3)) == (0, 0, 0)
    assert made_by(lambda: run(window=31)) == (0, 0, 0)
    assert made_by(lambda: run(slopes=torch.rand(2, device=device))) == (0, 0, 0)

    def fresh(shift):
        return flex_attention(*qkv(device), score_mod=lambda score, b, h, q_idx, kv_idx: score + shift)

    assert made_by(lambda: fresh(1.0)) == (1, 1, 1)
    assert made_by(lambda: fresh(2.5)) == (0, 0, 0)
    assert cache_info().hits > 0


@pytest.mark.parametrize("device", DEVICES)
def test_changes_are_seen(device):
    """The same lambda after its global, its closed-over function, number or tensor changed gives the new result."""
    global OFFSET
    q, k, v = qkv(device)
    table = torch.rand(40, device=device)
    inner = [lambda x: x * 2]

    def mod(score, b, h, q_idx, kv_idx):
        return inner[0](score) + OFFSET * table[kv_idx]

    def check():
        out = flex_attention(q, k, v, mod)
        assert relative_error(out, dense_attention(q, k, v, mod)[0]) < 2e-6

    check()
    OFFSET = 3
    assert made_by(check) == (0, 0, 0)
    table.mul_(-1)
    assert made_by(check) == (0, 0, 0)
    inner[0] = lambda x: x - 1
    assert made_by(check) == (1, 1, 1)
    OFFSET = 1


@pytest.mark.parametrize("device", DEVICES)
def test_files_are_readable_and_private(device):
    def gentle_slope(score, b, h, q_idx, kv_idx):
        return score - 0.01 * kv_idx

    flex_attention(*qkv(device), gentle_slope)
    (path,) = flexpress.printed_kernels()
    assert path.name.startswith("forward_gentle_slope_d16_fp32_") and path.suffix == ".py"
    assert "return score - 0.01 * kv_idx" in path.read_text() and "test_cache.py:" in path.read_text()
    assert stat.S_IMODE(os.stat(path.parent).st_mode) & 0o077 == 0 or os.stat(path.parent).st_uid == os.getuid()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("damage", ["truncate", "edit", "delete", "link", "empty"])
def test_damaged_files_are_replaced(device, damage, tmp_path):
    """Whatever happened to the files on disk, the next call in a new state gives the right answer."""
    q, k, v = qkv(device)
    expected = dense_attention(q, k, v)[0]
    flex_attention(q, k, v)
    for path in list(cache.cache_dir().iterdir()):
        content = path.read_bytes()
        path.unlink()
        if damage == "truncate":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "edit":
            path.write_bytes(content.replace(b"tl.exp2", b"tl.log2") if path.suffix == ".py" else content[::-1])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "link":
            other = tmp_path / f"other_{path.name}"
            other.write_bytes(b"raise SystemExit('not ours')")
            path.symlink_to(other)
    cache_clear()
    assert relative_error(flex_attention(q, k, v), expected) < 2e-6
    (path,) = flexpress.printed_kernels()
    assert "tl.log2(score" not in path.read_text() and not path.is_symlink()


_CHILD = """
import torch, flexpress
from flexpress import mods
q = torch.randn(1, 2, 40, 16, device="{device}")
mask = flexpress.create_block_mask(mods.causal, None, None, 40, 40, "{device}")
out = flexpress.flex_attention(q, q, q, mods.softcap(3.0), mask)
assert torch.isfinite(out).all()
print(flexpress.cache_info().prints, flexpress.cache_info().compiles)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_processes_share_the_files(device):
    """Two processes at once both get it right; a later one prints nothing, and on a GPU compiles nothing."""
    command = [sys.executable, "-c", _CHILD.format(device=device)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all(child.wait() == 0 for child in children)
    prints, compiles = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert prints == "0" and (device == "cpu" or compiles == "0")
