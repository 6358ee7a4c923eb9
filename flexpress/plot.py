"""plot_mask: a picture of a mask's blocks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar, overload

import torch
from torch.nn.attention import flex_attention as torchs
from torch.types import Device

from flexpress.masks.block_mask import DEFAULT_BLOCK_SIZE, BlockMask
from flexpress.masks.foreign_masks import adopt, is_foreign_mask
from flexpress.masks.mask_creation import create_block_mask
from flexpress.mods import MaskMod

from .codegen.compiling import runs_uncompiled
from .codegen.mod.tracing.capture import name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PathT = TypeVar("PathT", bound="str | os.PathLike[str]")

_KINDS = ("empty", "partial", "full")
_COLOURS = ("#f2f2f2", "#e69f00", "#0072b2")  # grey, orange, blue of Okabe and Ito (2008): told apart by any eye, and in black and white
_CELLS = 512  # rows and columns drawn; more would be finer than the picture's pixels


@overload
def plot_mask(
    mask: torchs.BlockMask | MaskMod,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    *,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    batch: int = 0,
    head: int = 0,
    path: None = None,
    title: str | None = None,
) -> Figure | str: ...
@overload
def plot_mask(
    mask: torchs.BlockMask | MaskMod,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    *,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    batch: int = 0,
    head: int = 0,
    path: PathT,
    title: str | None = None,
) -> PathT | str: ...
@runs_uncompiled
def plot_mask(
    mask: torchs.BlockMask | MaskMod,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    *,
    device: Device = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    batch: int = 0,
    head: int = 0,
    path: str | os.PathLike[str] | None = None,
    title: str | None = None,
) -> Figure | str | os.PathLike[str]:
    """Draw which blocks of a mask are full, partial and empty, over query and key positions.

    mask         a BlockMask, ours or torch's, or a mask_mod. A mask_mod needs Q_LEN and KV_LEN; B, H, device and BLOCK_SIZE are
                 as in create_block_mask
    batch, head  which of the masks is drawn; one that all entries or heads share stands for any of them
    path         of the picture to write; its ending says the format, .png for example
    title        of the picture; by default the mask's name, shape, block size and sparsity

    Returns `path` if it is given, else a matplotlib Figure, which notebooks show. Without matplotlib, prints a picture made of characters
    and returns it as a str. A mask with more than 512 rows or columns of blocks is drawn in cells of several blocks: full if all of
    them are, empty if all of them are, else partial.

    Raises TypeError or ValueError for arguments, IndexError for a batch or head outside the mask.
    """
    if not (path is None or isinstance(path, (str, os.PathLike)) or hasattr(path, "write")):
        raise TypeError(f"path must be the name of a picture to write, as a str or a path, got {type(path).__name__}")
    mask = _block_mask(mask, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    extents = mask.as_lists().kv_indices.shape[:2]
    for name, i, extent in (("batch", batch, extents[0]), ("head", head, extents[1])):
        if isinstance(i, bool) or not isinstance(i, int) or not (extent == 1 or -extent <= i < extent):
            raise IndexError(f"{name}={i!r} is outside a mask of shape {mask.shape}; pass an int below {extent}")
    one = mask[batch if extents[0] > 1 else 0, head if extents[1] > 1 else 0]
    if title is None:
        place = f", batch {batch}, head {head}" if extents != (1, 1) else ""
        blocks = "blocks of {} x {}".format(*mask.BLOCK_SIZE)
        title = f"{name_of(mask.mask_mod)} {tuple(mask.seq_lengths)}{place}, {blocks}, {one.sparsity():.1f}% empty"
    try:
        figure = _figure(one, title)
    except ImportError:
        text = f"{title}\n{one.to_string((32, 64)).partition(chr(10))[2]}\n██ full  ░░ partial or mixed"
        missing = f"{os.fspath(path)} was not written: " if path is not None else ""
        print(f"{text}\n{missing}matplotlib makes a picture of this (pip install matplotlib)")
        return text
    if path is None:
        return figure
    figure.savefig(path, dpi=150)
    return path


def _figure(mask: BlockMask, title: str):
    """A matplotlib Figure of a mask's first batch entry and head. Raises ImportError where there is no matplotlib."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    status = mask._status()[0, 0]
    shares = [(status == kind).float().mean().item() if status.numel() else 0.0 for kind in range(3)]
    (Q_LEN, KV_LEN), size = mask.seq_lengths, mask.BLOCK_SIZE
    cells, steps = _reduced(status, _CELLS)
    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    axes = figure.subplots()
    if cells.numel():
        rows, columns = cells.shape
        axes.imshow(
            cells.cpu().numpy(),
            cmap=ListedColormap(_COLOURS),
            vmin=0,
            vmax=2,
            interpolation="nearest",
            extent=(0, columns * steps[1] * size[1], rows * steps[0] * size[0], 0),
            aspect="equal" if max(Q_LEN, KV_LEN) <= 3 * min(Q_LEN, KV_LEN) else "auto",
        )
    axes.set_xlim(0, max(KV_LEN, 1))
    axes.set_ylim(max(Q_LEN, 1), 0)
    axes.set_xlabel("key position (kv_idx)")
    axes.set_ylabel("query position (q_idx)")
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.set_title(title, fontsize=10)
    figure.legend(
        handles=[
            Patch(facecolor=_COLOURS[kind], edgecolor="#888888", label=f"{_KINDS[kind]} ({100 * shares[kind]:.1f}%)") for kind in (2, 1, 0)
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return figure


def _block_mask(mask, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE) -> BlockMask:
    if isinstance(mask, BlockMask):
        made = mask
    elif is_foreign_mask(mask):
        made = adopt(mask, mask.seq_lengths)
    elif callable(mask):
        if Q_LEN is None or KV_LEN is None:
            raise ValueError(f"a mask_mod has no lengths: pass Q_LEN and KV_LEN, got Q_LEN={Q_LEN}, KV_LEN={KV_LEN}")
        return create_block_mask(mask, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    else:
        raise TypeError(f"mask must be a BlockMask or a mask_mod, got {type(mask).__name__}")
    own = (*made.as_lists().kv_indices.shape[:2], *made.seq_lengths)
    given = [
        f"{name}={value}"
        for name, value, n in zip(("B", "H", "Q_LEN", "KV_LEN"), (B, H, Q_LEN, KV_LEN), own, strict=True)
        if value not in (None, n)
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)} does not fit this BlockMask of shape {made.shape}; leave B, H, Q_LEN and KV_LEN out, or pass "
            "its mask_mod to draw other lengths"
        )
    return made


def _reduced(status: torch.Tensor, most: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """status (rows, columns) in at most `most` cells each way, and the blocks a cell covers: 2 or 0 where all are, else 1."""
    steps = []
    for dim in (0, 1):
        step = max(1, -(-status.shape[dim] // most))
        steps.append(step)
        if step > 1:
            groups = status.split(step, dim)
            low, high = (torch.cat([f(g, dim, keepdim=True) for g in groups], dim) for f in (torch.amin, torch.amax))
            status = torch.where(low == high, low, torch.ones_like(low))
    return status, (steps[0], steps[1])
