"""Places for a model's blocks while they are not being processed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Resident:
    """Blocks that always stay in memory."""

    @contextmanager
    def held(self, name: str, block: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
        """Hold a block on a device (by default its own) while it is processed; yields the device."""
        home = next(block.parameters()).device
        block.to(device or home)
        yield torch.device(device or home)
        block.to(home)

    @contextmanager
    def on_demand(self) -> Iterator[None]:
        """Load blocks on demand, so that the whole model can run."""
        yield

    def values(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """All parameters of the model, as pairs of name and value."""
        yield from model.named_parameters()
