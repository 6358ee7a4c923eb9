"""The driver of the forward kernels: from a bound call to a kernel, a grid and arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch

from .. import logs
from ..device.devices import architecture_of, backend_of, multiprocessors
from ..device.kernel import NotYet
from ..device.memory import empty
from ..device.workers import Job
from ..mod.captured.tensors import LOWEST, check_kind
from ..plan.candidates import Choice, choose
from ..plan.extras import ORDINARY, Extras, factors_out
from ..plan.forward import Blocks, ForwardCase, Mod, Options, are_exact, wants_tma
from ..plan.geometry import geometry_of
from ..plan.hopper_elements import are_copied
from ..plan.hopper_forward import are_few
from ..plan.hopper_tiles import has_larger_tiles
from ..registry import INFO, Table
from .call import Bound, Rows, keys_of, output_dtype, structure_of, values_in_keys
from .cpu import Cpp
from .decode import Decode
from .forward_kernels import Call, Hopper, Portable
from .launch import Unusable, begin_only, launch_nothing
from .layouts import output_like, strides_like
from .meanwhile import Meanwhile, awaited_in, begun_beside, failed, is_capturing, must_wait, quick, serving
from .profiled import in_range, is_profiled, names_of

CANDIDATES = Decode(), Hopper(), Portable()
ON_CPU = (Cpp(),)  # before them
_refused: dict[tuple, str] = Table("forward kernels not used", 1024)  # that were compiled, and why
_ready: dict[tuple, Ready] = Table("forward calls", 1024)
_meanwhile: Table = Table("forward calls that others serve", 1024)


class Ready:
    """What is decided of calls of a kind: the kernels, and how their outputs lie in memory."""

    def __init__(self, choice: Choice, call: Call, bound: Bound, output_max: bool, output_rows: bool) -> None:
        q, d_v, lists = bound.q, bound.v.shape[3], bound.lists
        names = ("K", "V", "Q", "O", "LSE", *(["MAX"] if output_max else []), *(["ROWS"] if output_rows else []))
        names += tuple(bound.extras.named) if bound.extras else ()
        self.refusal, self.provisional = (choice.candidate.name, *call.key), False
        self.runner = choice.candidate.prepare(call, (*names, *(lists.tensors() if lists else ())), lists)
        Z, Hq, Q_LEN = rows = q.shape[:3]
        self.new_out = functools.partial(empty, (*rows, d_v), strides_like(q, d_v), output_dtype(q, bound.extras), q.device)
        self.new_stats = functools.partial(empty, tuple(rows), (Hq * Q_LEN, Q_LEN, 1), torch.float32, q.device)
        self.new_rows = functools.partial(empty, (*rows, 2), (Hq * Q_LEN * 2, Q_LEN * 2, 2, 1), torch.float32, q.device)

    @property
    def is_new(self) -> bool:
        """Is a kernel for GPUs to be compiled, or at least to be loaded?"""
        return any([launch.kernel.spec.backend != "cpu" and not launch.kernel.is_known for launch in self.runner.launches])

    def print(self) -> None:
        """Have the kernels' texts there."""
        for launch in self.runner.launches:
            launch.kernel.printed  # noqa: B018


def forward(
    bound: Bound, *, output_max: bool = False, output_rows: bool = False, waits: bool = True, before: Callable[..., None] | None = None
):
    """out (Z, Hq, Q_LEN, D_V), lse float32 (Z, Hq, Q_LEN), max_scores (the same, or None) and Rows (or None).

    waits    for the compiler; else other kernels may serve until it is done (meanwhile.py)
    before   backward.begin of the same call, where gradients are wanted: called in another thread while the forward kernels are compiled
    """
    q, k, v, inputs, scale, score, mask, lists, _, options, extras = bound
    score_key, mask_key = keys_of(score, mask, inputs.extents, lists)
    k_at, v_at, q_at = k.data_ptr(), v.data_ptr(), q.data_ptr()
    beside = (k_at | v_at | q_at) % 16 and ((k_at | v_at) % 16, q_at % 16)  # 0 for what TMA can load
    known = output_max, output_rows, extras and (extras.structure, extras.numbers), are_aligned(score)
    key = (inputs, beside, k_at == v_at, scale, score_key, mask_key, lists and lists.looks.structure, options, *known)
    ready = _ready.get(key)
    if ready is not None and k_at >= LOWEST and v_at >= LOWEST and q_at >= LOWEST:
        INFO.hits += 1
        is_new = False
    else:
        if 0 in (*inputs.extents, v.shape[3]):
            return nothing(bound, output_max, output_rows)
        _check_memory(bound)
        ready, failed_beside = serving(_meanwhile, key, q.device, options, waits)
        ready = ready or _decided(key, bound, output_max, output_rows, waits or failed_beside)
        is_new = before is not None and ready.runner.waits and ready.is_new and not is_capturing(q.device)
    out, lse, max_scores, rows = ready.new_out(), ready.new_stats(), None, None
    tensors, addresses = [k, v, q, out, lse], [k_at, v_at, q_at, out.data_ptr(), lse.data_ptr()]
    if output_max:
        max_scores = ready.new_stats()
        tensors.append(max_scores)
        addresses.append(max_scores.data_ptr())
    if output_rows:
        rows = Rows(ready.new_rows(), ready.runner.raw, ready.provisional)
        tensors.append(rows.values)
        addresses.append(rows.values.data_ptr())
    if extras:
        tensors += (given := extras.named.values())
        addresses += [t.data_ptr() for t in given]
    if is_new:
        begun_beside(functools.partial(before, out, rows), q.device)
    run = ready.runner.run if not is_profiled() else in_range(ready.runner.run, "forward", names_of(score, mask))
    try:
        run(tensors, None if beside else addresses, score and score[1], mask and mask[1], lists)
    except Unusable as why:
        _refuse(ready, why)
    except NotYet as soon:
        _ready.pop(key, None)
        if not must_wait(q.device, options, waits):
            others = _quick(bound, output_max, output_rows)
            waits = others is None
            if others is not None:
                both = before and functools.partial(before, out, rows, meanwhile_raw=others.runner.raw)
                begin = functools.partial(_begin, soon.begin, both)
                _meanwhile[key] = Meanwhile(others, begun_beside(begin, q.device), ready.refusal)
    except Exception as why:
        waits = failed("forward", ready.provisional, why)
    else:
        return out, lse, max_scores, rows
    return forward(bound, output_max=output_max, output_rows=output_rows, waits=waits)


def _check_memory(bound: Bound) -> None:
    for name, tensor in (("query", bound.q), ("key", bound.k), ("value", bound.v)):
        if tensor.data_ptr() < LOWEST:  # of a kind that looks as others do
            check_kind(name, tensor)


def _decided(key: tuple, bound: Bound, output_max: bool, output_rows: bool, waits: bool) -> Ready:
    """What serves calls of a new kind from now on."""
    ready = _ready[key] = _new(bound, output_max, output_rows)
    ready.runner.waits = must_wait(bound.q.device, bound.options, waits)
    return ready


def _quick(bound: Bound, output_max: bool, output_rows: bool) -> Ready | None:
    """What serves calls of a new kind until the kernels that shall are compiled. None if it cannot: these may not mind what is wrong."""
    try:
        others = _new(bound._replace(options=quick(bound.options)), output_max, output_rows)
        others.print()  # before all that nobody waits for
    except Exception as why:
        failed("forward", True, why)
        return None
    others.provisional = True
    return others


def _begin(begin: Callable[[], Job | None], before: Callable[..., None] | None, jobs: list[Job]) -> None:
    """Begin a kernel, amid what `before` begins."""

    def this() -> None:
        job = begin()
        if job is not None:
            jobs.append(job)

    before(jobs, forward=this) if before else this()


def _new(bound: Bound, output_max: bool, output_rows: bool) -> Ready:
    keys = keys_of(bound.score, bound.mask, bound.inputs.extents, bound.lists)
    choice, call = choice_of(bound, keys, output_max=output_max, output_rows=output_rows)
    logs.CHOICE.debug("forward: %s", choice.reasons)
    return Ready(choice, call, bound, output_max, output_rows)


def _refuse(ready: Ready, why: Unusable) -> None:
    _refused[ready.refusal] = str(why)
    logs.CHOICE.info("forward: %s is not used: %s", ready.refusal[0], why)
    _ready.clear()  # others of this case have other lengths


def prepare(
    bound: Bound, *, output_max: bool = False, output_rows: bool = False, before: Callable[..., None] | None = None
) -> tuple[torch.Tensor, Rows | None] | None:
    """Compile what `forward` launches, and launch nothing: out and Rows, unwritten. None where there is nothing to compute. `before` is as
    for `forward`; it is called when the forward kernels are begun beside this process."""
    q, k, v, inputs, _, score, mask, lists, _, _, extras = bound
    if 0 in (*inputs.extents, v.shape[3]):
        return None
    keys = keys_of(score, mask, inputs.extents, lists)
    while True:  # until a kernel is usable
        choice, call = choice_of(bound, keys, output_max=output_max, output_rows=output_rows)
        ready = Ready(choice, call, bound, output_max, output_rows)
        out, rows = ready.new_out(), Rows(ready.new_rows(), ready.runner.raw) if output_rows else None
        others = [
            *([ready.new_stats()] if output_max else []),
            *([rows.values] if rows else []),
            *(extras.named.values() if extras else []),
        ]
        given = [k, v, q, out, ready.new_stats(), *others], None, score and score[1], mask and mask[1], lists
        if before and call.backend != "cpu":
            with contextlib.suppress(Exception):  # whoever needs the kernels is told what is wrong
                ahead = Ready(choice, call, bound, output_max, output_rows)
                begin_only(ahead.runner.launches, [])
                with contextlib.suppress(Unusable):
                    ahead.runner.run(*given)
                before(out, rows, [])
            before = None
        launch_nothing(ready.runner.launches)
        try:
            ready.runner.run(*given)
            return out, rows
        except Unusable as why:
            _refuse(ready, why)


def are_aligned(score: tuple | None) -> bool:
    """Are the addresses of the tensors that a score_mod captures multiples of 16 bytes?"""
    return not score or not any([t.data_ptr() % 16 for t in score[1][: len(score[0].tensors)]])


def nothing(bound: Bound, output_max: bool, output_rows: bool):
    """What `forward` returns where there are no queries, no keys, or no columns."""
    q, v = bound.q, bound.v
    out = output_like(q, v.shape[3]).zero_().to(output_dtype(q, bound.extras))
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
    max_scores = lse.clone() if output_max else None
    if bound.extras and bound.extras.sinks is not None:
        lse = bound.extras.sinks.float()[:, None].expand(lse.shape).clone()  # keys there are none, and every row has its sink
    rows = torch.empty((*lse.shape, 2), dtype=torch.float32, device=q.device)
    return out, lse, max_scores, Rows(rows, False) if output_rows else None


def choice_of(bound: Bound, keys: tuple[Mod | None, Mod | None], **outputs: bool) -> tuple[Choice, Call]:
    """Which kernel serves a call, and what is known of that; `keys` and `outputs` are as for case_of. Raises ValueError if the one that the
    user asks for does not fit."""
    q, k, v, _, scale, score, _, lists, _, options, extras = bound
    outputs["aligned_captures"] = are_aligned(score)
    machine = backend_of(q.device.type), architecture_of(q.device)
    call = case_of((q, k, v), scale, keys, lists and lists.blocks, options, *machine, extras=structure_of(extras), **outputs)
    call = call if extras is None else call._replace(extras=extras.numbers)
    candidates = (*ON_CPU, *CANDIDATES) if options.backend == Cpp.name or call.backend == "cpu" else CANDIDATES
    return choose(candidates, call, options.backend, _refused), call


def is_awaited(choice: Choice, call: Call) -> bool:
    """Do other kernels serve such calls until the chosen one is compiled?"""
    return awaited_in(_meanwhile, (choice.candidate.name, *call.key))


def case_of(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    keys: tuple[Mod | None, Mod | None],
    blocks: Blocks | None,
    options: Options,
    backend: str,
    arch: str,
    *,
    output_max: bool = False,
    output_rows: bool = False,
    extras: Extras = ORDINARY,
    aligned_captures: bool = False,
) -> Call:
    """What the choice and the text of a call's kernels depend on.

    tensors   q, k and v, of which shapes, strides, dtype and alignment count; on the "meta" device they are 16-byte aligned
    keys      what of the bound score_mod and mask_mod changes a kernel (keys_of)
    arch      the row of the tile tables
    aligned_captures   the addresses of the tensors that score_mod captures are multiples of 16 bytes
    """
    q, k, v = tensors
    geometry = geometry_of(q.element_size(), (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride()), strides_like(q, v.shape[3]))
    aligned = (k.data_ptr() | v.data_ptr()) % 16 == 0
    case = ForwardCase(
        q.dtype,
        q.shape[3],
        v.shape[3],
        geometry.units,
        geometry.aligned,
        geometry.tma and wants_tma(options, q.dtype, arch) and aligned,
        blocks,
        options,
        factors_out(scale, extras),
        output_max,
        output_rows,
        are_exact(q.shape[2], k.shape[2], blocks),
        extras=extras,
        values_in_keys=values_in_keys(k, v),
    )
    if arch == "sm_90":
        if aligned_captures and are_copied(case, keys[0]):
            case = case._replace(copies=True)
        if has_larger_tiles(case) and q.device.type == "cuda" and are_few(q.shape[2], q.shape[0] * q.shape[1], multiprocessors(q.device)):
            case = case._replace(few_tiles=True)
    aligned = aligned and q.data_ptr() % 16 == 0
    return Call(case, geometry, (*q.shape[:3], k.shape[2]), q.device, backend, arch, aligned, scale, *keys)
