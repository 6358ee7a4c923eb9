"""What there is to read of a serving step: its limits, and its batch as the host knows it and as tensors."""

from __future__ import annotations

import torch
from torch.types import Device

from flexpress.caches.shared_prefix import SharedPrefix, shared_prefix_of
from flexpress.inputs.checks import whole
from flexpress.inputs.plain_arguments import device_or_default
from flexpress.steps.step_tensors import StepTensors


class StepView:
    """The base of SequenceInfo, which says what the arguments are, and changes what is read here."""

    def __init__(self, max_seq_len: int, max_batch_size: int, page_size: int, max_num_tokens: int, device: Device) -> None:
        self._max_seq_len = whole("max_seq_len", max_seq_len, 1)
        self._max_batch_size = whole("max_batch_size", max_batch_size, 1)
        self._page_size = whole("page_size", page_size) or self._max_seq_len
        self._max_num_tokens = whole("max_num_tokens", max_num_tokens) or self._max_batch_size * self._max_seq_len
        self._step = StepTensors(self._max_num_tokens, self._max_batch_size, self.max_pages_per_seq, device_or_default(device))

    # limits

    @property
    def max_seq_len(self) -> int:
        """Tokens that a sequence may have, in the cache and new."""
        return self._max_seq_len

    @property
    def max_batch_size(self) -> int:
        """Sequences that a step may have."""
        return self._max_batch_size

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def max_num_tokens(self) -> int:
        """New tokens that a step may have."""
        return self._max_num_tokens

    @property
    def max_pages_per_seq(self) -> int:
        """Pages of a sequence of max_seq_len tokens."""
        return -(-self._max_seq_len // self._page_size)

    @property
    def is_paged(self) -> bool:
        """Whether a sequence may have more than one page."""
        return self._page_size < self._max_seq_len

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._step.device

    # the batch, as the host knows it

    @property
    def num_sequences(self) -> int:
        """n, also of sequences without new tokens."""
        return len(self._step.lengths)

    @property
    def sequence_lengths(self) -> list[int]:
        """New tokens of each sequence."""
        return list(self._step.lengths)

    @property
    def input_positions(self) -> list[int]:
        """Tokens of each sequence that are in the cache."""
        return list(self._step.positions)

    @property
    def page_assignments(self) -> list[list[int]]:
        """The pages of each sequence."""
        return [list(pages) for pages in self._step.pages]

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self._step.lengths)

    @property
    def is_generate(self) -> bool:
        """Whether every sequence has one new token; input_ids is then [n, 1]."""
        return all(length == 1 for length in self._step.lengths)

    # the batch, as tensors

    @property
    def input_ids(self) -> torch.Tensor:
        """int32 [n, 1] or [1, total]: the new tokens. Where they are rows, [n, 1, ...] or [1, total, ...], in their dtype."""
        flat = self._step.tokens[: self.num_tokens]
        return flat[:, None] if self.is_generate else flat[None]

    @property
    def seq_len(self) -> torch.Tensor:
        """int32 [n]: new tokens of each sequence."""
        return self._step.of_sequences("seq_len")

    @property
    def input_pos(self) -> torch.Tensor:
        """int32 [n]: tokens of each sequence in the cache."""
        return self._step.of_sequences("input_pos")

    @property
    def pages_per_seq(self) -> torch.Tensor:
        """int32 [n]: pages of each sequence."""
        return self._step.of_sequences("pages_per_seq")

    @property
    def seq_start(self) -> torch.Tensor:
        """int32 [n]: where each sequence starts in input_ids."""
        return self._step.of_sequences("seq_start")

    def shared_prefix(self, *, groups: int | None = None, width: int | None = None) -> SharedPrefix | None:
        """Which sequences begin with the same pages, as PageAllocator.shared_prefix says it: pages that are full of tokens in the cache.
        `options` of it are for the operator mha_with_paged_cache of every layer. None if nothing is shared. It holds until a sequence is
        replaced, or loses tokens that it shares."""
        full = [pages[: position // self._page_size] for pages, position in zip(self._step.pages, self._step.positions, strict=True)]
        return shared_prefix_of(full, self._page_size, self.device, groups, width)

    @property
    def page_table(self) -> torch.Tensor:
        """int32 [n, max_pages_per_seq]: pages, then -1."""
        return self._step.of_sequences("page_table")

    @property
    def cache_loc(self) -> torch.Tensor:
        """int32 [sum of pages_per_seq]: the pages of all sequences, a flat list. cached_attention takes page_table instead."""
        return self._step.memory["cache_loc"][: sum(map(len, self._step.pages))]

    @property
    def position_ids(self) -> torch.Tensor:
        """int32 [n, 1] or [1, total], as input_ids: the position of each new token in its sequence. Made anew at each reading."""
        if self.is_generate:
            return self.input_pos[:, None].clone()
        offsets = torch.repeat_interleave(self.input_pos - self.seq_start, self.seq_len, output_size=self.num_tokens)
        return (offsets + torch.arange(self.num_tokens, dtype=torch.int32, device=self.device))[None]
