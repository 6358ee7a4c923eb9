"""What hooks of saved tensors and dispatch modes see of what is computed, such as those of checkpoints."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .tensors import tracing


def are_saved_elsewhere() -> bool:
    """Do hooks take what autograd saves now? What comes back may be of another forward pass, as checkpoints run one more."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_watched() -> bool:
    """Do hooks of saved tensors, or modes, see what is computed now? Those of checkpoints count it, and want the same again."""
    return are_saved_elsewhere() or torch._C._len_torch_dispatch_stack() > 0


@contextlib.contextmanager
def unwatched():
    """For computations that may be made at one call and not at the next: whoever watches sees none of them."""
    with contextlib.ExitStack() as stack:
        if are_saved_elsewhere():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        if torch._C._len_torch_dispatch_stack() and not tracing():  # by modes that make tensors what they are
            stack.enter_context(_disable_current_modes())
        yield


def _itself(tensor):
    return tensor
