"""Which request computes which of its tokens in a step. A state machine of requests and pages; no tensor is touched.

    waiting --admit--> running --its last token--> done
       ^                  |
       +-----preempt------+

A running request has pages for all tokens that it knows, its prompt and what it made. It computes those that are not in the cache: a chunk
of its prompt, then one token a step, or a tree of drafted ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flexpress import OutOfPages, PageAllocator

from .checks import token_ids, whole
from .prefixes import Page, Prefixes

Stop = Callable[[list[int]], str]  # of the tokens made so far: why the last one ends the answer, "" if it does not
Draft = Callable[["Request", int], tuple[list[int], list[int]]]  # at most so many tokens that may follow, and their parents; see drafts.py


def never(made: list[int]) -> str:
    """Answers end at their length alone."""
    return ""


@dataclass(eq=False)
class Request:
    """A prompt, how many tokens may follow it, and those that do so far.

    prompt     tokens, as ints in a list or tuple; a list of its own once it is submitted
    reason     why it is done: "length", "cancelled", or what `stop` says
    sequence   its number in the PageAllocator while it runs
    cached     how many of its tokens are in the cache
    preempted  how often its pages went to others
    times      when it was submitted, and when each of its tokens was made: seconds of time.perf_counter
    asked      of how many of its tokens `stop` has said whether they end it
    """

    prompt: list[int]
    wanted: int
    stop: Stop = never
    made: list[int] = field(default_factory=list)
    reason: str = ""
    sequence: int | None = None
    cached: int = 0
    preempted: int = 0
    times: list[float] = field(default_factory=list, repr=False)
    asked: int = 0

    @property
    def length(self) -> int:
        """Tokens that it knows."""
        return len(self.prompt) + len(self.made)

    def ask(self) -> None:
        """Is it done? Raises what `stop` does; then it is to be asked again. `stop` may have cancelled it."""
        said = self.stop(self.made)
        self.reason = self.reason or said or ("length" if len(self.made) >= self.wanted else "")
        self.asked = len(self.made)

    def known(self, first: int, count: int) -> list[int]:
        """`count` of its tokens, or those that there are, from number `first` on."""
        behind = first - len(self.prompt)
        if behind >= 0:
            return self.made[behind : behind + count]
        return self.prompt[first : first + count] + self.made[: max(0, behind + count)]


@dataclass
class Work:
    """What a request computes in a step.

    tokens   a chunk of what it knows, or the token made last and drafts behind it
    parents  of drafts: number of the token that each follows, -1 for the first; empty for a chunk
    answers  is what follows the last token wanted? With drafts, what follows each of them is
    """

    request: Request
    tokens: list[int]
    parents: list[int]
    answers: bool

    @property
    def rows(self) -> int:
        """For how many of its tokens, the last ones, a next token is asked."""
        return len(self.tokens) if self.parents else int(self.answers)


def accepted(work: Work, next_tokens: list[int]) -> list[int]:
    """The drafts that are what the model says, as numbers of a path from the first token on."""
    path = [0]
    for node in range(1, len(work.tokens)):
        if work.parents[node] == path[-1] and work.tokens[node] == next_tokens[path[-1]]:
            path.append(node)
    return path


class Scheduler:
    """Waiting and running requests, and the pages of all."""

    def __init__(
        self,
        pool: PageAllocator,
        max_sequences: int,
        chunk: int,
        draft: Draft | None = None,
        nodes: int = 1,
        vocab_size: int | None = None,
        max_length: int | None = None,
    ) -> None:
        """chunk: tokens of a step beyond one of each running request, for prompts and drafts. nodes: of a tree, its first one counted.
        vocab_size: tokens that the model has. max_length: of a request, prompt and answer. ValueError for limits with which nothing could
        be made."""
        self.max_sequences, self.chunk = whole("max_sequences", max_sequences, 1), whole("chunk", chunk, 1)
        self.pool, self.draft, self.nodes, self.vocab_size = pool, draft, whole("nodes", nodes, 1), vocab_size
        self.max_length = None if max_length is None else whole("max_length", max_length, 2)  # a token of a prompt, and one to make
        if draft is not None and not callable(draft):
            raise ValueError(f"draft is {draft!r}; it must be a function of a request and a number, as PromptLookup()")
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefixes = Prefixes()
        self.kept: dict[int, None] = {}  # sequences of no request, whose pages may be of use again; the one unused longest first
        self.busy = False  # is a step under way, from `plan` to `commit`?
        self.tokens_found = 0  # that nobody had to compute, as another's pages have them

    def submit(self, request: Request) -> None:
        """A request waits for its turn. TypeError for what is no request, ValueError if there is nothing to do or the model does not have
        a token, OutOfPages if it needs more pages than there are."""
        self.check(request)
        request.prompt, request.made = token_ids("the prompt", request.prompt), token_ids("made", request.made)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raises what `submit` would."""
        if not isinstance(request, Request):
            raise TypeError(f"a request must be a Request, got {type(request).__name__}; make one with Request(prompt, wanted)")
        token_ids("the prompt", request.prompt, self.vocab_size)
        token_ids("made", request.made, self.vocab_size)
        whole("wanted", request.wanted, 1)
        if not callable(request.stop):
            raise TypeError(f"a request's stop must be a function of the tokens made, got {request.stop!r}; leave it out to end by length")
        known = request.reason or request.sequence is not None or request in self.waiting
        if not request.prompt or known:
            raise ValueError(
                f"a request must have a prompt and be new; got one with {len(request.prompt)} tokens, "
                f"wanted={request.wanted}, reason={request.reason!r}, sequence={request.sequence}, waiting={request in self.waiting}"
            )
        if self.max_length is not None and len(request.prompt) + request.wanted > self.max_length:
            raise ValueError(
                f"the request has {len(request.prompt)} tokens and wants {request.wanted} more, but max_length is {self.max_length}; "
                "make an engine with a larger one"
            )
        pages = -(-(len(request.prompt) + request.wanted - 1) // self.pool.page_size)  # the last token is in no cache
        if pages > self.pool.num_pages:
            raise OutOfPages(pages, self.pool.num_pages, self.pool.num_pages)

    def cancel(self, request: Request) -> None:
        """A request is done with what it has. While a step is under way, as in a `stop`, it gets no more tokens, and leaves at the end."""
        request.reason = request.reason or "cancelled"
        if not self.busy:
            self._dismiss()

    def plan(self) -> list[Work]:
        """The work of the next step: of all that run, the oldest first, then of those that come in. Empty if nothing is left to do."""
        if self.busy:
            raise RuntimeError("a step is under way: `commit` or `abandon` it before the next is planned")
        self.busy = True
        for request in [r for r in self.waiting if r.asked < len(r.made)]:  # their `stop` has failed
            if not request.reason:
                request.ask()
        self._dismiss()
        step, spare = [], self.chunk
        for request in list(self.running):
            if request.sequence is None:  # preempted by one before it
                continue
            work = self._continue(request, spare)
            if work is not None:
                step.append(work)
                spare -= len(work.tokens) - 1
        least = min(self.chunk, self.pool.page_size)  # less is no page that others can go on from
        while spare >= least and self.waiting and len(self.running) < self.max_sequences and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            step.append(self._chunk(self.running[-1], spare))
            spare -= len(step[-1].tokens)
        self.busy = bool(step)
        return step

    def commit(self, step: list[Work], next_tokens: list[list[int]]) -> list[tuple[int, int]]:
        """What follows the rows of each work. Returns places of the cache to copy, as (source, target), all at once: accepted drafts."""
        moves: list[tuple[int, int]] = []
        for work, found in zip(step, next_tokens, strict=True):
            request, first = work.request, work.request.cached
            path = accepted(work, found) if work.parents else list(range(len(work.tokens)))
            places = self._places(request, first, len(work.tokens)) if path[-1] >= len(path) else []
            moves += [(places[node], places[i]) for i, node in enumerate(path) if places and node != i]
            request.cached += len(path)
            for token in [found[node] for node in path] if work.parents else found:
                if request.reason:
                    break
                request.made.append(token)
                request.ask()
            request.cached = min(request.cached, request.length)
            self._note(request, request.cached)
        self.busy = False
        self._dismiss()
        return moves

    def abandon(self) -> None:
        """Nothing is in the cache, as when a step has failed: all that run wait again, with the tokens that they have made."""
        for sequence in [*self.kept, *(r.sequence for r in self.running if r.sequence is not None)]:
            self._free(sequence)
        self.kept.clear()
        for request in reversed(self.running):
            request.sequence, request.cached = None, 0
            self.waiting.appendleft(request)
        self.running.clear()
        self.busy = False
        self._dismiss()

    def _dismiss(self) -> None:
        """Who is done leaves. Not in the midst of a step: a `stop` or a draft may cancel any request, and its pages are in use."""
        for request in [r for r in self.running if r.reason]:
            self.running.remove(request)
            self._keep(request)
        self.waiting = deque(r for r in self.waiting if not r.reason)

    def _continue(self, request: Request, spare: int) -> Work | None:
        """The next work of a running request, or None if it was preempted."""
        decoding = request.cached == request.length - 1 and bool(request.made)
        if not decoding:
            self._catch_up(request)
        while not self._room(request, request.length):
            self._preempt(self.running[-1])
            if request.sequence is None:
                return None
        if not decoding:
            return self._chunk(request, spare + 1)
        last = request.made[-1]
        if self.draft is None:
            return Work(request, [last], [], True)
        most = min(spare, self.nodes - 1, request.wanted - len(request.made) - 1)
        tokens, parents = self.draft(request, most) if most > 0 else ([], [])
        if not tokens or not self._room(request, request.length + len(tokens)):
            return Work(request, [last], [], True)
        return Work(request, [last, *tokens], [-1, *parents], True)

    def _chunk(self, request: Request, most: int) -> Work:
        """At most so many tokens of what it knows. A chunk that is not the last ends with a page, where others can go on."""
        size, count = self.pool.page_size, min(most, request.length - request.cached)
        if request.cached + count < request.length:
            count = max(0, (request.cached + count) // size * size - request.cached) or count
        self._note(request, request.cached + count)
        return Work(request, request.known(request.cached, count), [], request.cached + count == request.length)

    def _admit(self, request: Request) -> bool:
        """Pages for all that a request knows, others' as far as they go. One more for every fourth that runs must be there, or it would
        soon be out again."""
        holder, count = self.prefixes.longest(self._pages(request, 0))
        request.sequence = self.pool.allocate() if holder is None else self._forked(holder, count)
        if not self._room(request, request.length, len(self.running) // 4):
            self._free(request.sequence)
            request.sequence = None
            return False
        request.cached = count * self.pool.page_size
        self.tokens_found += request.cached
        return True

    def _catch_up(self, request: Request) -> None:
        """Takes pages that others have written meanwhile, or write in this step: a layer writes all keys before any is read."""
        size, own = self.pool.page_size, request.sequence
        holder, count = self.prefixes.longest(self._pages(request, self.prefixes.pages(own) * size), own)
        if holder is None:
            return
        request.sequence, length = self._forked(holder, count), self.pool.length(own)
        self._free(own)
        self.pool.extend(request.sequence, length - count * size)
        self.tokens_found += count * size - request.cached
        request.cached = count * size

    def _pages(self, request: Request, first: int) -> Iterator[Page]:
        """The tokens of its whole pages from number `first` on, but for the last token, which has to be computed."""
        size = self.pool.page_size
        for start in range(first, (request.length - 1) // size * size, size):
            yield tuple(request.known(start, size))

    def _forked(self, holder: int, count: int) -> int:
        """A new sequence that holds the first pages of another one."""
        sequence = self.pool.fork(holder)
        self.pool.truncate(sequence, count * self.pool.page_size)
        self.prefixes.fork(sequence, holder, count)
        if holder in self.kept:
            self.kept[holder] = self.kept.pop(holder)
        return sequence

    def _note(self, request: Request, length: int) -> None:
        """The first `length` tokens of a request are in the cache when the step is done."""
        size, known = self.pool.page_size, self.prefixes.pages(request.sequence)
        if length // size > known:
            pages = [tuple(request.known(start, size)) for start in range(known * size, length // size * size, size)]
            self.prefixes.add(request.sequence, pages)

    def _room(self, request: Request, length: int, spare: int = 0) -> bool:
        """Whole pages for so many tokens of a request, if they are free or of sequences that are only kept. Leaves `spare` pages."""
        pool, size, known = self.pool, self.pool.page_size, self.pool.length(request.sequence)
        if length <= known and not spare:
            return True
        length = max(-(-length // size) * size, known)
        while pool.free_pages < (length - known) // size + spare:
            if not self.kept:
                return False
            oldest = next(iter(self.kept))
            del self.kept[oldest]
            self._free(oldest)
        pool.extend(request.sequence, length - known)
        return True

    def _places(self, request: Request, first: int, count: int) -> list[int]:
        """Where tokens are in the cache: page * page_size + row."""
        pages, size = self.pool.pages(request.sequence), self.pool.page_size
        return [pages[t // size] * size + t % size for t in range(first, first + count)]

    def _preempt(self, request: Request) -> None:
        """A running request waits again, before all others. Its pages stay as long as nobody needs them."""
        self.running.remove(request)
        self._keep(request)
        request.cached, request.preempted = 0, request.preempted + 1
        self.waiting.appendleft(request)

    def _keep(self, request: Request) -> None:
        """Its pages belong to nobody, and may be of use."""
        pages = self.prefixes.pages(request.sequence)
        self.pool.truncate(request.sequence, pages * self.pool.page_size)
        if pages:
            self.kept[request.sequence] = None
        else:
            self._free(request.sequence)
        request.sequence = None

    def _free(self, sequence: int) -> None:
        self.prefixes.remove(sequence)
        self.pool.free(sequence)
