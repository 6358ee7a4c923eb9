"""The driver of the backward kernels: from a bound call and grad_output to the gradients of q, k, v and captured tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import logs
from ..device.devices import architecture_of, backend_of
from ..device.kernel import NotYet
from ..device.memory import META, empty
from ..device.workers import Job
from ..mod.graphs.nan import are_ordinary
from ..plan.backward import BackwardCase, backward_geometry, delta_unit, whole_blocks
from ..plan.candidates import Choice, choose
from ..plan.extras import ORDINARY, Extras, factors_out
from ..plan.forward import Blocks, Mod, Options, are_exact, wants_tma
from ..registry import INFO, Table
from ..text.parameters import named_strides
from .backward_kernels import Call, Fused, Hopper, Portable, Sizes, TwoPass
from .block_lists import BlockLists, transposed_unmade
from .call import Bound, Rows, keys_of, structure_of
from .cpu_backward import Cpp
from .launch import Unusable, begin_only, launch_nothing
from .layouts import strides_like, with_rows
from .meanwhile import Meanwhile, awaited_in, begun_beside, failed, must_wait, quick, serving
from .profiled import in_range, is_profiled, names_of

CANDIDATES = Hopper(), Portable()
ON_CPU = (Cpp(),)  # before them
_refused: dict[tuple, str] = Table("backward kernels not used", 1024)  # that were compiled, and why
_ready: dict[tuple, TwoPass | Fused] = Table("backward calls", 1024)
_meanwhile: Table = Table("backward calls that others serve", 1024)


class Details(NamedTuple):
    """What of a call beside tensors changes its kernels."""

    options: Options
    deterministic: bool
    lse_gradient: bool
    wanted: frozenset[int]  # captured tensors that want a gradient
    raw_tops: bool = False  # see BackwardCase
    ordinary: bool = True
    extras: Extras = ORDINARY  # see BackwardCase


def backward(
    bound: Bound,
    out: torch.Tensor,
    rows: Rows,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    *,
    wanted: frozenset[int] = frozenset(),
    deterministic: bool = False,
    waits: bool = True,
):
    """dq, dk, dv (shaped, typed and laid out as q, k, v), {index of a captured tensor of score_mod in `wanted`: its gradient}, and the
    gradient of sinks, if bound.extras has any.

    out, rows   what the forward pass returned      do, dlse   gradients of out and lse; dlse may be None      waits   as for `forward`
    """
    score, mask, lists, inputs, extras = bound.score, bound.mask, bound.lists, bound.inputs, bound.extras
    q, k, v, do = bound.q, bound.k, bound.v, with_rows(do)
    out, values = _laid_out(out, rows, do)
    looks = inputs if inputs.alike(q, k, v) else _other_looks(inputs, q, k, v)
    like = _like.get(looks) or _likeness(looks, q, k, v)
    if like.copied:
        q, k, v = map(with_rows, (q, k, v))
    dq, dk, dv = [new() for new in like.new]
    if out.numel() == 0 or like.lengths[3] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), _all_of({}, wanted, score), _of_sinks_alone(bound, dlse)

    transposed, keys = bound.transposed(mask) if bound.transposed else None, keys_of(score, mask, like.lengths, lists)
    details = details_of(bound, rows.raw, dlse is not None, wanted, deterministic)
    layouts = do.shape, do.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16, do.data_ptr() % 16
    structures = lists and lists.structure, transposed and transposed.structure
    kind = (looks, *layouts, out.stride(), bound.scale, details, rows.provisional, _dropout_of(bound), *keys, *structures)
    tensors = {"Q": q, "K": k, "V": v, "O": out, "DO": do, "ROWS": values, "DQ": dq, "DK": dk, "DV": dv}
    tensors |= {} if dlse is None else {"DLSE": dlse.contiguous()}
    tensors |= extras.named if extras else {}
    meanwhile = rows.provisional
    while True:  # until kernels are usable
        ready, temporary, failed_beside = _ready.get(kind), None, False
        if ready is None:
            temporary, failed_beside = serving(_meanwhile, kind, q.device, bound.options, waits)
            ready = temporary
        if ready is None:
            ready = _ready[kind] = _new(_Pass((q, k, v, do), bound, keys, details, tensors, transposed), meanwhile)
            ready.waits = meanwhile or failed_beside or must_wait(q.device, bound.options, waits)
        else:
            INFO.hits += 1
        run = ready.run if not is_profiled() else in_range(ready.run, "backward", names_of(score, mask))
        try:
            gradients, of_sinks = run(tensors, score, mask, lists, transposed)
            of_sinks = None if of_sinks is None else of_sinks.sum((0, 2)).to(extras.sinks.dtype)
            return dq, dk, dv, _all_of(gradients, wanted, score), of_sinks
        except Unusable as why:
            _refuse(ready, why)
        except NotYet:
            _ready.pop(kind, None)
            if not must_wait(q.device, bound.options, waits):
                _meanwhile[kind] = _begun(_Pass((q, k, v, do), bound, keys, details, tensors, transposed), ready)
        except Exception as why:
            waits, meanwhile = failed("backward", meanwhile or temporary is not None, why), False
            _ready.pop(kind, None)


def _laid_out(out: torch.Tensor, rows: Rows, do: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and the values of rows as kernels read them: hooks of saved tensors may have laid them out anew. `do` has rows."""
    return out if out.stride() == do.stride() else with_rows(out), rows.values.contiguous()


def _other_looks(inputs, *tensors: torch.Tensor) -> tuple:
    """How q, k and v look that lie otherwise than in the forward pass."""
    q, k, _ = tensors
    if (*q.shape[:3], k.shape[2]) != inputs.extents:
        raise ValueError("hooks of saved tensors gave flex_attention's back in other shapes; they must unpack what was packed")
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


class _Like(NamedTuple):
    """What follows from how q, k and v lie in memory: lengths (Z, Hq, Q_LEN, KV_LEN), whether rows must be copied to be read, and what
    makes gradients."""

    lengths: tuple[int, int, int, int]
    copied: bool
    new: tuple[Callable[[], torch.Tensor], ...]


_like: dict[object, _Like] = Table("gradients like inputs", 1024)


def _likeness(looks: object, *tensors: torch.Tensor) -> _Like:
    read = q, k, _ = tuple(map(with_rows, tensors))
    copied = any(t is not given for t, given in zip(read, tensors, strict=True))
    new = [functools.partial(empty, tuple(t.shape), strides_like(t, t.shape[3]), t.dtype, t.device) for t in read]
    found = _like[looks] = _Like((*q.shape[:3], k.shape[2]), copied, tuple(new))
    return found


def _all_of(gradients: dict[int, torch.Tensor], wanted: frozenset[int], score: tuple | None) -> dict[int, torch.Tensor]:
    """All wanted gradients. Tensors that a mod only rounds, compares or detaches have none from a kernel: they get zeros."""
    return gradients | {i: torch.zeros_like(score[1][i]) for i in wanted - gradients.keys()}


def _of_sinks_alone(bound: Bound, dlse: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of sinks, if there are any, where there is nothing else: lse is the sink, and -inf is no weight at all."""
    sinks = bound.extras and bound.extras.sinks
    if sinks is None or dlse is None:
        return None if sinks is None else torch.zeros_like(sinks)
    return dlse.sum((0, 2)).masked_fill(sinks == float("-inf"), 0.0).to(sinks.dtype)


class _Pass(NamedTuple):
    """A backward pass: q, k, v and dO, what is known of it, and its tensors by name."""

    inputs: tuple
    bound: Bound
    keys: tuple[Mod | None, Mod | None]
    details: Details
    tensors: dict[str, torch.Tensor]
    transposed: BlockLists | None

    def run(self, ready: TwoPass | Fused) -> None:
        ready.run(self.tensors, self.bound.score, self.bound.mask, self.bound.lists, self.transposed)


def _new(call: _Pass, meanwhile: bool = False) -> TwoPass | Fused:
    """The kernels for calls of a new kind; or those that serve meanwhile."""
    lists, details = call.bound.lists, call.details
    if meanwhile:
        details = details._replace(options=quick(details.options))
    choice, case = choice_of(call.inputs, call.bound.scale, call.keys, lists and lists.blocks, details)
    logs.CHOICE.debug("backward: %s", choice.reasons)
    return choice.candidate.prepare(case, _sizes(case, call.tensors, call.bound), tuple(call.tensors), lists, call.transposed)


def details_of(bound: Bound, raw_tops: bool, lse_gradient: bool, wanted: frozenset[int], deterministic: bool) -> Details:
    """Those of a call whose forward pass left its row maxima so."""
    score = bound.score
    ordinary = score is None or are_ordinary(score[1][len(score[0].tensors) :])
    return Details(bound.options, deterministic, lse_gradient, wanted, raw_tops, ordinary, structure_of(bound.extras))


def _refuse(ready: TwoPass | Fused, why: Unusable) -> None:
    _refused[(ready.name, *ready.key)] = str(why)
    logs.CHOICE.info("backward: %s is not used: %s", ready.name, why)
    _ready.clear()  # others of this case have other lengths


def prepare(bound: Bound, out: torch.Tensor, rows: Rows, *, wanted: frozenset[int], deterministic: bool) -> None:
    """Compile what `backward` launches for a gradient of out that lies as out does, and launch nothing but what makes block lists."""
    call = _imagined(bound, out, rows, wanted, deterministic)
    while True:  # until kernels are usable
        ready = _new(call)
        launch_nothing(ready.launches)
        try:
            call.run(ready)
            return
        except Unusable as why:
            _refuse(ready, why)


def begin(
    bound: Bound,
    wanted: frozenset[int],
    deterministic: bool,
    out: torch.Tensor,
    rows: Rows,
    jobs: list[Job],
    meanwhile_raw: bool | None = None,
    forward: Callable[[], None] | None = None,
) -> None:
    """Have what `prepare` compiles compiled beside this process, after what serves meanwhile, and after what `forward` begins.

    jobs            takes those of the kernels that are awaited
    meanwhile_raw   of the rows that the forward kernels leave meanwhile; None: nothing serves meanwhile
    """
    if any(with_rows(t) is not t for t in _unmade(bound.q, bound.k, bound.v)):
        call = None  # they are copied first: the backward pass begins its kernels itself
    else:
        call = _imagined(bound, out, rows, wanted, deterministic, unmade=True)
        if bound.transposed:
            bound.transposed(bound.mask, begins=True)
    if call and meanwhile_raw is not None:
        before = call._replace(details=call.details._replace(raw_tops=meanwhile_raw))
        _begin_all(before, _new(before, meanwhile=True), [])
    if forward:
        forward()
    if call:
        _begin_all(call, _new(call), jobs)


def _begun(call: _Pass, ready: TwoPass | Fused) -> Meanwhile:
    """The kernels of `ready` are begun, others serve meanwhile."""
    jobs = begun_beside(functools.partial(_begin_all, call, _new(call)), call.bound.q.device)
    return Meanwhile(_new(call, meanwhile=True), jobs, (ready.name, *ready.key))


def _begin_all(call: _Pass, ready: TwoPass | Fused, jobs: list[Job]) -> None:
    begin_only(ready.launches, jobs)
    ready.writes_to = META
    with contextlib.suppress(Unusable):
        call.run(ready)


def _unmade(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Others that lie as these do, without memory."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META) for t in tensors]


def _imagined(bound: Bound, out: torch.Tensor, rows: Rows, wanted: frozenset[int], deterministic: bool, *, unmade: bool = False) -> _Pass:
    """A pass for a gradient of out that lies as out does. What there is not yet has memory, unless it stays `unmade`."""
    do = _unmade(out)[0] if unmade else torch.empty_like(out)
    q, k, v, do = map(with_rows, (bound.q, bound.k, bound.v, do))
    if unmade:
        transposed = bound.lists and transposed_unmade(bound.lists, k.shape[2])
    else:
        transposed = bound.transposed(bound.mask) if bound.transposed else None
    keys = keys_of(bound.score, bound.mask, (*q.shape[:3], k.shape[2]), bound.lists)
    tensors = {"Q": q, "K": k, "V": v, "O": out, "DO": do, "ROWS": rows.values, **(bound.extras.named if bound.extras else {})}
    device = META if unmade else q.device
    new = [torch.empty_strided(t.shape, strides_like(t, t.shape[3]), dtype=t.dtype, device=device) for t in (q, k, v)]
    tensors |= dict(zip(("DQ", "DK", "DV"), new, strict=True))
    details = details_of(bound, rows.raw, False, wanted, deterministic)
    return _Pass((q, k, v, do), bound, keys, details, tensors, transposed)


def _dropout_of(bound: Bound) -> float:
    return bound.extras.dropout_p if bound.extras else 0.0


def _sizes(call: Call, tensors: dict[str, torch.Tensor], bound: Bound) -> Sizes:
    q, k, unit, strides = tensors["Q"], tensors["K"], delta_unit(call.case), {}
    for name, t in (("o", tensors["O"]), ("do", tensors["DO"])):
        strides |= named_strides(name, "zhm", (stride // unit if n > 1 else 0 for stride, n in zip(t.stride(), t.shape, strict=True)))
    return Sizes((*q.shape[:3], k.shape[2]), tuple(k.shape[:2]), bound.scale, strides, _dropout_of(bound))


def choice_of(
    tensors: tuple[torch.Tensor, ...], scale: float, keys: tuple[Mod | None, Mod | None], blocks: Blocks | None, details: Details
) -> tuple[Choice, Call]:
    """Which kernels serve a backward pass, and what is known of that; arguments as for case_of. A BACKEND that does not fit is no error
    here."""
    device, named = tensors[0].device, details.options.backend
    call = case_of(tensors, scale, keys, blocks, details, backend_of(device.type), architecture_of(device))
    candidates = (*ON_CPU, *CANDIDATES) if call.backend == "cpu" else CANDIDATES
    return choose(candidates, call, named if named == Portable.name else None, _refused), call


def is_awaited(choice: Choice, call: Call) -> bool:
    """Do other kernels serve such calls until the chosen one is compiled?"""
    return awaited_in(_meanwhile, (choice.candidate.name, *call.key))


def case_of(
    tensors: tuple[torch.Tensor, ...],
    scale: float,
    keys: tuple[Mod | None, Mod | None],
    blocks: Blocks | None,
    details: Details,
    backend: str,
    arch: str,
) -> Call:
    """What the choice and the text of a backward pass's kernels depend on.

    tensors   q, k, v and dO, of which shapes, strides, dtype and alignment count; on the "meta" device they are 16-byte aligned
    keys      what of the bound score_mod and mask_mod changes a kernel (keys_of)
    arch      the row of the tile tables
    """
    q, k, v, do = tensors
    shapes = tuple(t.shape for t in (q, k, v, do, q, k, v))  # and dq, dk and dv
    strides = (*(t.stride() for t in (q, k, v, do)), *(strides_like(t, t.shape[3]) for t in (q, k, v)))
    geometry = backward_geometry(q.element_size(), shapes, strides)
    tma = wants_tma(details.options, q.dtype, arch) and backend != "cpu"
    use_tma = tuple(
        tma and possible and all(t.data_ptr() % 16 == 0 for t in pair)
        for possible, pair in zip(geometry.tma, ((k, v), (q, do)), strict=True)
    )
    case = BackwardCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.aligned,
        use_tma,
        blocks,
        details.options,
        factors_out(scale, details.extras),
        exact_indices=are_exact(q.shape[2], k.shape[2], blocks),
        one_batch=q.shape[0] == 1,
        one_head=q.shape[1] == 1,
        deterministic=details.deterministic,
        lse_gradient=details.lse_gradient,
        captured=details.wanted,
        ordinary=details.ordinary,
        raw_tops=details.raw_tops,
        extras=details.extras,
        whole=whole_blocks(q.shape[2], k.shape[2], blocks),
    )
    return Call(case, geometry, backend, arch, *keys, (*q.shape[:3], *k.shape[:3]), q.device)
