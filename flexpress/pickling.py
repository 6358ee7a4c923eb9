"""Block masks and recipes' mods in files: what torch.load must be told of."""

from __future__ import annotations

from collections.abc import Callable

from flexpress import mods
from flexpress.masks.block_mask import BlockMask
from flexpress.masks.mask_mods import and_masks, noop_mask, or_masks


def safe_globals() -> list[Callable | tuple[Callable, str]]:
    """What `torch.load(file, weights_only=True)` needs to know to read block masks and mods of recipes: hand it to
    torch.serialization.add_safe_globals, or to the context manager safe_globals there. Reading them runs recipes, and nothing else."""
    recipes = [getattr(mods, name) for name in mods.__all__ if name not in ("alibi_slopes", "document_from_offsets", "t5_bucket")]
    return [BlockMask, and_masks, or_masks, noop_mask, *recipes]
