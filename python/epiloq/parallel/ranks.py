"""What ranks tell each other beside tensors: that they open the same files, and what went wrong on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_NAME = "epiloq.parallel"


@contextmanager
def ended() -> Iterator[None]:
    """Raise ConnectionError, in a sentence, where an exchange fails because a rank is not there any more."""
    try:
        yield
    except RuntimeError as error:
        said = (str(error).strip().splitlines() or [""])[-1]
        raise ConnectionError(f"{_NAME}: expected an answer of every rank, but one has ended: {said}") from error


def everyone_says(value: Any, group: Any = None) -> list[Any]:
    """What every rank gives, a small value, in order. Raises ConnectionError where one has ended."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with ended():
        dist.all_gather_object(found, value, group=group)
    return found


@contextmanager
def together(group: Any = None) -> Iterator[None]:
    """Raise what one rank raises inside, as a ValueError, on every rank. Inside, nothing is exchanged."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    said = everyone_says(None if error is None else str(error), group)
    if error is not None:
        raise error
    for rank, message in enumerate(said):
        if message is not None:
            raise ValueError(f"{_NAME}: rank {rank} ended: {message}")


def to_first(value: Any, group: Any = None) -> list[Any] | None:
    """What every rank gives, in order, on the group's first; None on the others."""
    first = dist.get_rank(group) == 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    with ended(), torch.inference_mode(False):
        dist.gather_object(value, found, group_dst=0, group=group)
    return found
