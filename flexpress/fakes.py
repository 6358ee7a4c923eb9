"""Fake implementations of operators whose arguments users give themselves: what outputs look like, without values."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def fake_of(operator) -> Callable[[Callable], Callable]:
    """As operator.register_fake, but ValueError for a tensor on "meta" beside others. Then torch asks the fake implementation, too, and
    what that makes on another device is memory that nobody has written."""
    names = [argument.name for argument in operator._opoverload._schema.arguments]

    def register(fake: Callable) -> Callable:
        @functools.wraps(fake)
        def on_one_device(*args, **kwargs):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            devices = {name: value.device for name, value in given.items() if isinstance(value, torch.Tensor)}
            shapes_alone = [name for name, device in devices.items() if device.type == "meta"]
            others = [name for name in devices if name not in shapes_alone]
            if shapes_alone and others:
                name, other = shapes_alone[0], others[0]
                raise ValueError(f"{name} is on meta, where no values are, but {other} is on {devices[other]}; pass all of one device")
            return fake(*args, **kwargs)

        return operator.register_fake(on_one_device)

    return register
