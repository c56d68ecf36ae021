"""The processes that calibrate a model together: their windows, and their exchanges."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

STRANDS = 8
"""Number of runs of consecutive windows. Statistics are summed within each run, then over runs in order, for any number
of ranks. So the sums are bit-identical on 1 to 8 ranks; further ranks have no windows, but also quantise layers.
"""
_CHUNK = 1 << 30
"""Bytes sent in one message."""

T = TypeVar("T")


class Ranks:
    """A single process, whose exchanges return their arguments. `Group` is several processes. All ranks must call the
    methods in the same order.
    """

    rank = 0
    world = 1
    agreed: str | None = None
    """The message of an error that `together` raised on every rank, so that only one of them displays it."""

    def strands(self, windows: int) -> list[range]:
        """This rank's runs of consecutive windows; the runs of all ranks follow each other in order."""
        count = min(STRANDS, windows)
        return [
            range(s * windows // count, (s + 1) * windows // count)
            for s in range(count)
            if s * self.world // count == self.rank
        ]

    def share(self, value: T | None, owner: int = 0) -> T:
        """Broadcast the owner's value to all ranks; GPU tensors arrive on the receiver's GPU."""
        return value  # type: ignore[return-value]

    def move(self, value: T | None, source: int, target: int) -> T | None:
        """Send the source's value to the target; returns None on other ranks, and the value itself if both are one."""
        return value

    def gather(self, value: T) -> list[T]:
        """Gather a small value from every rank, in order."""
        return [value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise a ValueError of any rank inside this context on every rank. Nothing may be exchanged inside."""
        yield


class Group(Ranks):
    """The ranks of the default process group of ``torch.distributed``, which must be initialised.

    device
        Device on which GPU tensors are received.
    reason
        Called when an exchange fails, to explain it; the exchange then raises ConnectionError.
    """

    def __init__(
        self, device: torch.device | str = "cpu", reason: Callable[[], str] = lambda: "the connection was lost"
    ) -> None:
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), torch.device(device)
        self.reason = reason

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Convert the failure of an exchange to ConnectionError with the reason."""
        try:
            yield
        except RuntimeError as error:
            raise ConnectionError(self.reason()) from error

    def share(self, value: T | None, owner: int = 0) -> T:
        """See `Ranks`."""
        with self._connected():
            return self._share(value, owner)

    def _share(self, value: T | None, owner: int) -> T:
        head, tensors = _packed(value) if owner == self.rank else (b"", [])
        sent = [head]
        dist.broadcast_object_list(sent, owner, device=torch.device("cpu"))
        if owner != self.rank:
            tensors = self._empty(sent[0])
        for chunk in _chunks(tensors):
            dist.broadcast(chunk, owner)
        return value if owner == self.rank else _unpacked(sent[0], tensors)  # type: ignore[return-value]

    def move(self, value: T | None, source: int, target: int) -> T | None:
        """See `Ranks`."""
        if source == target:
            return value if source == self.rank else None
        with self._connected():
            return self._move(value, source, target)

    def _move(self, value: T | None, source: int, target: int) -> T | None:
        if self.rank == source:
            head, tensors = _packed(value)
            dist.send_object_list([head], target, device=torch.device("cpu"))
            for chunk in _chunks(tensors):
                dist.send(chunk, target)
        elif self.rank == target:
            received = [b""]
            dist.recv_object_list(received, source, device=torch.device("cpu"))
            tensors = self._empty(received[0])
            for chunk in _chunks(tensors):
                dist.recv(chunk, source)
            return _unpacked(received[0], tensors)  # type: ignore[no-any-return]
        return None

    def gather(self, value: T) -> list[T]:
        """See `Ranks`."""
        found: list[Any] = [None] * self.world
        with self._connected():
            dist.all_gather_object(found, value)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Ranks`."""
        own: ValueError | None = None
        try:
            yield
        except ValueError as error:
            own = error
        first = next((text for text in self.gather(None if own is None else str(own)) if text is not None), None)
        if first is not None:
            self.agreed = first
            raise (own if own is not None and str(own) == first else ValueError(first))

    def _empty(self, head: bytes) -> list[Tensor]:
        forms = pickle.loads(head)[0]
        return [
            torch.empty(shape, dtype=dtype, device=self.device if on_gpu else "cpu") for shape, dtype, on_gpu in forms
        ]


def balanced(costs: Sequence[float], world: int) -> list[int]:
    """A rank for each item of work: the most expensive items first, each to the rank with the least work."""
    loads, found = [0.0] * world, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[index] = loads.index(min(loads))
        loads[found[index]] += costs[index]
    return found


def _packed(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value pickled with placeholders (shape and dtype) for its tensors, and the tensors."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> int | None:
            if not isinstance(item, Tensor):
                return None
            tensors.append(item.detach().contiguous())
            return len(tensors) - 1

    body = io.BytesIO()
    Pickler(body).dump(value)
    forms = [(tensor.shape, tensor.dtype, tensor.device.type != "cpu") for tensor in tensors]
    return pickle.dumps((forms, body.getvalue())), tensors


def _unpacked(head: bytes, tensors: list[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> Any:
            return tensors[number]

    return Unpickler(io.BytesIO(pickle.loads(head)[1])).load()


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of tensors, because not every backend supports every dtype."""
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.flatten().view(torch.uint8).split(_CHUNK)
