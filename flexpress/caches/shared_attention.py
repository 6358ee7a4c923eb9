"""cached_attention of sequences that begin with the same pages, which are read once for all of them.

The queries of a group's sequences are the queries of one sequence, whose keys are the group's pages. Then each sequence attends to the rest
of its own, and the two results are merged by lse. No kernel knows of groups: the mods do, by tables of rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from flexpress.caches.cached_mods import mask_behind, mask_of_rows, score_behind, score_of_rows
from flexpress.caches.cached_problem import CachedProblem
from flexpress.caches.shared_prefix import SharedPrefix, SharedTables
from flexpress.inputs.cache_checks import CacheTables, described

from ..codegen.mod.graphs.loads import dots_of
from ..codegen.mod.tracing.bind import graph_of
from ..codegen.plan.shared_tiles import BLOCK
from ..codegen.run.call import Cached
from ..codegen.run.launch import Unusable
from ..codegen.run.merge_parts import merge_parts
from ..codegen.run.shared_tables import Laid
from ..codegen.run.shared_tiles import Tiles

LEAST_FILL = 0.5  # of the rows of tiles: with fewer queries the kernel for few of them takes no longer


class Together(NamedTuple):
    """What sequences of a batch attend to together: the groups as sequences, the mods of the batch's own sequences, which of these and
    which position each row of a group is, and what makes tiles for so many heads and programs."""

    score_mod: Callable | None
    mask_mod: Callable | None
    where: Cached
    laid: Laid
    lay: Callable[[int, int], Tiles]


def check_shared(shared, query: torch.Tensor, tables: CacheTables, k_cache: torch.Tensor) -> None:
    """Raises TypeError or ValueError for what is no SharedPrefix of this batch, or SharedTables of other tensors. These are checked."""
    if not isinstance(shared, (SharedPrefix, SharedTables)):
        raise TypeError(f"shared_prefix must be what PageAllocator.shared_prefix returns, got {described(shared)}")
    prefix, kv_len = shared if isinstance(shared, SharedPrefix) else shared.shared, tables.kv_len
    if tables.page_table is None:
        raise ValueError(
            f"shared_prefix is for caches in pages, but k_cache {tuple(k_cache.shape)} comes without page_table; pass page_table, or leave "
            "shared_prefix out"
        )
    if prefix.batch_size != kv_len.shape[0] or prefix.device != kv_len.device:
        raise ValueError(
            f"shared_prefix was made for {prefix.batch_size} sequences on {prefix.device}, but kv_len is {tuple(kv_len.shape)} on "
            f"{kv_len.device}; make one for the batch at hand: pool.shared_prefix(sequences, device=...)"
        )
    if prefix.page_size != k_cache.shape[1]:
        raise ValueError(
            f"shared_prefix has pages of {prefix.page_size} tokens, but k_cache {tuple(k_cache.shape)} has pages of {k_cache.shape[1]}; "
            "make it of the PageAllocator whose pages the cache has"
        )
    if isinstance(shared, SharedTables):
        if tables.cache_loc is not None:
            raise ValueError("tables of a shared_prefix are of each sequence's pages: pass page_table[cache_loc], which they were made of")
        for name in ("kv_len", "page_table", "cu_seqlens_q", "q_offset"):
            _check_same(name, getattr(tables, name), shared.made_of[name])
        queries = query.shape[2 if tables.cu_seqlens_q is None else 0]
        if shared.queries != queries:
            raise ValueError(
                f"shared_prefix holds tables that were made of queries={shared.queries}, but query {tuple(query.shape)} has {queries}; "
                "make them once a step: shared.tables(..., queries=)"
            )


def _check_same(name: str, tensor: torch.Tensor | None, known: torch.Tensor | None) -> None:
    if tensor is known:
        return
    both = tensor is not None and known is not None
    if not both or (tensor.data_ptr(), tensor.shape, tensor.stride()) != (known.data_ptr(), known.shape, known.stride()):
        what = "None" if tensor is None else described(tensor)
        raise ValueError(
            f"shared_prefix holds tables that were made of another {name} ({'None' if known is None else described(known)}) than this "
            f"one ({what}); make them once a step, of the tensors of the step: shared.tables(kv_len, page_table, ...)"
        )


def is_worthwhile(shared: SharedPrefix | SharedTables, problem: CachedProblem) -> bool:
    """Is what need not be read again enough to pay for a second part?"""
    prefix = shared if isinstance(shared, SharedPrefix) else shared.shared
    if not prefix.saves_enough(problem.k_cache, problem.v_cache, problem.tokens, shared is not prefix):
        return False
    return is_possible(prefix, problem)


def is_possible(prefix: SharedPrefix, problem: CachedProblem) -> bool:
    """May a prefix be read once? Not where sequences decide what they attend to alone, and not with a mod that has dot products: a tile
    reads rows of one sequence for them."""
    if problem.batch_invariant or 0 in problem.k_cache.shape or not problem.where.pages.shape[1]:  # type: ignore[union-attr]
        return False
    if not prefix.has_few(problem.tokens):
        return False
    mods = ("score", problem.score_mod), ("mask", problem.mask_mod)
    return not any(mod is not None and dots_of(graph_of(mod, kind, problem.k_cache.device)) for kind, mod in mods)


def may_fill(problem: CachedProblem) -> bool:
    """Are there queries enough for tiles of groups, if all are in one?"""
    return problem.tokens >= LEAST_FILL * BLOCK


def attend_shared(
    attend: Callable, shared: SharedPrefix | SharedTables, problem: CachedProblem, in_tiles: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, by `attend`, which takes one part. in_tiles: by the kernel that has tiles of groups, where it serves; None: if these are
    full enough."""
    query, where, score_mod, mask_mod = problem.query, problem.where, problem.score_mod, problem.mask_mod
    if isinstance(shared, SharedPrefix):
        steps = {"queries": problem.queries, "cu_seqlens_q": where.cu_q, "q_offset": problem.q_offset}
        shared = shared.tables(where.kv_lens, where.pages, **steps)  # type: ignore[arg-type]
    groups, laid = shared.shared, shared.laid
    whole = replace(where, cu_q=laid.starts, max_q=laid.token.shape[0], kv_lens=groups.lengths, pages=groups.pages)
    rest = replace(
        problem,
        where=replace(where, kv_lens=laid.kv_len, pages=laid.pages),
        q_offset=laid.q_offset,
        score_mod=None if score_mod is None else score_behind(score_mod, laid.shift),
        mask_mod=None if mask_mod is None else mask_behind(mask_mod, laid.shift),
    )
    if in_tiles or in_tiles is None and groups.fills(problem.tokens) >= LEAST_FILL:
        together = Together(score_mod, mask_mod, whole, laid, shared.tiles)
        with contextlib.suppress(Unusable):
            return attend(rest, together)
    out, lse = attend(rest)
    # the part of the groups: each is one sequence, whose queries are rows
    tokens = query if problem.is_ragged else query.transpose(1, 2).flatten(0, 1)
    rows = replace(
        problem,
        query=tokens.index_select(0, laid.token),
        where=whole,
        q_offset=laid.starts[:-1],
        score_mod=None if score_mod is None else score_of_rows(score_mod, laid.sequence, laid.position),
        mask_mod=None if mask_mod is None else mask_of_rows(mask_mod, laid.sequence, laid.position),
        sinks=None,
        sees_all=mask_mod is None,  # rows whose queries are not all behind the prefix are not taken, so causal hides nothing
    )
    part, part_lse = attend(rows)
    if problem.is_ragged:
        merge_parts(out.transpose(0, 1)[None], lse.transpose(0, 1)[None], part, part_lse, laid.place)
    else:
        merge_parts(out, lse, part, part_lse, laid.place)
    return out, lse


def check_contents_of(shared: SharedPrefix | SharedTables, kv_len: torch.Tensor, page_table: torch.Tensor) -> None:
    """Raises ValueError if page_table does not begin with the pages that sequences are said to share, or if tables are older than what they
    were made of. Waits for the device."""
    prefix = shared if isinstance(shared, SharedPrefix) else shared.shared
    order, starts, pages = prefix.order.tolist(), prefix.starts.tolist(), prefix.pages.tolist()
    lengths, known = kv_len.tolist(), prefix.prefix.tolist()
    for group, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        for number in order[first:last]:
            count = known[number] // prefix.page_size
            found = page_table[number, :count].tolist()
            if lengths[number] >= known[number] and found != pages[group][:count]:  # a shorter one reads all itself
                raise ValueError(
                    f"shared_prefix says that sequence {number} begins with pages {pages[group][:count]}, but page_table has {found}; "
                    "make it anew when a sequence is freed or truncated"
                )
    if isinstance(shared, SharedTables) and not shared.are_current():
        raise ValueError("shared_prefix holds tables of an earlier step; make them once a step, when kv_len and the others are written")
