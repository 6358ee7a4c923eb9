"""The batch of a serving step: which tokens are computed, at which positions, and in which pages of the cache they belong.

    info = SequenceInfo(max_seq_len=8192, max_batch_size=64, page_size=64, device="cuda")
    info.nest_sequences([[5, 3, 8], [7]], input_pos=[0, 41], page_assignments=[[2], [9]])      # a prompt beside a decoding step
    logits = model(*info.args)                                                                 # [1, 4, vocabulary]
    first, second = info.unnest_sequences(logits)                                              # [3, vocabulary], [1, vocabulary]
    info.update_pos()                                                                          # those 3 and 1 tokens are in the cache now

Nothing here knows a kernel: an attention operation takes the tensors that it needs. Pages come from any allocator
(`flexpress.PageAllocator` is one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.types import Device

from flexpress.inputs.checks import check_are_tensors, whole
from flexpress.inputs.plain_arguments import named_device
from flexpress.steps.attention_info import AttentionInfo, CacheConfig, PositionalEmbeddingConfig
from flexpress.steps.step_view import StepView
from flexpress.steps.token_ids import flatten, integers

__all__ = ["ARG_NAMES", "AttentionInfo", "CacheConfig", "PositionalEmbeddingConfig", "SequenceInfo"]

ARG_NAMES = ("input_ids", "seq_len", "input_pos", "cache_loc", "pages_per_seq", "seq_start", "page_table")


class SequenceInfo(StepView):
    """The sequences of a serving step, n of at most `max_batch_size`, each with new tokens (also none), a position and pages.

    Tensors, all int32 on `device`:

    input_ids      [n, 1] if every sequence has one new token (generate-only), else [1, total]: the new tokens, sequence after sequence.
                   Where tokens are rows, such as embeddings, [n, 1, ...] or [1, total, ...], in their own dtype
    seq_len        [n]  new tokens of each sequence
    input_pos      [n]  tokens of each sequence that are in the cache already, so the position of its first new token
    cache_loc      [sum of pages_per_seq]  the pages of all sequences, sequence after sequence. It is not cached_attention's cache_loc, one
                   entry of the cache for each sequence
    pages_per_seq  [n]  pages of each sequence
    seq_start      [n]  where each sequence starts in input_ids
    page_table     [n, max_pages_per_seq]  the pages of each sequence, then -1: no kernel may read there

    They are views of memory that stays where it is until `to`, so a CUDA graph sees every change; ids and rows have memory of their own,
    that of rows as long as their shape and dtype stay. Behind its n entries seq_len is 0 up
    to max_batch_size, and page_table -1: a kernel launched for more sequences finds no work in them. The host keeps the numbers too, and
    never waits for the device unless it is given positions or pages that are there. Bad arguments raise before anything has changed.
    """

    def __init__(
        self,
        max_seq_len: int = 1,
        max_batch_size: int = 1,
        page_size: int = 0,
        max_num_tokens: int = 0,
        num_pages: int = 0,
        device: Device = "cpu",
    ) -> None:
        """Limits; the batch is that of `reset`.

        max_seq_len     tokens of a sequence, in the cache and new
        max_batch_size  sequences of a step
        page_size       tokens of a page; 0: max_seq_len, one page a sequence, a cache without paging
        max_num_tokens  new tokens of a step; 0: max_batch_size * max_seq_len
        num_pages       pages of the cache; 0: as many as max_num_tokens tokens fill, however they are spread over max_batch_size sequences.
                        That is a cache for one largest step. A server sets it to what its memory holds
        Raises ValueError for negative numbers, and for fewer pages than max_batch_size.
        """
        super().__init__(max_seq_len, max_batch_size, page_size, max_num_tokens, device)
        self.num_pages = whole("num_pages", num_pages) or self._pages_of_a_step()
        self.reset()

    @property
    def num_pages(self) -> int:
        """Pages of the cache. May be set, once it is known how much memory there is: at least max_batch_size, and all assigned pages."""
        return self._num_pages

    @num_pages.setter
    def num_pages(self, number: int) -> None:
        used = max((page for pages in self._step.pages for page in pages), default=-1)
        if whole("num_pages", number, self._max_batch_size) <= used:
            raise ValueError(f"num_pages is {number}, but page {used} is assigned; reset first")
        self._num_pages = int(number)

    @property
    def named_args(self) -> dict[str, torch.Tensor]:
        """The tensors by name, in the order of ARG_NAMES: what the class lists, input_ids first. Raises as `check` does."""
        self.check()
        return {name: getattr(self, name) for name in ARG_NAMES}

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of ARG_NAMES. Raises as `check` does."""
        return tuple(self.named_args.values())

    @property
    def extra_arg_names(self) -> tuple[str, ...]:
        """ARG_NAMES without input_ids."""
        return ARG_NAMES[1:]

    def check(self) -> None:
        """ValueError if a sequence, with its new tokens, would be longer than max_seq_len or than its pages."""
        for i, (length, position, pages) in enumerate(zip(self._step.lengths, self._step.positions, self._step.pages, strict=True)):
            end = position + length
            if end > self._max_seq_len:
                raise ValueError(
                    f"sequence {i} has {position} tokens in the cache and {length} new ones; max_seq_len is {self._max_seq_len}"
                )
            if end > len(pages) * self._page_size:
                raise ValueError(
                    f"sequence {i} has {position} tokens in the cache and {length} new ones, but its {len(pages)} pages hold "
                    f"{len(pages) * self._page_size}; assign_cache_loc gives it more"
                )

    # changes

    def nest_sequences(
        self,
        sequences: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
        input_pos: int | Sequence[int] | torch.Tensor | None = None,
        page_assignments: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """The new tokens of each sequence, and with them their number.

        sequences         lists of ids or integer tensors [s_i], s_i >= 0; or one integer tensor [n, s]. Tokens that are no ids: tensors
                          [s_i, ...] or [n, s, ...] of one shape and dtype behind s, floating-point (embeddings) or integers
        input_pos         tokens of each sequence in the cache, as in update_pos(..., reset=True)
        page_assignments  pages of each sequence, as in assign_cache_loc
        Where these are not given, sequence i keeps the position and pages of the sequence i before it; a new one starts at
        position 0, without pages (without paging: in page i, if no other sequence has it). Ids must fit int32; those on a device are not
        checked. Raises ValueError or TypeError for bad input, and ValueError for more sequences or tokens than the limits allow.
        """
        lengths, ids = flatten(sequences)
        n, total = len(lengths), sum(lengths)
        if not 1 <= n <= self._max_batch_size:
            raise ValueError(f"sequences has {n} entries; a batch has 1 to max_batch_size = {self._max_batch_size}")
        if max(lengths) > self._max_seq_len:
            raise ValueError(f"sequence {lengths.index(max(lengths))} has {max(lengths)} tokens; max_seq_len is {self._max_seq_len}")
        if total > self._max_num_tokens:
            raise ValueError(f"sequences has {total} tokens; max_num_tokens is {self._max_num_tokens}")
        if input_pos is None:
            positions = self._step.positions[:n] + [0] * (n - len(self._step.positions))
        else:
            positions = self._checked_positions(integers("input_pos", input_pos, n))
        pages = self._kept_pages(n) if page_assignments is None else self._checked_pages(page_assignments, n)
        self._step.set_tokens(lengths, ids)
        self._step.set_positions(positions)
        self._step.set_pages(pages)

    def unnest_sequences(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What belongs to each sequence in a tensor laid out as input_ids: [n, 1, ...] or [1, total, ...] -> n views [s_i, ...].

        ValueError for another shape.
        """
        check_are_tensors(tensor=tensor)
        shape = (self.num_sequences, 1) if self.is_generate else (1, self.num_tokens)
        if tuple(tensor.shape[:2]) != shape:
            raise ValueError(f"tensor has shape {tuple(tensor.shape)}; this batch is laid out as {shape}, any dimensions behind")
        return list(torch.split(tensor.flatten(0, 1), self._step.lengths))

    def update_pos(self, seq_len: int | Sequence[int] | torch.Tensor | None = None, reset: bool = False) -> None:
        """Adds to the number of tokens in the cache; reset: sets it.

        seq_len   an int for all sequences, or a list or integer tensor [n]; by default the new tokens of this step. Negative numbers take
                  tokens back (those that speculative decoding has guessed wrong).
        Raises ValueError if a position leaves 0 to max_seq_len.
        """
        numbers = self._step.lengths if seq_len is None else integers("seq_len", seq_len, self.num_sequences)
        if not reset:
            numbers = [old + more for old, more in zip(self._step.positions, numbers, strict=True)]
        self._step.set_positions(self._checked_positions(list(numbers)))

    def assign_cache_loc(self, page_assignments: Sequence[Sequence[int]]) -> None:
        """The pages of each sequence, one list a sequence, in the order of its tokens.

        Sequences may share pages; that no shared page is written is up to who assigns them. Raises ValueError for another number of
        lists, more than max_pages_per_seq pages in one, and pages outside 0 to num_pages - 1.
        """
        self._step.set_pages(self._checked_pages(page_assignments, self.num_sequences))

    def reset(self) -> None:
        """A generate-only batch with nothing in the cache: token 0 for as many sequences as the limits allow, sequence i on page i.

        Tokens stay what they are, ids or rows, here, in set_largest_batch and in example_args: a token 0 is a row of zeros then.
        """
        n = min(self._max_batch_size, self._max_num_tokens)
        self.nest_sequences(self._zeros([1] * n), 0, [[i] for i in range(n)])

    def set_largest_batch(self) -> None:
        """max_num_tokens tokens 0, spread over max_batch_size sequences: to warm up, and to see how much memory a step needs at most.

        Fewer tokens where max_seq_len or num_pages allow no more: each new token of a step has a place of its own in the cache.
        """
        n, left, first = self._max_batch_size, self._max_num_tokens, 0
        lengths: list[int] = []
        pages: list[list[int]] = []
        for i in range(n):
            own = (self._num_pages + i) // n  # pages, as many for all; those that can hold least come first
            length = min(own * self._page_size, self._max_seq_len, left // (n - i))
            count = -(-length // self._page_size)
            pages.append([*range(first, first + count)])
            lengths.append(length)
            left, first = left - length, first + count
        self.nest_sequences(self._zeros(lengths), 0, pages)

    def sync(self, other: SequenceInfo) -> None:
        """Takes over the batch of another one: its tokens, positions and pages. They are copied to this one's device; `other` keeps its own
        tensors. ValueError if its limits differ."""
        if not isinstance(other, SequenceInfo):
            raise TypeError(f"other must be a SequenceInfo, got {type(other).__name__}")
        for name in ("max_seq_len", "max_batch_size", "page_size", "max_num_tokens", "num_pages"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"{name} is {getattr(self, name)} here and {getattr(other, name)} in the other")
        tokens = other.input_ids.flatten(0, 1)
        self.nest_sequences(torch.split(tokens, other.sequence_lengths), other.input_positions, other.page_assignments)

    def to(self, device: torch.device | str | int) -> SequenceInfo:
        """Moves the tensors to `device`; returns itself. TypeError for what is no device: the tensors stay int32."""
        self._step.to(named_device(device))
        return self

    # torch.export

    def example_args(self) -> tuple[torch.Tensor, ...]:
        """Tensors to export a model with, in the order of ARG_NAMES; the batch stays as it is.

        torch.export takes an extent of 1 for a constant, so each extent that dynamic_shapes names is 2 or more: input_ids is [2, 4] where
        limits allow, also where that is more than max_num_tokens (a model finds tokens behind the last sequence), and a sequence alone has
        two pages.
        """
        n, s = min(2, self._max_batch_size), min(4, self._most_tokens)
        length = min(s, self._max_seq_len)
        count = min(max(-(-length // self._page_size), 3 - n), self.max_pages_per_seq)
        example = SequenceInfo(self._max_seq_len, n, self._page_size, n * s, n * count, device=self.device)
        example.nest_sequences([[0] * length] * n, 0, [list(range(i * count, (i + 1) * count)) for i in range(n)])
        return (self._step.tokens.new_zeros((n, s, *self._step.tokens.shape[1:])), *example.args[1:])

    @property
    def dynamic_shapes(self) -> tuple[dict, ...]:
        """For each tensor of args, the extents that change from step to step, as torch.export wants them: {dimension: Dim}.

        New objects at each reading; take all from one.
        """
        from torch.export import Dim

        batch = {}
        if self._max_batch_size > 1:
            batch = {0: Dim("num_sequences", max=self._max_batch_size)}
        ids = {1: Dim("tokens_per_row", max=self._most_tokens)} if self._most_tokens > 1 else {}
        if self._max_batch_size > 1:
            ids[0] = Dim("rows", max=self._max_batch_size)
        most = self._step.memory["cache_loc"].shape[0]
        return (ids, batch, batch, {0: Dim("assigned_pages", max=most)} if most > 1 else {}, batch, batch, batch)

    def __repr__(self) -> str:
        return (
            f"SequenceInfo(max_seq_len={self._max_seq_len}, max_batch_size={self._max_batch_size}, page_size={self._page_size}, "
            f"max_num_tokens={self._max_num_tokens}, num_pages={self._num_pages}, device={str(self.device)!r}): "
            f"{self.num_sequences} sequences, {self.num_tokens} new tokens"
        )

    @property
    def _most_tokens(self) -> int:
        return min(self._max_num_tokens, self._max_batch_size * self._max_seq_len)

    def _zeros(self, lengths: list[int]) -> tuple[torch.Tensor, ...]:
        """Tokens 0 of that many each, of the kind that there are."""
        tokens = self._step.tokens
        return torch.split(tokens.new_zeros((sum(lengths), *tokens.shape[1:])), lengths)

    def _pages_of_a_step(self) -> int:
        """What max_num_tokens tokens fill at most: a page of each sequence with one token, then a page for every page_size tokens."""
        sequences, more = self._max_batch_size, max(self._max_num_tokens - self._max_batch_size, 0)
        return min(sequences * self.max_pages_per_seq, sequences + more // self._page_size)

    def _kept_pages(self, n: int) -> list[list[int]]:
        pages = self._step.pages[:n]
        taken = {page for row in pages for page in row}
        return pages + [[] if self.is_paged or i in taken else [i] for i in range(len(pages), n)]

    def _checked_positions(self, positions: list[int]) -> list[int]:
        for i, position in enumerate(positions):
            if not 0 <= position <= self._max_seq_len:
                raise ValueError(f"sequence {i} would have {position} tokens in the cache; possible are 0 to {self._max_seq_len}")
        return positions

    def _checked_pages(self, assignments, n: int) -> list[list[int]]:
        if isinstance(assignments, str) or not isinstance(assignments, Iterable):
            raise TypeError(f"page_assignments must be a list of lists of pages, got {assignments!r}")
        rows = [integers(f"page_assignments[{i}]", row) for i, row in enumerate(assignments)]
        if len(rows) != n:
            raise ValueError(f"page_assignments has {len(rows)} entries for {n} sequences")
        for i, row in enumerate(rows):
            if len(row) > self.max_pages_per_seq:
                raise ValueError(f"page_assignments[{i}] has {len(row)} pages; {self.max_pages_per_seq} hold max_seq_len tokens")
            for page in row:
                if not 0 <= page < self._num_pages:
                    raise ValueError(f"page_assignments[{i}] has page {page}; there are {self._num_pages} pages")
        return rows
