"""The processes that calibrate a model together: which windows each has, and how they exchange what they found."""

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
"""Windows are summed in so many runs of neighbours, and the runs' sums in their order, however many ranks there are.

So the sums are the same bit for bit on 1 to 8 ranks; further ranks have no windows, but quantise layers all the same.
"""
_CHUNK = 1 << 30
"""Bytes that are sent at once."""

T = TypeVar("T")


class Ranks:
    """One process alone, whose exchanges hand everything back. `Group` is several.

    A calibration calls the methods of all ranks in the same order.
    """

    rank = 0
    world = 1
    agreed: str | None = None
    """The message of the error that `together` raised on every rank, for one of them to display."""

    def strands(self, windows: int) -> list[range]:
        """This rank's runs of windows, neighbours all; those of all ranks together are in order."""
        count = min(STRANDS, windows)
        return [
            range(s * windows // count, (s + 1) * windows // count)
            for s in range(count)
            if s * self.world // count == self.rank
        ]

    def share(self, value: T | None, owner: int = 0) -> T:
        """The value that the owner gives, on all ranks; tensors on a GPU arrive on the receiver's."""
        return value  # type: ignore[return-value]

    def move(self, value: T | None, source: int, target: int) -> T | None:
        """The value that the source gives, on the target; None elsewhere, and where both are one the value itself."""
        return value

    def gather(self, value: T) -> list[T]:
        """What every rank gives, in order, for small values."""
        return [value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise a ValueError that any rank raises inside on every rank. Inside, nothing is exchanged."""
        yield


class Group(Ranks):
    """The ranks of the default process group of ``torch.distributed``, which has been made.

    device
        Where tensors arrive that were on a GPU.
    reason
        Asked, when an exchange fails, why that is. The exchange then raises ConnectionError.
    """

    def __init__(
        self, device: torch.device | str = "cpu", reason: Callable[[], str] = lambda: "the connection was lost"
    ) -> None:
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), torch.device(device)
        self.reason = reason

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise ConnectionError, which says why, where an exchange fails."""
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
        first = next((said for said in self.gather(None if own is None else str(own)) if said is not None), None)
        if first is not None:
            self.agreed = first
            raise (own if own is not None and str(own) == first else ValueError(first))

    def _empty(self, head: bytes) -> list[Tensor]:
        forms = pickle.loads(head)[0]
        return [
            torch.empty(shape, dtype=dtype, device=self.device if on_gpu else "cpu") for shape, dtype, on_gpu in forms
        ]


def balanced(costs: Sequence[float], world: int) -> list[int]:
    """A rank for each item of work, the most expensive first to whoever has least to do."""
    loads, found = [0.0] * world, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        found[index] = loads.index(min(loads))
        loads[found[index]] += costs[index]
    return found


def _packed(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value pickled without its tensors, whose shapes and types go with it, and those."""
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
    """The bytes of tensors, for not every backend knows every type."""
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.flatten().view(torch.uint8).split(_CHUNK)
