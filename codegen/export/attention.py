"""A file with the kernels of flex_attention: what its template asks for."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..mod.expr import INDEX_BOUND
from ..mod.graphs.intervals import analyse
from ..mod.graphs.nan import are_ordinary
from ..mod.table.dtypes import dtype_name
from ..plan.backward import STATS_ALIGNMENT, delta_rows
from ..plan.extras import SMALLEST_SCALE, factors_out
from ..plan.forward import LOG2_E
from ..plan.masks import mask_texts
from ..plan.tiles import BLOCK
from ..text.spelling import literal_text
from .captures import layouts_for_any, named, sinks_of
from .file import File, Kernel, TritonFile, listed, unpacked
from .hopper import HopperPart
from .kernels import Exported, Plans
from .torch_text import torch_text

MASKS = {  # kernel -> grid, suffix of its functions, name of its launch
    "block_zones": ("Z * Hm * (rows + columns)", "", "zones"),
    "block_status": ("Z * Hm * rows * triton.cdiv(columns, launch.constants[0])", "", "status"),
    "block_lists": ("Z * Hm * lines", "", "lists"),
    "transposed_block_lists": ("Z * Hm * lines", "transposed", "transposed_lists"),
}
_QUERIES, _KEYS = "Z * Hq * triton.cdiv(Q_LEN, launch.constants[0])", "Zkv * Hkv * triton.cdiv(KV_LEN, launch.constants[1])"
_ROWS = "Z * Hq * STATS_LEN // launch.constants[0]"
_KERNELS = {
    "forward": (_QUERIES, "", "forward"),
    "forward_with_rows": (_QUERIES, "with_rows", "forward_with_rows"),
    "backward_delta": (_ROWS, "", "delta"),
    "backward_delta_with_lse": (_ROWS, "with_lse", "delta_with_lse"),
    "backward_dkv": (_KEYS, "dkv", "dkv"),
    "backward_dq": (_QUERIES, "dq", "dq"),
    "backward_dkv_whole": (_KEYS, "whole", ""),
    "backward_dq_whole": (_QUERIES, "whole", ""),
    "hopper_delta": (_ROWS, "hopper", "hopper_delta"),
    "hopper_delta_with_lse": (_ROWS, "hopper_with_lse", "hopper_delta_with_lse"),
    "hopper_delta_scaled": (_ROWS, "scaled", "hopper_delta_scaled"),
    "hopper_delta_scaled_with_lse": (_ROWS, "scaled_with_lse", "hopper_delta_scaled_with_lse"),
    **MASKS,
}
_DENSE = 200 << 20  # bytes of a tensor of scores in float64, in the demo
TOLERANCES = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 1e-3}  # of the demo
_MOVING: dict[str, dict[str, int]] = {"head": {}, "row": {"q_idx": 2}, "column": {"kv_idx": 2}}  # what a buffer's last axis is
_AXES = {"head": ".sum(-1)[:, :, None, None]", "row": "[:, :, :, None]", "column": "[:, :, None, :]"}


class Gathered(NamedTuple):
    """A gradient of a captured tensor: the kernel that fills its buffer, how that is made, and what adds it up."""

    step: str
    buffer: str
    made: str
    lines: tuple[str, ...]


class AttentionFile(TritonFile):
    """What exported_attention.jinja asks for. `version` is the package's; captures have no names in `reserved`."""

    template = "exported_attention.jinja"

    def __init__(self, call: Exported, version: str, reserved: frozenset[str]) -> None:
        plans = Plans(call, call.target, None)
        on_target, use_tma = plans.kernels()
        forward_tma = bool(on_target["forward"].spec.flag["USE_TMA"])
        on_cpu, _ = Plans(call, "cpu", forward_tma).kernels(use_tma)
        self.hopper = hopper = HopperPart(plans)
        self.gluon, self.named_tuples = hopper.kernels, call.mask is not None
        on_target |= {name: pair["on_target"] for name, pair in hopper.deltas.items()}
        on_cpu |= {name: pair["on_cpu"] for name, pair in hopper.deltas.items()}
        names = named(call[:2], call.origins, call.wanted, plans.keys, reserved, sinks_of(call.sinks))
        kernels = tuple(
            Kernel(name, grid, on_target[name], on_cpu[name], suffix, called)
            for name, (grid, suffix, called) in _KERNELS.items()
            if name in on_target
        )
        super().__init__(kernels, names, call.score, call.mask, version)
        describe_call(self, call)
        self.target, self.has_transposed = call.target, call.backward and self.mask
        self.tma = forward_tma or bool(use_tma and any(use_tma))
        vector = 16 // call.dtype.itemsize
        self.q_unit, self.v_unit = (vector if d % vector == 0 else 1 for d in (call.d_qk, call.d_v))
        self.scale_apart = plans.forward(False).scale_apart
        self.gathered = ()
        if call.backward:
            self._differentiate(plans, use_tma)
        if self.mask:
            describe_mask(self, call.mask, plans.extents)

    def _differentiate(self, plans: Plans, use_tma: tuple[bool, bool] | None) -> None:
        """What the backward pass asks for."""
        steps = plans.backward(False, False, use_tma)[0]
        self.backward_scale_apart = steps.scale_apart
        self.gathered = self._gathered((("dkv", steps.dkv), ("dq", steps.dq)))
        self.hopper_gathered = self._gathered((("hopper", self.hopper.backward),)) if self.hopper.backward else ()
        dkv = next(kernel for kernel in self.kernels if kernel.name == "backward_dkv")
        tiles = (k.constants["BLOCK_M"] for k in (dkv.on_target, dkv.on_cpu))
        self.stats_step = math.lcm(STATS_ALIGNMENT, *((self.q_block,) if self.mask else tiles))
        self.delta_rows = delta_rows(self.d_v)

    def _gathered(self, steps: tuple) -> tuple[Gathered, ...]:
        """The gradients of captured tensors, in the order of the kernels, named, that leave them."""
        if self.call.score is None:
            return ()
        found, seen = [], set()
        for name, step in steps:
            for captured, load in step.captured:
                tensor = self.of_score[load.attr]
                found.append(self._gathered_of(name, captured, load, tensor, tensor in seen))
                seen.add(tensor)
        return tuple(found)

    def _gathered_of(self, name: str, captured, load, tensor: str, more: bool) -> Gathered:
        """One of them; `more`: others of the tensor were added up before."""
        tiles = "2 * tiles" if name == "hopper" else "tiles"  # one for each consumer
        shapes = {"row": "(Z, Hq, Q_LEN)", "column": "(Z, Hq, KV_LEN)", "head": f"(Z, Hq, {tiles})"}
        buffer, total = captured.buffer, captured.buffer
        if captured.role in shapes:
            made = f"torch.empty({shapes[captured.role]}, dtype=torch.float32, device=device)"
            axes = {"b": 0, "h": 1, **_MOVING[captured.role]}
            kept = [axes.get(index.attr) if index.op == "symbol" else None for index in load.args]
            if kept and None not in kept and len(set(kept)) == len(kept):
                total = f"placed({tensor}, {_summed(buffer, kept)})"
            else:
                return Gathered(name, buffer, made, added(self, captured, load, buffer, f"d_{tensor} + " if more else ""))
        else:
            dtype = f"{tensor}.dtype" if captured.role == "store" else "torch.float32"
            made = f"torch.empty_strided({tensor}.shape, {tensor}.stride(), dtype={dtype}, device=device).zero_()"
        return Gathered(name, buffer, made, (f"d_{tensor} = {f'd_{tensor} + ' if more else ''}{total}",))


def added(file: File, captured, load, buffer: str, plus: str = "", before: str = "") -> tuple[str, ...]:
    """Statements that add what is in a buffer to the elements that a load reads, of a tensor's gradient: `plus` another sum, or into the
    one that is called `before`."""
    count, tensor = len(file.call.score[0].tensors), file.of_score[load.attr]
    places = torch_text(tuple(load.args), file.of_score[:count], file.of_score[count:], f"place_{tensor}_{captured.load}", "float32")
    arguments = [tensor, buffer + _AXES[captured.role], *(f"{place}.long()" for place in places.results)]
    arguments += [f"before={before}"] if before else []
    return *places.lines, f"d_{tensor} = {plus}added({', '.join(arguments)})"


def _summed(buffer: str, kept: list[int]) -> str:
    """A buffer added up over the axes that are not `kept`, which come in this order."""
    others, order = [str(axis) for axis in range(3) if axis not in kept], [sorted(kept).index(axis) for axis in kept]
    text = f"{buffer}.sum(({', '.join(others)},))" if others else buffer
    return text if order == sorted(order) else f"{text}.permute({', '.join(map(str, order))})"


def symbols_of(gathered: tuple[Gathered, ...]) -> str:
    """The targets for positions that adding up gradients needs; nothing if it needs none."""
    return unpacked(line for one in gathered for line in one.lines)


def describe_call(file: File, call: Exported) -> None:
    """What exported_attention.jinja asks for, whatever kernels are written in."""
    file.call, file.backward, file.sinks = call, call.backward, call.sinks is not None
    file.learns_sinks = call.learns_sinks
    file.dtype, file.d_qk, file.d_v = dtype_name(call.dtype), call.d_qk, call.d_v
    file.longest, file.log2_e, file.tolerance = INDEX_BOUND, LOG2_E, TOLERANCES[file.dtype]
    file.scale, file.scale_factors_out = literal_text(call.scale), factors_out(call.scale, call.extras)
    file.least_scale = literal_text(SMALLEST_SCALE)
    file.q_block, file.kv_block = call.size
    numbers = call.score[1][len(call.score[0].tensors) :] if call.score else []
    file.ordinary = call.backward and are_ordinary(numbers) and any(isinstance(n, float) for n in numbers)
    file.wanted = tuple(c.name for c in file.captured if c.wanted)
    file.named = listed(f"d_{name}" for name in file.wanted)
    file.zeros = listed("d_sinks" if name == "sinks" else f"torch.zeros_like({name})" for name in file.wanted)
    converted = [f"d_{name}.to({name}.dtype)" for name in file.wanted]
    file.converted, file.converted_apart = listed(converted), f"({', '.join(converted)}{',' * (len(converted) == 1)})"
    file.returned = listed(f"d_{c.name}" if c.wanted else "None" for c in file.captured if c.of_kernels)
    file.symbols_of = symbols_of
    (Z, Zkv), (Hq, Hkv) = call.batch, call.heads
    file.demo_shapes = {"query": f"{Z}, {Hq}, Q_LEN, {call.d_qk}", "key": f"{Zkv}, {Hkv}, KV_LEN, {call.d_qk}"}
    file.demo_shapes["value"] = f"{Zkv}, {Hkv}, KV_LEN, {call.d_v}"
    file.demo_lengths = ", ".join(map(str, _lengths_of_demo(call)))


def _lengths_of_demo(call: Exported) -> tuple[int, int]:
    """The example's, or as many positions, in whole blocks, as have small tensors of scores in float64: the demo makes some of these."""
    most, (q_len, kv_len) = _DENSE // (8 * max(call.batch[0] * call.heads[0], 1)), call.lengths
    if q_len * kv_len <= most:
        return call.lengths
    shorter = min(q_len, kv_len, _whole(math.isqrt(most)))
    longer = _whole(most // shorter)
    return (min(q_len, longer), shorter) if q_len > kv_len else (shorter, min(kv_len, longer if q_len < kv_len else shorter))


def _whole(positions: int) -> int:
    return positions // BLOCK * BLOCK or max(positions, 1)


def describe_mask(file: File, bound: tuple, extents: tuple) -> None:
    """What _exported_masks.jinja asks for."""
    graph = bound[0]
    file.by_batch, file.by_head, file.by_rules = "b" in graph.symbols, "h" in graph.symbols, analyse(graph).by_rules
    zones = mask_texts(bound, extents, "cpu", layouts_for_any).zones
    file.zones = tuple(
        {"low": z.names[0], "high": z.names[1], "dtype": z.dtype, "extent": "rows" if z.axis == "q_idx" else "columns"} for z in zones
    )
