"""The kernel that says which tiles the prefixes of groups make for the kernel for Hopper, as a plan."""

from __future__ import annotations

from ..text.parameters import constants, numbers, pointer
from ..text.spec import KernelSpec

BLOCK = 128  # rows of a tile, and keys of a block
NUMBERS = 6  # that describe a tile
MOST_PARTS = 32  # of a group's keys


def tiles_spec(backend: str) -> KernelSpec:
    """The kernel's KernelSpec."""
    tensors = {
        "GROUP_STARTS": "[GROUPS + 1]: where the rows of each group begin",
        "LENGTHS": "[GROUPS]: keys of each group",
        "TOKEN": "[T]: the token of each row",
        "PLACE": "[T]: the row of each token, or -1: it reads all by itself",
        "TILES": f"[tiles, {NUMBERS}]: written, as all below",
        "COUNT": "[1]: how many tiles there are",
        "PARTS": "[T]: how many parts each token has; those of no tile stay as they are",
    }
    pointers = [pointer(name, "int32", meaning) for name, meaning in tensors.items()]
    parameters = *pointers, *numbers("GROUPS", "T", "HEADS", "PROGRAMS", "MOST"), *constants("BLOCK")
    return KernelSpec("shared_tiles", (), (("NUMBERS", NUMBERS), ("MOST_PARTS", MOST_PARTS)), backend, parameters)


def most_parts(tokens: int, heads: int, programs: int) -> int:
    """Parts of a group's keys for which there is room: enough for twice as many tiles as programs, a multiple of 4."""
    wanted = 2 * programs // (heads * -(-tokens // BLOCK))
    return max(4, min(MOST_PARTS, -(-wanted // 4) * 4))
