"""How the host learns, some steps late, which sequences have ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq.generation.steps import Sequences


class Mailbox:
    """Copies of each step's state on their way to the host, which reads them `lag` steps later.

    With a lag of 0 each is read at once, so the host waits for the device.
    """

    def __init__(self, sequences: Sequences, lag: int, streamer: Any = None) -> None:
        self.sequences, self.lag, self.streamer = sequences, lag, streamer
        on_gpu = sequences.ids.device.type == "cuda"
        batch = sequences.ids.shape[0]

        def on_host() -> Tensor:
            return torch.empty(batch, dtype=torch.long, pin_memory=on_gpu)

        self._slots = [(on_host(), on_host(), torch.cuda.Event() if on_gpu else None) for _ in range(lag + 1)]
        self.posted = self.read = 0
        self.ended: int | None = None
        """Number of the step after which no sequence goes on, if that is known."""

    def post(self) -> None:
        """Send the state after a step, and read that of `lag` steps before."""
        unfinished, tokens, arrived = self._slots[self.posted % len(self._slots)]
        unfinished.copy_(self.sequences.unfinished, non_blocking=True)
        if self.streamer is not None:
            tokens.copy_(self.sequences.token[:, 0], non_blocking=True)
        if arrived is not None:
            arrived.record()
        self.posted += 1
        while self.ended is None and self.read < self.posted - self.lag:
            self._read()

    def finish(self) -> int:
        """Read what is on its way; returns the number of steps that transformers would have made."""
        while self.ended is None and self.read < self.posted:
            self._read()
        return self.posted if self.ended is None else self.ended

    def _read(self) -> None:
        unfinished, tokens, arrived = self._slots[self.read % len(self._slots)]
        if arrived is not None:
            arrived.synchronize()
        self.read += 1
        if self.streamer is not None:
            self.streamer.put(tokens.clone())
        if not unfinished.any():
            self.ended = self.read
