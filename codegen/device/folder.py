"""The folder of printed kernels and compiled code: which it is, who may write to it, and how files are read, written and removed.

Kernels are code, so nobody else may be able to put a file there: the folder and all above it belong to this user or to root, and others may
not write to them (they may where the sticky bit keeps them from renaming what is not theirs, as in /tmp). A folder that others share is
not touched: files go to a folder of this user's own in it. If files cannot be kept there, they go to a folder of this user's own among
the temporary files, or else stay in memory; that is said once.

    FLEXPRESS_CACHE_DIR    the folder; default $XDG_CACHE_HOME/flexpress or ~/.cache/flexpress
    FLEXPRESS_CACHE_MIB    how much it may hold, 1024 by default; what was not used for longest goes first
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

from .. import logs
from ..registry import Bounded, Table
from ..text.lines import one_line
from ..turn import Turn

_NAME_BYTES = 120  # of a kernel's name in a file name: file systems take 255 bytes, some 143, and a key and an ending follow
_OURS = re.compile(r".+_[0-9a-f]{12}(\.py|\.cpp|\.[0-9a-f]{12}\.(json|metadata\.json|cubin|hsaco|so))|\.[0-9a-f]{24}\.spec", re.DOTALL)
_TEMPORARY = re.compile(r"\.flexpress-[0-9a-z_]+\.tmp")
_TEMPORARY_FOLDER = re.compile(r"flexpress-[0-9a-z_]{8}")  # of tempfile.TemporaryDirectory(prefix="flexpress-")
_ABANDONED = 3600.0  # seconds after which a temporary file has nobody who still writes it
_FRESH = 600.0  # seconds in which a file's time of use need not be written again
_DEFAULT_MIB = 1024
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UNMAPPED = 65534  # whom files of users outside belong to, root among them, in a container with users of its own


class Unsafe(OSError):
    """Somebody else may write to a folder."""


class _File(NamedTuple):
    name: str
    bytes: int
    used: float  # when it was last read or written, to _FRESH seconds

    @property
    def held(self) -> int:
        """Bytes that it takes of the folder."""
        return max(self.bytes, 512)


class _Place:
    """The folder that a configuration leads to. `path` is None if files stay in memory."""

    def __init__(self, configured: str | None) -> None:
        self.moved = False
        wanted: str | Path = configured or "~/.cache/flexpress"
        try:
            wanted = _wanted(configured)
            self.path: Path | None = _opened(wanted)
        except (OSError, RuntimeError, ValueError) as error:
            self.path = None
            self._go_elsewhere(wanted, error)

    def give_up(self, failed: Path, error: Exception) -> None:
        """Go on elsewhere, unless another thread has found out already."""
        if self.path == failed:
            self._go_elsewhere(failed, error)

    def _go_elsewhere(self, failed, error: Exception) -> None:
        try:
            spare = _opened(Path(tempfile.gettempdir()) / f"flexpress-{_user()}")
            probe = f".flexpress-probe_{os.getpid()}.tmp"
            _write(spare, probe, bytes(1 << 16))  # not only the folder is needed but room in it
            _remove(spare / probe)
            self.path = spare if spare != self.path and not self.moved else None
        except (OSError, RuntimeError, ValueError):
            self.path = None
        if self.moved:
            return
        self.moved = True
        where = f"go to {self.path}" if self.path else "stay in memory"
        warnings.warn(
            one_line(
                f"the kernel cache {failed} cannot be used ({error}); kernels of this process {where}. Set "
                "FLEXPRESS_CACHE_DIR to a folder of your own that nobody else can write to.",
                limit=1000,
            ),
            stacklevel=2,
        )


_places: dict[str | None, _Place] = Table("cache folders", 64)
_unchecked: dict[Path, int] = Bounded(64)  # bytes written since a folder's size was last looked at; no cache, so never forgotten
_choosing = Turn()


def _place() -> _Place:
    configured = os.environ.get("FLEXPRESS_CACHE_DIR") or None
    return _places.get(configured) or _choosing.run(_chosen, configured)


def _chosen(configured: str | None) -> _Place:
    found = _places.get(configured)
    if found is None:
        found = _places[configured] = _Place(configured)
    return found


def path() -> Path | None:
    """The folder; None if files stay in memory."""
    return _place().path


def file_name(name: str, key: str) -> str:
    """`name_key`, short enough for a file system in bytes, whatever alphabet the name is written in. In a locale of ASCII files have ASCII
    names."""
    short = name.encode("utf-8", "replace")[:_NAME_BYTES].decode("utf-8", "ignore")
    try:
        os.fsencode(short)
    except UnicodeEncodeError:
        short = re.sub(r"[^ -~]", "_", short)
    return f"{short}_{key}"


def read(name: str, counts: bool = True) -> bytes | None:
    """The content of a file of the folder that this user wrote, in one read; None for a link, somebody else's file or no file.

    counts   the file is in use
    """
    folder = path()
    if folder is None:
        return None
    try:
        handle = os.open(folder / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        with os.fdopen(handle, "rb") as file:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or info.st_mode & _OTHERS_WRITE or info.st_uid != _user():
                return None
            content = file.read()
    except OSError:
        return None
    if counts and time.time() - info.st_mtime > _FRESH:  # so that what is in use is not taken for old
        with contextlib.suppress(OSError):
            os.utime(folder / name)
    return content


def note(name: str, counts: bool = True) -> dict:
    """The JSON object of a file of the folder, {} if it holds none. `counts` as for `read`."""
    with contextlib.suppress(ValueError, RecursionError):  # the latter of one that is nested too deep
        found = json.loads(read(name, counts) or b"")
        if isinstance(found, dict):
            return found
    return {}


def write(name: str, content: bytes) -> Path | None:
    """Keep a file, and return in which folder; None if it is not on disk. A reader, or a crash in the middle, never sees half of one."""
    place = _place()
    while (folder := place.path) is not None:
        try:
            _write(folder, name, content)
        except OSError as error:
            _choosing.run(place.give_up, folder, error)
        else:
            _make_room(folder, len(content))
            return folder
    return None


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write under another name and rename."""
    try:
        _write_once(folder, name, content)
    except FileNotFoundError:  # a cleaner took the folder
        _opened(folder)
        _write_once(folder, name, content)


def _write_once(folder: Path, name: str, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=".flexpress-", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _wanted(configured: str | None) -> Path:
    if configured:
        place = Path(configured).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        place = (Path(base) if base else Path.home() / ".cache") / "flexpress"
    return Path(os.path.abspath(place))  # the working directory may change


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _opened(place: Path) -> Path:
    """The folder at `place`, made if there is none, or this user's own one in it if others may write there. Raises OSError if it is not
    safe, and UnicodeError if the compiler could not be told its name."""
    str(place).encode("utf-8")
    missing = [p for p in (place, *place.parents) if not os.path.lexists(p)]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    place = Path(os.path.realpath(place))
    str(place).encode("utf-8")
    if not hasattr(os, "getuid"):
        return place
    for folder in reversed(place.parents):
        _check(folder, shared=True)
    shared = bool(place.stat().st_mode & _OTHERS_WRITE)
    _check(place, shared)
    if shared:
        place = place / f"flexpress-{_user()}"
        place.mkdir(mode=0o700, exist_ok=True)
        _check(place, shared=False)
    return place


def _check(folder: Path, shared: bool) -> None:
    """Raise Unsafe if others could put a file into `folder`, or, where it may be `shared`, rename one of this user's in it."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(f"{folder} is not a directory")
    if info.st_uid != _user() and not (shared and info.st_uid in (0, _UNMAPPED)):
        raise Unsafe(f"{folder} belongs to user {info.st_uid}")
    if info.st_mode & _OTHERS_WRITE and not (shared and info.st_mode & stat.S_ISVTX):
        raise Unsafe(f"others may write to {folder} (mode {stat.S_IMODE(info.st_mode):o})")


def limit() -> int:
    """Bytes that the folder may hold."""
    given = os.environ.get("FLEXPRESS_CACHE_MIB") or _DEFAULT_MIB
    try:
        bytes_ = int(float(given) * 2**20)
    except (ValueError, OverflowError):
        bytes_ = -1
    if bytes_ >= 0:
        return bytes_
    warnings.warn(f"FLEXPRESS_CACHE_MIB={given!r} is no size: set it to a number of MiB. It is taken for {_DEFAULT_MIB}.", stacklevel=2)
    return _DEFAULT_MIB << 20


def files(place: Path | None) -> tuple[list[_File], list[_File]]:
    """Flexpress's own files in a folder: those of kernels, and temporary ones that nobody writes any more. What others put there is not
    among them. There may be thousands, and a new process looks before its first kernel: so they have names, not paths."""
    kernels, temporary = [], []
    with contextlib.suppress(OSError):
        for entry in os.scandir(place) if place else ():
            found = kernels if _OURS.fullmatch(entry.name) else temporary if _TEMPORARY.fullmatch(entry.name) else None
            with contextlib.suppress(OSError):
                if found is not None and stat.S_ISREG((info := entry.stat(follow_symlinks=False)).st_mode):
                    found.append(_File(entry.name, info.st_size, info.st_mtime))
    return kernels, [file for file in temporary if time.time() - file.used > _ABANDONED]


def _make_room(folder: Path, size: int) -> None:
    """Now and then: remove temporary files that killed processes left, and, if the folder holds too much, what was not used for longest.

    Other processes may do the same, or use what goes: they print or compile it again.
    """
    most, known = limit(), _unchecked.get(folder)
    if known is not None and known + size < most // 16:
        _unchecked[folder] = known + size
        return
    _unchecked[folder] = 0
    ours, abandoned = files(folder)
    for file in abandoned:
        _remove(folder / file.name)
    _sweep_temporary_folders()
    held = sum(file.held for file in ours)
    if held > most:
        kernels: dict[str, list[_File]] = {}  # what belongs together
        for file in ours:
            kernels.setdefault(file.name.lstrip(".").split(".")[0], []).append(file)
        before, count = held, 0
        for group in sorted(kernels.values(), key=lambda group: max(file.used for file in group)):
            for file in group:
                _remove(folder / file.name)
            held, count = held - sum(file.held for file in group), count + len(group)
            if held <= most * 3 // 4:
                break
        logs.CACHE.info("%s held %d MiB: removed the %d files that were unused longest", folder, before >> 20, count)


def _sweep_temporary_folders() -> None:
    """Remove those that killed processes of this user have left where compilers write."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if _TEMPORARY_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                info = entry.stat(follow_symlinks=False)
                if info.st_uid == _user() and time.time() - info.st_mtime > _ABANDONED:
                    shutil.rmtree(entry.path, ignore_errors=True)


def _remove(file: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file)
