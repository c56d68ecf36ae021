"""Communication between ranks other than tensors: checks that they open the same files, and errors of a rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_NAME = "epiloq.parallel"


@contextmanager
def ended() -> Iterator[None]:
    """Convert the failure of an exchange with a rank that has ended to ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        # The first sentence of gloo's last line, without the source location.
        message = re.sub(r"^\[[^]]*\]\s*", "", (str(error).strip().splitlines() or [""])[-1]).partition(". ")[0]
        raise ConnectionError(f"{_NAME}: expected an answer from every rank, but one has ended: {message}") from error


def all_gather(value: Any, group: Any = None) -> list[Any]:
    """Gather a small value from every rank, in order. Raises ConnectionError if one has ended."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with ended():
        dist.all_gather_object(found, value, group=group)
    return found


def check_same(own: Mapping[str, Any], name: str) -> None:
    """Raise ValueError on every rank, with a message that begins with `name`, unless these small values are equal."""
    everyone = all_gather(dict(own))
    for rank, given in enumerate(everyone):
        for key in sorted(everyone[0].keys() | given.keys()):
            first, other = everyone[0].get(key), given.get(key)
            if first != other:
                text = isinstance(first, str) and isinstance(other, str)
                which = f"has {other} and rank 0 has {first}" if text else "has a different one than rank 0"
                raise ValueError(f"{name}: expected the same {key} on every rank, but rank {rank} {which}")


@contextmanager
def together(group: Any = None) -> Iterator[None]:
    """Raise an error of one rank as a ValueError on every rank. The body must not communicate."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    messages = all_gather(None if error is None else str(error), group)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"{_NAME}: rank {rank} ended: {message}")


def to_first(value: Any, group: Any = None) -> list[Any] | None:
    """Gather a value from every rank, in order, on the group's first rank; returns None on the others."""
    first = dist.get_rank(group) == 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    with ended(), torch.inference_mode(False):
        dist.gather_object(value, found, group_dst=0, group=group)
    return found
