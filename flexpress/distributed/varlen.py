"""varlen_attention with a context plan: packed sequences over ranks, which cut them anywhere."""

from __future__ import annotations

from flexpress.distributed.attention import Arguments, attend_packed_in_context
from flexpress.distributed.plan import ContextPlan, check_plan
from flexpress.inputs.checks import check_rank
from flexpress.inputs.dropout import Dropout

from ..codegen.mod.captured.tensors import is_distributed


def attend_varlen_in_context(plan: ContextPlan, arguments: tuple, sinks, max_scores: bool, dropout: Dropout | None) -> tuple:
    """out (local total_q, Hq, Dv), lse and max_scores, or None, of this rank's q, k and v and what follows them in `attend_packed`."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, score_mod, mask_mod, scale, kernel_options, deterministic = arguments
    named, of_plan = {"q": q, "k": k, "v": v}, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "mask_mod": mask_mod}
    check_plan(plan)
    if plan.packing is None:
        raise ValueError("context= must be a plan of packed sequences here: ContextPlan.packed(cu_seqlens, mask_mod=...)")
    for name, stated in of_plan.items():
        if stated is not None:
            raise ValueError(f"with context= the plan has {name}: leave it out, and make another plan for another one")
    for name, tensor in named.items():
        check_rank(name, tensor, "(local tokens, H, D)", may_stand=True)
    if score_mod is not None:
        score_mod = plan.packing.score_mod(score_mod)
    given = Arguments(scale, True, kernel_options, deterministic, max_scores, sinks, dropout)
    if any(map(is_distributed, named.values())):
        from flexpress.distributed.shards import attend_packed_shards_in_context

        return attend_packed_shards_in_context(plan, named, score_mod, given)
    return attend_packed_in_context(plan, tuple(named.values()), score_mod, given)
