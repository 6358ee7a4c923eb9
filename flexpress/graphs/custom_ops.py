"""How operators of torch.library are made: on the shortest way to their functions, with lists that may be empty, and with fake
implementations for arguments that users give themselves."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from operator import itemgetter

import torch
from torch.autograd.graph import increment_version
from torch.library import CustomOpDef

from flexpress.versions import torch_writes_operators

from ..codegen.compiling import runs_uncompiled

try:
    from torch._C import _after_ADInplaceOrView_keyset, _any_requires_grad, _AutoDispatchBelowAutograd
    from torch._library.autograd import make_autograd_impl
except ImportError:  # a torch that has other names for them: calls go all the way
    make_autograd_impl = None

_MAY_BE_EMPTY = re.compile(r"\[\] (?=(tensors|ints|floats|lists|starts|wanted)\b)")


_DEVICES = "CPU", "CUDA"


def operator(name: str, mutates_args: tuple[str, ...] = (), **more) -> Callable[[Callable], CustomOpDef]:
    """Decorator, as torch.library.custom_op, for operators in the namespace flexpress."""

    def register(function: Callable):
        made = torch.library.custom_op(f"flexpress::{name}", function, mutates_args=mutates_args, **more)
        if make_autograd_impl is not None:
            _shorten(made, function)
        return made

    return register


def _shorten(made: CustomOpDef, function: Callable) -> None:
    """Have calls of plain tensors, whose gradients nobody wants, run the function at once. Torch's own way there is four functions in
    Python, which in a compiled model take longer than what the function does for a kernel's launch."""
    whole, arguments = make_autograd_impl(made._opoverload, made), made._opoverload._schema.arguments
    needed = [(i, argument.name) for i, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType)]
    mutated = [i for i, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write]
    backends = {getattr(torch._C.DispatchKey, device) for device in _DEVICES}

    def naming_what_is_missing(function: Callable, first: int) -> Callable:
        """The function, whose operator's arguments are those from `first` on; torch's schemas let None pass for a tensor."""

        @runs_uncompiled
        def called(*args, **named):  # those that schemas have by name alone
            try:
                return function(*args, **named)
            except Exception:
                given = args[first:]
                missing = [name for i, name in needed if (given[i] if i < len(given) else named.get(name)) is None]
                if missing:
                    raise TypeError(f"{missing[0]} must be a tensor, got None") from None
                raise

        return called

    def short(keyset, *args, **named):
        followed = (keyset & _after_ADInplaceOrView_keyset).highestPriorityTypeId() not in backends  # by a mode, or a class of tensors
        if followed or (torch.is_grad_enabled() and _any_requires_grad(*args, **named)):
            return whole(keyset, *args, **named)
        for i in mutated:
            increment_version(args[i])
        with _AutoDispatchBelowAutograd():
            return function(*args, **named)

    for device in _DEVICES:
        made._lib.impl(made._name, naming_what_is_missing(short, 1), f"Autograd{device}", with_keyset=True)
        made._lib.impl(made._name, naming_what_is_missing(function, 0), device)  # of tensors of inference mode


def operator_of_mods(name: str) -> Callable[[Callable], CustomOpDef]:
    """As `operator`, where what mods capture and a mask's lists may be None: that is what AOTInductor and torch's C++ wrapper make of an
    empty list."""

    def register(function: Callable):
        if not torch_writes_operators():
            return operator(name)(function)
        schema = torch.library.infer_schema(function, mutates_args=())
        places = [i for i, parameter in enumerate(schema.split(",")) if _MAY_BE_EMPTY.search(parameter)]

        lists_of = itemgetter(*places, places[0])  # a tuple, also of one

        @functools.wraps(function)
        def with_lists(*given):
            if None in lists_of(given):
                given = tuple([] if value is None and i in places else value for i, value in enumerate(given))
            return function(*given)

        return operator(name, schema=_MAY_BE_EMPTY.sub("[]? ", schema))(with_lists)

    return register


def fake_of(made: CustomOpDef) -> Callable[[Callable], Callable]:
    """As register_fake, but ValueError for a tensor on "meta" beside others. Then torch asks the fake implementation, too, and
    what that makes on another device is memory that nobody has written."""
    names = [argument.name for argument in made._opoverload._schema.arguments]

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

        return made.register_fake(on_one_device)

    return register
