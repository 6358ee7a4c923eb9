"""Kernels on NVIDIA GPUs through the driver's own interface (libcuda, by ctypes): load, launch, describe tensors for TMA.

Triton's launcher binds arguments in C code that it builds with the host's compiler, for some versions once per list of argument
types (0.4 s each). A launch is one call of the driver with the addresses of the packed arguments, which needs no
compiler and costs less time on the host.

Source: CUDA driver API reference, sections Module Management, Execution Control and Tensor Map Object Management.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Iterator

import torch

SHARED_LIMIT, DYNAMIC_SHARED, LOCAL_SIZE = 97, 8, 3  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_FUNC_ATTRIBUTE_...
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_OUT_OF_MEMORY = 2
_INVALID_CONTEXT = 201  # of a thread that has not used CUDA yet, or has left torch's context since
_FORMATS = {"i1": "?", "u1": "?", "i32": "i", "i64": "q", "fp32": "f"}  # struct's codes; every pointer is "Q"
# CUtensorMapDataType, which has bytes for float8
_MAP_TYPES = {torch.float32: 7, torch.float16: 6, torch.bfloat16: 9, torch.float8_e4m3fn: 0}
_MAP_BYTES = 128
_CONFIG = struct.Struct("7IPPI4x")  # CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and how many there are
_ATTRIBUTE = struct.Struct("i4xi60x")  # CUlaunchAttribute: which, and its value
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, of kernels that begin early
_BEGINS_EARLY = ctypes.create_string_buffer(_ATTRIBUTE.pack(6, 1), _ATTRIBUTE.size)
_DESCRIPTOR_FIELDS = [f"{_MAP_BYTES}s", *"iiii", *"qqqq"]  # map, sizes and strides
_DESCRIPTOR = struct.Struct("".join(_DESCRIPTOR_FIELDS))


class DoesNotFit(Exception):
    """A kernel needs more shared memory than a block of this device may have."""


class CudaError(RuntimeError):
    """The CUDA driver refused something."""


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    words, pointer = ctypes.c_uint, ctypes.c_void_p  # cuLaunchKernelEx has no argtypes, which would double its time: pointers go as objects
    driver.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    driver.cuFuncGetAttribute.argtypes = [pointer, ctypes.c_int, pointer]
    driver.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    driver.cuCtxSetCurrent.argtypes = [pointer]
    driver.cuTensorMapEncodeTiled.argtypes = [pointer, ctypes.c_int, words, ctypes.c_uint64, *[pointer] * 4, *[ctypes.c_int] * 4]
    return driver


def _version() -> int:
    """That of CUDA which the driver runs: 12030 is 12.3."""
    version = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(version)), "asking for the driver's version")
    return version.value


def driver_version() -> int | None:
    """The major version of CUDA that the driver runs; None if there is no driver."""
    try:
        return _version() // 1000
    except (OSError, CudaError):
        return None


@functools.cache
def _lets_kernels_begin_early() -> bool:
    """CUDA graphs know kernels that do since CUDA 12.3."""
    return _version() >= 12030


def capture_number(stream: int) -> int | None:
    """Which capture into a CUDA graph, of all of this process, is under way on `stream`; None if the driver does not say."""
    ask = getattr(_driver(), "cuStreamGetCaptureInfo_v2", None)
    status, number = ctypes.c_int(), ctypes.c_uint64()
    if (
        ask is None
        or ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
        or status.value != _CAPTURING
    ):
        return None
    return number.value


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        kind = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else CudaError
        raise kind(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


_threads = threading.local()


def _made_room(code: int) -> bool:
    """Had the driver too little memory, for a kernel's code or for what its threads spill, and is what torch keeps of freed memory given
    back now?"""
    if code != _OUT_OF_MEMORY or torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.empty_cache()
    return True


def _enter_context(device: int) -> None:
    """Make torch's context of `device` current in this thread."""
    context = ctypes.c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "retaining the device's context")
    _check(_driver().cuCtxSetCurrent(context), "setting the context")


@contextlib.contextmanager
def unrestricted() -> Iterator[None]:
    """For this thread, what the driver forbids while a CUDA graph is captured, here or by another thread. Loading a kernel is no part of
    a graph, and takes memory; nor is what is allocated for more than one."""
    mode = ctypes.c_int(_RELAXED)
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "letting kernels be loaded")  # `mode` is what it was before
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def shared_limit(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    value = ctypes.c_int()
    _check(_driver().cuDeviceGetAttribute(ctypes.byref(value), SHARED_LIMIT, device), "asking for the shared memory")
    return value.value


class Function:
    """A compiled kernel, loaded on one device.

    code        the cubin
    metadata    Triton's: name, shared, num_warps, tensordesc_meta, ...
    types       Triton's types of the arguments, descriptors first, without tl.constexpr parameters
    """

    def __init__(self, code: bytes, metadata: dict, types: list[str], device: int) -> None:
        if metadata["shared"] > shared_limit(device):
            raise DoesNotFit(
                f"{metadata['name']} needs {metadata['shared']} bytes of shared memory, the device has {shared_limit(device)} for a block"
            )
        if metadata["global_scratch_size"] or metadata["num_ctas"] != 1:
            raise NotImplementedError("kernels with scratch memory or clusters are not launched here")
        driver = _driver()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _enter_context(device)
        with unrestricted():
            answer = driver.cuModuleLoadData(ctypes.byref(module), code)
            if _made_room(answer):
                answer = driver.cuModuleLoadData(ctypes.byref(module), code)
            _check(answer, f"loading {metadata['name']}")
            _check(driver.cuModuleGetFunction(ctypes.byref(function), module, metadata["name"].encode()), f"finding {metadata['name']}")
            _check(driver.cuFuncSetAttribute(function, DYNAMIC_SHARED, metadata["shared"]), "reserving shared memory")
        local = ctypes.c_int()
        _check(driver.cuFuncGetAttribute(ctypes.byref(local), LOCAL_SIZE, function), "asking for the local memory")
        self.local = local.value  # bytes of a thread: what it spills, and arrays
        self.name, self.device, self.shared, self.threads = metadata["name"], device, metadata["shared"], metadata["num_warps"] * 32
        self.handle, self.maps = function, metadata["tensordesc_meta"] or []
        fields = argument_format(types)
        count = len(self.maps)
        self.pack = struct.Struct(f"{_DESCRIPTOR.size}s" * count + "".join(fields[len(_DESCRIPTOR_FIELDS) * count :])).pack_into
        self.buffer = ctypes.create_string_buffer(struct.calcsize("".join(fields)))
        ends = [struct.calcsize("".join(fields[: i + 1])) for i in range(len(fields))]
        starts = [end - struct.calcsize(field) for end, field in zip(ends, fields, strict=True)]
        self.pointers = (ctypes.c_void_p * len(fields))(*(ctypes.addressof(self.buffer) + start for start in starts))
        self.attributes = ctypes.addressof(_BEGINS_EARLY), int(metadata["launch_pdl"] and _lets_kernels_begin_early())
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.lock, self.start = threading.Lock(), driver.cuLaunchKernelEx

    def launch(self, x: int, y: int, z: int, stream: int, args: list) -> None:
        """Launch over a grid; `args` in the order of `types`: descriptors (tma.Descriptor), addresses and numbers."""
        count = len(self.maps)
        self.launch_plain(x, y, z, stream, [*self.expanded(args[:count]), *args[count:]] if count else args)

    def expanded(self, descriptors: list) -> list:
        """Descriptors as the kernel takes them: the bytes of a map, sizes and strides each."""
        return [_expanded(*pair, self.device) for pair in zip(descriptors, self.maps, strict=True)]

    def launch_plain(self, x: int, y: int, z: int, stream: int, args: list) -> None:
        """Launch over a grid; `args` begin with descriptors as `expanded` gives them."""
        if not hasattr(_threads, "entered"):  # a thread that may not have used CUDA yet, such as autograd's
            _enter_context(self.device)
            _threads.entered = True
        with self.lock:
            _CONFIG.pack_into(self.config, 0, x, y, z, self.threads, 1, 1, self.shared, stream, *self.attributes)
            try:
                self.pack(self.buffer, 0, *args, 0, 0)
            except OverflowError:  # a float beyond float32 is infinite there
                args = [ctypes.c_float(a).value if type(a) is float else a for a in args]
                self.pack(self.buffer, 0, *args, 0, 0)
            code = self.start(self.config, self.handle, self.pointers, None)
            if code == _INVALID_CONTEXT:
                _enter_context(self.device)
                code = self.start(self.config, self.handle, self.pointers, None)
            if _made_room(code):
                code = self.start(self.config, self.handle, self.pointers, None)
        if code:
            _check(code, f"launching {self.name}")


def argument_format(types: list[str]) -> list[str]:
    """The kernel's parameters as `struct` writes them.

    A descriptor is its map, four sizes and four strides; behind the last argument stand the two (unused) scratch pointers.
    """
    fields = []
    for place, kind in enumerate(types):
        if kind.startswith("tensordesc"):
            if place and not types[place - 1].startswith("tensordesc"):
                raise ValueError("descriptors come first")
            fields += _DESCRIPTOR_FIELDS
        else:
            fields.append("Q" if kind.startswith("*") else _FORMATS[kind])
    return [*fields, "Q", "Q"]


def _expanded(descriptor, how: dict, device: int) -> bytes:
    """A descriptor as the kernel takes it. Kept on the descriptor, which is used again."""
    key = (how["swizzle"], *how["block_size"])
    kept = descriptor.expanded.get(key)
    if kept is None:
        kept = descriptor.expanded[key] = _DESCRIPTOR.pack(_tensor_map(descriptor, how, device), *descriptor.shape, *descriptor.strides)
    return kept


def _tensor_map(descriptor, how: dict, device: int) -> bytes:
    rank = len(descriptor.shape)
    itemsize = descriptor.base.dtype.itemsize
    room = ctypes.create_string_buffer(_MAP_BYTES + 64)
    start = -ctypes.addressof(room) % 64
    shape = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
    strides = (ctypes.c_uint64 * (rank - 1))(*(s * itemsize for s in reversed(descriptor.strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(how["block_size"]))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    # no interleaving, the kernel's swizzle, promotion to 128 bytes in the L2 cache, zeros outside
    arguments = (
        ctypes.addressof(room) + start,
        _MAP_TYPES[descriptor.base.dtype],
        rank,
        descriptor.base.data_ptr(),
        shape,
        strides,
        box,
        steps,
        0,
        how["swizzle"],
        2,
        0,
    )
    code = _driver().cuTensorMapEncodeTiled(*arguments)
    if code == _INVALID_CONTEXT:
        _enter_context(device)
        code = _driver().cuTensorMapEncodeTiled(*arguments)
    _check(code, f"describing a tensor of shape {tuple(descriptor.shape)} and strides {tuple(descriptor.strides)} for TMA")
    return room.raw[start : start + _MAP_BYTES]
