"""The kernel that lays out a step of sequences that share pages as a plan: from what is known of tensors to its KernelSpec."""

from __future__ import annotations

from typing import NamedTuple

from ..text.parameters import constants, numbers, pointer
from ..text.spec import KernelSpec

BLOCK_T = 16  # rows of a program


class SharedCase(NamedTuple):
    """What changes the kernel."""

    ragged: bool = False  # queries of all sequences follow one another
    offsets: bool = False  # each sequence says where its first query is


def shared_spec(case: SharedCase, backend: str) -> KernelSpec:
    """The kernel's KernelSpec."""
    tensors = {
        "KV_LENS": "[B]: positions of each sequence",
        "PAGES": "[B, WIDTH]: the pages that hold them",
        "CU_Q": "[B + 1]: where each sequence's queries start among all T, and where the last one's end",
        "Q_OFFSETS": "[B]: the position of each sequence's first query",
        "ORDER": "[B]: numbers of sequences, those of a group one after another",
        "STARTS": "[GROUPS + 1]: where in ORDER each group begins",
        "PREFIX": "[B]: tokens that each sequence shares with its group",
        "SHIFT": "[B]: those that it reads with it; written, as all below",
        "OWN_LENS": "[B]: positions that it reads itself",
        "OWN_PAGES": "[B, WIDTH]: their pages, then -1",
        "OWN_OFFSETS": "[B]: Q_OFFSETS behind the shift",
        "GROUP_STARTS": "[GROUPS + 1]: where the rows of each group begin",
        "TOKEN": "[T]: the token of each row",
        "SEQUENCE": "[T]: its sequence",
        "POSITION": "[T]: its position there",
        "PLACE": "[T]: the row of each token, or -1",
    }
    left_out = {*(() if case.ragged else ("CU_Q",)), *(() if case.offsets else ("Q_OFFSETS", "OWN_OFFSETS"))}
    pointers = [pointer(name, "int32", meaning) for name, meaning in tensors.items() if name not in left_out]
    sizes = numbers("B", "T", *(() if case.ragged else ("Q_LEN",)), "WIDTH", "ROOM", "PAGE_SIZE", "stride_pages")
    flags = {"RAGGED": case.ragged, "OFFSETS": case.offsets}
    return KernelSpec("shared_tables", (), tuple(flags.items()), backend, (*pointers, *sizes, *constants("BLOCK_T")))
