"""Which of several kernels serves a call: an ordered list of candidates, and one loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Candidate(Protocol):
    """A kernel (or the kernels of one pass) that may serve a call. The last of a list serves any, and has but a name.

    name         what the option BACKEND calls it
    fits         why it cannot serve a call, or None
    worthwhile   why a later candidate is faster, or None; not asked where the user names the kernel
    """

    name: str

    def fits(self, call) -> str | None: ...

    def worthwhile(self, call) -> str | None: ...


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
