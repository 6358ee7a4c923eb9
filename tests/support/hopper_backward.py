"""Plans of the backward kernel for Hopper."""

from __future__ import annotations

import torch

from flexpress.codegen.mod.tracing.bind import bind
from flexpress.codegen.plan.backward import BackwardCase
from flexpress.codegen.plan.forward import Blocks
from flexpress.codegen.plan.hopper_backward import HopperBackwardPlan, plan_hopper_backward
from flexpress.codegen.run.imagined import EXTENTS
from flexpress.codegen.text.layouts import layouts_of
from flexpress.commands.recipes import make

PLAIN = BackwardCase(torch.bfloat16, 128, 128, use_tma=(True, True))


def planned(mods: str | tuple, changes: dict) -> HopperBackwardPlan:
    """The plan for mods, or recipes' names, in a case that differs from PLAIN by `changes`."""
    score_mod, mask_mod = make(*mods.split()) if isinstance(mods, str) else mods
    bound = [bind(mod, kind) if mod else None for mod, kind in ((score_mod, "score"), (mask_mod, "mask"))]
    case = PLAIN._replace(**{"blocks": Blocks(True, 128, 128) if mask_mod else None, **changes})
    return plan_hopper_backward(case, *((b[0], layouts_of(*b, EXTENTS)) if b else None for b in bound))
