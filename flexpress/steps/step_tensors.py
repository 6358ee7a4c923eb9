"""The numbers of a serving step, on the host, and as tensors whose memory stays where it is."""

from __future__ import annotations

from itertools import accumulate

import torch


class StepTensors:
    """New tokens, position and pages of each sequence. `memory` holds them as int32 tensors, by name, with room for the largest step.

    Tokens that are rows of numbers, such as embeddings, are in "input_rows", made when the first ones come.

    Nothing is checked here, and nothing waits for the device.
    """

    def __init__(self, max_num_tokens: int, max_batch_size: int, max_pages_per_seq: int, device) -> None:
        self.lengths: list[int] = []
        self.positions: list[int] = []
        self.pages: list[list[int]] = []
        shapes = {
            "input_ids": (max_num_tokens,),
            "seq_len": (max_batch_size,),
            "input_pos": (max_batch_size,),
            "cache_loc": (max_batch_size * max_pages_per_seq,),
            "pages_per_seq": (max_batch_size,),
            "seq_start": (max_batch_size,),
            "page_table": (max_batch_size, max_pages_per_seq),
        }
        self.memory = {name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in shapes.items()}
        self._tokens_in = "input_ids"

    @property
    def device(self) -> torch.device:
        return self.memory["input_ids"].device

    def to(self, device: torch.device) -> None:
        self.memory = {name: memory.to(device) for name, memory in self.memory.items()}

    @property
    def tokens(self) -> torch.Tensor:
        """Memory for the largest step, which begins with the step's tokens: ids, or rows."""
        return self.memory[self._tokens_in]

    def of_sequences(self, name: str) -> torch.Tensor:
        """The part of a tensor that the step's sequences fill."""
        return self.memory[name][: len(self.lengths)]

    def set_tokens(self, lengths: list[int], ids: torch.Tensor) -> None:
        sent = self._sent(ids)  # first: if it fails, nothing has changed
        if lengths != self.lengths:
            self.lengths = lengths
            self.memory["seq_len"][len(lengths) :] = 0
            self._write("seq_len", lengths)
            self._write("seq_start", [0, *accumulate(lengths[:-1])])
        self._hold(ids.shape[1:], ids.dtype if ids.is_floating_point() else torch.int32)
        self.tokens[: len(ids)] = sent

    def _hold(self, row: torch.Size, dtype: torch.dtype) -> None:
        """Let `tokens` be memory for tokens of that shape: what held such tokens last, if it is there."""
        self._tokens_in = "input_rows" if row else "input_ids"
        held = self.memory.get(self._tokens_in)
        if held is None or (held.shape[1:], held.dtype) != (row, dtype):
            most = len(self.memory["input_ids"])
            self.memory[self._tokens_in] = torch.zeros((most, *row), dtype=dtype, device=self.device)

    def set_positions(self, positions: list[int]) -> None:
        self.positions = positions
        self._write("input_pos", positions)

    def set_pages(self, rows: list[list[int]]) -> None:
        if rows == self.pages:
            return
        self.pages = rows
        counts = [len(row) for row in rows]
        self._write("pages_per_seq", counts)
        self._write("cache_loc", [page for row in rows for page in row])
        row = torch.repeat_interleave(torch.arange(len(rows), device="cpu"), torch.tensor(counts, device="cpu"))
        column = torch.arange(sum(counts), device="cpu") - torch.tensor([0, *accumulate(counts[:-1])], device="cpu")[row]
        pages = self.memory["cache_loc"][: sum(counts)]
        self.memory["page_table"].fill_(-1)[self._sent(row), self._sent(column)] = pages

    def _write(self, name: str, numbers: list[int]) -> None:
        self.memory[name][: len(numbers)] = self._sent(torch.tensor(numbers, dtype=torch.int32, device="cpu"))

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host on the device, without waiting for it."""
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
