"""The kernels of masks in C++ as plans: their KernelSpecs."""

from __future__ import annotations

from ..registry import remembered
from ..text.cpp import CPP
from ..text.parameters import numbers, pointer
from ..text.spec import KernelSpec
from .masks import MaskTexts, begins, lists_parameters, starts_parameters


def blocks_spec(texts: MaskTexts, size: tuple[int, int], starts: bool, evaluates: bool, whole_queries: bool) -> KernelSpec:
    """The KernelSpec of cpu_blocks, for blocks of `size`.

    starts         blocks begin where tensors say           evaluates   what bounds cannot decide is evaluated
    whole_queries  with `starts`, a full block has a whole block's queries
    """
    zones = tuple(p for zone in texts.zones for p in zone.parameters)
    own = (
        pointer("status", "int8", "[Zm, Hm, rows, columns]: written"),
        pointer("num_blocks", "int32", "[Zm, Hm, rows]: how many are partial; written"),
        pointer("num_full", "int32", "[Zm, Hm, rows]: how many are full; written"),
        *zones,
        *begins(starts),
        *numbers("Zm", "Hm", "rows", "columns", "Q_LEN", "KV_LEN"),
    )
    parts = *((texts.mask,) if evaluates else ()), texts.verdict, *(zone.text for zone in texts.zones)
    captured = tuple({p.name: p for text in parts for p in text.parameters}.values())
    flags = {
        "LANGUAGE": CPP.name,
        "WRITTEN": ("status", "num_blocks", "num_full", *(p.name for p in zones)),
        "Q_BLOCK": size[0],
        "KV_BLOCK": size[1],
        "STARTS": starts,
        "EVALUATES": evaluates,
        "WHOLE_QUERIES": whole_queries,
        "zones": texts.zones,
    }
    return KernelSpec("cpu_blocks", parts, tuple(flags.items()), "cpu", (*own, *captured))


@remembered("specs of cpu_lists", 16)
def cpu_lists_spec(separate_full: bool, starts: bool) -> KernelSpec:
    """The KernelSpec of cpu_lists."""
    own = (*lists_parameters(separate_full, starts), *numbers("Zm"))
    written = tuple(p.name for p in own if p.name.endswith(("blocks", "indices")))
    flags = {"LANGUAGE": CPP.name, "WRITTEN": written, "SEPARATE_FULL": separate_full, "STARTS": starts}
    return KernelSpec("cpu_lists", (), tuple(flags.items()), "cpu", own)


@remembered("specs of cpu_starts", 16)
def cpu_starts_spec(block: int, sequences: bool) -> KernelSpec:
    """The KernelSpec of cpu_starts, which may write the blocks' sequences too."""
    own = (*starts_parameters(sequences), *numbers("COUNT"))
    flags = {"LANGUAGE": CPP.name, "WRITTEN": ("starts", "sequences"), "BLOCK": block, "SEQUENCES": sequences}
    return KernelSpec("cpu_starts", (), tuple(flags.items()), "cpu", own)
