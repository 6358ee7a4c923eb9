"""Pages of a paged cache: which pages of a pool hold the tokens of which sequence. Host side only, no tensor of the cache is touched.

    pool = PageAllocator(num_pages=1024, page_size=64)
    a = pool.allocate(100)                          # the pages of 100 tokens
    b = pool.fork(a)                                # b continues the same 100 tokens, in the same pages
    for source, target in pool.extend(b, 1):        # b needs the last page for itself
        k_cache[target] = k_cache[source]
        v_cache[target] = v_cache[source]
    table = pool.page_table([a, b], device="cuda")

Token t of a sequence lies in page `pages(sequence)[t // page_size]`, row `t % page_size`. Paged caches are the idea of PagedAttention
(Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.types import Device

from flexpress.caches.shared_prefix import SharedPrefix, shared_prefix_of
from flexpress.inputs.checks import whole
from flexpress.inputs.plain_arguments import device_or_default


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than a call needs. The call has changed nothing.

    wanted     pages that the call needs
    free       pages that are free
    num_pages  pages of the pool
    """

    def __init__(self, wanted: int, free: int, num_pages: int) -> None:
        super().__init__(wanted, free, num_pages)
        self.wanted, self.free, self.num_pages = wanted, free, num_pages

    def __str__(self) -> str:
        return (
            f"{self.wanted} pages are needed but {self.free} of {self.num_pages} are free; free or truncate other sequences, or make "
            "a larger pool"
        )


class PageAllocator:
    """A pool of `num_pages` pages (numbered from 0) of `page_size` tokens each, and the sequences that hold them.

    A sequence is an integer, given out by `allocate` and `fork` and never given out again. Sequences that `fork` has made share pages. A
    shared page is never written: `extend` gives the sequence a page of its own first, and says which page to copy. Every call costs as
    many steps as it touches pages. Bad arguments and a lack of pages raise before anything has changed. Not for several threads at once.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """ValueError unless both are at least 1."""
        self._num_pages, self._page_size = whole("num_pages", num_pages, 1), whole("page_size", page_size, 1)
        self._free = list(range(self._num_pages))[::-1]  # taken from the end: what was freed last, first
        self._holders = [0] * self._num_pages  # of each page: how many sequences hold it
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Tokens that a page holds."""
        return self._page_size

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence. ValueError if there is no such sequence."""
        return self._lengths[self._known(sequence)]

    def pages(self, sequence: int) -> list[int]:
        """The pages of a sequence in the order of its tokens, ceil(length / page_size) of them. ValueError if there is no such sequence."""
        return list(self._pages[self._known(sequence)])

    def allocate(self, length: int = 0) -> int:
        """A new sequence of `length` tokens on pages of its own. Raises ValueError for a negative length, and OutOfPages."""
        length = whole("length", length)
        return self._add(self._take(self._pages_for(length)), length)

    def extend(self, sequence: int, n: int = 1) -> list[tuple[int, int]]:
        """Makes room for n more tokens; returns pages to copy, as (source, target), before they are written.

        There is one pair if the last page is partly filled and another sequence holds it too, else none. After several calls, make all
        copies in the order of the calls, then write the new tokens: what was a source may by then be another sequence's to write.
        Raises ValueError for an unknown sequence or negative n, and OutOfPages.
        """
        pages, length = self._pages[self._known(sequence)], self._lengths[sequence]
        new_length = length + whole("n", n)
        shared = new_length > length and length % self._page_size and self._holders[pages[-1]] > 1
        taken = self._take(self._pages_for(new_length) - len(pages) + bool(shared))
        copies = []
        if shared:
            copies = [(pages[-1], taken[0])]
            self._holders[pages[-1]] -= 1
            pages.pop()
        pages += taken
        self._lengths[sequence] = new_length
        return copies

    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of this one, in the same pages; takes no page. ValueError if there is no such sequence."""
        pages = self.pages(sequence)
        for page in pages:
            self._holders[page] += 1
        return self._add(pages, self._lengths[sequence])

    def truncate(self, sequence: int, length: int) -> None:
        """Drops tokens from `length` on, and pages that held nothing else. ValueError if the sequence is unknown or has fewer tokens."""
        pages, length = self._pages[self._known(sequence)], whole("length", length)
        if length > self._lengths[sequence]:
            raise ValueError(f"length is {length}, but sequence {sequence} has {self._lengths[sequence]} tokens; extend makes it longer")
        kept = self._pages_for(length)
        self._drop(pages[kept:])
        del pages[kept:]
        self._lengths[sequence] = length

    def free(self, sequence: int) -> None:
        """Ends a sequence; its pages are free unless another one holds them. ValueError if there is no such sequence."""
        self._drop(self._pages.pop(self._known(sequence)))
        del self._lengths[sequence]

    def page_table(self, sequences: Sequence[int], width: int | None = None, device: Device = None) -> torch.Tensor:
        """int32 [len(sequences), width] on `device`: the pages of each sequence, then -1.

        width   columns; by default as many as the longest of the sequences has pages
        The -1 stand past a sequence's last page, where no kernel may read: a page that is read by mistake is then no valid one, not one
        of another sequence. Raises ValueError for an unknown sequence, and for one with more than `width` pages.
        """
        device, sequences = device_or_default(device), _listed(sequences)
        rows = [self._pages[self._known(sequence)] for sequence in sequences]
        most = max(map(len, rows), default=0)
        width = most if width is None else whole("width", width)
        if width < most:
            sequence = next(s for s, row in zip(sequences, rows, strict=True) if len(row) == most)
            raise ValueError(f"width is {width}, but sequence {sequence} has {most} pages: pass {most} or more, or leave it out")
        table = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(table, dtype=torch.int32, device="cpu").reshape(len(rows), width).to(device)

    def shared_prefix(
        self, sequences: Sequence[int], device: Device = None, *, groups: int | None = None, width: int | None = None
    ) -> SharedPrefix | None:
        """Which of a batch's sequences begin with the same pages, for `cached_attention(..., shared_prefix=)`. None if none do.

        sequences   of the batch, in its order
        device      of its tensors; by default the CPU. cached_attention wants them where the cache is
        groups      room for so many groups, of which those that save most are kept; by default as many as there are
        width       room for so many pages of a prefix; by default as many as the longest has. Both fix shapes, for `SharedPrefix.update`

        Only whole pages count that are full in every member. Of sequences that share more with some than with others, groups are such that
        as few tokens as possible are read again. It holds while its members only grow: make it anew when one is freed, or truncated to
        less than it shares. Raises ValueError for an unknown sequence, and for longer prefixes than `width`.
        """
        full = [self._pages[self._known(sequence)][: self._lengths[sequence] // self._page_size] for sequence in _listed(sequences)]
        return shared_prefix_of(full, self._page_size, device, groups, width)

    def __repr__(self) -> str:
        return (
            f"PageAllocator(num_pages={self._num_pages}, page_size={self._page_size}): {len(self._pages)} sequences, "
            f"{self.free_pages} pages free"
        )

    def _known(self, sequence: int) -> int:
        number = isinstance(sequence, int) and not isinstance(sequence, bool)  # True would be sequence 1
        if not number or sequence not in self._pages:
            freed = number and 0 <= sequence < self._next
            raise ValueError(f"sequence {sequence!r} was freed" if freed else f"there is no sequence {sequence!r} in this pool")
        return sequence

    def _pages_for(self, length: int) -> int:
        return -(-length // self._page_size)

    def _take(self, count: int) -> list[int]:
        """`count` free pages, with one holder each."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self._num_pages)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _drop(self, pages: list[int]) -> None:
        """One holder less for each page."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _add(self, pages: list[int], length: int) -> int:
        sequence = self._next
        self._next += 1
        self._pages[sequence], self._lengths[sequence] = pages, length
        return sequence


def _listed(sequences) -> list[int]:
    """The argument `sequences`, which may be anything that is walked through once."""
    try:
        return list(sequences)
    except TypeError:
        raise TypeError(f"sequences must be a list of sequences, as allocate and fork give them, got {sequences!r}") from None
