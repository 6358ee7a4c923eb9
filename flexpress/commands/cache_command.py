"""`python -m flexpress cache`: what the folder of kernels holds."""

from __future__ import annotations

import sys

from ..codegen.device import contents, folder
from ..codegen.device.contents import Entry, age
from ..codegen.text.lines import one_line

_COLUMNS = "KERNEL", "MODS", "TARGET", "SIZE", "AGE", "USED", "NAME"
_MEMORY = "no folder can be written to: kernels stay in memory, and nothing is kept"


def list_kernels() -> int:
    """A line for each kernel, those used last first."""
    rows = [_COLUMNS, *map(_row, contents.entries())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(entry: Entry) -> tuple[str, ...]:
    mods, targets = "+".join(entry.mods), ", ".join(sorted(entry.targets))
    cells = (entry.template, mods, targets, shown_size(entry.bytes), age(entry.made), age(entry.used), entry.name or "(notes of no kernel)")
    return tuple(one_line(cell) or "-" for cell in cells)


def show(name: str) -> int:
    """Print the kernel with this name, or the only one whose name begins with or holds it. Exit code 2 if there is none, or several."""
    texts = {file.stem: file.name for entry in contents.entries() for file in entry.files if file.suffix in (".py", ".cpp")}
    names = sorted(texts)
    for fits in (name.removesuffix(".py").removesuffix(".cpp").__eq__, lambda found: found.startswith(name), lambda found: name in found):
        fitting = list(filter(fits, names))
        if fitting:
            break
    if len(fitting) != 1:
        some = f"{len(fitting)} kernels have {name!r} in their names: {', '.join(fitting[:8])}{', ...' if len(fitting) > 8 else ''}"
        none = f"no kernel in {folder.path()} has {name!r} in its name"
        print(f"{some if fitting else none}; `python -m flexpress cache list` shows the names", file=sys.stderr)
        return 2
    sys.stdout.write((folder.read(texts[fitting[0]]) or b"").decode("utf-8", "replace"))
    sys.stdout.flush()
    return 0


def clear() -> int:
    """Remove everything that Flexpress keeps there, and say what that was."""
    place = folder.path()
    if place is None:
        print(_MEMORY)
        return 0
    kernels = sum(1 for entry in contents.entries() if entry.name)
    count, held = contents.clear()
    print(f"removed {kernels} kernels ({count} files, {shown_size(held)}) from {place}")
    return 0


def size() -> int:
    """How much the folder holds, and may hold."""
    place = folder.path()
    if place is None:
        print(_MEMORY)
        return 0
    entries = contents.entries()
    held, kernels = sum(entry.bytes for entry in entries), sum(1 for entry in entries if entry.name)
    print(f"{kernels} kernels, {shown_size(held)} of at most {shown_size(folder.limit())} (FLEXPRESS_CACHE_MIB), in {place}")
    return 0


def shown_size(number: int) -> str:
    """Bytes: "87 KiB"."""
    for unit, length in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= length:
            return f"{number / length:.{1 if number < 10 * length else 0}f} {unit}"
    return f"{number} B"
