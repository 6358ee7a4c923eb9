"""Which tensors kernels can read: those that are ordinary memory.

A kernel gets addresses. Tensors that stand for something else (no memory, another layout, several tensors, a value with its sign still to
be turned) have none, or one that means something else. All that is asked of a tensor before its address is taken is asked here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedTensorMixin

from ...compiling import runs_uncompiled
from ...registry import remembered
from .levels import has_tangent, is_one_of_several

_FLOATS, _INTEGERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64), (torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = frozenset((*_FLOATS, *_INTEGERS, torch.uint8, torch.bool))  # of what mods capture

LOWEST = 1 << 32  # address: below is what data_ptr() gives for no memory, the bytes before a view's first element, and hardly anything else
ORDINARY = (torch.Tensor, torch.nn.Parameter)  # what most calls are made with

_transform = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
_traced = torch._C._is_tracing


def check_surroundings(name: str) -> None:
    """Raise NotImplementedError if the public function `name` is called where torch transforms operations: a launch by address is none that
    it could see."""
    if _transform() is not None:
        raise NotImplementedError(
            f"{name} was called inside a transform of torch.func (vmap, grad, jvp, ...), which it does not follow, as flex_attention and "
            "what is made of that does; call it outside"
        )
    if _traced():
        raise NotImplementedError(
            f"{name} was called under torch.jit.trace, which would not record the kernel; trace the parts around it, or use torch.export"
        )


def check_values(function: str, **tensors) -> None:
    """`check_surroundings`, and NotImplementedError where operations are recorded without their values: for functions that are no operators
    there."""
    check_surroundings(function)
    if tracing():
        raise NotImplementedError(
            f"{function} was called where torch records operations without their values (FakeTensorMode, make_fx, torch.export); call it "
            "outside"
        )
    if tensors and forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{function} was called inside torch.autograd.forward_ad.dual_level, which it does not follow; call it outside"
        )
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            check_kind(name, tensor)
            if tensor.is_meta:
                raise NotImplementedError(f"{name} is on meta, where tensors have no values; pass one on 'cuda' or 'cpu'")


@runs_uncompiled
def is_transformed() -> bool:
    """Is a call made inside a transform of torch.func, or in forward mode?"""
    return (_transform() is not None or forward_ad._current_level >= 0) and not _traced()


def is_moving(tensor) -> bool:
    """Does a tensor stand for others in a transform of torch.func, or has it a tangent?"""
    if not isinstance(tensor, torch.Tensor):
        return False
    if _transform() is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return has_tangent(tensor)


def followed(name: str) -> bool:
    """Is the public function `name` called inside transforms that it follows? NotImplementedError for those that it does not."""
    if _traced():
        check_surroundings(name)
    if _transform() is not None:
        kinds = torch._C._functorch.TransformType
        stack = torch._C._functorch.get_interpreter_stack()
        if any(interpreter.key() not in (kinds.Grad, kinds.Jvp, kinds.Vmap) for interpreter in stack):
            raise NotImplementedError(
                f"{name} was called inside a transform of torch.func that printed kernels cannot follow; they follow grad, vjp, jvp, vmap "
                "and what is made of these"
            )
        return True
    return forward_ad._current_level >= 0


def check_still(function: str, *tensors) -> None:
    """`check_surroundings`, and NotImplementedError for tensors with tangents: for functions that have no derivative there."""
    check_surroundings(function)
    if any(map(is_moving, tensors)):
        raise NotImplementedError(
            f"{function} was given a dual tensor with a tangent, and has no forward-mode derivative; flex_attention has"
        )


def is_unseen() -> bool:
    """Is a call neither transformed nor recorded by anybody?"""
    return _transform() is None and not _modes() and not _traced() and forward_ad._current_level < 0


def are_plain(query, key, value) -> bool:
    """Are these ordinary tensors, in a call that nobody records? As far as a quick look shows: what has no strides or no address is found
    where it is asked for them."""
    try:
        return (
            is_unseen()
            and query.__class__ in ORDINARY
            and key.__class__ in ORDINARY
            and value.__class__ in ORDINARY
            and not (query.is_neg() or key.is_neg() or value.is_neg())
        )
    except (AttributeError, RuntimeError):
        return False


def recording(*tensors) -> bool:
    """Is a call to be seen by torch as an operator? Where a dispatch mode is on (torch.compile and torch.export trace in some; counters,
    selective checkpointing and users have others), and for tensors that only stand for others."""
    return bool(_modes()) or any(isinstance(t, torch.Tensor) and (t.is_meta or is_traced_kind(t)) for t in tensors)


def is_recorded(function: str, query, key, value) -> bool:
    """`recording`, for a public function that is an operator then, with a quick look first. Raises as `check_surroundings` does."""
    if are_plain(query, key, value) and not query.is_meta:
        return False
    check_still(function, query, key, value)
    return recording(query, key)


def tracing() -> bool:
    """Does a dispatch mode run operations without their values?"""
    kinds = torch._C._TorchDispatchModeKey
    return bool(_modes()) and any(torch._C._get_dispatch_mode(k) is not None for k in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))


def is_traced_kind(tensor: torch.Tensor) -> bool:
    """Is it one of the kinds by which torch's compiler traces?"""
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor") and type(tensor).__module__.startswith("torch._subclasses.")


def readable_inputs(query, key, value) -> tuple:
    """query, key and value with their negative bit resolved. Raises NotImplementedError for kinds that kernels cannot read."""
    check_surroundings("flex_attention")
    return tuple(readable(name, t) if isinstance(t, torch.Tensor) else t for name, t in (("query", query), ("key", key), ("value", value)))


def is_distributed(tensor) -> bool:
    """Is it a DTensor? Where there is one, its module was imported; we do not, as that takes long."""
    cls = type(tensor)
    module = None if cls in ORDINARY else sys.modules.get("torch.distributed.tensor")
    return module is not None and cls is module.DTensor


def is_pending(tensor) -> bool:
    """Is it the result of a collective for which nobody has waited yet?"""
    cls = type(tensor)
    module = None if cls in ORDINARY else sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and cls is module.AsyncCollectiveTensor


class _Waited(torch.autograd.Function):
    """The tensor of a collective that is done; its gradient is that of the pending one."""

    @staticmethod
    def forward(ctx, pending):
        return pending.wait().detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or one with its values where they are not what lies in its memory, through which gradients flow: of a view with
    the negative bit (`x.conj().imag`) a copy, of a pending collective its result. Raises NotImplementedError for a kind of tensor without
    ordinary memory; `name` says whose it is."""
    if is_pending(tensor):
        tensor = _Waited.apply(tensor)
    check_kind(name, tensor)
    return tensor.resolve_neg()


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raise NotImplementedError unless the tensor is ordinary memory. On devices without kernels nothing is asked."""
    kind = _kind(tensor)
    if kind:
        raise NotImplementedError(f"{name} is {kind}")


def is_causal_bias(tensor: torch.Tensor) -> bool:
    """Is it torch.nn.attention.bias's, which means what it does in torch's function alone? (To import that imports torch's compiler.)"""
    return type(tensor).__name__ == "CausalBias" and type(tensor).__module__ == "torch.nn.attention.bias"


@runs_uncompiled
def _kind(tensor: torch.Tensor) -> str | None:
    """What a tensor is instead of ordinary memory, and what to do."""
    cls = type(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor of a torch.func transform (vmap, grad, jvp, ...), which printed kernels cannot follow; call it outside"
    if tensor.is_nested:
        return "a nested tensor; pack the sequences (varlen_attention, or flex_attention with a document mask) instead"
    if is_causal_bias(tensor):
        return "a CausalBias, whose memory means nothing: scaled_dot_product_attention takes it, others mods.causal or mods.causal_offset"
    if isinstance(tensor, UninitializedTensorMixin):
        return f"an {cls.__name__}, which has no memory yet; run its module once"
    if is_traced_kind(tensor) and _modes():
        return None
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        remedies = {
            "FakeTensor": "it has no memory: kernels need real tensors",
            "DTensor": "pass what this rank has, .to_local(), or all, .full_tensor(); flex_attention takes it beside DTensors",
            "AsyncCollectiveTensor": "wait for it with .wait()",
        }
        return f"a {cls.__name__}, a tensor subclass with operations of its own (__torch_dispatch__); " + remedies.get(
            cls.__name__, "pass the ordinary tensor that it holds, or makes"
        )
    if tensor.is_quantized:
        return "a quantized tensor; pass .dequantize()"
    if tensor.layout is not torch.strided:
        word = "a sparse" if "sparse" in str(tensor.layout) else "a"
        return f"{word} tensor of layout {tensor.layout}; pass .to_dense()"
    if is_one_of_several(tensor):
        return (
            "one of several that is_grads_batched=True, or vectorize=True, hands over at once; use vmap of the backward pass, jacrev, "
            "jacfwd or hessian of torch.func"
        )
    if has_tangent(tensor):
        return "a dual tensor with a tangent, where it cannot be followed; call jvp, or forward_ad, around an eager flex_attention"
    if tensor.device.type in ("cpu", "cuda") and not tensor.is_complex():
        keys = torch._C._dispatch_keys(tensor.resolve_neg()).raw_repr()
        if _transform() is None and keys not in _ordinary_keys(tensor.device):
            return f"a tensor of a kind that kernels cannot read ({torch._C._dispatch_keys(tensor)}); pass .clone()"
        with torch._C.DisableTorchFunction():  # a trace follows what is done with storages
            if tensor.data_ptr() < LOWEST and tensor.numel() and not tensor.untyped_storage().data_ptr():
                return "a tensor whose memory was freed (its storage was resized to 0, as FSDP does); use it while it has memory"
    return None


def check_address(tensor: torch.Tensor) -> None:
    """For one below LOWEST: raise NotImplementedError if the tensor has no memory. One without elements needs none."""
    traced = is_traced_kind(tensor) and tensor.numel() and f"a {type(tensor).__name__}, which has no memory"
    if kind := _kind(tensor) or traced:
        raise NotImplementedError(f"a kernel was to get {kind}; it is {tensor.dtype} {tuple(tensor.shape)}")


@remembered("keys of ordinary tensors", 64)
def _ordinary_keys(device: torch.device) -> frozenset[int]:
    """The dispatch keys of ordinary tensors, of those made in inference mode too: whatever has others is more than memory."""
    found = set()
    for inference in (False, True):
        with torch.inference_mode(inference), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            made = torch.empty(1, dtype=torch.float32, device=device)
            found |= {torch._C._dispatch_keys(t).raw_repr() for t in (made, made[:1])}
    return frozenset(found)


def looks_ordinary(tensor: torch.Tensor) -> bool:
    """Is a tensor ordinary memory, as far as a quick look shows?"""
    try:
        return (
            tensor.__class__ in ORDINARY
            and not tensor.is_neg()
            and tensor.data_ptr() >= LOWEST
            and not tensor.is_nested
            and forward_ad._current_level < 0
        )
    except RuntimeError:  # it has no address
        return False


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """`check_kind`, for a tensor that cannot be copied because it is written, or large: its memory must hold its values."""
    if looks_ordinary(tensor):
        return
    check_kind(name, tensor)
    if tensor.is_neg():
        raise NotImplementedError(
            f"{name} is a view with the negative bit (of x.conj().imag, for example), whose memory holds other values; pass .resolve_neg()"
        )


def read_captured(bound: tuple, device: torch.device, where: str, gather: Callable | None = None) -> None:
    """Make what a bound mod captures readable, in place, after `gather(bound, where)`. Kernels read captured tensors where they lie: on the
    device of the call.

    Raises ValueError for another device, TypeError for a dtype and NotImplementedError for a kind that kernels cannot read.
    """
    if gather is not None:
        gather(bound, where)
    graph, values = bound
    for i, capture in enumerate(graph.tensors):
        tensor = values[i]
        try:  # as looks_ordinary does, without its call
            if (
                tensor.device == device
                and tensor.__class__ in ORDINARY
                and capture.dtype in DTYPES
                and not tensor.is_neg()
                and tensor.data_ptr() >= LOWEST
                and not tensor.is_nested
                and forward_ad._current_level < 0
            ):
                continue
        except RuntimeError:  # it has no address
            pass
        if tensor.device != device:
            check_kind(f"{where} {graph.name} captures {capture.name}, which", tensor)
            raise ValueError(
                f"{where} {graph.name} captures {capture.name}, a tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
                f"but the call is on {device}; move it with .to({str(device)!r})"
            )
        values[i] = readable(f"{where} {graph.name} captures {capture.name}, which", tensor)
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{where} {graph.name} captures {capture.name}, a tensor of {tensor.dtype}, which mods cannot read; convert it "
                "with .to(...), or capture real and imaginary parts"
            )


def savable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As autograd saves it: of a tensor of inference mode, which has no version, a copy."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor


def tensors_in(value):
    """The tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
