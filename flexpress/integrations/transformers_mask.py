"""What the mask function for Hugging Face transformers returns. Models hand it to attention; one that takes it for a tensor is refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves

from flexpress.masks.block_mask import BlockMask

from ..codegen.mod.operators import BINARY, COMPARISONS, UNARY


class TakenForATensor(NotImplementedError, AttributeError):
    """A model asked a Mask for what only tensors have. An AttributeError too, so that hasattr(mask, "size") is False."""


class Mask:
    """A mask (B, H, Q_LEN, KV_LEN): its mask_mod, or None where nothing is hidden, and a BlockMask of it or None.

    Only flexpress's attention function reads it. What a model does to a tensor (scores + mask, mask[..., :9], mask.size()) raises
    NotImplementedError: it computes attention itself, and would do so without any mask if it were given None. `config` is the
    model's, for that message. It is no BlockMask of torch's, as Doge ignores these in the dense masks that it makes.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], mask_mod: Callable | None, block_mask: BlockMask | None = None, config: object = None
    ) -> None:
        self.shape, self.mask_mod, self.block_mask, self.config = shape, mask_mod, block_mask, config

    ndim = 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> Mask:
        """Itself: `generate` asks for that as if it were a tensor."""
        return self

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Mask:
        """The same mask for layers on another device, as accelerate's hooks ask for. Tensors that mask_mod reads stay where they are."""
        if isinstance(device, (torch.dtype, torch.Tensor)):
            raise self.refusal(f"mask.to({device})")
        return self if self.block_mask is None else Mask(self.shape, self.mask_mod, self.block_mask.to(device), self.config)

    def __repr__(self) -> str:
        return f"Mask(shape={self.shape}, block_mask={self.block_mask!r})"

    def refusal(self, what: str) -> TakenForATensor:
        return TakenForATensor(
            f'attn_implementation="flexpress" has no mask tensor, and the model of {type(self.config).__name__} uses one ({what}): it '
            'computes attention or a part of its masks itself. Load it with attn_implementation="eager", or "sdpa" where the model has it'
        )

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "shape" not in vars(self):  # what copy and pickle look for
            raise AttributeError(name)
        raise self.refusal(f"mask.{name}")

    @classmethod
    def __torch_function__(cls, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        """torch calls this for any function of its own that is given a Mask."""
        mask = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Mask))
        raise mask.refusal(getattr(function, "__name__", str(function)))

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, Mask):
            return self is other
        raise self.refusal("mask == value")

    __hash__ = object.__hash__


def _operator(name: str) -> Callable:
    def refused(self: Mask, *_: object) -> object:
        raise self.refusal(name)

    return refused


_OWN = {"__eq__", "__ne__"}  # a mask is compared with None
for _word in (*BINARY, *COMPARISONS, *UNARY):
    for _name in {f"__{_word}__", f"__r{_word}__"} - _OWN:
        setattr(Mask, _name, _operator(_name))
for _name in ("__getitem__", "__setitem__", "__len__", "__iter__", "__contains__", "__bool__"):
    setattr(Mask, _name, _operator(_name))
