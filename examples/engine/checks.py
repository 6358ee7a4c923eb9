"""What a request and an engine may be asked for: one clear error each, before anything is made. What is wrong later fails every step."""

from __future__ import annotations

import operator


def whole(name: str, value: object, least: int) -> int:
    """The argument `name` as an int. ValueError if it is none, or less than `least`."""
    number = _integer(value)
    if number is None or number < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return number


def token_ids(name: str, tokens: object, vocab_size: int | None = None) -> list[int]:
    """The tokens of a list or tuple, in a new list of ints. TypeError for all else, ValueError for those that the model does not have."""
    found = [_integer(token) for token in tokens] if isinstance(tokens, (list, tuple)) else [None]
    if None in found:
        what = f"{type(tokens).__name__} {tokens!r}"
        raise TypeError(
            f"{name} must be a list of ints, got {what[:80]}; of a tensor or array pass .tolist(), of a text tokenizer.encode(text)"
        )
    for number, token in enumerate(found):
        if token < 0 or vocab_size is not None and token >= vocab_size:
            has = "from 0 on" if vocab_size is None else f"0 to {vocab_size - 1}"
            raise ValueError(f"token {number} of {name} is {token}, but the model's are {has}: {str(found)[:80]}; does its tokenizer fit?")
    return found


def _integer(value: object) -> int | None:
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
