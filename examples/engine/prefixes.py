"""Which sequences hold the pages of which tokens: a tree whose edges are whole pages of tokens.

A request that begins with tokens that another one has in the cache takes the pages of that one (PageAllocator.fork) and computes the rest
alone. The idea is RadixAttention's (Zheng et al. 2023, arXiv 2312.07104), by pages instead of tokens: so no page is ever copied.
"""

from __future__ import annotations

from collections.abc import Iterable

Page = tuple[int, ...]  # the tokens of a page


class _Node:
    """A page of tokens behind those of its parents, and the sequences that hold it."""

    __slots__ = ("tokens", "children", "holders")

    def __init__(self, tokens: Page) -> None:
        self.tokens = tokens
        self.children: dict[Page, _Node] = {}
        self.holders: dict[int, None] = {}  # in the order of their coming


class Prefixes:
    """The tree. Tokens are compared, not hashes of them, so what is found is what was asked for."""

    def __init__(self) -> None:
        self._root = _Node(())
        self._paths: dict[int, list[_Node]] = {}

    def pages(self, sequence: int) -> int:
        """How many pages of a sequence are in the tree."""
        return len(self._paths.get(sequence, ()))

    def add(self, sequence: int, pages: Iterable[Page]) -> None:
        """A sequence has more pages, behind those that are in the tree."""
        path = self._paths.setdefault(sequence, [])
        for tokens in pages:
            parent = path[-1] if path else self._root
            node = parent.children.setdefault(tokens, _Node(tokens))
            node.holders[sequence] = None
            path.append(node)

    def fork(self, sequence: int, other: int, count: int) -> None:
        """A new sequence has the first `count` pages of another one."""
        self.add(sequence, [node.tokens for node in self._paths[other][:count]])

    def remove(self, sequence: int) -> None:
        """A sequence has no pages any more."""
        path = self._paths.pop(sequence, [])
        for parent, node in zip([self._root, *path], path, strict=False):
            del node.holders[sequence]
            if not node.holders:  # then its children have none: who holds a page holds those before it
                del parent.children[node.tokens]
                break

    def longest(self, pages: Iterable[Page], behind: int | None = None) -> tuple[int | None, int]:
        """A sequence that begins with most of these pages, and with how many; of `behind` if given, after the pages of this sequence.

        (None, 0) if there is none. `pages` is asked for no more than needed.
        """
        path = self._paths.get(behind, []) if behind is not None else []
        node, count = path[-1] if path else self._root, len(path)
        found = None
        for tokens in pages:
            child = node.children.get(tokens)
            if child is None:
                break
            node, count, found = child, count + 1, next(iter(child.holders))
        return (None, 0) if found is None else (found, count)
