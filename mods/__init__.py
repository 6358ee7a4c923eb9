"""Recipes: score_mods and mask_mods of the literature, one idea per file.

Each name is a factory that checks its arguments and returns the function to pass to `flex_attention` or
`create_block_mask`; `causal` alone is that function already. The functions they return follow
torch.nn.attention.flex_attention, so they run there too, and they pickle. Nothing here imports more than torch.
`MaskMod` and `ScoreMod` are their types, for annotations.
"""

from ._arguments import MaskMod as MaskMod
from ._arguments import ScoreMod as ScoreMod
from .alibi import alibi, alibi_slopes, alibi_symmetric
from .block_diffusion import block_causal, block_diffusion
from .causal import causal, causal_offset
from .compose import compose_scores
from .differential import differential, differential_lambda
from .dilated_window import dilated_window
from .disentangled import disentangled
from .document import document, document_from_offsets
from .forget_gate import forget_gate
from .gaussian_distances import gaussian_distances
from .global_sliding import global_sliding
from .graph_bias import graph_bias, graph_distances, graph_neighbors
from .invariant_points import invariant_points
from .jagged_window import jagged_window
from .neighborhood import neighborhood
from .prefix_lm import prefix_lm
from .relative_bias import relative_bias, t5_bias, t5_bucket
from .sliding_window import sliding_window, sliding_window_bidirectional
from .softcap import softcap
from .tree import tree
from .within_radius import within_radius
from .yarn_temperature import yarn_temperature

__all__ = [
    "alibi",
    "alibi_slopes",
    "alibi_symmetric",
    "block_causal",
    "block_diffusion",
    "causal",
    "causal_offset",
    "compose_scores",
    "differential",
    "differential_lambda",
    "dilated_window",
    "disentangled",
    "document",
    "document_from_offsets",
    "forget_gate",
    "gaussian_distances",
    "global_sliding",
    "graph_bias",
    "graph_distances",
    "graph_neighbors",
    "invariant_points",
    "jagged_window",
    "neighborhood",
    "prefix_lm",
    "relative_bias",
    "sliding_window",
    "sliding_window_bidirectional",
    "softcap",
    "t5_bias",
    "t5_bucket",
    "tree",
    "within_radius",
    "yarn_temperature",
]
