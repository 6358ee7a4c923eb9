"""Kernels for head dims beyond 256 compile for GPUs that are not here, and fit their shared memory."""

from __future__ import annotations

import pytest

from flexpress.codegen.device import offline
from flexpress.codegen.gpus import SHARED_MEMORY
from flexpress.codegen.run.preview import Compilation, backward_compilations, compilation, decode_compilations, hopper_decode_compilation
from flexpress.commands.recipes import make
from support.tritons import PINNED, chosen, further, last_stage

LATENT = dict(head_dim=576, head_dim_v=512, values_in_keys=True)
MAKERS = {
    "forward d512": lambda target: {"": compilation(target, *make("causal"), head_dim=512)},
    "forward d576, 512": lambda target: {"": compilation(target, *make("causal"), **LATENT)},
    "forward d320 fp32": lambda target: {"": compilation(target, *make("alibi"), "float32", head_dim=320)},
    "decode d512": lambda target: decode_compilations(target, *make("plain"), head_dim=512),
    "decode d576, 512, 64 rows": lambda target: decode_compilations(target, *make("causal"), **LATENT, group=64),
    "decode d576, 512, pages": lambda target: decode_compilations(target, *make("plain"), **LATENT, group=16, page_size=16),
    "hopper decode, pages": lambda _: {
        "decode": hopper_decode_compilation(*make("alibi"), **LATENT, page_size=64, lengths=True, balanced=True)
    },
    "hopper decode, lists": lambda _: {
        "decode": hopper_decode_compilation(*make("softcap", "causal"), **LATENT, page_size=16, lengths=True, ragged=True, split=False)
    },
    "hopper decode d320, 256": lambda _: {
        "decode": hopper_decode_compilation(*make("causal"), head_dim=320, head_dim_v=256, lengths=True, located=True)
    },
    "backward d512": lambda target: backward_compilations(target, *make("alibi", "causal"), head_dim=512),
    "backward d576, 512": lambda target: backward_compilations(target, *make("causal"), head_dim=576, head_dim_v=512),
}
FOR_HOPPER = {
    "forward d320 fp32",
    "decode d512",
    "backward d512",
    *(name for name in MAKERS if name.startswith("hopper")),  # which is for it
}  # others have the same loops with more columns
SPILLED = {  # bytes at most, by case and kernel, on any target under any Triton that is tested
    ("forward d576, 512", ""): 164,
    ("decode d512", "decode"): 12,
    ("decode d576, 512, 64 rows", "decode"): 304,
    ("hopper decode, lists", "decode"): 4,  # Triton 3.9
    ("backward d512", "dv"): 184,
    ("backward d576, 512", "dk"): 84,
    ("backward d576, 512", "dv"): 208,
}


def kernels_of(case: str, target: str) -> dict[str, Compilation]:
    return {name: kernel for name, kernel in MAKERS[case](target).items() if isinstance(kernel, Compilation)}


FEW = chosen({case: [kernel.spec for kernel in kernels_of(case, "sm_90").values()] for case in MAKERS})


def targets_of(case: str) -> list[str]:
    return ["sm_90"] if not PINNED or case in FOR_HOPPER else list(offline.TARGETS)


@pytest.mark.parametrize("case, target", [(case, target) for case in MAKERS for target in targets_of(case)])
def test_wide_heads_compile_and_fit(case, target, every_kernel):
    number = list(MAKERS).index(case)
    if PINNED:  # every second one, as the others have the same loops with other flags; backward kernels, which take long, for Hopper alone
        few = target == "sm_90" if case.startswith("backward") else further(target, number)
        last = None if every_kernel or number % 2 == 0 and few else "ttgir"
    else:
        last = last_stage(case, FEW, (), every_kernel)
    for name, kernel in kernels_of(case, target).items():
        made = kernel.compile(last)
        if last:
            continue
        assert made.shared <= SHARED_MEMORY[target], name
        assert (made.spilled or 0) <= SPILLED.get((case, name), 0), name
        assert not made.warnings, name


def test_table_of_spills_names_cases():
    assert {case for case, _ in SPILLED} | FOR_HOPPER <= set(MAKERS)
