"""Where a model's blocks are while they are not worked on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Resident:
    """Blocks that are in memory all the time."""

    @contextmanager
    def held(self, name: str, block: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
        """Have a block on a device, by default where it is, to be worked on; gives the device."""
        home = next(block.parameters()).device
        block.to(device or home)
        yield torch.device(device or home)
        block.to(home)

    @contextmanager
    def on_demand(self) -> Iterator[None]:
        """Have the whole model run as it is called."""
        yield

    def values(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model by name, with its value."""
        yield from model.named_parameters()
