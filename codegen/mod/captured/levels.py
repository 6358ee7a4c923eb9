"""What torch puts around tensors inside of transforms of torch.func, and beside them in forward mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_BATCHED = torch._C._parse_dispatch_key("Batched")  # of tensors that autograd's own vmap makes; None in a torch without it


def has_tangent(tensor: torch.Tensor) -> bool:
    """Has it one in forward mode? Inside of an operator, which is below autograd, none has, and none of inference mode: torch must not be
    asked."""
    if forward_ad._current_level < 0 or tensor.is_inference() or torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


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


def is_one_of_several(tensor) -> bool:
    """Is it a tensor of autograd's own vmap, by which is_grads_batched=True and vectorize=True ask for several gradients at once?"""
    return _BATCHED is not None and isinstance(tensor, torch.Tensor) and torch._C._dispatch_keys(tensor).has(_BATCHED)


def each_alone(run: Callable, size: int, tensors, dims) -> tuple:
    """What `run` gives for each of so many calls, stacked in front; None stays. dims: where the tensors have a call's own, or None."""
    calls = [run(*(t if t is None or dim is None else t.select(dim, i) for t, dim in zip(tensors, dims, strict=True))) for i in range(size)]
    return tuple(None if found[0] is None else torch.stack(found) for found in zip(*calls, strict=True))


def one_by_one(backward: Callable) -> Callable:
    """Decorator of an autograd.Function's backward pass: of several at once it is run for each, one after another."""

    @functools.wraps(backward)
    def each(ctx, *gradients):
        several = [is_one_of_several(g) for g in gradients]
        if not any(several):
            return backward(ctx, *gradients)
        # of the first level: the thread that this is in, on a GPU one of autograd's own, does not know of levels
        given = [torch._remove_batch_dim(g, 1, 1, 0) if one else g for g, one in zip(gradients, several, strict=True)]
        size = len(given[several.index(True)])
        found = each_alone(functools.partial(backward, ctx), size, given, [0 if one else None for one in several])
        return tuple(t if t is None else torch._add_batch_dim(t, 0, 1) for t in found)

    return each


@contextlib.contextmanager
def untransformed():
    """For work on tensors that no transform stands for: torch.func sees nothing of it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # there already, where there are transforms

    with temporarily_clear_interpreter_stack():
        yield
