"""The driver of the kernels over a cache: the first that serves fills out and lse."""

from __future__ import annotations

from .. import logs
from ..device.cpp_compiler import by_either
from ..plan.candidates import choose
from ..registry import Table
from . import cpu_decode
from .cached_call import CachedCall
from .decode import DecodeCached
from .launch import Unusable
from .prefill import Prefill

CANDIDATES = Prefill(), DecodeCached()
_refused: dict[tuple, str] = Table("kernels over caches not used", 1024)  # that were compiled, and why


def attend_cached(call: CachedCall, *, prepare: bool = False) -> None:
    """Fill call.out and call.lse; or, to `prepare` such calls, compile what does, and launch nothing but what makes lists. Raises Unusable
    if the kernel for call.shared is not usable."""
    by_either(
        lambda in_cpp: (cpu_decode.attend_cached if in_cpp and cpu_decode.serves(call) else _attend)(call, prepare=prepare), call.q.device
    )


def serves_long_prompt(call: CachedCall) -> bool:
    """Does the kernel for long prompts serve this call?"""
    return choose(CANDIDATES, call, None, _refused).candidate is CANDIDATES[0]


def _attend(call: CachedCall, *, prepare: bool) -> None:
    while True:  # until a kernel is usable
        candidate = choose(CANDIDATES, call, None, _refused).candidate
        try:
            return candidate.run(call, prepare=prepare)
        except Unusable as why:
            if call.shared:  # the kernel for what sequences share; whoever asked for it knows another way
                raise
            _refused[(candidate.name, *call.key)] = str(why)
            logs.CHOICE.info("cached_attention: %s is not used: %s", candidate.name, why)
