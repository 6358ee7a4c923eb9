"""What changes the softmax beside scores and masks, or tensors' elements: sinks, dropout and scales, as plans see them."""

from __future__ import annotations

from typing import NamedTuple

from ..text.parameters import Parameter, pointer


class Extras(NamedTuple):
    """What changes the softmax beside scores and masks: its structure.

    sinks     the dtype of sinks; "": there are none
    dropout   weights are dropped by their "positions", or by those in "packed" sequences; "": none is
    scales    which of "q", "k" and "v" are to be multiplied by scales
    out       the dtype of the output; "": that of q
    part      this is a part of a batch and of heads, whose first ones dropout's seed comes with
    """

    sinks: str = ""
    dropout: str = ""
    scales: str = ""
    out: str = ""
    part: bool = False

    @property
    def flags(self) -> dict[str, object]:
        """What templates know of it."""
        return {"SINKS": bool(self.sinks), **self.dropout_flags, "SCALES": self.scales}

    @property
    def dropout_flags(self) -> dict[str, object]:
        """What they know of dropout."""
        return {"DROPOUT": self.dropout, "DROPOUT_PART": self.part}

    @property
    def of_sinks(self) -> tuple[Parameter, ...]:
        """The parameters that take sinks."""
        return (pointer("SINKS", self.sinks, "[Hq]: the score of one more key, whose value is 0"),) if self.sinks else ()

    @property
    def of_dropout(self) -> tuple[Parameter, ...]:
        """The parameters that take what says which weights are dropped."""
        places = ("DROP_Q", "DROP_K") if self.dropout == "packed" else ()
        return (pointer("SEED", "int64"), *(pointer(name, "int32") for name in places)) if self.dropout else ()

    @property
    def of_scales(self) -> tuple[Parameter, ...]:
        """The parameters that take scales."""
        return tuple(pointer(f"{name.upper()}_SCALES", "float32", "[Z or 1, Hkv or 1]: to be multiplied by") for name in self.scales)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of its numbers."""
        strides = tuple(f"stride_{name}_scale_{dim}" for name in self.scales for dim in "zh")
        return (*(("DROPPED", "KEPT_SCALE") if self.dropout else ()), *strides)


ORDINARY = Extras()
DROPOUT_STEPS = 1 << 14  # probabilities of dropout are multiples of one over that


def extra_numbers(extras: Extras, p: float, strides: tuple[tuple[int, int], ...] = ()) -> dict[str, int | float]:
    """The values of Extras.numbers, of dropout with probability p and of scales with these strides."""
    names = (f"stride_{name}_scale_{dim}" for name in extras.scales for dim in "zh")
    return {**dropout_numbers(p), **dict(zip(names, (step for pair in strides for step in pair), strict=True))}


def dropout_numbers(p: float) -> dict[str, int | float]:
    """DROPPED: the least number of 14 bits that keeps a weight. KEPT_SCALE: what kept weights are multiplied by, 1 / (1 - p). For p = 1
    that would be infinite, and nothing is kept: it is 0."""
    dropped = round(p * DROPOUT_STEPS)
    return {"DROPPED": dropped, "KEPT_SCALE": DROPOUT_STEPS / (DROPOUT_STEPS - dropped) if dropped < DROPOUT_STEPS else 0.0}


SMALLEST_SCALE = 1e-20  # smaller ones would make TO_LOG2 0, or what is divided by it, such as sinks, infinite


def factors_out(scale: float, extras: Extras) -> bool:
    """May scores stay unscaled, the scale being folded into TO_LOG2? Only a positive one above SMALLEST_SCALE: the row maximum is then at
    the same score. Sinks are divided by it, so with them it must be known on the host, and not be a product with float8 scales."""
    return not (extras.sinks and extras.scales) and scale > SMALLEST_SCALE


def backward_needs_sinks(wanted: bool, scale: float) -> bool:
    """Does a backward pass need the sinks? Yes, if their gradient is wanted, or if the scale is not folded into TO_LOG2 (factors_out)."""
    return wanted or scale <= SMALLEST_SCALE
