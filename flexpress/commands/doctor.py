"""`python -m flexpress doctor`: what this machine can run, checked by running it."""

from __future__ import annotations

import platform
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata

import torch
import triton
from triton import knobs

import flexpress
from flexpress import mods

from ..codegen.device import cpp_compiler, offline
from ..codegen.gpus import SHARED_MEMORY, architecture
from ..codegen.run.preview import compilation
from ..versions import MINIMUM, too_new, too_old


class _Report:
    """Prints a line per check and remembers whether one that matters failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def title(self, text: str) -> None:
        print(f"\n{text}")

    def say(self, name: str, text: str) -> None:
        print(f"          {name:14} {text}")

    def check(self, name: str, run: Callable[[], str], needed: bool = True) -> None:
        """`run` describes what it found, or raises."""
        try:
            mark, text = "ok", run()
        except Exception as error:
            known = type(error) is RuntimeError and str(error)
            mark, text = "failed", known or f"{type(error).__name__}: {error}"
            if needed:
                self.failed.append(name)
            else:
                text += " (not needed on this machine)"
        print(f"  {mark:7} {name:14} {text}", flush=True)


def doctor() -> int:
    """Check versions, GPUs, cache, compilers, interpreter. 0 if all that this machine needs works, else 1."""
    report = _Report()
    _versions(report)
    here = _gpus(report)
    report.title("cache")
    report.check("directory", _cache_directory)
    report.title("C++ compiler, for tensors on the CPU")
    report.check("c++", _compiler, needed=not torch.cuda.is_available() and not cpp_compiler.interpreter_asked_for())
    report.title("offline compilation of a causal kernel, bfloat16, head dim 64")
    for target in offline.TARGETS:
        report.check(target, lambda target=target: _compile(target), needed=target in here)
    report.title("a small attention, against plain torch")
    report.check("cpu", lambda: _attend("cpu"))
    for i in range(torch.cuda.device_count()):
        report.check(f"cuda:{i}", lambda i=i: _attend(f"cuda:{i}"))
    print("\n" + (f"failed: {', '.join(report.failed)}" if report.failed else "All that this machine needs works."))
    return 1 if report.failed else 0


def _versions(report: _Report) -> None:
    report.title("versions")
    report.say("python", f"{platform.python_version()}  {sys.executable}")
    report.say("flexpress", flexpress.__version__)
    for name in MINIMUM:
        report.check(name, lambda name=name: _version(name))


def _version(name: str) -> str:
    """The version, with a word if nobody has tried it; a RuntimeError if it is too old."""
    version = triton.__version__ if name == "triton" else torch.__version__ if name == "torch" else metadata.version(name)
    if problem := too_old(name, version):
        raise RuntimeError(problem)
    return too_new(name, version) or version


def _gpus(report: _Report) -> set[str]:
    """The architectures of the GPUs here, as the tile tables call them."""
    report.title("GPUs")
    if not torch.cuda.is_available():
        report.say("none", "kernels run on tensors on the CPU")
        return set()
    found = set()
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        arch = architecture("hip" if torch.version.hip else "cuda", (device.major, device.minor))
        found.add(arch)
        model = getattr(device, "gcnArchName", "") if torch.version.hip else f"sm_{device.major}{device.minor}"
        shared = getattr(device, "shared_memory_per_block_optin", 0) or SHARED_MEMORY[arch]
        report.say(f"cuda:{i}", f"{device.name}, {model}, {device.total_memory / 2**30:.0f} GiB")
        report.say("", f"tile table {arch}; shared memory {shared / 1024:g} KiB a block, planned with {SHARED_MEMORY[arch] / 1024:g} KiB")
    return found


def _cache_directory() -> str:
    """Where printed kernels go; an error if they cannot go where they should."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = flexpress.cache_dir()
    if caught:
        raise RuntimeError(caught[0].message)
    if path is None:
        raise RuntimeError("kernels stay in memory: no folder could be written to")
    with tempfile.NamedTemporaryFile(dir=path):
        pass
    info = path.stat()
    kernels = [file for file in path.iterdir() if file.suffix in (".py", ".cpp")]
    return (
        f"{path}  mode {info.st_mode & 0o777:o}, owner {info.st_uid}, {len(kernels)} printed "
        f"kernel{'s' * (len(kernels) != 1)}, {sum(f.stat().st_size for f in kernels) / 1024:.0f} KiB"
    )


def _compiler() -> str:
    """The compiler's version, and how long it takes; a RuntimeError that says how to get one."""
    path = cpp_compiler.compiler()
    if path is None:
        raise RuntimeError(
            f"{cpp_compiler.missing()}. Kernels for CPUs are interpreted, for tests. They need g++ 12 or clang++ 15 or newer (apt install "
            "g++, dnf install gcc-c++, xcode-select --install)"
        )
    start = time.perf_counter()
    cpp_compiler.tried()
    return f"{shlex.join(path)}  {cpp_compiler.version(path)}, {time.perf_counter() - start:.2f} s for the headers"


def _compile(target: str) -> str:
    """Compile a kernel anew, whatever Triton's own cache holds."""
    kernel = compilation(target, mask_mod=mods.causal, head_dim=64)
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        start = time.perf_counter()
        made = kernel.compile()
        seconds = time.perf_counter() - start
    registers = f", {made.registers} registers, {made.spilled} bytes spilled" if made.registers else ""
    return f"{seconds:.2f} s, {made.shared / 1024:.0f} KiB shared memory{registers}"


def _attend(device: str) -> str:
    """Run a small causal attention; an error if it is off."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 48, 32, dtype=torch.float32, device=device).unbind()
    start = time.perf_counter()
    mask = flexpress.create_block_mask(mods.causal, None, None, 48, 48, device=device)
    out = flexpress.flex_attention(q, k, v, block_mask=mask)
    seconds = time.perf_counter() - start
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    hidden = torch.ones(48, 48, dtype=torch.bool, device=device).triu(1)
    error = (out - scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.double()).abs().max().item()
    if not error < 1e-5:
        raise RuntimeError(f"the largest error is {error:.1e}, more than 1e-5")
    return f"{seconds:.2f} s, largest error {error:.1e} (float32)"
