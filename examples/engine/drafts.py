"""Drafts without a second model: what followed the last tokens when they came before, in the prompt or in the answer.

Prompt lookup (Saxena 2023), with several continuations in one tree, which one step verifies (SpecInfer, Miao et al. 2023, arXiv
2305.09781).
"""

from __future__ import annotations

from collections import defaultdict
from weakref import WeakKeyDictionary

from .scheduler import Request


class _Index:
    """Where each run of `size` tokens of a request ends, the last few places."""

    def __init__(self, sizes: tuple[int, ...], places: int) -> None:
        self.sizes, self.most, self.tokens = sizes, places, []
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def read(self, request: Request) -> None:
        """Takes in what the request knows since."""
        for token in request.known(len(self.tokens), request.length):
            for size in self.sizes:  # runs that end before the token, which is what follows them
                if len(self.tokens) >= size:
                    places = self.ends[tuple(self.tokens[-size:])]
                    places.append(len(self.tokens))
                    del places[: -self.most]
            self.tokens.append(token)

    def continuations(self) -> list[int]:
        """Numbers of tokens that followed the last ones before: after longer runs first, then later ones first."""
        found = [place for size in self.sizes for place in reversed(self.ends.get(tuple(self.tokens[-size:]), []))]
        return list(dict.fromkeys(found))


class PromptLookup:
    """Trees of up to `branches` continuations of the longest of `sizes` that was seen before."""

    def __init__(self, branches: int = 2, sizes: tuple[int, ...] = (3, 2)) -> None:
        self.branches, self.sizes = branches, sizes
        self._indices: WeakKeyDictionary[Request, _Index] = WeakKeyDictionary()

    def __call__(self, request: Request, most: int) -> tuple[list[int], list[int]]:
        """At most `most` drafted tokens, and the parent of each: 0 is the token made last, 1 the first draft. Parents come first, and a
        draft's first child right behind it: of the likeliest path nothing has to move when it is accepted."""
        index = self._indices.setdefault(request, _Index(self.sizes, self.branches))
        index.read(request)
        tokens: list[int] = []
        parents: list[int] = []
        numbers: dict[tuple[int, int], int] = {}  # of the node that follows a node with a token
        places = index.continuations()[: self.branches]
        for place in places:
            node, depth = 0, most if place == places[-1] else -(-2 * most // 3)  # the later ones get what is left
            for token in index.tokens[place : place + depth]:
                if (node, token) not in numbers:
                    if len(tokens) == most:
                        break
                    tokens.append(token)
                    parents.append(node)
                    numbers[node, token] = len(tokens)
                node = numbers[node, token]
        return tokens, parents
