"""How operators of torch.library are made: their lists, and fake implementations of those whose arguments users give themselves."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch

from flexpress.versions import torch_writes_operators

_MAY_BE_EMPTY = re.compile(r"\[\] (?=(tensors|ints|floats|lists|starts|wanted)\b)")


def operator_of_mods(name: str) -> Callable:
    """As torch.library.custom_op, where what mods capture and a mask's lists may be None: that is what AOTInductor and torch's C++ wrapper
    make of an empty list."""

    def register(function: Callable):
        if not torch_writes_operators():
            return torch.library.custom_op(f"flexpress::{name}", function, mutates_args=())
        schema = torch.library.infer_schema(function, mutates_args=())
        places = [i for i, parameter in enumerate(schema.split(",")) if _MAY_BE_EMPTY.search(parameter)]

        @functools.wraps(function)
        def with_lists(*given):
            found = list(given)
            for place in places:
                found[place] = [] if found[place] is None else found[place]
            return function(*found)

        return torch.library.custom_op(f"flexpress::{name}", with_lists, mutates_args=(), schema=_MAY_BE_EMPTY.sub("[]? ", schema))

    return register


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
