"""What the driver is asked for, and what follows from its answers. Kernels of few queries and of caches are launched before the kernel
before has ended, and wait for that one's end."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from flexpress import cached_attention, flex_attention, update_cache
from flexpress.codegen.device import cuda
from flexpress.codegen.device.arguments import Numbers
from flexpress.codegen.device.kernel import Kernel
from flexpress.codegen.run.evaluate import evaluate_mod
from flexpress.codegen.run.launch import usable
from flexpress.codegen.run.preview_masks import evaluate_compilation
from support.dense import dense_attention
from support.devices import DEVICES

METADATA = {
    "name": "kernel",
    "shared": 4096,
    "num_warps": 4,
    "num_ctas": 1,
    "global_scratch_size": 0,
    "tensordesc_meta": None,
    "launch_pdl": False,
}


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, with the one value that is used here of its union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    ]


class Library:
    """libcuda, of which every function succeeds, but those for which there are `answers`, to give one after another. `launched`:
    configurations."""

    def __init__(self, version: int, **answers: list[int]) -> None:
        self.version, self.answers, self.launched = version, answers, []

    def answer(self, name: str) -> int:
        return self.answers[name].pop(0) if self.answers.get(name) else 0

    def __getattr__(self, name: str):
        return lambda *_: self.answer(name)

    def cuDriverGetVersion(self, place) -> int:
        place._obj.value = self.version
        return 0

    def cuDeviceGetAttribute(self, place, *_) -> int:
        place._obj.value = 232_448
        return 0

    def cuLaunchKernelEx(self, config, *_) -> int:
        self.launched.append(Config.from_buffer_copy(config))
        return self.answer("cuLaunchKernelEx")


def loaded(monkeypatch, library: Library, **changes) -> cuda.Function:
    """A kernel."""
    monkeypatch.setattr(cuda, "_driver", lambda: library)
    monkeypatch.setattr(cuda, "_threads", SimpleNamespace())
    for function in (cuda.shared_limit, cuda._lets_kernels_begin_early):
        monkeypatch.setattr(cuda, function.__name__, function.__wrapped__)
    return cuda.Function(b"", METADATA | changes, ["*fp32", "i32"], 0)


@pytest.mark.parametrize("early, version, count", [(True, 13000, 1), (True, 12030, 1), (True, 12020, 0), (False, 13000, 0)])
def test_what_the_driver_is_told(monkeypatch, early, version, count):
    library = Library(version)
    kernel = loaded(monkeypatch, library, launch_pdl=early)
    for grid, stream in (((7, 3, 1), 2**40 + 8), ((5, 1, 2), 0)):
        kernel.launch(*grid, stream, [2**50, 11])
        found = library.launched[-1]
        assert (tuple(found.grid), tuple(found.block), found.shared, found.stream or 0) == (grid, (128, 1, 1), 4096, stream)
        assert found.count == count
        assert (found.attributes[0].id, found.attributes[0].value) == (6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert ctypes.sizeof(Config) == cuda._CONFIG.size and ctypes.sizeof(Attribute) == cuda._ATTRIBUTE.size


LOAD, LAUNCH = "cuModuleLoadData", "cuLaunchKernelEx"


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(
    "name, answers", [*((name, answers) for name in (LOAD, LAUNCH) for answers in ([2], [2, 2], [1])), (LAUNCH, [201, 2])]
)
def test_memory_that_torch_keeps_is_given_back(monkeypatch, name, capturing, answers):
    """Where the driver has too little for a kernel: once, and not while a graph is captured, which may use it."""
    given_back = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    fails = answers in ([2, 2], [1]) or 2 in answers and capturing

    def work() -> None:
        loaded(monkeypatch, Library(13000, **{name: [*answers]})).launch(1, 1, 1, 0, [2**50, 11])

    if fails:
        with pytest.raises(cuda.CudaError if answers == [1] else torch.OutOfMemoryError, match=r"ing kernel: unknown error \(CUDA error"):
            work()
    else:
        work()
    assert len(given_back) == (2 in answers and not capturing)


def test_too_little_memory_is_no_reason_for_another_kernel():
    def variant(*_, **__):
        raise torch.OutOfMemoryError("loading hopper_forward: out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        usable(SimpleNamespace(variant=variant), [], torch.device("cpu"), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("sequences, length", [(1, 700), (3, 8000), (40, 1500)])
def test_a_chain_of_layers_computes_what_calls_one_by_one_do(sequences, length):
    """Each layer's queries, keys and values are what the one before has computed: a kernel that did not wait would read older ones."""
    torch.manual_seed(length)
    shape = dict(device="cuda", dtype=torch.bfloat16)
    caches = [torch.randn(2, sequences, length, 2, 64, **shape) for _ in range(12)]  # of layers
    kv_len = torch.full((sequences,), length, device="cuda", dtype=torch.int32)
    start = torch.randn(sequences, 8, 1, 64, **shape)

    def step(wait) -> torch.Tensor:
        x = start
        for k, v in caches:
            wait()
            update_cache(x[:, :2], x[:, 2:4], k, v, kv_len, check=False)
            wait()
            x = cached_attention(x, k, v, kv_len, check=False)
        return x

    assert step(torch.cuda.synchronize).isfinite().all()
    for _ in range(20):
        start.copy_(torch.randn_like(start))
        found = step(lambda: None)
        assert torch.equal(found, step(torch.cuda.synchronize))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(lambda: None)
    for _ in range(20):
        start.copy_(torch.randn_like(start))
        graph.replay()
        assert torch.equal(out.clone(), step(torch.cuda.synchronize))


def test_a_bool_and_an_integer_have_variants_of_their_own(monkeypatch):
    """Also where one kernel takes both: as a bool, 2 would be 1."""
    monkeypatch.setattr(Kernel, "_obtained", lambda self, key, layout, *_: SimpleNamespace(layout=layout))
    mod = lambda score, b, h, q_idx, kv_idx: score * 2  # noqa: E731
    kernel = Kernel(evaluate_compilation("sm_90", mod, "score", "float32").spec)
    memory = torch.empty(64)
    for together in (False, True):
        for number in (True, 2, False, 3, True):
            args = memory, Numbers([number]) if together else number
            variant, plain = kernel.variant(args, torch.device("cpu"), (64, 64))
            assert variant.layout[-1] == ("u1" if isinstance(number, bool) else "i32") and plain[-1] is number


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_bool_before_an_integer(device):
    scores, base = torch.randn(1, 2, 5, 7, device=device), torch.linspace(0.5, 2, 5, device=device).half()
    q, k, v = (torch.randn(1, 2, 20, 16, device=device) for _ in range(3))

    def made(x):
        return lambda score, b, h, q_idx, kv_idx: score * 0 + base[q_idx % 5] ** x

    def shifted(x):
        return lambda score, b, h, q_idx, kv_idx: score + kv_idx * x

    for x in (True, 2, False, 3):
        torch.testing.assert_close(evaluate_mod(made(x), scores)[0, 0, :, 0], (base**x).float(), rtol=1e-3, atol=1e-3)
        out = flex_attention(q, k, v, shifted(x))
        exact, *_ = dense_attention(q, k, v, shifted(x))
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5 if device == "cpu" else 5e-3)
