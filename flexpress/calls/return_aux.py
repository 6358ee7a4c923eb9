"""What attention returns beside its output where return_aux asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention import flex_attention as torchs
from torch.utils import _pytree as pytree

from flexpress.calls.probabilities import wanted_of
from flexpress.inputs.plain_arguments import flag

from ..codegen.run.statistics import Wanted


class AuxRequest(NamedTuple):
    """Which statistics attention is to return beside the output; see AuxOutput and AuxStatistics.

    The first two cost nothing (but max_scores of cached_attention). entropy and top_index take a pass over the keys of their own (one for
    both), and column_sums another one: each about as long as a forward pass by the portable kernels, whichever kernels compute the output.
    A gradient of column_sums takes a forward and a backward pass, one of entropy two backward passes and what forward mode takes.
    """

    lse: bool = False
    max_scores: bool = False
    entropy: bool = False
    top_index: bool = False
    column_sums: bool = False


# lse and max_scores, float32 (B, Hq, Q_LEN), or None where not asked for: torch's own class, so that isinstance is what it is there
AuxOutput = torchs.AuxOutput


class AuxStatistics(NamedTuple):
    """What was asked for where that is more than AuxOutput holds, None elsewhere. P is the softmax of a row's scores.

    lse          float32 (B, Hq, Q_LEN)     natural logarithm of the softmax's denominator, -inf for a row with nothing to attend to
    max_scores   float32 (B, Hq, Q_LEN)     the largest score
    entropy      float32 (B, Hq, Q_LEN)     -sum of P ln(P), in nats, a sink's P too; 0 for an empty row
    top_index    int64 (B, Hq, Q_LEN)       the key with the largest score, of equal ones the first; -1 for an empty row
    column_sums  float32 (B, Hq, KV_LEN)    the sum of P over all queries: what each key is given, as evicting from a KV cache asks (H2O,
                                            arXiv 2306.14048; SnapKV, arXiv 2404.14469)
    """

    lse: torch.Tensor | None = None
    max_scores: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    top_index: torch.Tensor | None = None
    column_sums: torch.Tensor | None = None


for _result in (AuxOutput, AuxStatistics):  # torch.export.save asks by which names programs know them
    pytree._register_namedtuple(_result, serialized_type_name=f"flexpress.{_result.__name__}")


def aux_of(request, lse, max_scores, *statistics) -> AuxOutput | AuxStatistics:
    """What a request gets of these."""
    lse = lse if request.lse else None
    return AuxStatistics(lse, max_scores, *statistics) if any(wanted_of(request)) else AuxOutput(lse, max_scores)


def checked_request(return_aux, return_lse: bool) -> AuxRequest:
    """The request. Raises ValueError or TypeError."""
    if return_lse:
        raise ValueError("return_lse and return_aux exclude each other: write return_aux=AuxRequest(lse=True)")
    is_request = not isinstance(return_aux, (type, AuxOutput, AuxStatistics))
    if not (is_request and hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):  # torch's will do
        raise TypeError(f"return_aux must be AuxRequest(lse=..., max_scores=...), got {repr(return_aux)[:200]}")
    for name in AuxRequest._fields:
        asked = getattr(return_aux, name, False)
        if asked is not False and asked is not True:
            flag(f"return_aux.{name}", asked)
    return return_aux


def asked_for(return_aux, return_lse: bool) -> tuple[bool, Wanted]:
    """Are max_scores wanted, and what of the probabilities. Raises ValueError or TypeError."""
    if return_aux is None:
        return False, Wanted()
    request = checked_request(return_aux, return_lse)
    return request.max_scores, wanted_of(request)


def opened(given: dict) -> dict:
    """The arguments by name of a function that has return_aux, as `looked` takes them; torch's compiler traces this. With a context the
    call is outside of the graph."""
    max_scores, wanted = asked_for(given["return_aux"], given["return_lse"])
    taken = {name: given[name] for name in given if name not in ("return_lse", "return_aux", "context")}
    return {**taken, "max_scores": max_scores, "wanted": tuple(wanted)}


def looked(function: Callable, max_scores: bool, wanted: tuple, **given) -> tuple[torch.Tensor, ...]:
    """out, lse and, if they are wanted, max_scores and statistics of the probabilities, of a function with these arguments."""
    out, aux = function(**given, return_aux=AuxRequest(True, max_scores, *wanted))
    return out, *(t for t in aux if t is not None)


def result_of(found: tuple, given: dict):
    """What a function with these arguments by name returns of out, lse and what else was asked for. torch's compiler traces this."""
    out, lse = found[:2]
    request = given["return_aux"]
    if request is None:
        return (out, lse) if given["return_lse"] else out
    statistics, place = [], 2
    for asked in (request.max_scores, *wanted_of(request)):
        statistics.append(found[place] if asked else None)
        place += bool(asked)
    return out, aux_of(request, lse, *statistics)
