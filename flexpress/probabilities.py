"""What return_aux tells of the probabilities themselves: entropy, top index, column sums."""

from __future__ import annotations

import torch

from flexpress.autograd import Refusing

from .codegen.run.call import Bound
from .codegen.run.statistics import Statistics, Wanted, statistics

NOT_OVER_DEVICES = (
    "entropy, top_index and column_sums are not known where keys or heads lie on several devices: leave them out of return_aux, or call "
    "flex_attention with ordinary tensors and without context="
)
NOT_WITH_SINKS = (
    "entropy, top_index and column_sums are not known of a softmax with sinks: leave them out of return_aux, or leave sinks out"
)
NO_GRADIENT = (
    "entropy and column_sums of return_aux have no gradient: detach them (aux.entropy.detach()), or compute what is to be differentiated "
    "by dense attention"
)


def wanted_of(return_aux) -> Wanted:
    """What an AuxRequest asks of the probabilities; torch's asks nothing."""
    return Wanted(*(bool(getattr(return_aux, name, False)) for name in Wanted._fields))


def look(call, wanted: Wanted) -> Statistics:
    """What is wanted of the probabilities of a call, a Bound or a Recorded. What is made of it refuses a backward pass."""
    if not isinstance(call, Bound):
        return call.look(wanted)
    with torch.no_grad():
        found = statistics(call, wanted)
    if not torch.is_grad_enabled():
        return found
    anchor = next((t for t in (call.q, call.k, *call.captured) if t.requires_grad), None)
    if anchor is None:
        return found
    entropy, column_sums = (t if t is None else Refusing.apply(anchor, t, NO_GRADIENT) for t in (found.entropy, found.column_sums))
    return Statistics(entropy, found.top_index, column_sums)
