"""What return_aux tells of the probabilities of cached_attention.

On a GPU, and in the interpreter, kernels read the cache where it is. Those in C++ look at packed sequences, so that on a CPU the keys of
sequences are copied one after another first.
"""

from __future__ import annotations

import math

import torch

from flexpress.caches.cached_arguments import no_autocast
from flexpress.caches.cached_calls import call_as_it_is, scale_of
from flexpress.caches.cached_mods import causal_from, mask_from, part_of, position_from, score_from
from flexpress.caches.cached_problem import CachedProblem
from flexpress.calls.call import attend
from flexpress.calls.packed_call import in_sequences, packed_call
from flexpress.calls.probabilities import look

from ..codegen.device.cpp_compiler import by_either
from ..codegen.mod.tracing.capture import name_of
from ..codegen.run.cached_statistics import cached_statistics
from ..codegen.run.profiled import in_range, is_profiled
from ..codegen.run.statistics import Statistics, Wanted


def look_at_cache(problem: CachedProblem, max_scores: bool, wanted: Wanted) -> tuple:
    """max_scores and Statistics, as one tuple, with None for what is not wanted: (B, Hq, Q_LEN), or (T, Hq) of ragged queries; column sums
    (B, Hq, positions that a sequence has room for)."""
    where, query = problem.where, problem.query
    room = problem.k_cache.shape[1] * (1 if where.pages is None else where.pages.shape[1])
    if 0 in (*query.shape, *problem.k_cache.shape, room):
        return _of_nothing(problem, max_scores, wanted, room)
    with torch.no_grad(), no_autocast(query):  # what is copied for C++ may be wider than autocast's dtype
        look_at = lambda in_cpp: (_of_copies if in_cpp else _in_place)(problem, max_scores, wanted, room)  # noqa: E731
        run = by_either
        if is_profiled():
            run = in_range(by_either, "cached_statistics", [*map(name_of, filter(None, (problem.score_mod, problem.mask_mod)))])
        most, *found = run(look_at, query.device)
    return most if max_scores else None, *found


def _of_nothing(problem: CachedProblem, max_scores: bool, wanted: Wanted, room: int) -> tuple:
    rows, device = problem.query.shape[:-1], problem.query.device
    sums = problem.where.kv_lens.shape[0], problem.query.shape[1], room  # type: ignore[union-attr]
    return (
        torch.full(rows, -math.inf, dtype=torch.float32, device=device) if max_scores else None,
        torch.zeros(rows, dtype=torch.float32, device=device) if wanted.entropy else None,
        torch.full(rows, -1, dtype=torch.int64, device=device) if wanted.top_index else None,
        torch.zeros(sums, dtype=torch.float32, device=device) if wanted.column_sums else None,
    )


def _in_place(problem: CachedProblem, max_scores: bool, wanted: Wanted, room: int) -> tuple:
    call = call_as_it_is(problem)[0]
    if call is None:
        return _of_nothing(problem, max_scores, wanted, room)
    most, found = cached_statistics(call, wanted)
    return most, *found


def _of_copies(problem: CachedProblem, max_scores: bool, wanted: Wanted, room: int) -> tuple:
    """Of the sequences packed: lengths lie on a CPU, where nobody waits for them."""
    query, where = problem.query, problem.where
    kv_lens: torch.Tensor = where.kv_lens  # type: ignore[assignment]  # a cache has them
    q, ends_q, token = _packed_queries(problem)
    keys, ends_k, sequence, position = _packed_keys(problem, room)
    if where.k_scales is not None:
        q, keys = q.float(), keys.float() * where.k_scales[:, None]
    scale, score_mod = scale_of(problem.scale, problem.score_mod, query)
    at = position_from(problem.q_offset, kv_lens, where.cu_q, query.shape[2])
    score = None if score_mod is None else score_from(part_of(score_mod, "score", q.device, room), at)
    if problem.mask_mod is None:
        mask = causal_from(at, kv_lens)
    else:
        mask = mask_from(part_of(problem.mask_mod, "mask", q.device, room), at, kv_lens)
    # values are not read, but for max_scores: one column will do
    call = packed_call(q, keys, keys[..., :1], ends_q, ends_k, score, mask, scale, sinks=problem.sinks)
    most = attend(call, True, False)[2] if max_scores else None
    found = look(call, wanted, False) if any(wanted) else Statistics()
    top_index, sums = found.top_index, found.column_sums
    if top_index is not None:
        top_index = in_sequences(top_index[0].T, ends_q, ends_k, keys.shape[0]).T[None]
    if sums is not None:
        heads = torch.arange(sums.shape[1], device=sums.device)[:, None]
        sums = sums.new_zeros(kv_lens.shape[0], sums.shape[1], room).index_put((sequence, heads, position), sums[0])
    rows = (most, -math.inf), (found.entropy, 0.0), (top_index, -1)
    return *(t if t is None else _of_rows(t, of_nothing, token, problem) for t, of_nothing in rows), sums


def _packed_queries(problem: CachedProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The queries of all sequences one after another (total, Hq, D), where each one's begin, and which token each is. As kernels read
    offsets: they may say anything, and what is longer than max_q_len is cut."""
    query, where = problem.query, problem.where
    if where.cu_q is None:
        batch, _, q_len, _ = query.shape
        ends = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=query.device)
        return query.transpose(1, 2).flatten(0, 1), ends, torch.arange(batch * q_len, device=query.device)
    offsets = where.cu_q.clamp(0, query.shape[0])
    counts = (offsets[1:] - offsets[:-1]).clamp(0, where.max_q)
    ends, sequence, place = _one_after_another(counts)
    token = offsets[sequence] + place
    return query[token], ends, token


def _one_after_another(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of so many things of each sequence, packed: where each one's begin, and of every thing its sequence and its place there."""
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    sequence = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
    return ends, sequence, torch.arange(sequence.shape[0], device=counts.device) - ends[sequence]


def _of_rows(tensor: torch.Tensor, of_nothing: float, token: torch.Tensor, problem: CachedProblem) -> torch.Tensor:
    """What packed queries (1, Hq, total) have, as lse lies in memory."""
    rows = problem.query.shape[:-1]
    if not problem.is_ragged:
        return tensor[0].T.unflatten(0, (rows[0], rows[2])).transpose(1, 2).contiguous()
    return tensor.new_full(rows, of_nothing).index_put((token,), tensor[0].T)


def _packed_keys(problem: CachedProblem, room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys of all sequences one after another (total, Hkv, D), where each one's begin; and of every key its sequence and position."""
    where, cache = problem.where, problem.k_cache
    lengths = where.kv_lens.clamp(0, room)  # type: ignore[union-attr]
    entries = cache.shape[0]
    if where.kv_locs is not None:
        lengths = torch.where((where.kv_locs >= 0) & (where.kv_locs < entries), lengths, 0)
    ends, sequence, position = _one_after_another(lengths)
    if where.pages is not None:
        entry = where.pages[sequence, position // cache.shape[1]]
        position_there = position % cache.shape[1]
    else:
        entry = sequence % entries if where.kv_locs is None else where.kv_locs[sequence]
        position_there = position
    bits = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # torch indexes no float8
    keys = bits[entry.clamp(0, entries - 1), position_there].view(cache.dtype).to(problem.query.dtype)
    return keys.masked_fill_(((entry < 0) | (entry >= entries))[:, None, None], 0.0), ends, sequence, position
