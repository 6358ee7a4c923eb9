"""The scheduler of examples/engine as a state machine, its drafts and its texts: no kernel, and a cache of plain lists."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexpress import OutOfPages, PageAllocator
from support.engines import engine

parts = engine("scheduler")
Request, Scheduler = parts.Request, parts.Scheduler

STEPS = 10_000
WORDS = 5  # the model's vocabulary
END = 3  # ends an answer where what came before says so


def after(state: int, token: int) -> int:
    """All that a model knows after one more token: what the cache has of it, in place of keys and values."""
    return hash((state, token))


def next_token(state: int) -> int:
    return state // 7 % WORDS


def greedy(prompt: list[int], wanted: int, ends: bool) -> tuple[list[int], str]:
    """What a request has to make, and why it ends."""
    state, made = 0, []
    for token in prompt:
        state = after(state, token)
    while True:
        made.append(next_token(state))
        state = after(state, made[-1])
        if ends and made[-1] == END:
            return made, "end"
        if len(made) == wanted:
            return made, "length"


class Server:
    """A scheduler, a cache as lists, and requests that come, are cancelled, and whose steps fail, at random."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.size, pages = draw.choice([1, 2, 4, 8]), draw.randint(12, 60)
        self.pool = PageAllocator(pages, self.size)
        self.memory = [[None] * self.size for _ in range(pages)]
        draft = self.draft if draw.random() < 0.7 else None
        self.scheduler = Scheduler(self.pool, draw.randint(1, 8), draw.randint(1, 30), draft, draw.randint(2, 6))
        self.longest = min(100, pages * self.size)
        self.systems = [[draw.randrange(WORDS) for _ in range(draw.randint(0, self.longest // 4))] for _ in range(3)]
        self.requests, self.states = [], {}
        self.preempted = self.shared = self.accepted = self.moved = self.cancelled_in_steps = 0

    def draft(self, request, most):
        """Trees in which the right continuation may be, at random."""
        self.cancel(0.005)
        draw, tokens, parents, state, node = self.draw, [], [], self.known(request)[-1], 0
        while len(tokens) < most and draw.random() < 0.8:
            right = next_token(state)
            for token in draw.sample([right, (right + 1) % WORDS], draw.randint(1, 2)):
                if len(tokens) < most:
                    tokens.append(token)
                    parents.append(node)
            chosen = draw.randrange(len(tokens) - parents.count(node), len(tokens))
            node, state = chosen + 1, after(state, tokens[chosen])
        return tokens, parents

    def known(self, request) -> list[int]:
        """The states after each token that a request knows."""
        states = self.states.setdefault(request, [])
        for token in request.known(len(states), request.length):
            states.append(after(states[-1] if states else 0, token))
        return states

    def arrive(self) -> None:
        draw = self.draw
        prompt = draw.choice(self.systems) + [draw.randrange(WORDS) for _ in range(draw.randint(1, self.longest // 4))]
        ends, wanted = draw.random() < 0.1, draw.randint(1, self.longest // 2)

        def stop(made):
            self.cancel(0.001)
            return "end" if ends and made[-1] == END else ""

        self.requests.append((Request(prompt, wanted, stop), greedy(prompt, wanted, ends)))
        self.scheduler.submit(self.requests[-1][0])

    def cancel(self, chance: float) -> None:
        """Any request, or none: also in the midst of a step."""
        if self.requests and self.draw.random() < chance:
            request = self.draw.choice(self.requests)[0]
            reason = request.reason
            self.scheduler.cancel(request)
            assert request.reason == (reason or "cancelled")
            self.cancelled_in_steps += self.scheduler.busy and not reason

    def step(self) -> bool:
        scheduler, running = self.scheduler, len(self.scheduler.running)
        step = scheduler.plan()
        assert sum(len(work.tokens) for work in step) <= scheduler.chunk + running, "no more tokens than a step may have"
        assert len({work.request for work in step}) == len(step) and all(work.tokens for work in step)
        assert {work.request for work in step} == set(scheduler.running), "who runs computes in every step"
        if step and self.draw.random() < 0.01:
            self.write(step[:1])
            scheduler.abandon()
            self.memory = [[None] * self.size for _ in self.memory]
            return True
        found = self.write(step)
        before = {work.request: len(work.request.made) for work in step}
        moves = scheduler.commit(step, found)
        values = [self.memory[source // self.size][source % self.size] for source, _ in moves]
        for (_, target), value in zip(moves, values, strict=True):
            self.memory[target // self.size][target % self.size] = value
        self.moved += len(moves)
        self.accepted += sum(len(work.request.made) - before[work.request] - 1 for work in step if work.parents)
        return bool(step)

    def write(self, step) -> list[list[int]]:
        """As a layer does: all keys are written before any is read. Returns next tokens of rows."""
        written, wanted = {}, []
        for work in step:
            request, states = work.request, self.known(work.request)
            first, pages = request.cached, self.pool.pages(request.sequence)
            values = []
            for i, token in enumerate(work.tokens):
                parent = work.parents[i] if work.parents else i - 1
                assert parent < i
                before = values[parent] if parent >= 0 else states[first - 1] if first else 0
                values.append(after(before, token))
                page = pages[(first + i) // self.size]
                assert written.setdefault(page, request) is request, "a page is written by one sequence"
                self.memory[page][(first + i) % self.size] = values[-1]
            wanted.append([next_token(value) for value in values[len(values) - work.rows :]])
        for work in step:
            self.read(self.pool.pages(work.request.sequence), self.known(work.request)[: work.request.cached])
        return wanted

    def read(self, pages: list[int], states: list[int]) -> None:
        """A sequence's pages hold what was written for its tokens."""
        for i, page in zip(range(0, len(states), self.size), pages, strict=False):
            part = states[i : i + self.size]
            assert self.memory[page][: len(part)] == part

    def check(self) -> None:
        """Nothing is lost, and no page leaks."""
        scheduler, pool = self.scheduler, self.pool
        running, waiting = set(scheduler.running), set(scheduler.waiting)
        assert not running & waiting and len(waiting) == len(scheduler.waiting)
        done = {request for request, _ in self.requests if request.reason}
        assert running | waiting | done == {request for request, _ in self.requests} and not (running | waiting) & done
        assert len(running) <= scheduler.max_sequences
        sequences = [*(r.sequence for r in running), *scheduler.kept]
        held = {page for sequence in sequences for page in pool.pages(sequence)}
        assert pool.free_pages + len(held) == pool.num_pages and len(set(sequences)) == len(sequences)
        assert all(r.sequence is None and r.cached == 0 for r in waiting) and all(r.sequence is None for r in done)
        for request, (made, reason) in self.requests:
            assert request.made == made[: len(request.made)], "tokens are those of the model alone"
            assert request.reason in ("", "cancelled") or (request.made == made and request.reason == reason)
        self.requests = [(r, m) for r, m in self.requests if not r.reason]
        for sequence in scheduler.kept if self.draw.random() < 0.1 else ():
            states = [0]
            for node in scheduler.prefixes._paths[sequence]:
                assert len(node.tokens) == self.size
                for token in node.tokens:
                    states.append(after(states[-1], token))
            self.read(pool.pages(sequence), states[1:])
            assert pool.length(sequence) == len(states) - 1, "what is kept is whole pages, which the tree knows"

    def run(self, steps: int) -> None:
        draw = self.draw
        for _ in range(steps):
            while draw.random() < 0.3:
                self.arrive()
            self.cancel(0.02)
            waited = {request: request.preempted for request, _ in self.requests}
            self.step()
            self.preempted += sum(r.preempted - count for r, count in waited.items())
            self.check()
        left = sum(r.wanted + len(r.prompt) for r, _ in self.requests) * 60 + 100
        while self.step():
            self.check()
            left -= 1
            assert left > 0, "it comes to an end"
        assert not self.requests and not self.scheduler.running and not self.scheduler.waiting
        self.shared = self.scheduler.tokens_found
        self.scheduler.abandon()
        assert self.pool.free_pages == self.pool.num_pages


def test_ten_thousand_random_steps():
    servers = [Server(seed) for seed in range(40)]
    for server in servers:
        server.run(STEPS // 40)
    for what in ("preempted", "shared", "accepted", "moved", "cancelled_in_steps"):
        assert sum(getattr(server, what) for server in servers) > 100, f"nothing was {what}"


def test_equal_beginnings_are_computed_once():
    """Also of requests that come together: the second takes pages that the first writes in the same step."""
    scheduler = Scheduler(PageAllocator(40, 4), 4, 8)
    requests = [Request([*range(21), last], 2) for last in (30, 31, 32)]
    for request in requests:
        scheduler.submit(request)
    computed = 0
    while step := scheduler.plan():
        computed += sum(len(work.tokens) for work in step if not work.request.made)
        scheduler.commit(step, [[9] * work.rows for work in step])
    assert computed == 22 + 2 * 2 and scheduler.tokens_found == 2 * 20
    again = Request([*range(21), 30, 9, 8], 1)
    scheduler.submit(again)
    assert [len(work.tokens) for work in scheduler.plan()] == [4], "pages of what is done serve who comes later"


def test_a_prompt_holds_up_nobody():
    """While a long prompt is computed, who has its own behind it makes a token in every step."""
    scheduler = Scheduler(PageAllocator(100, 4), 4, 8)
    scheduler.submit(Request([1], 50))
    scheduler.commit(scheduler.plan(), [[0]])
    scheduler.submit(Request(list(range(100)), 1))
    for _ in range(10):
        step = scheduler.plan()
        assert len(step[0].tokens) == 1 and step[0].answers and len(step[1].tokens) == 8
        scheduler.commit(step, [[0] * work.rows for work in step])


@pytest.mark.parametrize("wanted, says, reason", [(3, "", "length"), (9, "end of text", "end of text"), (4, "", "")])
def test_a_stop_that_fails_makes_no_answer_longer(wanted, says, reason):
    """It raises once, and is asked again of the same tokens."""
    failures = []

    def stop(made):
        if len(made) == 3:
            if not failures:
                failures.append(made)
                raise BrokenPipeError
            return says
        return ""

    scheduler = Scheduler(PageAllocator(10, 4), 4, 8)
    request = Request([1, 2], wanted, stop)
    scheduler.submit(request)
    with pytest.raises(BrokenPipeError):
        while step := scheduler.plan():
            scheduler.commit(step, [[0] * work.rows for work in step])
    scheduler.abandon()
    assert bool(scheduler.plan()) == (not reason) and (request.made, request.reason) == ([0, 0, 0], reason)


def test_what_is_refused():
    scheduler = Scheduler(PageAllocator(2, 4), 4, 8)
    with pytest.raises(OutOfPages, match="3 pages are needed but 2 of 2 are free"):
        scheduler.submit(Request([1, 2, 3], 7))
    for bad in (Request([], 1), Request([1], 1, reason="length")):
        with pytest.raises(ValueError, match="a request must have a prompt and be new"):
            scheduler.submit(bad)
    assert not scheduler.waiting
    request = Request([1, 2, 3], 6 - 1)
    scheduler.submit(request)
    scheduler.submit(Request([1, 2, 3], 6))  # its last token needs no place
    with pytest.raises(ValueError, match="and be new; got one with 3 tokens, wanted=5, .* waiting=True"):
        scheduler.submit(request)


ARRAY = torch.tensor([1, 2])


@pytest.mark.parametrize(
    "request_of, error, words",
    [
        (
            lambda: Request([1, 9], 2),
            ValueError,
            r"token 1 of the prompt is 9, but the model's are 0 to 8: \[1, 9\]; does its tokenizer fit",
        ),
        (lambda: Request([-1], 2), ValueError, "token 0 of the prompt is -1"),
        (lambda: Request(ARRAY, 2), TypeError, r"the prompt must be a list of ints, got Tensor .* pass .tolist\(\)"),
        (lambda: Request(ARRAY.numpy(), 2), TypeError, "got ndarray"),
        (lambda: Request("text", 2), TypeError, r"got str 'text'; .* of a text tokenizer.encode\(text\)"),
        (lambda: Request([[1, 2]], 2), TypeError, r"got list \[\[1, 2\]\]"),
        (lambda: Request([1.0], 2), TypeError, "got list"),
        (lambda: Request([True], 2), TypeError, "got list"),
        (lambda: Request([1], 2, made=[9]), ValueError, "token 0 of made is 9"),
        (lambda: Request([1], 0), ValueError, "wanted is 0; it must be a whole number of at least 1"),
        (lambda: Request([1], 2.0), ValueError, "wanted is 2.0; it must be"),
        (lambda: Request([1], None), ValueError, "wanted is None; it must be"),
        (lambda: Request([1], 2, "stop"), TypeError, "stop must be a function of the tokens made, got 'stop'"),
        (lambda: [1, 2], TypeError, "must be a Request, got list"),
    ],
)
def test_what_no_step_could_compute_is_refused(request_of, error, words):
    """It would fail every step, of all requests."""
    scheduler = Scheduler(PageAllocator(9, 4), 4, 8, vocab_size=9)
    for refused in (scheduler.check, scheduler.submit):
        with pytest.raises(error, match=words):
            refused(request_of())
    assert not scheduler.waiting


def test_prompts_are_taken_as_they_are():
    """A tuple, and numpy's ints; and what happens to the list later changes nothing."""
    scheduler, given = Scheduler(PageAllocator(9, 4), 4, 8, vocab_size=9), [1, 8]
    for prompt in ((1, 8), [*torch.tensor(given).numpy()], given):
        request = Request(prompt, 2)
        scheduler.submit(request)
        given.append(9) if prompt is given else None
        assert request.prompt == [1, 8] and {type(token) for token in request.prompt} == {int}


@pytest.mark.parametrize("name", ["max_sequences", "chunk", "nodes", "max_length"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "4"])
def test_limits_with_which_nothing_is_made(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be a whole number of at least "):
        Scheduler(**{"pool": PageAllocator(9, 4), "max_sequences": 4, "chunk": 8, name: value})


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 7), st.integers(1, 3))
def test_drafts_are_trees_of_what_was_seen(tokens, most, branches):
    lookup = engine("drafts").PromptLookup(branches=branches)
    request = Request(tokens, 10)
    lookup(request, most)
    request.made += tokens[:3]
    found, parents = lookup(request, most)
    assert len(found) == len(parents) <= most
    paths = [[]]
    for i, (token, parent) in enumerate(zip(found, parents, strict=True)):
        assert 0 <= parent <= i
        paths.append([*paths[parent], token])
    assert len(set(map(tuple, paths))) == len(paths), "no two nodes say the same"
    known = tokens + tokens[:3]
    seen = {tuple(known[i:j]) for i in range(len(known)) for j in range(i, len(known) + 1)}
    assert all(tuple(path) in seen for path in paths)
    tail = known[-2:]
    if found and len(known) > 2:
        assert any(tuple(tail + path) in seen for path in paths[1:])


def test_drafts_of_a_repetition():
    lookup = engine("drafts").PromptLookup()
    request = Request([1, 2, 3, 4, 5, 1, 2, 3, 6, 7], 10, made=[1, 2, 3])
    assert lookup(request, 5) == ([6, 7, 1, 2, 4], [0, 1, 2, 3, 0]), "what followed last, then what did before"
    assert lookup(Request([1, 2, 3], 10, made=[4]), 5) == ([], [])


class Letters:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, ids, *, skip_special_tokens):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@pytest.mark.parametrize("strings, said, text, pieces", [
    ((), "naïve €", "naïve €", ["n", "a", "ï", "v", "e", " ", "€"]),
    (("\n\n",), "a\nb\n\nc", "a\nb", ["a", "\nb"]),
    (("abc", "bd"), "abdx", "a", ["a"]),
    (("abc",), "ababx", "ababx", ["ab", "abx"]),
])  # fmt: skip
def test_texts(strings, said, text, pieces):
    written, made = [], []
    answer = engine("text").Answer(Letters(), frozenset([300]), strings, written.append)
    for token in [*said.encode(), 300]:
        made.append(token)
        if reason := answer(made):
            break
    assert reason == ("end of text" if text == said else "stop string")
    assert answer.text == text == "".join(written) and written == pieces


def test_a_text_that_ends_by_length():
    written = []
    answer = engine("text").Answer(Letters(), strings=("bcd",), write=written.append)
    for end in range(1, 4):
        assert answer(list(b"abc"[:end])) == ""
    assert written == ["a"]
    answer.close()
    answer.close()
    assert written == ["a", "bc"]


def test_a_text_whose_writer_fails():
    """Asked again of the same tokens, it says the same."""
    written, failing = [], [True]

    def write(piece):
        if failing and "c" in piece:
            failing.pop()
            raise BrokenPipeError
        written.append(piece)

    answer, made = engine("text").Answer(Letters(), strings=("bcd", "ef"), write=write), []
    for token in b"abcxef":
        made.append(token)
        try:
            reason = answer(made)
        except BrokenPipeError:
            reason = answer(made)
        if reason:
            break
    assert reason == "stop string" and answer.text == "".join(written) == "abcx"


class Pieces:
    """A tokenizer whose tokens are any bytes. What is no UTF-8 is U+FFFD, once for the beginning of a character."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids, *, skip_special_tokens):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


class ByteByByte(Pieces):
    """The same as SentencePiece's bytes have it: of what is no UTF-8 every byte is U+FFFD."""

    def decode(self, ids, *, skip_special_tokens):
        text = b"".join(self.pieces[i] for i in ids)
        try:
            return text.decode()
        except UnicodeDecodeError as why:
            return text[: why.start].decode() + "\ufffd" * (len(text) - why.start)


def answered(tokenizer, strings=()):
    """The answer of all its tokens, what was written of it, and why it ended."""
    written, made, reason = [], [], ""
    answer = engine("text").Answer(tokenizer, strings=strings, write=written.append)
    while len(made) < len(tokenizer.pieces) and not reason:
        made.append(len(made))
        reason = answer(made)
    answer.close()
    assert "".join(written) == answer.text
    return answer, written, reason


@pytest.mark.parametrize("tokenizer", [Pieces, ByteByByte])
@pytest.mark.parametrize("pieces, strings, written", [
    ([b"hi ", b"wor\xf0\x9f"], (), ["hi ", "wor"]),  # ended by length
    ([b"hi ", "done\ufffd".encode()], (), ["hi ", "done", "\ufffd"]),
    ([b"hi ", "done\ufffd".encode(), b"!"], (), ["hi ", "done", "\ufffd!"]),
    ([b"wor\xf0", b"\x9f\x98", b"\x80ld"], (), ["wor", "\U0001f600ld"]),
    ([b"a", b"STOP\xff", b"q"], ("STOP",), ["a"]),
    ([b"a", b"ST\xe2", b"\x82\xac"], ("STOP", "ST\u20ac"), ["a"]),
])  # fmt: skip
def test_texts_that_end_in_a_character(tokenizer, pieces, strings, written):
    answer, found, reason = answered(tokenizer(pieces), strings)
    assert reason == ("stop string" if strings else "")
    if not strings:
        assert answer.text == tokenizer(pieces).decode(range(len(pieces)), skip_special_tokens=True)
    assert [piece for piece in found if piece.strip("\ufffd")] == [piece for piece in written if piece.strip("\ufffd")]


@given(
    st.lists(
        st.sampled_from([b"a", b"b", b"ab", "\u20ac".encode(), b"\xe2", b"\x82", b"\xac", b"a\xe2\x82", b"\xff", b"b\xf0\x9f"]), min_size=1
    ),
    st.sampled_from([(), ("ab",), ("\u20aca", "bb"), ("b\u20ac",)]),
)
def test_texts_are_those_of_a_plain_decode(pieces, strings):
    """Up to a stop string, which ends them as soon as it is there."""
    tokenizer = Pieces(pieces)
    expected, end = "", ""
    for count in range(1, len(pieces) + 1):
        expected = tokenizer.decode(range(count), skip_special_tokens=True)
        places = [expected.find(s) for s in strings if s in expected]
        if places:
            expected, end = expected[: min(places)], "stop string"
            break
    answer, _, reason = answered(tokenizer, strings)
    assert (answer.text, reason) == (expected, end)


class Words:
    """A tokenizer that leaves out a space at the beginning, as SentencePiece does, and shows nothing of token 0."""

    def decode(self, ids, *, skip_special_tokens):
        return "".join(["", " Hello", " world", ","][i] for i in ids).removeprefix(" ")


def test_spaces_behind_a_token_that_shows_nothing():
    made, answer = [1, 0, 2, 3, 0, 0, 2], engine("text").Answer(Words())
    for end in range(1, len(made) + 1):
        answer(made[:end])
    assert answer.text == Words().decode(made, skip_special_tokens=True) == "Hello world, world"
