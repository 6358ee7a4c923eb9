"""Streams of a GPU: tensors that one call makes, and calls on other streams read."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class MadeOn:
    """The current stream, by which tensors were made just now that later calls read. Their streams may be others, which `wait`.

    While a CUDA graph is captured nothing waits: its replays begin when all that was made before has long been there.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors = [t for t in tensors if t.is_cuda] if torch.cuda.is_initialized() else []
        if self.tensors:
            self.device = self.tensors[0].device
            self.event = torch.cuda.current_stream(self.device).record_event()
            self.streams = {torch._C._cuda_getCurrentRawStream(self.device.index)}

    def wait(self) -> None:
        """Have the current stream wait until the tensors are there, and their memory stay until it has read them."""
        if not self.tensors:
            return
        number = torch._C._cuda_getCurrentRawStream(self.device.index)
        if number in self.streams or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.event)
        for tensor in self.tensors:
            tensor.record_stream(stream)
        self.streams.add(number)

    def __reduce__(self):
        """Copies of the tensors are made by who copies."""
        return MadeOn, ()
