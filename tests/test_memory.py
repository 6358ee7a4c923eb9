"""Memory for what kernels write: on the short way and on torch's own it is the same tensor."""

from __future__ import annotations

import pytest
import torch

from flexpress.codegen.device import memory
from flexpress.codegen.mod.captured.tensors import check_kind
from support.devices import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)


@on_devices
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("shape, strides", [((2, 3, 4), (12, 4, 1)), ((2, 3, 4), (4, 8, 1)), ((0, 3), (3, 1)), ((5,), (1,))])
def test_what_torch_would_give(shape, strides, inference, device):
    where = torch.empty(1, device=device).device
    with torch.inference_mode(inference):
        mine = memory.empty(torch.Size(shape), strides, torch.bfloat16, where)
        theirs = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device=where)
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "grad_fn"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert mine.stride() == theirs.stride() and mine.is_inference() == theirs.is_inference() == inference
        assert torch._C._dispatch_keys(mine).raw_repr() == torch._C._dispatch_keys(theirs).raw_repr()
        check_kind("it", mine)
        assert memory.contiguous(shape, torch.int32, where).is_contiguous()


@on_devices
def test_memory_that_torch_fills(device):
    """Deterministic algorithms fill new memory, by which a missing store is seen."""
    where = torch.empty(1, device=device).device
    torch.use_deterministic_algorithms(True)
    try:
        assert memory.contiguous((64,), torch.float32, where).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_short_way_is_there():
    """In the torches of today; on GPUs that are not NVIDIA's torch's own way serves."""
    assert memory._ALLOCATE["cpu"] is not None
    assert (memory._ALLOCATE["cuda"] is not None) == (torch.backends.cuda.is_built() and torch.version.hip is None)
