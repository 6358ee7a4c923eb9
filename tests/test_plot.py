"""plot_mask: the picture with matplotlib, and without."""

from __future__ import annotations

import sys

import pytest
import torch
from matplotlib.colors import to_rgb

from flexpress import BlockMask, create_block_mask, mods, plot_mask
from flexpress.plot import _COLOURS, _reduced


def drawn(figure):
    """The cells of a figure, 0 empty, 1 partial and 2 full, and their extent in positions."""
    (image,) = figure.axes[0].images
    return torch.tensor(image.get_array().data), image.get_extent()


def test_a_figure():
    figure = plot_mask(mods.causal, None, None, 100, 100, device="cpu", BLOCK_SIZE=32)
    cells, extent = drawn(figure)
    assert cells.tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]] and list(extent) == [0, 128, 128, 0]
    axes = figure.axes[0]
    assert axes.get_xlim() == (0, 100) and axes.get_ylim() == (100, 0)
    assert axes.get_xlabel() == "key position (kv_idx)" and axes.get_ylabel() == "query position (q_idx)"
    assert "causal (100, 100), blocks of 32 x 32, 37.5% empty" in axes.get_title()
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels == ["full (37.5%)", "partial (25.0%)", "empty (37.5%)"]
    assert plot_mask(mods.causal, Q_LEN=64, KV_LEN=64, device="cpu", title="mine").axes[0].get_title() == "mine"


def test_a_file(tmp_path):
    mask = create_block_mask(mods.sliding_window(30), None, None, 200, 333, "cpu", (16, 32))
    path = tmp_path / "mask.png"
    assert plot_mask(mask, path=path) == path
    assert path.read_bytes().startswith(b"\x89PNG")
    for empty in (mask.adjust(0, 333), mask.adjust(200, 0)):
        plot_mask(empty, path=tmp_path / "empty.png")


def test_which_mask_is_drawn():
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (kv_idx // 16 == b) | (h == 1), 2, 2, 16, 32, "cpu", 16)
    for batch, head, cells in ((0, 0, [[2, 0]]), (1, 0, [[0, 2]]), (0, 1, [[2, 2]]), (-1, -2, [[0, 2]])):
        assert drawn(plot_mask(mask, batch=batch, head=head))[0].tolist() == cells
    shared = create_block_mask(mods.causal, None, None, 16, 16, "cpu", 16)
    assert drawn(plot_mask(shared, batch=5, head=7))[0].tolist() == [[1]]
    with pytest.raises(IndexError, match=r"batch=2 is outside a mask of shape \(2, 2, 16, 32\)"):
        plot_mask(mask, batch=2)


def test_masks_of_torch_and_sliced_ones():
    from torch.nn.attention.flex_attention import create_block_mask as torch_mask

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    theirs = torch_mask(causal, None, None, 64, 64, "cpu", 16)
    assert drawn(plot_mask(theirs))[0].tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]]
    ours = create_block_mask(causal, None, None, 64, 64, "cpu", 16)
    assert drawn(plot_mask(ours[:, :, 2:]))[0].tolist() == [[2, 2, 1, 0], [2, 2, 2, 1]]


def test_large_masks_are_reduced():
    """A cell is full or empty only if all its blocks are."""
    status = torch.randint(0, 3, (1300, 40), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    status[:600], status[600:900, :20] = 2, 0
    cells, steps = _reduced(status, 100)
    assert cells.shape == (100, 40) and steps == (13, 1)
    for r in range(100):
        part = status[13 * r : 13 * r + 13]
        for c in range(40):
            seen = set(part[:, c].tolist())
            assert cells[r, c] == (seen.pop() if len(seen) == 1 else 1)
    both, steps = _reduced(status, 7)
    assert both.shape == (7, 7) and steps == (186, 6) and both[0].tolist() == [2] * 7

    n = 8192  # blocks each way, one full one a row on the diagonal
    ones, diagonal = torch.ones(1, 1, n, dtype=torch.int32), torch.arange(n, dtype=torch.int32).view(1, 1, n, 1)
    lists = (torch.zeros_like(ones), torch.zeros_like(diagonal), ones, diagonal)
    mask = BlockMask.from_kv_blocks(*lists, 16, seq_lengths=(16 * n, 16 * n))
    cells, extent = drawn(plot_mask(mask))
    assert torch.equal(cells, torch.eye(512, dtype=torch.int8)) and list(extent) == [0, 16 * n, 16 * n, 0]


def test_colours_are_distinct_in_grey_too():
    luminance = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(to_rgb, _COLOURS)]
    assert min(a - b for a, b in zip(luminance, luminance[1:], strict=False)) > 0.2


@pytest.mark.parametrize("path", [None, "mask.png"])
def test_without_matplotlib(monkeypatch, capsys, tmp_path, path):
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it now fails
    target = path and tmp_path / path
    text = plot_mask(mods.causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16, path=target)
    lines = text.splitlines()
    assert lines[1:5] == ["░░      ", "██░░    ", "████░░  ", "██████░░"] and "causal (64, 64)" in lines[0] and "full" in lines[5]
    printed = capsys.readouterr().out
    assert printed.startswith(text) and "pip install matplotlib" in printed
    assert (f"{target} was not written" in printed) == (path is not None) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((mods.causal,), ValueError, "a mask_mod has no lengths: pass Q_LEN and KV_LEN"),
        ((mods.causal, None, None, 5), ValueError, "got Q_LEN=5, KV_LEN=None"),
        ((3,), TypeError, "mask must be a BlockMask or a mask_mod, got int"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        plot_mask(*arguments)


def test_a_path_that_is_none():
    with pytest.raises(TypeError, match="path must be the name of a picture to write, as a str or a path, got int"):
        plot_mask(mods.causal, Q_LEN=9, KV_LEN=9, path=0)


def test_lengths_that_do_not_fit_a_block_mask():
    with pytest.raises(ValueError, match=r"Q_LEN=32 does not fit this BlockMask of shape \(1, 1, 64, 64\)"):
        plot_mask(create_block_mask(mods.causal, None, None, 64, 64, "cpu"), Q_LEN=32)
