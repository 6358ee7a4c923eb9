"""Tensors in host memory that pass for a Hopper GPU's, so that everything up to a launch runs without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch

from flexpress.codegen.device import binary, devices, kernel, tma
from flexpress.codegen.device.arguments import one_by_one
from flexpress.codegen.run import backward, backward_kernels, decode, decode_kernels, forward, forward_kernels, prefill, shared_parts
from flexpress.codegen.run import launch as launch_module
from flexpress.codegen.run.launch import Launch
from flexpress.codegen.text.render import render
from support import fake_gluon


class Variant:
    """In place of a compiled kernel. `local`: bytes spilled."""

    def __init__(self, name: str = "", local: int = 0) -> None:
        self.name, self.local, self.function = name, local, self

    def expanded(self, descriptors: list) -> list:
        return [(d.base.address, tuple(d.shape), tuple(d.strides), tuple(d.block_shape)) for d in descriptors]

    def launch(self, grid, args, _) -> None:
        """The long way; `args` may hold descriptors."""
        assert all(type(arg) in (int, float, bool) or hasattr(arg, "block_shape") for arg in args)

    def launch_plain(self, x, y, z, _, args) -> None:
        """The short way, with expanded descriptors."""


def pass_for_hopper(monkeypatch, variant: Callable[[str], Variant], multiprocessors: int = 5, beside: bool = False) -> None:
    """`variant` makes what stands for the compiled kernel with a printed file's name.

    beside   kernels may be compiled by processes beside, which would be real ones, and begun by threads, which take memory
    """
    for module in (devices, forward, backward, decode):
        monkeypatch.setattr(module, "backend_of", lambda _: "cuda")
    for module in (kernel, forward_kernels, backward_kernels, decode_kernels, launch_module):
        monkeypatch.setattr(module, "on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(devices, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(binary, "obtain", lambda name, *_: (variant(name), False))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # as the index of "cpu"
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    if not beside:
        monkeypatch.setattr(forward, "begun_beside", lambda *_: [])

    def descriptor(t, rows, columns=None):
        columns = columns or tma.round_up_head_dim(t.shape[3])
        return tma.descriptor_at(t.data_ptr(), t.dtype, t.shape, t.stride(), rows, columns)

    monkeypatch.setattr(launch_module, "descriptor", descriptor)
    for module in (forward_kernels, backward_kernels, prefill, shared_parts):
        monkeypatch.setattr(module, "multiprocessors", lambda _: multiprocessors)
    monkeypatch.setattr(backward_kernels, "worthwhile", lambda *_: None)


def forward_on_cpu(monkeypatch, run: bool = True) -> list:
    """A Hopper GPU of which the forward kernel runs in a stand-in for Gluon. The list gets every Launch."""
    launched = []
    pass_for_hopper(monkeypatch, Variant)

    def persistent(launch, tensors, captured, tiles, limit, programs):
        launched.append(launch)
        if run:
            tensors["O"].fill_(float("nan"))
            tensors["COUNTER"] = torch.zeros(2, dtype=torch.int32)
            with monkeypatch.context() as patch:
                patch.setattr(launch_module, "descriptor", fake_gluon.Descriptor)
                arguments = launch.arguments(tensors, captured, {})
            fake_gluon.run(render(launch.spec), "hopper_forward", tuple(one_by_one(arguments)))
            assert not tensors["COUNTER"].any()

    monkeypatch.setattr(forward_kernels, "persistent", persistent)
    monkeypatch.setattr(forward_kernels, "worthwhile", lambda *_: None)
    return launched


def prefixes_on_cpu(monkeypatch, multiprocessors: int = 5) -> list:
    """A Hopper GPU of which the kernel over shared prefixes runs in a stand-in for Gluon, and all others in Triton's interpreter. The list
    gets every Launch of the former."""
    launched = []
    pass_for_hopper(monkeypatch, Variant, multiprocessors)
    monkeypatch.setattr(decode, "backend_of", lambda kind: kind)
    monkeypatch.setattr(decode, "multiprocessors", lambda _: multiprocessors)
    monkeypatch.setenv("FLEXPRESS_CPU", "interpreter")

    def persistent(launch, tensors, captured, tiles, limit, programs):
        launched.append(launch)
        tensors["COUNTER"] = torch.zeros(2, dtype=torch.int32)
        for name in ("PART", "PART_SHARE", "PART_MAX"):
            tensors[name].fill_(float("nan"))
        with monkeypatch.context() as patch:
            patch.setattr(launch_module, "descriptor", fake_gluon.Descriptor)
            arguments = launch.arguments(tensors, captured, {})
        fake_gluon.run(render(launch.spec), "hopper_forward", tuple(one_by_one(arguments)))
        assert not tensors["COUNTER"].any()

    monkeypatch.setattr(forward_kernels, "persistent", persistent)
    return launched


def decode_on_cpu(monkeypatch) -> list:
    """A Hopper GPU of which the decode kernel runs in a stand-in for Gluon, and combine_splits in Triton's interpreter. The list gets every
    Launch of the former."""
    launched = []
    pass_for_hopper(monkeypatch, Variant)

    def if_usable(launch, tensors, captured, grid, *_):
        launched.append(launch)
        with monkeypatch.context() as patch:
            patch.setattr(launch_module, "descriptor", fake_gluon.Descriptor)
            arguments = launch.arguments(tensors, captured, {})
        fake_gluon.run(render(launch.spec), "hopper_decode", tuple(one_by_one(arguments)), grid)

    combine = Launch.with_constants

    def with_constants(launch, constants, tensors, captured, grid, device):
        if launch.spec.template == "combine_splits":
            launch = Launch(replace(launch.spec, backend="cpu"), launch._numbers, launch._order)
        combine(launch, constants, tensors, captured, grid, device)

    monkeypatch.setattr(Launch, "if_usable", if_usable)
    monkeypatch.setattr(Launch, "with_constants", with_constants)
    return launched
