"""PageAllocator against a plain model that also keeps what is in the pages: nothing lost, nothing leaked, no shared page written."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flexpress import OutOfPages, PageAllocator


class Machine(RuleBasedStateMachine):
    """tokens: what each sequence should hold. memory: what the pages do hold, after the copies and writes that a server would make. steps:
    of all machines."""

    steps = 0

    @initialize(num_pages=st.integers(1, 30), page_size=st.sampled_from([1, 2, 3, 5]))
    def start(self, num_pages, page_size):
        self.pool = PageAllocator(num_pages, page_size)
        self.first = self.pool.allocate()  # lives on, so that there is always a sequence to pick
        self.memory = torch.full((num_pages, page_size), -1)
        self.tokens: dict[int, list[int]] = {self.first: []}
        self.freed: list[int] = []
        self.written = 0

    def pick(self, number: int) -> int:
        return list(self.tokens)[-1 - number % len(self.tokens)]

    def holders(self, page: int) -> int:
        return sum(page in self.pool.pages(s) for s in self.tokens)

    def attempt(self, wanted: int, call, *arguments):
        """call(*arguments), which needs `wanted` pages; None if that is too many, and then nothing may have changed."""
        free, before = self.pool.free_pages, copy.deepcopy(vars(self.pool))
        if wanted <= free:
            result = call(*arguments)
            assert self.pool.free_pages == free - wanted
            return result
        with pytest.raises(OutOfPages) as caught:
            call(*arguments)
        assert (caught.value.wanted, caught.value.free, caught.value.num_pages) == (wanted, free, self.pool.num_pages)
        assert vars(self.pool) == before
        return None

    def write(self, sequence: int, first: int) -> None:
        """Writes tokens from position `first` on, each with a value of its own."""
        pages, size = self.pool.pages(sequence), self.pool.page_size
        for position in range(first, self.pool.length(sequence)):
            page = pages[position // size]
            assert self.holders(page) == 1, "a shared page is written"
            self.written += 1
            self.memory[page, position % size] = self.written
            self.tokens[sequence].append(self.written)

    def extend(self, sequence: int, n: int):
        """The copies, or None when out of pages. The model's own count of the pages that it takes."""
        pages, size, length = self.pool.pages(sequence), self.pool.page_size, len(self.tokens[sequence])
        copied = n > 0 and length % size > 0 and self.holders(pages[-1]) > 1
        copies = self.attempt(-(-(length + n) // size) - len(pages) + copied, self.pool.extend, sequence, n)
        if copies is not None:
            assert [source for source, _ in copies] == pages[-1:] * copied
            assert [target for _, target in copies] == self.pool.pages(sequence)[len(pages) - 1 : len(pages)] * copied
        return copies

    def step(self, lengths: dict[int, int]) -> None:
        """A step of a server: room for all sequences, then all copies, then all writes."""
        copies = []
        for sequence, n in lengths.items():
            copies += self.extend(sequence, n) or []
        for source, target in copies:
            self.memory[target] = self.memory[source]
        for sequence in lengths:
            self.write(sequence, len(self.tokens[sequence]))

    @rule(length=st.integers(0, 12))
    def allocate(self, length):
        sequence = self.attempt(-(-length // self.pool.page_size), self.pool.allocate, length)
        if sequence is not None:
            assert sequence not in self.tokens and sequence not in self.freed
            self.tokens[sequence] = []
            self.write(sequence, 0)

    @rule(number=st.integers(0, 5), n=st.integers(0, 5))
    def extend_one(self, number, n):
        self.step({self.pick(number): n})

    @rule(lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=5))
    def extend_several(self, lengths):
        self.step({self.pick(number): n for number, n in lengths})

    @rule(number=st.integers(0, 5), old=st.integers(0, 3), new=st.integers(0, 3))
    def fork(self, number, old, new):
        sequence = self.pick(number)
        forked = self.attempt(0, self.pool.fork, sequence)
        assert forked not in self.tokens and forked not in self.freed
        assert self.pool.pages(forked) == self.pool.pages(sequence)
        self.tokens[forked] = list(self.tokens[sequence])
        self.step({sequence: old, forked: new})

    @rule(number=st.integers(0, 5), back=st.integers(0, 6))
    def truncate(self, number, back):
        sequence = self.pick(number)
        length = max(0, len(self.tokens[sequence]) - back)
        self.pool.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @rule(number=st.integers(0, 5))
    def free(self, number):
        sequence = self.pick(number)
        if sequence != self.first:
            self.pool.free(sequence)
            del self.tokens[sequence]
            self.freed.append(sequence)

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def share(self, numbers):
        """What sequences of a batch are said to share, they hold; and if nothing is, no two begin with the same full page."""
        sequences = [self.pick(number) for number in numbers]
        shared, size = self.pool.shared_prefix(sequences), self.pool.page_size
        full = [self.pool.pages(s)[: len(self.tokens[s]) // size] for s in sequences]
        if shared is None:
            first = [pages[0] for pages in full if pages]
            assert len(first) == len({*first})
            return
        order, starts, lengths = shared.order.tolist(), shared.starts.tolist(), shared.lengths.tolist()
        assert sorted(order) == [*range(len(sequences))] and shared.groups == tuple(
            (length, end - start) for length, start, end in zip(lengths, starts, starts[1:], strict=False)
        )
        expected = [0] * len(sequences)
        for pages, length, start, end in zip(shared.pages.tolist(), lengths, starts, starts[1:], strict=False):
            assert length > 0 and end - start > 1
            for b in order[start:end]:
                assert full[b][: length // size] == pages[: length // size]
                expected[b] = length
        assert shared.prefix.tolist() == expected

    @invariant()
    def nothing_lost_nothing_leaked(self):
        Machine.steps += 1
        pool, size = self.pool, self.pool.page_size
        held = {page for s in self.tokens for page in pool.pages(s)}
        assert held <= set(range(pool.num_pages)) and pool.free_pages + len(held) == pool.num_pages
        table = pool.page_table(list(self.tokens))
        for row, (sequence, tokens) in zip(table, self.tokens.items(), strict=True):
            pages = pool.pages(sequence)
            assert pool.length(sequence) == len(tokens) and len(set(pages)) == len(pages) == -(-len(tokens) // size)
            assert row.tolist() == pages + [-1] * (table.shape[1] - len(pages))
            assert self.memory[pages].flatten()[: len(tokens)].tolist() == tokens

    def teardown(self):
        if hasattr(self, "pool"):
            for sequence in self.tokens:
                self.pool.free(sequence)
            assert self.pool.free_pages == self.pool.num_pages
            self.attempt(self.pool.num_pages, self.pool.allocate, self.pool.num_pages * self.pool.page_size)


def test_ten_thousand_random_steps():
    Machine.steps = 0
    run_state_machine_as_test(Machine, settings=settings(max_examples=250, stateful_step_count=50))
    assert Machine.steps >= 10_000


def test_fork_copies_the_last_page_once():
    pool = PageAllocator(8, 4)
    a = pool.allocate(6)
    b, c = pool.fork(a), pool.fork(a)
    assert pool.pages(a) == pool.pages(b) == [0, 1] and pool.free_pages == 6
    assert pool.extend(b, 1) == [(1, 2)] and pool.pages(b) == [0, 2]
    assert pool.extend(b, 1) == [], "the page is its own now"
    assert pool.extend(a, 3) == [(1, 3)] and pool.pages(a) == [0, 3, 4]
    assert pool.extend(c, 1) == [], "the last holder needs no copy"
    assert pool.pages(c) == [0, 1]
    pool.free(a)
    assert pool.free_pages == 5 and pool.pages(b) == [0, 2]


def test_full_pages_are_not_copied():
    pool = PageAllocator(4, 4)
    a = pool.allocate(4)
    b = pool.fork(a)
    assert pool.extend(b, 0) == [] and pool.extend(b, 1) == []
    assert pool.pages(b) == [0, 1]
    pool.truncate(b, 3)
    assert pool.free_pages == 3
    assert pool.extend(b, 1) == [(0, 1)], "position 3 of the shared page would be written"


def test_page_table():
    pool = PageAllocator(8, 4)
    a, empty, b = pool.allocate(9), pool.allocate(), pool.allocate(2)
    table = pool.page_table([b, a, empty, b])
    assert table.dtype == torch.int32 and table.tolist() == [[3, -1, -1], [0, 1, 2], [-1] * 3, [3, -1, -1]]
    assert pool.page_table([b], width=2).tolist() == [[3, -1]]
    assert pool.page_table([empty]).shape == (1, 0) and pool.page_table([], width=5).shape == (0, 5)
    assert pool.page_table([a], device="meta").device.type == "meta"
    pool.pages(a).append(7)
    assert pool.pages(a) == [0, 1, 2], "a list of its own"
    assert "3 sequences, 4 pages free" in repr(pool)


def test_out_of_pages():
    pool = PageAllocator(3, 4)
    a = pool.allocate(5)
    with pytest.raises(OutOfPages, match="2 pages are needed but 1 of 3 are free") as caught:
        pool.extend(a, 8)
    assert isinstance(caught.value, RuntimeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert pool.length(a) == 5 and pool.pages(a) == [0, 1] and pool.free_pages == 1


def bad_pool() -> PageAllocator:
    pool = PageAllocator(4, 4)
    pool.allocate(5)
    pool.free(pool.allocate(1))
    return pool


BAD = {
    "no pages": (lambda pool: PageAllocator(0, 4), ValueError, "num_pages is 0; it must be at least 1"),
    "page size": (lambda pool: PageAllocator(4, 2.0), TypeError, "page_size must be an integer, got 2.0"),
    "allocate": (lambda pool: pool.allocate(-1), ValueError, "length is -1; it must be at least 0"),
    "allocate a float": (lambda pool: pool.allocate(1.5), TypeError, "length must be an integer, got 1.5"),
    "extend": (lambda pool: pool.extend(0, -1), ValueError, "n is -1"),
    "extend freed": (lambda pool: pool.extend(1, 1), ValueError, "sequence 1 was freed"),
    "truncate": (lambda pool: pool.truncate(0, -1), ValueError, "length is -1"),
    "truncate up": (lambda pool: pool.truncate(0, 6), ValueError, "length is 6, but sequence 0 has 5 tokens; extend makes it longer"),
    "truncate unknown": (lambda pool: pool.truncate(2, 0), ValueError, "there is no sequence 2 in this pool"),
    "fork freed": (lambda pool: pool.fork(1), ValueError, "sequence 1 was freed"),
    "free twice": (lambda pool: pool.free(1), ValueError, "sequence 1 was freed"),
    "free unknown": (lambda pool: pool.free([0]), ValueError, r"there is no sequence \[0\] in this pool"),
    "free a bool": (lambda pool: pool.free(False), ValueError, "there is no sequence False in this pool"),
    "length": (lambda pool: pool.length(None), ValueError, "there is no sequence None in this pool"),
    "pages": (lambda pool: pool.pages(-1), ValueError, "there is no sequence -1 in this pool"),
    "table": (lambda pool: pool.page_table([0, 1]), ValueError, "sequence 1 was freed"),
    "table of a number": (lambda pool: pool.page_table(5), TypeError, "sequences must be a list of sequences, .* got 5"),
    "narrow table of a generator": (lambda pool: pool.page_table(iter([0]), 1), ValueError, "width is 1, but sequence 0 has 2 pages"),
    "prefix of nothing": (lambda pool: pool.shared_prefix(None), TypeError, "sequences must be a list of sequences, .* got None"),
    **{
        f"{name}, device {device!r}": (
            lambda pool, name=name, device=device: getattr(pool, name)([0], device=device),
            TypeError,
            "device must be a torch.device or its name, got",
        )
        for name in ("page_table", "shared_prefix")
        for device in (True, 1.5, torch.float16, torch.zeros(1), "x")
    },
    "narrow table": (lambda pool: pool.page_table([0], width=1), ValueError, "width is 1, but sequence 0 has 2 pages"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_arguments_change_nothing(case):
    call, error, message = BAD[case]
    pool = bad_pool()
    before = copy.deepcopy(vars(pool))
    with pytest.raises(error, match=message):
        call(pool)
    assert vars(pool) == before


@pytest.mark.parametrize("width", [2.0, True, "2"])
def test_widths_that_are_no_numbers(width):
    pool = PageAllocator(8, 4)
    sequence = pool.allocate(4)
    with pytest.raises(TypeError, match=f"width must be an integer, got {width!r}"):
        pool.page_table([sequence], width)
    with pytest.raises(ValueError, match="width is -1"):
        pool.page_table([], -1)
