"""What torch puts around tensors inside of transforms of torch.func, and beside them in forward mode."""

from __future__ import annotations

import contextlib

import torch
from torch.autograd import forward_ad


def has_tangent(tensor: torch.Tensor) -> bool:
    """Has it one in forward mode? One of inference mode has none, and must not be asked."""
    return forward_ad._current_level >= 0 and not tensor.is_inference() and forward_ad.unpack_dual(tensor).tangent is not None


def without_levels(values):
    """A tensor whose values have no derivative, such as integers, without what torch.func's derivatives put around it. What vmap maps
    stays, and so does what is no tensor."""
    functorch, inner = torch._C._functorch, values
    while isinstance(inner, torch.Tensor) and functorch.is_functorch_wrapped_tensor(inner):
        if functorch.is_batchedtensor(inner):
            return values
        inner = functorch.get_unwrapped(inner)
    return inner


def is_mapped(values) -> bool:
    """Does vmap map a tensor, so that each call has its own?"""
    values = without_levels(values)
    return isinstance(values, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(values)


def of_all_calls(name: str, values):
    """As without_levels, of what a block mask is made of. Raises NotImplementedError for what vmap maps; `name` says what it is."""
    if is_mapped(values):
        raise NotImplementedError(
            f"{name} is mapped by vmap, and a block mask is one for all calls: pass mask_mod= to flex_attention in its place, which has "
            "the mask of each"
        )
    return without_levels(values)


@contextlib.contextmanager
def untransformed():
    """For work on tensors that no transform stands for: torch.func sees nothing of it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # there already, where there are transforms

    with temporarily_clear_interpreter_stack():
        yield
