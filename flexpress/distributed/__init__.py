"""Attention over sequences that are split over ranks (context parallelism).

from flexpress.distributed import ContextPlan

plan = ContextPlan(group, q_len=131072, mask_mod=causal)
q, k, v = (plan.shard(t, dim=2) for t in (q, k, v))      # or made of plan.position_ids in the first place
out = flex_attention(q, k, v, score_mod=alibi(slopes), context=plan)
"""

# The files of this folder:
#
#     plan, layout, assignment           who has which blocks
#     dtensors, parts                    DTensors over batch and heads
#     attention, cached, varlen, shards  the functions for them; shards are of DTensors
#     exchange, heads, agreement         what ranks send each other, and whether they mean the same

from flexpress.distributed.cached import split_cached_attention
from flexpress.distributed.layout import Layout
from flexpress.distributed.plan import ContextPlan

__all__ = ["ContextPlan", "Layout", "split_cached_attention"]
