"""GPUs as the tables know them."""

from __future__ import annotations

# bytes that one program may have
SHARED_MEMORY = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}

WIDEST_TILE = 256  # of a head dim in one tile; wider ones are tiles side by side (plan/slices.py)


def round_up_head_dim(d: int, itemsize: int = 2) -> int:
    """Triton's tiles are powers of two, and a dot needs at least 16, or 32 of 8 bits each."""
    return max(32 if itemsize == 1 else 16, 1 << (d - 1).bit_length())


def architecture(backend: str, capability) -> str:
    """The row of the tables for a device: "sm_80", "sm_86", "sm_90", "sm_100", "gfx942" or "cpu"."""
    if backend == "cpu":
        return "cpu"
    if backend == "hip":
        return "gfx942"
    major, minor = capability
    if major >= 10:
        return "sm_86" if major >= 12 else "sm_100"  # consumer Blackwell has the small shared memory
    if major == 9:
        return "sm_90"
    return "sm_80" if (major, minor) == (8, 0) else "sm_86"
