"""Which of several kernels serves a call: an ordered list of candidates, and one loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..text.spec import KernelSpec


class Candidate(Protocol):
    """A kernel (or the kernels of one pass) that may serve a call. The last of a list serves any, and needs no `fits` and `worthwhile`.

    name         what the option BACKEND calls it
    fits         why it cannot serve a call, or None
    worthwhile   why a later candidate is faster, or None; not asked where the user names the kernel

    A candidate for the forward pass also has `prepare(call, names, lists)`, which gives a Runner. One for the backward pass has a `prepare`
    that gives the kernels of a pass (codegen/run/backward_kernels.py), one for caches `run` instead (codegen/run/prefill.py).
    """

    name: str

    def fits(self, call) -> str | None: ...

    def worthwhile(self, call) -> str | None: ...


class LaunchedKernel(Protocol):
    """What drivers ask of a kernel; codegen/device/kernel.py has it.

    spec       its KernelSpec, of which `backend` says whether there is anything to compile beside the process
    printed    its text; reading it prints the kernel
    is_known   it is compiled for some arguments, or on its way
    """

    spec: KernelSpec
    is_known: bool

    @property
    def printed(self) -> object: ...


class Launched(Protocol):
    """One launch of a Runner, as codegen/run/launch.py has it. To compile without launching, drivers put another object in place of
    `kernel` before `run`. So `run` must launch through it: `launch.kernel.launch(...)` or `launch.kernel.variant(...)`."""

    kernel: LaunchedKernel


class Runner(Protocol):
    """A forward kernel in calls of a kind, as a candidate's `prepare` gives it; codegen/run/forward_kernels.py has one.

    launches   what `run` launches; none where nothing is compiled: then `precompile` calls `run` as a call does
    raw        the row maxima that it leaves in ROWS are of a score_mod's scores without scale (see `Rows` in codegen/run/call.py)
    waits      set by the driver before `run`: wait for the compiler. If False, `run` may raise NotYet while a kernel is being compiled;
               other kernels then serve the call
    run        fills the outputs among `tensors`, whose names `prepare` got. These are K, V, Q, O and LSE, then MAX, ROWS and extras where
               the call has them; names of the lists' tables follow, which come in `lists`. addresses: those of the tensors if q, k and v
               are 16-byte aligned, else None. score, mask: what the mods capture, or None. Raises Unusable if the kernel does not compile
               or spills: the next candidate serves
    """

    raw: bool
    waits: bool

    @property
    def launches(self) -> Sequence[Launched]: ...

    def run(self, tensors: list, addresses: list[int] | None, score: list | None, mask: list | None, lists) -> None: ...


class Choice(NamedTuple):
    """The candidate that serves a call, and why the ones before it do not: names and reasons."""

    candidate: Candidate
    passed: tuple[tuple[str, str], ...]

    @property
    def reasons(self) -> str:
        """The candidate, and why not those before it."""
        return self.candidate.name + "".join(f"; not {name}: {reason}" for name, reason in self.passed)


def choose(candidates: tuple[Candidate, ...], call, named: str | None, refused: dict[tuple, str]) -> Choice:
    """The first candidate that serves; the last one serves any call.

    named     the user's BACKEND, or None
    refused   kernels that were compiled and are not used, by name and call.key, and why

    Raises ValueError if the kernel that the user names does not fit.
    """
    passed = []
    for candidate in candidates[:-1]:
        if named and named != candidate.name:
            reason = f"BACKEND is {named}"
        else:
            reason = candidate.fits(call)
            if named and reason:
                raise ValueError(f"kernel_options['BACKEND'] names {named}, but {reason}; leave BACKEND out")
            if not named:
                reason = reason or refused.get((candidate.name, *call.key)) or candidate.worthwhile(call)
        if reason is None:
            return Choice(candidate, tuple(passed))
        passed.append((candidate.name, reason))
    return Choice(candidates[-1], tuple(passed))
