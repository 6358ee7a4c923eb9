"""The log, by Python's logging: what is traced, printed, compiled and passed over. Only slow paths write to it.

    flexpress.trace      DEBUG: a mod was traced; WARNING: one is traced at every call
    flexpress.print      INFO: a kernel was printed; DEBUG: its print was found on disk
    flexpress.compile    INFO: a kernel was compiled, in so many seconds; DEBUG: the compiled code was found on disk
    flexpress.choice     INFO: a compiled kernel is not used, and why; DEBUG: the kernels of a new kind of call, and why not others
    flexpress.cache      INFO: files were removed to make room
    flexpress.options    DEBUG: kernel options of other back ends, which change nothing

As a library's it is silent until somebody listens. FLEXPRESS_LOG, read when flexpress is imported, is a level (debug, info, warning, error
or critical): messages from there on go to stderr, and nowhere else.
"""

from __future__ import annotations

import logging
import os
import warnings

ROOT = logging.getLogger("flexpress")
TRACE, PRINT, COMPILE, CHOICE, CACHE, OPTIONS = (
    ROOT.getChild(name) for name in ("trace", "print", "compile", "choice", "cache", "options")
)
LEVELS = ("debug", "info", "warning", "error", "critical")
_FORMAT = "[%(asctime)s] %(levelname)s %(name)s: %(message)s"


def listen(level: str | None) -> None:
    """Write messages of a level (see FLEXPRESS_LOG above) and above to stderr; None or "": leave that to the application."""
    if not ROOT.handlers:
        ROOT.addHandler(logging.NullHandler())
    if not level:
        return
    if level.strip().lower() not in LEVELS:
        warnings.warn(f"FLEXPRESS_LOG={level!r} is no level: set it to one of {', '.join(LEVELS)}. Nothing is logged.", stacklevel=2)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    ROOT.addHandler(handler)
    ROOT.setLevel(level.strip().upper())
    ROOT.propagate = False


listen(os.environ.get("FLEXPRESS_LOG"))
