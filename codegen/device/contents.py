"""What the folder of kernels holds: which kernels, of which mods, for which GPUs, how large, how old."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import folder


@dataclass
class Entry:
    """A printed kernel with what was compiled of it.

    name      of its file, without .py; "" where only compiled code, or a note of no kernel, is left
    template  the kernel's, "" where an earlier version of flexpress printed it; mods: the names of those in it
    targets   what it was compiled for ("sm_90"), or for what language it was printed ("cuda", "hip", "cpu")
    bytes     of all files
    made      when it was printed, None if that is not known; used: when one of its files was read or written, to 10 minutes
    """

    name: str
    template: str = ""
    mods: tuple[str, ...] = ()
    targets: set[str] = field(default_factory=set)
    bytes: int = 0
    made: float | None = None
    used: float = 0.0
    files: list[Path] = field(default_factory=list)


def entries() -> list[Entry]:
    """The kernels of the folder, those used last first. Another process may add and remove some meanwhile."""
    found: dict[str, Entry] = {}
    place = folder.path()
    files, _ = folder.files(place)
    for file in files:
        if not file.name.endswith(".spec"):
            name = file.name.split(".")[0]
            _add(found.setdefault(name, Entry(name)), place / file.name, file.bytes, file.used)
    for file in files:
        if file.name.endswith(".spec"):
            note = folder.note(file.name, counts=False)
            entry = found.get(Path(note["file"]).stem) if isinstance(note.get("file"), str) else None
            if entry is None:
                entry = found.setdefault("", Entry(""))
            else:
                _describe(entry, note)
            _add(entry, place / file.name, file.bytes, file.used)
    return sorted(found.values(), key=lambda entry: -entry.used)


def _add(entry: Entry, file: Path, size: int, used: float) -> None:
    entry.files.append(file)
    entry.bytes, entry.used = entry.bytes + size, max(entry.used, used)
    if file.name.endswith(".metadata.json"):
        target = folder.note(file.name, counts=False).get("target")
        if isinstance(target, dict):
            arch = target.get("arch")
            entry.targets.add(f"sm_{arch}" if isinstance(arch, int) else str(arch))


def _describe(entry: Entry, note: dict) -> None:
    """What cache.py noted of the kernel when it was printed."""
    mods = note.get("mods")
    entry.template, entry.mods = str(note.get("template", "")), tuple(map(str, mods if isinstance(mods, list) else ()))
    entry.made = note["made"] if isinstance(note.get("made"), float) else None
    if not entry.targets and "backend" in note:
        entry.targets.add(str(note["backend"]))


def clear() -> tuple[int, int]:
    """Remove all files of kernels, and temporary ones of killed processes: how many, and their bytes. Processes that run go on with what
    they have loaded, and print and compile again what they need."""
    count = held = 0
    place = folder.path()
    ours, abandoned = folder.files(place)
    for file in (*ours, *abandoned):
        with contextlib.suppress(OSError):
            (place / file.name).unlink()
            count, held = count + 1, held + file.bytes
    return count, held


def age(moment: float | None) -> str:
    """How long ago something was: "3 h"."""
    if moment is None:
        return "-"
    seconds = max(time.time() - moment, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
