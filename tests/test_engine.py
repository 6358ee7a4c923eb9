"""examples/engine with kernels: every way to serve makes the tokens of the dense model in float64."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch

from flexpress import printed_kernels
from flexpress.caches import shared_attention, shared_prefix
from support.engines import engine

parts = engine()
PAGE = 8

pytestmark = pytest.mark.usefixtures("in_cpp")


def drawn(vocab_size: int, count: int, prompt: int, new: int, systems: int = 2, system: int = 3 * PAGE + 5):
    """Requests of random lengths, each behind one of a few system prompts. Their tokens repeat, so that something can be drafted."""
    draw = random.Random(3)
    beginnings = [[draw.randrange(vocab_size) for _ in range(system)] for _ in range(systems)]
    requests = []
    for i in range(count):
        own = [draw.randrange(vocab_size) for _ in range(draw.randint(1, prompt))]
        requests.append(parts.Request(beginnings[i % systems] + own + own[: len(own) // 2], draw.randint(2, new)))
    return requests


WAYS = {  # what an engine has, beside enough pages for all that run
    "plain": {},
    "one at a time": dict(max_sequences=1),
    "small chunks": dict(chunk=PAGE - 1),
    "drafts": dict(draft=parts.PromptLookup(), nodes=5),
    "few pages": dict(num_pages=16),
    "float8": dict(float8=True),
    "float8, drafts and few pages": dict(float8=True, draft=parts.PromptLookup(branches=3), nodes=7, num_pages=16),
}


def served(model, requests, **options):
    """The engine that has made all tokens of the requests."""
    server = parts.Engine(model, **(dict(num_pages=80, page_size=PAGE, max_sequences=5, chunk=24) | options))
    if server.tensors.scales is not None:
        server.calibrate(requests[0].prompt)
    server.run(requests)
    assert all(r.reason == "length" and len(r.made) == r.wanted == len(r.times) - 1 for r in requests)
    server.scheduler.abandon()
    assert server.pool.free_pages == server.pool.num_pages
    return server


def unlike_dense(model, requests, server) -> list[int]:
    return [parts.wrong_tokens(model, r, server.tensors.stored if server.tensors.scales is not None else None) for r in requests]


@pytest.fixture
def always_shared(monkeypatch):
    """However little need not be read again. Gives a list: 1 for each merge of two parts."""
    merged, merge = [], shared_attention.merge_parts
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0)
    monkeypatch.setattr(shared_attention, "merge_parts", lambda *tensors: (merged.append(1), merge(*tensors)))
    return merged


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_dense_model(way, always_shared):
    model = parts.Llama.random(parts.Config(), 1)
    requests = drawn(256, 12, 12, 50)
    server = served(model, requests, **WAYS[way])
    assert unlike_dense(model, requests, server) == [0] * len(requests)
    assert server.scheduler.tokens_found > 0 and bool(always_shared) == (way != "one at a time")
    assert (sum(r.preempted for r in requests) > 0) == ("few pages" in way)
    assert (server.accepted > 5) == ("drafts" in way), server.accepted
    broken = requests[3].made
    broken[1] = (broken[1] + 1) % 256
    assert sum(unlike_dense(model, requests[3:4], server)) > 0, "the check must see a wrong token"


def test_the_same_tokens_with_prefixes_read_once(monkeypatch):
    """As when each sequence reads them."""
    model, made = parts.Llama.random(parts.Config(), 1), []
    for least in (0, 1 << 40):
        monkeypatch.setattr(shared_prefix, "LEAST_BYTES", least)
        requests = drawn(256, 10, 12, 30)
        served(model, requests)
        made.append([r.made for r in requests])
    assert made[0] == made[1]


def test_kernels_of_attention_are_compiled_ahead(own_directory, always_shared):
    model, lines = parts.Llama.random(parts.Config(), 1), []
    server = parts.Engine(model, num_pages=80, page_size=PAGE, max_sequences=5, chunk=24)
    assert server.compile(lines.append) > 1 and server.compile() == 0
    known = {*printed_kernels()}
    server.run(drawn(256, 6, 12, 10))
    assert not [path for path in {*printed_kernels()} - known if "update_cache" not in path.name]
    assert "kernels compiled for" in lines[0] and len(lines) == 2


@pytest.mark.parametrize("way", ["drafts", "few pages"])
def test_the_same_tokens_as_alone(way):
    """Whatever else runs, and whoever is preempted."""
    model = parts.Llama.random(parts.Config(), 1)
    alone, together = drawn(256, 8, 12, 50), drawn(256, 8, 12, 50)
    for request in alone:
        served(model, [request])
    served(model, together, **WAYS[way])
    assert [r.made for r in together] == [r.made for r in alone]


def test_a_draft_that_has_to_move():
    """The second branch is right: its keys lie behind the first one's."""
    model = parts.Llama.random(parts.Config(), 1)
    (known,) = drawn(256, 1, 12, 14)
    served(model, [known])
    (request,) = drawn(256, 1, 12, 14)

    def wrong_then_right(request, most):
        right = known.made[len(request.made) : len(request.made) + 2]
        tokens, parents = [(right[0] + 1) % 256, 7, *right], [0, 1, 0, 3]
        return tokens[: most if most > 2 else 0], parents[: most if most > 2 else 0]

    server = served(model, [request], draft=wrong_then_right, nodes=5)
    assert request.made == known.made and server.accepted >= 7


@pytest.mark.parametrize("what", ["draft", "run", "stop", "move"])
def test_nothing_is_lost_when_a_step_fails(what):
    """In whatever part of it: planning, computing, looking at an answer, moving drafts."""
    model = parts.Llama.random(parts.Config(), 1)
    requests, expected = drawn(256, 6, 12, 12), drawn(256, 6, 12, 12)
    served(model, expected)
    answers = {tuple(r.prompt): r.made for r in expected}
    failures = []

    def fails(name, number):
        """The first and the third time it is done."""
        if name == what and len(failures) < 4:
            failures.append(number)
            if len(failures) % 2:
                raise MemoryError(name)

    def second_is_right(request, most):
        fails("draft", most)
        right = answers[tuple(request.prompt)][len(request.made)]
        return ([(right + 1) % 256, right], [0, 0]) if most > 1 else ([], [])

    server = parts.Engine(model, num_pages=60, page_size=PAGE, max_sequences=4, chunk=24, draft=second_is_right, nodes=3)
    run, move = server.tensors.run, server.tensors.move
    server.tensors.run = lambda step: (fails("run", len(step)), run(step))[1]
    server.tensors.move = lambda places: (fails("move", len(places)), move(places))
    for request in requests:
        request.stop = lambda made: fails("stop", len(made)) or ""
        server.submit(request)
    for _ in range(2):
        with pytest.raises(MemoryError, match=what):
            while server.step():
                pass
        assert not server.scheduler.running and server.pool.free_pages == server.pool.num_pages
    server.run([])
    assert [r.made for r in requests] == [r.made for r in expected] and server.accepted > 5


def test_who_is_cancelled_leaves():
    model = parts.Llama.random(parts.Config(), 1)
    requests, expected = drawn(256, 4, 12, 9), drawn(256, 4, 12, 9)
    served(model, expected)
    server = parts.Engine(model, num_pages=40, page_size=PAGE, max_sequences=3, chunk=60)
    for request in requests:
        server.submit(request)
    server.step()
    server.cancel(requests[0])
    server.cancel(requests[3])
    server.run([])
    assert [r.reason for r in requests] == ["cancelled", "length", "length", "cancelled"]
    assert [r.made for r in requests[1:3]] == [r.made for r in expected[1:3]] and requests[3].made == []


@pytest.mark.parametrize("where", ["stop", "write", "stop of another", "draft"])
def test_who_is_cancelled_in_a_step(where):
    """By what is called in it: it gets no further token, and nothing of it is left over. All others go on as if nothing was."""
    model = parts.Llama.random(parts.Config(), 1)
    requests, expected = drawn(256, 4, 12, 9), drawn(256, 4, 12, 9)
    served(model, expected)
    own = requests[1]

    def cancels(made):
        if len(made) == 2 and not own.reason:
            server.cancel(own)
            assert own.reason == "cancelled"
        return ""

    def no_draft(request, most):
        cancels(request.made if where == "draft" else [])
        return [], []

    server = parts.Engine(model, num_pages=40, page_size=PAGE, max_sequences=3, chunk=60, draft=no_draft)
    if where == "write":
        words = SimpleNamespace(decode=lambda ids, skip_special_tokens: "a" * len(ids))
        own.stop = parts.Answer(words, write=lambda piece: cancels(own.made))
    elif where != "draft":
        requests[0 if "another" in where else 1].stop = cancels
    server.run(requests)
    assert [r.reason for r in requests] == ["length", "cancelled", "length", "length"] and len(own.made) <= 2
    assert [r.made for r in requests] == [r.made[: len(own.made)] if r is expected[1] else r.made for r in expected]
    scheduler = server.scheduler
    assert not scheduler.running and not scheduler.waiting and own.sequence is None
    assert all(sequence in scheduler.kept for sequence in scheduler.prefixes._paths)
    scheduler.abandon()
    assert server.pool.free_pages == server.pool.num_pages and not scheduler.prefixes._paths


@pytest.mark.parametrize("what", ["step", "forget", "run"])
def test_a_step_in_a_step(what):
    """It is refused, and nothing is lost."""
    model = parts.Llama.random(parts.Config(), 1)
    requests, expected = drawn(256, 2, 12, 9), drawn(256, 2, 12, 9)
    served(model, expected)
    server = parts.Engine(model, num_pages=40, page_size=PAGE)

    def stop(made):
        if not refused:
            with pytest.raises(RuntimeError, match="a step is under way"):
                server.run([parts.Request([1], 1)]) if what == "run" else getattr(server, what)()
            refused.append(what)
        return ""

    refused, requests[0].stop = [], stop
    server.run(requests)
    assert refused and [r.made for r in requests] == [r.made for r in expected]


def test_an_answer_ends_where_it_stops():
    model = parts.Llama.random(parts.Config(), 1)
    (known,) = drawn(256, 1, 12, 14)
    served(model, [known])
    (request,) = drawn(256, 1, 12, 14)
    request.stop = lambda made: "end" if made[-1] == known.made[4] else ""
    server = parts.Engine(model, num_pages=40, page_size=PAGE, draft=lambda r, most: (known.made[len(r.made) :][:most], [*range(most)]))
    server.run([request])
    assert request.reason == "end" and request.made == known.made[: known.made.index(known.made[4]) + 1]


def test_requests_that_never_fit():
    model = parts.Llama.random(parts.Config(), 1)
    server = parts.Engine(model, num_pages=40, page_size=PAGE, max_length=50)
    first = parts.Request([1], 2)
    with pytest.raises(ValueError, match="the request has 45 tokens and wants 6 more, but max_length is 50"):
        server.run([first, parts.Request([1] * 45, 6)])
    assert not server.scheduler.waiting, "none is taken"
    server.run([first])
    assert first.reason == "length"


@pytest.mark.parametrize("prompt", [[1, 256], [1, -1], torch.tensor([1, 2]), "text"])
def test_a_prompt_that_the_model_cannot_read(prompt):
    """Nobody else's step fails for it, and of a run nothing is taken."""
    server = parts.Engine(parts.Llama.random(parts.Config(), 1), num_pages=40, page_size=PAGE)
    first = parts.Request((1, 255), 2)
    for refused in (lambda: server.submit(parts.Request(prompt, 3)), lambda: server.run([first, parts.Request(prompt, 3)])):
        with pytest.raises((ValueError, TypeError), match="the prompt"):
            refused()
    assert not server.scheduler.waiting
    server.run(iter([first]))
    assert first.reason == "length" and len(first.made) == 2


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_sequences", "chunk", "max_length", "nodes", "draft"])
def test_limits_of_an_engine(name):
    model = parts.Llama.random(parts.Config(), 1)
    for value in (0, -3, 2.5):
        with pytest.raises(ValueError, match=f"{name} is {value}; it must be a "):
            parts.Engine(model, **{"num_pages": 40, "page_size": PAGE, name: value})


def test_what_scales_cannot_be_made_of():
    model = parts.Llama.random(parts.Config(), 1)
    with pytest.raises(ValueError, match="calibrate needs float8=True"):
        parts.Engine(model, num_pages=4, page_size=PAGE).calibrate([1])
    server = parts.Engine(model, num_pages=4, page_size=PAGE, float8=True)
    for text in ([], [256], torch.tensor([1])):
        with pytest.raises((ValueError, TypeError), match="the text|a text"):
            server.calibrate(text)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 0), (9, 9, 9, 1, 0), (3, 40, 3, 30, 0), (5, 17, 17, 5, 5), (5, 47, 9, 33, 4), (2, 9, 1, 9, 0)]
)
def test_captured_shapes_have_room(shape):
    steps = engine("steps")
    exact = steps.Shape(*shape)
    room = exact.rounded()
    for name in ("sequences", "tokens", "rows", "max_q_len", "nodes"):
        assert getattr(room, name) >= getattr(exact, name)
    assert room.rounded() == room and room.tokens <= 2 * exact.tokens + 8
    assert room.rows <= room.tokens


class Replayed:
    """What a CUDA graph does, on a CPU: what was called while it was captured is called again, and writes to the same tensor."""

    capturing = None

    def replay(self) -> None:
        self.left.copy_(self.run())


@contextlib.contextmanager
def captured(graph, pool):
    Replayed.capturing = graph
    yield
    Replayed.capturing = None


@pytest.mark.parametrize("way", ["plain", "float8, drafts and few pages"])
@pytest.mark.parametrize("shared", [True, False])
def test_captured_steps(way, shared, always_shared, monkeypatch):
    """Batches with places that nobody has, inputs that stay where they are, and shared prefixes that change under a graph."""
    steps = engine("steps").Steps
    forward = steps._forward

    def noted(self, inputs, prefix):
        found = forward(self, inputs, prefix)
        if Replayed.capturing is not None:
            Replayed.capturing.left, Replayed.capturing.run = found, lambda: forward(self, inputs, prefix)
        return found

    monkeypatch.setattr(steps, "_forward", noted)
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", 0 if shared else 1 << 40)
    for name, fake in (("graph_pool_handle", lambda: None), ("CUDAGraph", Replayed), ("graph", captured)):
        monkeypatch.setattr(torch.cuda, name, fake)
    model = parts.Llama.random(parts.Config(), 1)
    requests, more = drawn(256, 9, 12, 40), drawn(256, 9, 20, 30, systems=3)
    server = served(model, requests, graphs=True, **WAYS[way])
    shapes = len(server.tensors._captured)
    server.run(more)
    assert unlike_dense(model, requests + more, server) == [0] * 18
    assert shapes < server.steps / 3 and bool(always_shared) == shared


@pytest.mark.gpu
@pytest.mark.parametrize("way, dtype", [*((way, torch.bfloat16) for way in WAYS), ("plain", torch.float32), ("drafts", torch.float32)])
def test_a_larger_model(way, dtype, request):
    """By CUDA graphs: in bfloat16 with prefixes that are read once, in float32 as it pays."""
    merged = request.getfixturevalue("always_shared") if dtype == torch.bfloat16 else None
    model = parts.Llama.random(parts.Config(4000, 512, 1024, 6, 8, 2, 64, tie_word_embeddings=True), 1).to("cuda", dtype)
    few = "few pages" in way
    prompt, new = (60, 200) if few else (500, 60)  # answers that outgrow the pages
    requests = drawn(4000, 40, prompt, new, systems=3, system=300)
    options = dict(num_pages=400, page_size=64, max_sequences=24, chunk=512) | WAYS[way]
    if few:
        options |= dict(num_pages=150, page_size=16)
    server = served(model, requests, **options)
    assert unlike_dense(model, requests, server) == [0] * len(requests)
    assert merged is None or bool(merged) == (way != "one at a time")
    assert (sum(r.preempted for r in requests) > 0) == few and len(server.tensors._captured) > 1


@pytest.mark.gpu
def test_a_graph_makes_the_tokens_of_a_run_without():
    model = parts.Llama.random(parts.Config(256, 512, 1024, 6, 8, 2, 64), 1).to("cuda")
    made = []
    for graphs in (False, True):
        server = parts.Engine(model, num_pages=300, page_size=64, max_sequences=6, chunk=256, graphs=graphs)
        for _ in range(2):  # the second time every shape is known
            requests = drawn(256, 12, 200, 30, systems=3, system=300)
            server.run(requests)
            made.append([r.made for r in requests])
    assert made[0] == made[1] == made[2] == made[3]
