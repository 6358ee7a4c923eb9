"""Text of an answer, as its tokens come: where it ends, and what of it may be shown already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Tokenizer(Protocol):
    """What is used of a tokenizer: that of transformers has it."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens. What is no whole character yet is U+FFFD."""


class Answer:
    """A `stop` of a Request: ends at one of `ids`, or where one of `strings` begins, which is no part of the text.

    text    what the tokens say so far; at its end there may be U+FFFD for a character that is not whole yet
    write   is called with every new piece of it; held back is what may be the beginning of one of `strings`, or of a character
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: frozenset[int] = frozenset(),
        strings: tuple[str, ...] = (),
        write: Callable[[str], object] | None = None,
    ) -> None:
        self.tokenizer, self.ids, self.strings, self.write = tokenizer, ids, tuple(filter(None, strings)), write
        self.text = ""
        self._shown = 0  # characters of it
        self._read_whole = 0  # characters of it that stay as they are
        self._searched, self._end = 0, ""  # characters without a stop string, and what ended it
        self._whole = 0, 0  # of the tokens, those before the last piece, and all that are text: a piece may depend on the one before it

    def __call__(self, made: list[int]) -> str:
        """After each token: "end of text", "stop string" or "". If `write` fails, the same when it is asked again."""
        if not self._end and made[-1] in self.ids:
            self._end = "end of text"
        if not self._end:
            self._read(made)
            whole = self.text.rstrip("\ufffd")
            places = [at for s in self.strings if (at := whole.find(s, max(0, self._searched - len(s)))) >= 0]
            self._searched = len(whole)
            if places:
                self.text, self._end = self.text[: min(places)], "stop string"
            else:
                self._show(len(whole) - self._held(whole))
        if self._end:
            self.close()
        return self._end

    def close(self) -> None:
        """Shows what was held back."""
        self._show(len(self.text))

    def _read(self, made: list[int]) -> None:
        """Adds the text of new tokens. Where they end inside of a character, it is read again with the next one."""
        first, last = self._whole
        known = self.tokenizer.decode(made[first:last], skip_special_tokens=True)
        piece = self.tokenizer.decode(made[first:], skip_special_tokens=True)
        self.text = self.text[: self._read_whole] + piece[len(known) :]
        if not piece.endswith("\ufffd"):
            self._read_whole = len(self.text)
            # from a piece that shows something: a decoder leaves out a space at the beginning of what it is given
            self._whole = last if len(piece) > len(known) else first, len(made)

    def _held(self, text: str) -> int:
        """Characters at the end with which one of `strings` may begin."""
        return max((n for s in self.strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)

    def _show(self, end: int) -> None:
        if self.write is not None and end > self._shown:
            self.write(self.text[self._shown : end])
        self._shown = max(self._shown, end)
