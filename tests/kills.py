"""Processes killed while they fill the cache: the next one gives right answers, and no file is half written.

    python tests/kills.py --n 300

Each child prints new kernels and keeps records of compiled code until SIGKILL strikes it at a random moment; the one after it begins
with what the killed one was at. After every kill each file under its own name is whole. At the end the temporary files of the killed,
made to look two hours old, are swept by the next writer.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch

from flexpress import cache_clear, cache_info, evaluate_mod
from flexpress.codegen.device import binary, folder
from support.fresh_mods import score_mod, score_of


def check(number: int) -> None:
    scores = torch.randn(1, 1, 3, 5)
    assert torch.allclose(evaluate_mod(score_mod(number), scores), score_of(number, scores), atol=1e-5)


def compiled(number: int) -> binary.Compiled:
    """What stands for a compiled kernel: 100 kB that belong together."""
    code = hashlib.sha256(str(number).encode()).digest() * 3000
    return binary.Compiled(json.dumps({"name": str(number)}).encode(), code, "cubin", {"pointer": "*fp32"})


def record(number: int) -> None:
    name = f"kernel_{number:012x}.{number:012x}"
    found = binary._read(name)
    assert found is None or found == compiled(number), f"record {number} is another"
    if found is None:
        binary._write(name, compiled(number))
    assert binary._read(name) == compiled(number)


def fill(start: int) -> None:
    """Until killed."""
    for number in itertools.count(start):
        check(number)
        record(number)


def whole(place: Path) -> int:
    """Check every file that has a name of its own; how many there are."""
    count = 0
    for path in place.iterdir():
        if path.suffix == ".tmp":
            continue
        count += 1
        content = path.read_bytes()
        if path.suffix == ".py":
            ast.parse(content)
            assert content.endswith(b"\n"), path
        elif path.suffix == ".spec" or path.name.endswith(".metadata.json"):
            json.loads(content)
        elif path.suffix == ".json":
            assert binary._read(path.stem) is not None, path
        elif path.suffix == ".cubin":
            assert len(content) == 96000, path
    return count


def campaign(n: int, seed: int, place: Path, longest: float = 0.3) -> str:
    random.seed(seed)
    os.environ["FLEXPRESS_CACHE_DIR"] = str(place)
    check(10**6)  # children begin with the templates loaded
    start = 0
    for i in range(n):
        pid = os.fork()
        if pid == 0:
            try:
                cache_clear()  # as if it were another process
                fill(max(start - 2, 0))
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(1)
        time.sleep(random.uniform(0.0, longest))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"child {i} failed before it was killed"
        if place.exists():
            files = whole(place)
            start = sum(path.suffix == ".py" for path in place.iterdir()) - 1
    left = [path for path in place.iterdir() if path.suffix == ".tmp"]
    for path in left:
        os.utime(path, (time.time() - 7200,) * 2)
    cache_clear()
    folder._unchecked.clear()  # a new process looks through the folder
    for number in range(start + 3):
        check(number)
        record(number)
    assert cache_info().prints >= 1 and not list(place.glob(".*.tmp")), "temporary files are not swept"
    assert folder.path() == place
    return f"{n} kills, {files} files, all whole; {start} kernels right; {len(left)} temporary files left by the killed, all swept"


if __name__ == "__main__":
    os.environ.setdefault("FLEXPRESS_CPU", "interpreter")  # on a CPU this is of kernels in Triton
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flexpress-kills-") as scratch:
        print(campaign(given.n, given.seed, Path(scratch) / "kernels"))
