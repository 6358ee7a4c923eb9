"""An engine: requests come, steps make tokens of them, and nothing is lost when a step fails."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from flexpress import PageAllocator

from .checks import token_ids, whole
from .llama import Llama
from .scheduler import Draft, Request, Scheduler, Work
from .steps import Steps


class Engine:
    """Continuous batching of greedy answers over one model, on the device of its weights.

    steps, steps_waited   how many there were, and in how many a request waited
    peak_pages            pages in use at most, without those that are only kept
    drafted, accepted     tokens
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_pages: int,
        page_size: int,
        max_sequences: int = 64,
        chunk: int = 512,
        max_length: int | None = None,
        draft: Draft | None = None,
        nodes: int = 8,
        float8: bool = False,
        graphs: bool | None = None,
    ) -> None:
        """
        max_sequences   that run at a time
        chunk           tokens of prompts and drafts in a step
        max_length      tokens of a request, prompt and answer; by default as many as the pages hold
        draft, nodes    what proposes next tokens, and how many tokens are verified at a time; by default nothing is drafted
        float8          keys and values are stored as e4m3; call `calibrate` before the first request
        graphs          CUDA graphs; by default on a GPU
        ValueError for limits with which nothing could be made.
        """
        self.pool = PageAllocator(whole("num_pages", num_pages, 1), whole("page_size", page_size, 1))
        self.max_length = max(2, num_pages * page_size) if max_length is None else max_length
        self.scheduler = Scheduler(self.pool, max_sequences, chunk, draft, nodes, model.config.vocab_size, self.max_length)
        graphs = model.head.is_cuda if graphs is None else graphs
        self.tensors = Steps(model, self.pool, self.max_length, float8=float8, graphs=graphs)
        self.limits = max_sequences, chunk, nodes if draft else 0
        self.forget()

    def compile(self, say: Callable[[str], object] | None = None) -> int:
        """Compiles the kernels of attention ahead, side by side, and returns how many that were. What it did, and later each graph that is
        captured, is said in a line."""
        if say is not None:
            self.tensors.say = say
        return self.tensors.compile(*self.limits)

    def forget(self) -> None:
        """Nothing is in the cache, and all numbers begin at 0. Requests that run wait again."""
        self._check_idle()
        self.scheduler.abandon()
        self.scheduler.tokens_found = 0
        self.steps = self.steps_waited = self.peak_pages = self.drafted = self.accepted = 0

    def calibrate(self, ids: list[int]) -> None:
        """Sets the scales of a float8 cache by a text. ValueError without such a cache, and for tokens that the model does not have."""
        ids = token_ids("the text", ids, self.scheduler.vocab_size)
        if self.tensors.scales is None or not ids:
            raise ValueError(f"calibrate needs float8=True and a text of one token or more, got {len(ids)} tokens")
        with torch.no_grad():
            self.tensors.calibrate(ids)

    def submit(self, request: Request) -> None:
        """A request waits for its turn. TypeError, ValueError or OutOfPages if its turn could not come, or the model cannot read it."""
        self.scheduler.submit(request)
        request.times[:] = [time.perf_counter()]

    def cancel(self, request: Request) -> None:
        """A request is done with what it has. Its own `stop`, and what that calls, may do it, too."""
        self.scheduler.cancel(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """One run of the model over what is there to compute. Returns the requests that were in it; none if nothing is left to do.

        If it fails, as when memory is short, all requests wait again with the tokens that they have made. A `stop` that has failed is asked
        again; if it always fails, cancel its request.
        """
        self._check_idle()
        step: list[Work] = []
        try:
            step = self.scheduler.plan()
            if not step:
                return []
            self._count()
            moves = self.scheduler.commit(step, self.tensors.run(step))
            if moves:
                self.tensors.move(moves)
        except BaseException:
            self.scheduler.abandon()
            raise
        finally:
            self._note(step)
        return [work.request for work in step]

    def _check_idle(self) -> None:
        if self.scheduler.busy:
            raise RuntimeError(
                "a step is under way, whose pages are in use: a `stop` may submit and cancel requests, but begin no other step"
            )

    def _note(self, step: list[Work]) -> None:
        """When tokens were made, also those of a step that failed behind them, and how many drafts were right."""
        now = time.perf_counter()
        for work in step:
            made = len(work.request.made) + 1 - len(work.request.times)
            work.request.times += [now] * made
            if work.parents and made:
                self.drafted += len(work.parents) - 1
                self.accepted += made - 1

    def run(self, requests: list[Request]) -> None:
        """Makes all tokens of all requests. Raises what `submit` does, before anything is made."""
        self._check_idle()
        requests = list(requests)
        if len(set(map(id, requests))) < len(requests):
            raise ValueError("a request is there twice; make one for each answer")
        for request in requests:
            self.scheduler.check(request)
        for request in requests:
            self.submit(request)
        while self.step():
            pass

    def pages_in_use(self) -> int:
        """By requests that run."""
        return len({page for request in self.scheduler.running for page in self.pool.pages(request.sequence)})

    def _count(self) -> None:
        """A step begins."""
        self.steps, self.steps_waited = self.steps + 1, self.steps_waited + bool(self.scheduler.waiting)
        if self.pool.num_pages - self.pool.free_pages > self.peak_pages:
            self.peak_pages = max(self.peak_pages, self.pages_in_use())
