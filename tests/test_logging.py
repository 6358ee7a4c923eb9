"""The log, and the line on a terminal while a kernel compiles."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from flexpress import cache_clear, flex_attention, mods
from flexpress.codegen import logs, progress
from flexpress.codegen.device import binary, folder
from flexpress.codegen.plan.candidates import choose
from flexpress.codegen.run import forward
from flexpress.codegen.run.launch import Unusable
from support.devices import DEVICES

SCRIPT = """
import torch, flexpress
q = torch.randn(1, 1, 20, 16)
flexpress.flex_attention(q, q, q, mask_mod=flexpress.mods.causal)
flexpress.flex_attention(q, q, q, mask_mod=flexpress.mods.causal)
"""


def stderr_of(script: str, tmp_path, **environment: str) -> str:
    environment = {**os.environ, "FLEXPRESS_CACHE_DIR": str(tmp_path / "kernels"), **environment}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    return done.stderr


def lines_of(caplog) -> list[str]:
    return [f"{record.name} {record.levelname} {record.getMessage()}" for record in caplog.records]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_logged_and_nothing_of_a_repeated_call(own_directory, caplog, device):
    caplog.set_level("DEBUG", "flexpress")
    q = torch.randn(1, 1, 20, 16, device=device)
    flex_attention(q, q, q, mods.softcap(3.0))
    text = "\n".join(lines_of(caplog))
    assert re.search(r"^flexpress.trace DEBUG traced score_mod softcap in \d+\.\d ms$", text, re.MULTILINE)
    assert re.search(
        r"^flexpress.choice DEBUG forward: PORTABLE; (not CPP: .*; )?not DECODE: query has 20 positions, more than 16", text, re.MULTILINE
    )
    assert re.search(r"^flexpress.print INFO printed /.*/forward_softcap_d16_fp32_\w+\.py in \d+ ms$", text, re.MULTILINE)
    if device == "cpu":
        assert re.search(r"^flexpress.compile INFO loaded forward_softcap_d16_fp32_\w+ for the interpreter$", text, re.MULTILINE)
    else:
        assert re.search(r"^flexpress.compile INFO compiled forward_softcap_\w+ \(.*num_warps=\d.*\) in \d+\.\d\d s$", text, re.MULTILINE)
    caplog.clear()
    flex_attention(q, q, q, mods.softcap(5.0))
    assert lines_of(caplog) == []
    cache_clear()
    flex_attention(q, q, q, mods.softcap(5.0))
    text = "\n".join(lines_of(caplog))
    assert "flexpress.print DEBUG found the print /" in text and "INFO printed" not in text
    assert device == "cpu" or "flexpress.compile DEBUG found forward_softcap" in text


def test_a_compiled_kernel_that_is_not_used_is_logged(caplog, monkeypatch):
    caplog.set_level("INFO", "flexpress")

    class Spilling:
        name, raw = "HOPPER", False
        fits = worthwhile = staticmethod(lambda call: None)

        @staticmethod
        def prepare(call, *_):
            return Spilling()

        def run(self, *_):
            raise Unusable("its threads would spill 400 bytes, more than 32")

    cache_clear()
    monkeypatch.setattr(forward, "CANDIDATES", (Spilling(), forward.CANDIDATES[-1]))
    q = torch.randn(1, 1, 20, 16)
    flex_attention(q, q, q)
    cache_clear()
    assert "flexpress.choice INFO forward: HOPPER is not used: its threads would spill 400 bytes, more than 32" in lines_of(caplog)


def test_removed_files_are_logged(own_directory, caplog, monkeypatch):
    caplog.set_level("INFO", "flexpress")
    monkeypatch.setenv("FLEXPRESS_CACHE_MIB", "0.5")
    for number in range(12):
        folder.write(f"kernel_{number:012x}.py", b"#" * (1 << 17))
    assert any(re.match(r"flexpress.cache INFO /.* held 0 MiB: removed the \d+ files", line) for line in lines_of(caplog))


def test_reasons_are_those_that_explain_prints():
    call = type("Call", (), {"key": ()})()
    candidates = [type("C", (), {"name": n, "fits": lambda self, call: "it is small", "worthwhile": None})() for n in "AB"]
    assert choose(tuple(candidates), call, None, {}).reasons == "B; not A: it is small"


def test_a_library_is_silent_until_somebody_listens(tmp_path):
    assert stderr_of(SCRIPT, tmp_path) == ""
    assert any(isinstance(handler, logging.NullHandler) for handler in logs.ROOT.handlers)


def test_the_environment_variable_shows_the_log(tmp_path):
    shown = stderr_of(SCRIPT, tmp_path, FLEXPRESS_LOG=" DEBUG")
    assert "INFO flexpress.print: printed " in shown and shown.count("DEBUG flexpress.trace: traced mask_mod causal") == 1


def test_it_goes_to_stderr_alone_and_by_its_level(tmp_path):
    """An application that logs gets no second copy (without the variable it gets the only one, as caplog does above)."""
    shown = stderr_of(
        "import logging; logging.basicConfig(level='DEBUG', format='ROOT %(message)s')\n" + SCRIPT, tmp_path, FLEXPRESS_LOG="info"
    )
    assert "INFO flexpress.compile: loaded " in shown and "DEBUG" not in shown and "ROOT" not in shown


def test_a_bad_level_is_one_warning(tmp_path):
    shown = stderr_of(SCRIPT, tmp_path, FLEXPRESS_LOG="loud")
    assert shown.count("FLEXPRESS_LOG='loud' is no level: set it to one of debug, info, warning, error, critical") == 1
    assert "INFO" not in shown


class Terminal(io.StringIO):
    """Where a terminal would be."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """What progress.py takes for stderr (pytest changes sys.stderr itself), and a line that comes soon."""
    screen = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=screen))
    monkeypatch.setattr(progress, "AFTER", 0.2)
    monkeypatch.setattr(progress, "_EVERY", 0.05)
    monkeypatch.delenv("FLEXPRESS_PROGRESS", raising=False)
    return screen


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def left_of(written: str) -> str:
    """What a terminal shows of it."""
    return written.rpartition("\x1b[2K")[2]


def test_a_long_compilation_has_a_line_that_goes_away(terminal):
    with progress.shown("compiling one"):
        wait_for(lambda: "compiling one" in terminal.getvalue())
        assert left_of(terminal.getvalue()).startswith("flexpress: compiling one, ")
    assert left_of(terminal.getvalue()) == "" and "\n" not in terminal.getvalue()
    wait_for(lambda: progress._screen.thread is None)


def test_a_short_one_has_none(terminal):
    with progress.shown("compiling one"):
        pass
    time.sleep(0.3)
    assert terminal.getvalue() == ""


def test_an_error_wipes_the_line_out(terminal):
    with pytest.raises(KeyError), progress.shown("compiling one"):
        wait_for(lambda: "one" in terminal.getvalue())
        raise KeyError
    assert left_of(terminal.getvalue()) == ""


def test_threads_share_the_line(terminal):
    go_on = [threading.Event(), threading.Event()]

    def work(i: int) -> None:
        with progress.shown(f"compiling number {i}"):
            go_on[i].wait(10)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    wait_for(lambda: "compiling number 0 and 1 more" in terminal.getvalue())
    go_on[0].set()
    threads[0].join()
    wait_for(lambda: left_of(terminal.getvalue()).startswith("flexpress: compiling number 1, "))
    go_on[1].set()
    threads[1].join()
    assert left_of(terminal.getvalue()) == ""


def test_one_that_was_thrown_out_of_its_frame_is_not_waited_for(terminal):
    """An interrupt between the beginning and the `try`: nobody holds the work any more."""
    progress._screen.begin(progress._Work("compiling one"))
    wait_for(lambda: progress._screen.thread is None)
    assert left_of(terminal.getvalue()) == ""


@pytest.mark.parametrize("why", ["no terminal", "turned off", "no stderr"])
def test_no_line_where_it_is_not_wanted(terminal, monkeypatch, why):
    if why == "turned off":
        monkeypatch.setenv("FLEXPRESS_PROGRESS", "0")
    else:
        progress.sys.stderr = io.StringIO() if why == "no terminal" else None
    with progress.shown("compiling one"):
        time.sleep(0.4)
    assert progress._screen.thread is None
    assert terminal.getvalue() == "" and (why != "no terminal" or progress.sys.stderr.getvalue() == "")


def test_a_forked_child_has_a_screen_of_its_own(terminal):
    with progress.shown("compiling one"):
        pid = os.fork()
        if pid == 0:
            fine = progress._screen.thread is None and progress._screen.turn.run(lambda: True)
            os._exit(0 if fine else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_compiling_shows_the_line(own_directory, terminal, monkeypatch):
    """binary.obtain is where kernels are compiled for a GPU."""
    monkeypatch.setattr(binary, "ast_source", lambda *_: type("Source", (), {"signature": {}})())
    monkeypatch.setattr(binary, "current_target", lambda: binary.GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(binary, "Binary", lambda *_: None)

    def slowly(*_):
        wait_for(lambda: "flexpress: compiling forward_causal_d16, " in terminal.getvalue())
        return {}, b"code", "cubin"

    monkeypatch.setattr(binary, "compile_source", slowly)
    assert binary.obtain("forward_causal_d16", (), (), {}, 0, lambda: None) == (None, True)
    assert left_of(terminal.getvalue()) == ""


def test_what_is_soon_done_has_no_line(terminal, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    screen, work = progress._Screen(), progress._Work("compiling one")
    screen.works.add(work)
    now[0] = 100.1875
    screen._draw()
    assert terminal.getvalue() == ""
    now[0] = 100.25
    screen._draw()
    assert left_of(terminal.getvalue()) == "flexpress: compiling one, 0 s"
