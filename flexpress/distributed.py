"""Attention over sequences that are split over ranks (context parallelism).

from flexpress.distributed import ContextPlan

plan = ContextPlan(group, q_len=131072, mask_mod=causal)
q, k, v = (plan.shard(t, dim=2) for t in (q, k, v))      # or made of plan.position_ids in the first place
out = flex_attention(q, k, v, score_mod=alibi(slopes), context=plan)
"""

from flexpress.context import ContextPlan, Layout
from flexpress.context_cached import split_cached_attention

__all__ = ["ContextPlan", "Layout", "split_cached_attention"]
