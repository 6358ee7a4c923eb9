"""Forks: a child works on the CPU and ends, whatever another thread of its parent was doing.

python tests/forks.py --n 25                    each of the ways below 25 times, each child with 60 seconds to do its work
python tests/forks.py --n 100 --ways interpret

import      right after `import flexpress`
interpret   while another thread runs interpreted kernels
trace       while another thread traces, lowers and prints new mods
compile     while another thread compiles for a GPU that is not there
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import threading
import time

import torch

_TIME = 60


def child(work) -> int:
    """Fork, do `work` in the child; its exit status, or -1 if it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # as torch's DataLoader: OpenMP's threads stay in the parent, and torch's products would wait for them
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    end = time.monotonic() + _TIME
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGABRT)
    os.waitpid(pid, 0)
    return -1


def attend() -> None:
    """Known and new mods on the CPU, checked."""
    import interrupts

    interrupts.call(7)
    interrupts.quick_check(10_000 + os.getpid() % 10_000)


def in_child(pristine) -> None:
    from support import fresh_mods

    assert fresh_mods.same_language(pristine), "triton.language is switched in the child"
    attend()


def importing(n: int) -> int:
    """In processes of their own, where nothing was imported."""
    import subprocess

    program = "import flexpress, forks; assert forks.threading.active_count() == 1; raise SystemExit(forks.child(forks.attend))"
    return sum(
        subprocess.run([sys.executable, "-c", program], cwd=os.path.dirname(os.path.abspath(__file__))).returncode != 0 for _ in range(n)
    )


def beside(n: int, work) -> int:
    """While another thread does `work(i)` for i = 0, 1, ..."""
    from support import fresh_mods

    attend()
    pristine, stop, done, failed = fresh_mods.language(), threading.Event(), [], []

    def repeat():
        for i in itertools.count():
            if stop.is_set():
                return
            try:
                work(i)
            except Exception as error:
                failed.append(error)
                raise
            done.append(i)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        bad = 0
        for _ in range(n):
            time.sleep(random.uniform(0.0, 0.03))
            bad += child(lambda: in_child(pristine)) != 0
    finally:
        stop.set()
        thread.join()
    assert done and not failed, (len(done), failed)
    return bad


def interpret(n: int) -> int:
    import interrupts

    return beside(n, lambda i: interrupts.call(i % 3))


def trace(n: int) -> int:
    from flexpress.codegen.run.preview import preview
    from flexpress.codegen.text.render import render
    from support import fresh_mods

    return beside(n, lambda i: render(preview(fresh_mods.score_mod(1000 + i), fresh_mods.mask_mod(3 + i))))


def compiling(n: int) -> int:
    from flexpress.codegen.run.preview import compilation
    from support import fresh_mods

    return beside(n, lambda i: compilation("sm_90", mask_mod=fresh_mods.mask_mod(3 + i), head_dim=64).compile())


WAYS = {"import": importing, "interpret": interpret, "trace": trace, "compile": compiling}

if __name__ == "__main__":
    os.environ.setdefault("FLEXPRESS_CPU", "interpreter")  # on a CPU this is of kernels in Triton
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=25)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    failures = 0
    for name in given.ways:
        begun = time.perf_counter()
        found = WAYS[name](given.n)
        failures += found
        print(f"{name}: {given.n} forks, {found} failed or hung, {time.perf_counter() - begun:.0f} s", flush=True)
    raise SystemExit(failures != 0)
