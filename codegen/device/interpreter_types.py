"""Types of tensors in Triton's interpreter, made once.

Every operation there makes a tensor, with a shape of constexprs, and mostly a block type, in dozens of calls: a third of the time of
kernels on small tiles. What they hold follows from an element type and a shape, of which a kernel has a few dozen.
"""

from __future__ import annotations

from triton.language import core

from ..registry import Table

# by the element type's name (every call makes pointer types of its own) and the shape; of tensors of one element by their type's name
_blocks: dict[tuple, dict] = Table("block types of the interpreter", 4096)
_scalars: dict[str, dict] = Table("scalar types of the interpreter", 256)


def keep_types(scope) -> None:
    """Until `scope` is restored, what a block type or a tensor holds is copied from the first one that was made alike."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def block_type(self, element_ty, shape) -> None:
        key = element_ty.name, *[s.value if type(s) is core.constexpr else s for s in shape]
        held = _blocks.get(key)
        if held is None:
            make_type(self, element_ty, shape)
            held = _blocks[key] = {**self.__dict__, "of_tensors": {}}
        self.__dict__.update(held)

    def tensor(self, handle, type) -> None:
        if type.is_block():
            held = type.__dict__.get("of_tensors")
        else:
            held = _scalars.get(type.name)
            if held is None:
                held = _scalars[type.name] = {}
        if held:
            self.__dict__.update(held, handle=handle, type=type)
            return
        make_tensor(self, handle, type)
        if held is not None:
            held.update({name: value for name, value in self.__dict__.items() if name not in ("handle", "type")})  # at once, or not at all

    equal = core.dtype.__eq__
    scope.set_attr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    scope.set_attr(core.block_type, "__init__", block_type)
    scope.set_attr(core.tensor, "__init__", tensor)
