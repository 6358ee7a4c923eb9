"""Sequences of a batch that begin with the same pages: which ones, and what a step needs to read those pages once.

PageAllocator.shared_prefix makes a SharedPrefix when the batch changes; SharedPrefix.tables makes SharedTables once a step, for all layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.types import Device

from flexpress.inputs.cache_checks import check_table, described
from flexpress.inputs.checks import check_rank, whole
from flexpress.inputs.plain_arguments import device_or_default

from ..codegen.plan.shared_tiles import BLOCK
from ..codegen.run.call import values_in_keys
from ..codegen.run.shared_tables import Laid, lay_out
from ..codegen.run.shared_tiles import Tiles, lay_tiles

LEAST_BYTES = 96 << 20  # of keys and values that need not be read again; below, what the second part launches takes longer than reading
QUERIES = 64  # for as many it must be as much again: two results of each are written and merged
TABLES_TIMES = 1.25  # as much, where the call makes the tables itself
MOST_QUERIES = 64  # of a sequence, on average; more fill tiles of their own, and reading is not what they wait for
_TENSORS = "order", "starts", "lengths", "pages", "prefix"


@dataclass(eq=False)
class SharedPrefix:
    """Groups of a batch's sequences whose first pages are the same. Made by `PageAllocator.shared_prefix`.

    Its tensors are int32 on one device, of shapes that follow from the number of sequences B, `groups` and `width`. So a CUDA graph that
    was captured with one sees what `update` copies into it.

    order         (B,): numbers of the batch's sequences, those of a group one after another, those of no group last
    starts        (groups + 1,): where in `order` each group begins, and where the last one ends
    lengths       (groups,): tokens that a group shares, a multiple of page_size; 0 for a group that is not there
    pages         (groups, width): the pages that hold them; then -1
    prefix        (B,): tokens that each sequence shares with its group; 0 for those of no group
    page_size     tokens of a page
    tokens_saved  tokens whose keys and values need not be read again: for each group, its length times its members but one
    groups        of each group, tokens that it shares and how many sequences it has, as the host knows them
    """

    order: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor
    prefix: torch.Tensor
    page_size: int
    tokens_saved: int
    groups: tuple[tuple[int, int], ...] = ()

    @property
    def options(self) -> dict[str, torch.Tensor | list[int]]:
        """What the operator `mha_with_paged_cache` takes of it, by name: its tensors, and numbers that the host knows."""
        tensors = {f"shared_{name}": getattr(self, name) for name in _TENSORS}
        return {**tensors, "shared_groups": [n for group in self.groups for n in group]}

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None], groups: Sequence[int], page_size: int) -> SharedPrefix | None:
        """From `options`; None if no tensor is there. Raises ValueError or TypeError for what is none of these."""
        if all(t is None for t in tensors):
            return None
        device = next(t.device for t in tensors if t is not None)
        for name, tensor in zip(_TENSORS, tensors, strict=True):
            check_table(f"shared_{name}", tensor, (None,) * (2 if name == "pages" else 1), torch.int32, device)
        order, starts, lengths, pages, prefix = given = [t for t in tensors if t is not None]
        if prefix.shape != order.shape or not starts.shape[0] - 1 == lengths.shape[0] == pages.shape[0] or len(groups) % 2:
            shapes = ", ".join(f"shared_{name} {tuple(tensor.shape)}" for name, tensor in zip(_TENSORS, given, strict=True))
            raise ValueError(f"{shapes} and {len(groups)} shared_groups do not belong together; pass all of SharedPrefix.options")
        known = tuple(zip(groups[::2], groups[1::2], strict=True))
        return cls(*given, page_size, sum(length * (members - 1) for length, members in known), known)

    @property
    def batch_size(self) -> int:
        """Sequences of the batch."""
        return self.order.shape[0]

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.order.device

    def pays(self, k_cache: torch.Tensor, v_cache: torch.Tensor, *, queries: int, tables: bool = True) -> bool:
        """Does cached_attention read the prefixes once, or does it go the usual way, which is faster? Known on the host.

        k_cache, v_cache   as for cached_attention
        queries   tokens in query, of all sequences
        tables    the call gets `tables` that were made before, not this object

        For whoever captures CUDA graphs with sharing and without, and chooses one for a step. (A mod that has dot products of rows goes
        the usual way in any case.)
        """
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_rank(name, cache, "(pages, page size, Hkv, D)", may_stand=True)
        return self.saves_enough(k_cache, v_cache, whole("queries", queries), tables)

    def saves_enough(self, k_cache: torch.Tensor, v_cache: torch.Tensor, queries: int, tables: bool) -> bool:
        """The same of arguments that are checked: every layer of a step asks."""
        if not self.tokens_saved or not self.has_few(queries) or 0 in k_cache.shape:
            return False
        columns = k_cache.shape[3] + (0 if values_in_keys(k_cache, v_cache) else v_cache.shape[3])
        saved = self.tokens_saved * k_cache.shape[2] * columns * k_cache.element_size()
        return saved >= LEAST_BYTES * (1 + queries / QUERIES) * (1 if tables else TABLES_TIMES)

    def has_few(self, queries: int) -> bool:
        """Are these queries so few a sequence that reading keys is what they wait for?"""
        return 0 < queries <= MOST_QUERIES * self.batch_size

    def fills(self, queries: int) -> float:
        """Which part of the rows of tiles are queries, where groups have tiles of their own, weighted by the keys that they attend to;
        `queries` of all sequences together. 0 if nothing is shared."""
        of_each, rows, padded = whole("queries", queries) / self.batch_size, 0.0, 0
        for length, sequences in self.groups:
            rows += length * sequences * of_each
            padded += length * BLOCK * math.ceil(sequences * of_each / BLOCK)
        return rows / padded if padded else 0.0

    def update(self, other: SharedPrefix | None) -> None:
        """Copy another one, of a batch of as many sequences, into this one's tensors; None: nothing is shared any more.

        A captured call goes on as it was captured: with sharing or without. It is right in both cases. Raises ValueError if shapes or page
        sizes differ.
        """
        if other is None:
            for tensor in (self.starts, self.lengths, self.prefix):
                tensor.zero_()
            self.tokens_saved, self.groups = 0, ()
            return
        if not isinstance(other, SharedPrefix):
            raise TypeError(f"other must be a SharedPrefix, from shared_prefix(...) of a pool, or None, got {described(other)}")
        shapes = [[tuple(getattr(one, name).shape) for name in _TENSORS] + [one.page_size] for one in (self, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"shared_prefix has tensors of shapes {shapes[0][:-1]} and pages of {self.page_size} tokens, the other {shapes[1][:-1]} "
                f"and {other.page_size}; make both for as many sequences, with the same groups= and width="
            )
        for name in _TENSORS:
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)
        self.tokens_saved, self.groups = other.tokens_saved, other.groups

    def tables(
        self,
        kv_len: torch.Tensor,
        page_table: torch.Tensor,
        *,
        queries: int,
        cu_seqlens_q: torch.Tensor | None = None,
        q_offset: torch.Tensor | None = None,
    ) -> SharedTables:
        """What a step needs to know of its sequences; to be passed to cached_attention of each layer, with the same tensors.

        kv_len, page_table, cu_seqlens_q, q_offset   as for cached_attention
        queries   tokens in query: its first extent with cu_seqlens_q, else queries of each sequence

        Made on the device, by the first call that reads a prefix once; the host does not wait. Under a CUDA graph, make it in the graph: it
        is then made anew at each replay. Raises ValueError or TypeError for tensors of another batch, device or dtype.
        """
        tensors = {"kv_len": kv_len, "page_table": page_table, "cu_seqlens_q": cu_seqlens_q, "q_offset": q_offset}
        for name, tensor in tensors.items():
            if tensor is not None:
                self._check(name, tensor, self.batch_size + (name == "cu_seqlens_q"), 2 if name == "page_table" else 1)
        return SharedTables(self, tensors, whole("queries", queries))

    def _check(self, name: str, tensor: torch.Tensor, extent: int, rank: int) -> None:
        check_table(name, tensor, (None,) * rank, torch.int32, tensor.device if isinstance(tensor, torch.Tensor) else self.device)
        if tensor.shape[0] != extent or tensor.device != self.device:
            raise ValueError(
                f"shared_prefix was made for {self.batch_size} sequences on {self.device}, but {name} is {tuple(tensor.shape)} on "
                f"{tensor.device}; make one for the batch at hand: pool.shared_prefix(sequences, device=...)"
            )


@dataclass(eq=False)
class SharedTables:
    """What a step needs, made once for all layers by `SharedPrefix.tables`.

    shared    what they are of
    made_of   the tensors of the step by name, and `queries` of it
    """

    shared: SharedPrefix
    made_of: dict[str, torch.Tensor | None] = field(repr=False)
    queries: int
    _tiles: dict[tuple[int, int], Tiles] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def laid(self) -> Laid:
        """The tables themselves. They are not made where all calls go the usual way."""
        return _laid(self)

    def tiles(self, heads: int, programs: int) -> Tiles:
        """Tiles of the groups' rows and of parts of their keys, for so many query heads and programs."""
        found = self._tiles.get((heads, programs))
        if found is None:
            found = self._tiles[heads, programs] = lay_tiles(self.laid, self.shared.lengths, heads, programs)
        return found

    def are_current(self) -> bool:
        """Do the tensors that they were made of still say the same? Waits for the device."""
        if "laid" not in self.__dict__:
            return True
        return all(made is None or torch.equal(made, found) for made, found in zip(self.laid, _laid(self), strict=True))


def _laid(tables: SharedTables) -> Laid:
    prefix = tables.shared
    return lay_out(prefix.order, prefix.starts, prefix.prefix, *tables.made_of.values(), tables.queries, prefix.page_size)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Beginning:
    """Elements that lists have in common, `depth` many.

    lists    that have no more in common with any other
    longer   beginnings that begin with this one
    above    depths of those that it begins with itself, from 0 on
    best     what can be counted of its lists, by the depth of the group around it: for every list the depth of its group, less for every
             group its depth
    """

    depth: int
    lists: list[int] = field(default_factory=list)
    longer: list[_Beginning] = field(default_factory=list)
    above: list[int] = field(default_factory=list)
    best: dict[int, int] = field(default_factory=dict)

    def counted(self, around: int) -> int:
        """What can be counted of its lists if it is no group: all of them, and what is longer, have the group around it."""
        return len(self.lists) * around + sum(b.best[around] for b in self.longer)


def grouped(pages: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Groups of lists that begin alike, as (how many elements are the same, numbers of the lists), so that the sum of elements times
    members but one is the largest that there is; each list is in one group at most.

    [[1, 2, 3], [1, 2, 4], [1, 2, 3]] gives [(2, [0, 1, 2])], which saves 4; of [[1, 2, 3], [1, 4], [1, 2, 3]] the first and the last
    alone save 3.
    """
    *longer_first, root = _beginnings(pages)
    for one in (root, *reversed(longer_first)):
        for other in one.longer:
            other.above = [*one.above, one.depth]
    for one in longer_first:
        as_group = one.counted(one.depth) - one.depth
        one.best = {around: max(one.counted(around), as_group) for around in one.above}
    groups: list[tuple[int, list[int]]] = []
    waiting: list[tuple[_Beginning, int, list[int]]] = [(one, 0, []) for one in root.longer]  # with the group around each
    while waiting:
        one, around, members = waiting.pop()
        if one.best[around] > one.counted(around):
            around, members = one.depth, []
            groups.append((one.depth, members))
        members += one.lists
        waiting += [(other, around, members) for other in one.longer]
    return [(count, sorted(members)) for count, members in groups]


def _beginnings(pages: Sequence[Sequence[int]]) -> list[_Beginning]:
    """What lists have in common: longer beginnings before those that they begin with, the empty one last."""
    order, found = sorted(range(len(pages)), key=pages.__getitem__), []
    path = [_Beginning(0)]  # from the empty one to where the walk is
    for i, number in enumerate(order):
        depth = _alike(pages[number], pages[order[i + 1]]) if i + 1 < len(order) else 0
        if depth > path[-1].depth:
            path.append(_Beginning(depth))
        path[-1].lists.append(number)
        while path[-1].depth > depth:
            found.append(path.pop())
            if path[-1].depth < depth:
                path.append(_Beginning(depth))
            path[-1].longer.append(found[-1])
    return [*found, *path]


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first elements are the same: by halves, as comparing lists is faster than a loop."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def shared_prefix_of(
    pages: list[list[int]], page_size: int, device: Device = None, groups: int | None = None, width: int | None = None
) -> SharedPrefix | None:
    """The SharedPrefix of sequences with these pages, all of them full. See PageAllocator.shared_prefix."""
    device = device_or_default(device)
    found = sorted(grouped(pages), key=lambda group: group[0] * (1 - len(group[1])))
    groups = len(found) if groups is None else whole("groups", groups, 1)
    found = sorted(found[:groups], key=lambda group: group[1])
    if not found:
        return None
    longest = max(count for count, _ in found)
    width = longest if width is None else whole("width", width, 1)
    if width < longest:
        raise ValueError(f"width is {width}, but sequences share {longest} pages: pass {longest} or more, or leave it out")
    rest, members = groups - len(found), [number for _, numbers in found for number in numbers]
    starts = [0]
    for _, numbers in found:
        starts.append(starts[-1] + len(numbers))
    prefix = [0] * len(pages)
    for count, numbers in found:
        for number in numbers:
            prefix[number] = count * page_size
    table = [pages[numbers[0]][:count] + [-1] * (width - count) for count, numbers in found] + [[-1] * width] * rest
    tensors = (
        [*members, *sorted({*range(len(pages))} - {*members})],
        starts + starts[-1:] * rest,
        [count * page_size for count, _ in found] + [0] * rest,
        table,
        prefix,
    )
    sizes = tuple((count * page_size, len(numbers)) for count, numbers in found)
    saved = page_size * sum(count * (len(numbers) - 1) for count, numbers in found)
    return SharedPrefix(*(torch.tensor(values, dtype=torch.int32, device="cpu").to(device) for values in tensors), page_size, saved, sizes)
