"""Printed Gluon kernels on a CPU: enough of the language, on torch tensors, that the kernels for Hopper compute real results.

Every partition of a program is a thread, barriers in shared memory count arrivals and bytes, and blocks lie in shared memory as TMA leaves
them, 128 bytes of columns at a time. One thread runs at a time, as far as it can (turns.py): who does not wait for a block finds it empty,
or has written over it. A product reads shared memory when it is started or when it is waited for, which is drawn. What it leaves in
registers is NaN until then. What a thread stores to shared memory, products and the TMA unit may read behind a fence. Layouts of registers
do not exist here.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import threading
import types
import zlib

import torch

from flexpress.inputs.dropout import philox
from support.ptx import inline_asm_elementwise
from support.turns import Turns


class Pointer:
    """Into a tensor, which strides address as memory."""

    def __init__(self, tensor: torch.Tensor, offset=0) -> None:
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset) -> Pointer:
        return Pointer(self.tensor, self.offset + offset)

    def __sub__(self, offset) -> Pointer:
        return self + -offset

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.tensor.dtype)

    def memory(self) -> torch.Tensor:
        return torch.as_strided(self.tensor, (self.tensor.untyped_storage().nbytes() // self.tensor.element_size(),), (1,), 0)

    def places(self) -> torch.Tensor:
        return torch.as_tensor(self.offset, dtype=torch.int64) + self.tensor.storage_offset()


def _among(pointer: Pointer, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Places, and which of them are asked for; all of those must lie in the tensor's memory."""
    places = pointer.places()
    mask = torch.ones_like(places, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand_as(places)
    assert not ((places < 0) | (places >= len(pointer.memory())))[mask].any(), "an address outside its tensor"
    return places, mask


def load(pointer: Pointer, mask=None, other=0) -> torch.Tensor:
    places, mask = _among(pointer, mask)
    found = pointer.memory()[torch.where(mask, places, 0)] if mask.any() else torch.zeros(places.shape, dtype=pointer.tensor.dtype)
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype))


def store(pointer: Pointer, value, mask=None) -> None:
    places, mask = _among(pointer, mask)
    value = torch.as_tensor(value, dtype=pointer.tensor.dtype).expand_as(places)
    pointer.memory()[places[mask]] = value[mask]


class Unfenced(threading.local):
    """What this thread has stored to shared memory since its last fence, as bytes of `unfenced` tensors."""

    def __init__(self) -> None:
        self.stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fence(self) -> None:
        for unfenced, places in self.stored:
            unfenced[places] = False
        self.stored = []


mine = Unfenced()


class Shared:
    """A part of shared memory, of which the last two extents are a block. What TMA copies lies there 128 bytes of columns at a time.

    unfenced   bool, for the bytes of `memory`: stored to by a thread that has not seen to it that products and the TMA unit find it
    """

    def __init__(self, memory: torch.Tensor, unfenced: torch.Tensor, start: int, shape: tuple[int, ...], slabs: bool) -> None:
        self.memory, self.unfenced, self.start, self.shape, self.slabs = memory, unfenced, start, tuple(shape), slabs

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def layout(self) -> str:
        return "slabs" if self.slabs else "rows"

    def index(self, i) -> Shared:
        assert 0 <= int(i) < self.shape[0], f"buffer {int(i)} of {self.shape[0]}"
        return Shared(self.memory, self.unfenced, self.start + int(i) * math.prod(self.shape[1:]), self.shape[1:], self.slabs)

    def reshape(self, shape) -> Shared:
        return Shared(self.memory, self.unfenced, self.start, shape, self.slabs)

    def slice(self, start, length: int, dim: int = 0) -> Slice:
        return Slice(self.memory, self.unfenced, self.places().narrow(dim, int(start), length))

    def reinterpret(self, dtype, shape, layout) -> Shared:
        memory = self.memory.view(dtype)
        start = self.start * self.dtype.itemsize // dtype.itemsize
        assert start + math.prod(shape) <= len(memory)
        return Shared(memory, self.unfenced, start, shape, layout == "slabs")

    def permute(self, order) -> Slice:
        return Slice(self.memory, self.unfenced, self.places().permute(order))

    def places(self) -> torch.Tensor:
        return _places(self.start, self.shape, 128 // self.dtype.itemsize if self.slabs else None)

    def bytes(self) -> torch.Tensor:
        """The first one of each element."""
        return self.places() * self.dtype.itemsize

    def load(self, _layout) -> torch.Tensor:
        return self.memory[self.places()]

    def store(self, value) -> None:
        assert tuple(value.shape) == self.shape
        self.memory[self.places()] = value.to(self.memory.dtype)
        places = self.bytes()
        self.unfenced[places] = True
        mine.stored.append((self.unfenced, places))

    def fenced(self) -> torch.Tensor:
        """As products and the TMA unit read it."""
        assert not self.unfenced[self.bytes()].any(), "shared memory that a thread has stored to is read without a fence"
        return self.load(None)

    def copy_in(self, value: torch.Tensor) -> None:
        """As the TMA unit writes it."""
        self.memory[self.places()] = value
        self.unfenced[self.bytes()] = False


@functools.lru_cache(4096)
def _places(start: int, shape: tuple[int, ...], width: int | None) -> torch.Tensor:
    """Row after row; or so many columns of all rows after another."""
    if width is None:
        return start + torch.arange(math.prod(shape)).reshape(shape)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    width = min(columns, width)
    return (start + column // width * rows * width + row * width + column % width).reshape(shape)


class Slice(Shared):
    """Places in shared memory."""

    def __init__(self, memory: torch.Tensor, unfenced: torch.Tensor, places: torch.Tensor) -> None:
        self.memory, self.unfenced, self.shape, self._places = memory, unfenced, tuple(places.shape), places

    def slice(self, start, length: int, dim: int = 0) -> Slice:
        return Slice(self.memory, self.unfenced, self._places.narrow(dim, int(start), length))

    def places(self) -> torch.Tensor:
        return self._places


class Barrier:
    """Its phase ends when all have arrived and all bytes are there."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.count, self.pending, self.bytes, self.phase = turns, 0, 0, 0, 0

    def change(self, arrivals: int, more: int) -> None:
        assert self.count, "a barrier that was not initialised"
        self.pending -= arrivals
        self.bytes += more
        assert self.pending >= 0, "too many arrivals"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def arrive(self, count: int) -> None:
        self.change(count, 0)
        self.dawdle()
        self.turns.let_one()

    def wait(self, phase) -> None:
        phase = int(phase)
        self.dawdle()
        self.turns.wait(lambda: self.phase != phase)

    def dawdle(self) -> None:
        """Let all others go on as far as they can, sometimes: one that was told too early writes over what a product, or the TMA unit, is
        to read for this thread."""
        if (running.products or stores.given) and self.turns.draw.random() < 0.5:
            self.turns.let_all()


class Barriers(list):
    """Of which one may go by the name of all."""

    def index(self, i) -> Barrier:
        assert int(i) >= 0
        return self[int(i)]


class Descriptor:
    """Of blocks of a (Z, H, S, D) tensor, or of its transpose if D is not contiguous."""

    def __init__(self, tensor: torch.Tensor, rows: int, columns: int) -> None:
        tensor = tensor if tensor.stride(3) == 1 else tensor.transpose(2, 3)
        assert tensor.dtype.itemsize > 1 or all(n == 1 or s % 16 == 0 for s, n in zip(tensor.stride()[:3], tensor.shape[:3], strict=True))
        self.tensor, self.box, self.dtype, self.layout = tensor, (rows, columns), tensor.dtype, "slabs"
        self.block_type = types.SimpleNamespace(nbytes=rows * columns * tensor.element_size())

    def part(self, at) -> tuple[tuple, tuple]:
        """Where a block that begins `at` lies in the tensor, and what of it does, as slices."""
        z, h, row, column = map(int, at)
        assert column * self.tensor.element_size() % 16 == 0, f"an illegal instruction: TMA copies columns from {column} on"
        inside = 0 <= z < self.tensor.shape[0] and 0 <= h < self.tensor.shape[1] and row >= 0 and column >= 0
        rows, columns = (
            min(n, size - first) if inside else 0 for n, size, first in zip(self.box, self.tensor.shape[2:], (row, column), strict=True)
        )
        rows, columns = max(rows, 0), max(columns, 0)
        return (z if inside else 0, h if inside else 0, slice(row, row + rows), slice(column, column + columns)), (
            slice(0, rows),
            slice(0, columns),
        )


def copy_in(descriptor: Descriptor, at, barrier: Barrier, buffer: Shared) -> None:
    there, here = descriptor.part(at)

    def copy() -> None:
        block = torch.zeros(descriptor.box, dtype=descriptor.dtype)
        if here[0].stop and here[1].stop:
            block[here] = descriptor.tensor[there]
        buffer.copy_in(block.reshape(buffer.shape))
        _one(barrier).change(0, -descriptor.block_type.nbytes)

    _one(barrier).turns.at_some_time(copy)


class Stores(threading.local):
    """What this thread has given to TMA: read when it waits for that and no sooner, and in memory when it waits for that, or ends."""

    def __init__(self) -> None:
        self.given, self.read = [], []

    def give(self, descriptor: Descriptor, at, buffer: Shared, add: bool = False) -> None:
        self.given.append((descriptor, tuple(map(int, at)), buffer, add))

    def wait_until_read(self, *_) -> None:
        self.read += [(descriptor, at, buffer.fenced().reshape(descriptor.box), add) for descriptor, at, buffer, add in self.given]
        self.given = []

    def wait(self) -> None:
        self.wait_until_read()
        for descriptor, at, block, add in self.read:
            there, here = descriptor.part(at)
            if here[0].stop and here[1].stop:
                descriptor.tensor[there] = descriptor.tensor[there] + block[here] if add else block[here]
        self.read = []


stores = Stores()


class Looked(threading.local):
    """Where this thread has looked for a count that others change."""

    at = None


looked = Looked()


def _one(barrier) -> Barrier:
    return barrier[0] if isinstance(barrier, Barriers) else barrier


def initialise(barrier, count: int) -> None:
    _one(barrier).count = _one(barrier).pending = count


mbarrier = types.SimpleNamespace(
    MBarrierLayout=lambda: "barriers",
    init=initialise,
    wait=lambda b, phase: _one(b).wait(phase),
    expect=lambda b, n: _one(b).change(1, n),
    arrive=lambda b, count=1: _one(b).arrive(count),
)
tma = types.SimpleNamespace(async_load=copy_in, async_store=stores.give, store_wait=stores.wait_until_read)


class Layout:
    """Registers have none here."""

    def __init__(self, *_) -> None:
        self.value = self


def allocate(turns: Turns, dtype, shape, layout):
    if layout == "barriers":
        return Barriers(Barrier(turns) for _ in range(shape[0]))
    memory = torch.full((math.prod(shape),), float("nan") if dtype.is_floating_point else -77, dtype=dtype)
    return Shared(memory, torch.zeros(memory.nbytes, dtype=torch.bool), 0, shape, layout == "slabs")


class Product(torch.Tensor):
    """What a product leaves in registers."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed from one is an ordinary tensor

    def reshape(self, shape):
        return super().reshape(shape).as_subclass(Product)

    def permute(self, order):
        return super().permute(order).as_subclass(Product)

    def split(self):
        """Gluon's: the last two of the last dimension."""
        return self.unbind(-1)


class Started:
    """A product: its operands, and its result, of which registers hold NaN until somebody has waited."""

    def __init__(self, a, b, acc, use_acc: bool) -> None:
        self.a, self.b, self.acc = a, b, acc if use_acc else torch.zeros(())
        self.value = None
        self.result = torch.full((a.shape[0], b.shape[1]), float("nan")).as_subclass(Product)
        self.result.started = self

    def compute(self) -> torch.Tensor:
        if self.value is None:
            a, b = (x.fenced() if isinstance(x, Shared) else x for x in (self.a, self.b))
            before = getattr(self.acc, "started", None)  # products on one accumulator follow each other, unwaited for
            self.value = a.float() @ b.float() + (before.compute() if before else self.acc)
        return self.value

    def finish(self) -> None:
        self.result.copy_(self.compute())
        self.result.started = self.a = self.b = self.acc = None


class Running(threading.local):
    """Products that this thread has started, in order."""

    def __init__(self) -> None:
        self.products: list[Started] = []

    def start(self, turns: Turns, a, b, acc, use_acc=True, is_async=False) -> Product:
        assert is_async
        self.products.append(Started(a, b, acc, bool(use_acc)))
        if turns.draw.random() < 0.5:
            self.products[-1].compute()
        return self.products[-1].result

    def wait(self, left: int, deps: tuple):
        while len(self.products) > left:
            self.products.pop(0).finish()
        return deps if len(deps) > 1 else deps[0]


running = Running()


def float_difference(a, b) -> torch.Tensor:
    """As the helper computes it, right for positions from 0 on alone."""
    a, b = ((torch.as_tensor(x) + 0x4B000000).to(torch.int32).view(torch.float32) for x in (a, b))
    return a - b


def fused(a, b, c) -> torch.Tensor:
    """a * b + c with one rounding."""
    a, b, c = (torch.as_tensor(x, dtype=torch.float32).double() for x in (a, b, c))
    return (a * b + c).float()


def where(condition, a, b):
    if isinstance(a, Pointer):
        return a if condition else b
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


def _plain(function):
    def on_tensors(*args, **_):
        return function(*(torch.as_tensor(a) for a in args))

    return on_tensors


def gluon_language(programs: int, program: tuple[int, ...], turns: Turns) -> types.SimpleNamespace:
    """What stands for gluon.language in one of so many programs along the first axis."""

    def atomic_add(pointer, value, sem=None, mask=None):
        if isinstance(value, torch.Tensor) and value.dim():  # places may be the same
            places, mask = _among(pointer, mask)
            pointer.memory().index_add_(0, places[mask], value.expand_as(places)[mask])
            return None
        place = id(pointer.tensor), int(pointer.places())
        if isinstance(value, int) and value == 0:  # somebody waits, and looks once more
            if looked.at == place:
                turns.let_all()
            looked.at = place
        before = load(pointer).clone()
        store(pointer, before + value)
        return before

    def warp_specialize(partitions, *_):
        @torch.no_grad()  # a setting of each thread
        def run(function, args):
            function(*args)
            assert not stores.given, "warps end before TMA has read what they gave to it"
            assert not running.products, "warps end before their products have"
            stores.wait()

        turns.together(functools.partial(run, *partition) for partition in partitions)

    dtypes = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int8", "int32", "int64")}
    dtypes |= {"uint16": torch.uint16, "uint32": torch.int64}  # wide enough
    dtypes |= {"int1": torch.bool, "float8e4nv": torch.float8_e4m3fn}
    layouts = dict.fromkeys(
        ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout", "SwizzledSharedLayout", "DistributedLinearLayout"),
        Layout,
    )
    layouts["NVMMASharedLayout"] = types.SimpleNamespace(get_default_for=lambda *_: "slabs")
    return types.SimpleNamespace(
        **dtypes,
        **layouts,
        constexpr=lambda x: x,
        program_id=lambda axis: torch.tensor(program[axis], dtype=torch.int32),
        num_programs=lambda _: programs,
        atomic_add=atomic_add,
        warp_specialize=warp_specialize,
        load=load,
        store=store,
        allocate_shared_memory=functools.partial(allocate, turns),
        shared_memory_descriptor=Shared,
        static_range=range,
        barrier=lambda: None,
        multiple_of=lambda x, _: x,
        cdiv=lambda a, b: -(-a // b),
        convert_layout=lambda x, *_, **__: x,
        join=lambda a, b: torch.stack((a, b), -1),
        split=lambda x: x.unbind(-1),
        arange=lambda a, b, layout=None: torch.arange(a, b, dtype=torch.int32),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, float("nan"), dtype=torch.float64).fill_(value).to(dtype),
        where=where,
        maximum=_plain(torch.maximum),
        minimum=_plain(torch.minimum),
        exp2=_plain(torch.exp2),
        log=_plain(torch.log),
        log2=_plain(torch.log2),
        div_rn=_plain(torch.div),
        sqrt_rn=_plain(torch.sqrt),
        abs=_plain(torch.abs),
        fma=fused,
        broadcast=lambda a, b: torch.broadcast_tensors(a, b),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
        min=lambda x, axis: x.amin(axis),
        inline_asm_elementwise=inline_asm_elementwise,
        associative_scan=lambda x, axis, _: x.cumsum(axis, dtype=x.dtype),
    )


def limits(to_log2, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's own, without its bits."""
    most = float(re.search(r"return (\S+) / TO_LOG2, STEP", text)[1])
    to_log2 = torch.as_tensor(to_log2, dtype=torch.float32)
    return most / to_log2, torch.exp2(torch.floor(torch.log2(to_log2.double()))).float()


def random_numbers(seed: torch.Tensor, *words) -> tuple[torch.Tensor, ...]:
    """The kernel's own Philox, without numbers that have no sign."""
    return tuple(philox(seed.long(), *torch.broadcast_tensors(*(torch.as_tensor(w, dtype=torch.int64) for w in words))))


class Number(int):
    """An argument that may be converted, as a kernel's may."""

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(self, dtype=dtype)


def run(text: str, name: str, args: tuple, grid: tuple[int, ...] = (2,)) -> None:
    """Run a printed kernel's entry point in the programs of a grid. Tensors are passed as pointers, Descriptors and numbers as they are."""
    text = text.replace(".type.layout", "").replace(".to(gl.float8e4nv, bitcast=True)", ".view(gl.float8e4nv)")
    lines = [line for line in text.splitlines() if not line.strip().startswith(("import triton", "from triton"))]
    code = compile("from __future__ import annotations\n" + "\n".join(lines), name, "exec")
    turns = Turns(zlib.crc32(repr((text, grid, [a for a in args if isinstance(a, int)])).encode()))  # one of its own for every problem

    def program(number: tuple[int, ...]) -> None:
        language = gluon_language(grid[0], number, turns)
        met = 0

        def wait_for_stores() -> None:
            if turns.draw.random() < 0.5:  # other programs must wait for that, too
                turns.let_all()
            stores.wait()

        def meet() -> None:
            """Of two consumers."""
            nonlocal met
            met += 1
            both = met + met % 2
            turns.wait(lambda: met >= both)

        told = set()

        def tell_other(step, CONSUMER) -> None:
            """Arrivals at a barrier are counted: two of one consumer would open it, with nobody there."""
            what = CONSUMER, int(step) & 1
            assert what not in told, "told twice before the other consumer waited"
            told.add(what)

        def wait_for_other(step, CONSUMER) -> None:
            what = 1 - CONSUMER, int(step) & 1
            turns.wait(lambda: what in told)
            told.remove(what)

        namespace = {
            "gl": language,
            "mbarrier": mbarrier,
            "tma": tma,
            "warpgroup_mma": functools.partial(running.start, turns),
            "fence_async_shared": mine.fence,
            "warpgroup_mma_wait": running.wait,
            "builtin": lambda f: f,
            "aggregate": lambda c: c,
            "gluon": types.SimpleNamespace(jit=lambda f=None, **_: f or (lambda g: g), constexpr_function=lambda f: f),
        }
        exec(code, namespace)
        instructions = {  # a GPU's
            "tanh_approx": torch.tanh,
            "float_difference": float_difference,
            "within": lambda position, first, count: (first <= position) & (position < first + count),
            "meet": meet,
            "tell_other": tell_other,
            "wait_for_other": wait_for_other,
            "tell_read": lambda CONSUMER: tell_other(1, CONSUMER),
            "tell_stored": lambda CONSUMER: tell_other(0, CONSUMER),
            "wait_until_read": lambda CONSUMER: wait_for_other(1, CONSUMER),
            "wait_until_stored": lambda CONSUMER: wait_for_other(0, CONSUMER),
            "limits": lambda x: limits(x, text),
            "philox": random_numbers,
            "turned": lambda word, LEFT: (word << LEFT | (word & 0xFFFFFFFF) >> 32 - LEFT) & 0xFFFFFFFF,
            "wait_for_stores": wait_for_stores,
            "tma_add": lambda *args: stores.give(*args, add=True),
        }
        for found in list(namespace):  # exported files may have several of a name, with suffixes
            for own, instruction in instructions.items():
                if found == own or found.startswith(f"{own}_"):
                    namespace[found] = instruction
        namespace[name](*(Pointer(a) if isinstance(a, torch.Tensor) else Number(a) if type(a) is int else a for a in args))
        assert not told, "a consumer was told something and ended before it waited for that"

    turns.together(functools.partial(program, number) for number in itertools.product(*map(range, grid)))
