"""Check a case, time it and its peers, and relate the times to the floor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Binder, Call, Inputs, Operation, Unavailable
from epiloq.bench.floor import Ceiling, ReadFloor
from epiloq.bench.timing import Timer, rotate

MEASURED_TO = 105.0
"""Percent of a floor up to which noise explains a time below it."""


@dataclass(frozen=True)
class PeerTime:
    """Time of a peer and its ratio to epiloq's (above 1: epiloq is faster), or a note on why there is none."""

    time_us: float | None
    ratio: float | None
    note: str


@dataclass
class Row:
    """One case with one choice of kernels (``arch``: "auto", or the architecture that was forced).

    ``status``: "ok"; "FAILED", a wrong result or an exception; "unsupported", refused with NotImplementedError; only
    "ok" rows carry numbers. ``error`` is the worst error as a multiple of the tolerance. Times are microseconds,
    ``tops`` 10^12 multiplications and additions a second, ``gb_s`` 10^9 bytes a second (inputs read once, outputs
    written once), ``bound`` which floor counts. ``copies`` input sets rotate; ``cold`` is false where they still fit
    the cache. ``host_us`` is the eager host time of this case, None on the CPU, where a call is host time throughout.
    """

    operation: str
    variant: str
    layer: str
    m: int
    n: int
    k: int
    arch: str
    status: str = "ok"
    reason: str = ""
    error: float | None = None
    kernel: str = ""
    time_us: float | None = None
    tops: float | None = None
    gb_s: float | None = None
    floor_us: float | None = None
    bound: str = ""
    percent_of_floor: float | None = None
    host_us: float | None = None
    copies: int = 0
    cold: bool = True
    peers: dict[str, PeerTime] = field(default_factory=dict)


@dataclass(frozen=True)
class HostTime:
    """Eager host time of a problem too small for its kernel to matter."""

    operation: str
    variant: str
    contender: str
    us: float | None
    note: str


@dataclass(frozen=True)
class Bench:
    """Measures cases on one device with one timer. An empty ``peer_names`` means every peer."""

    device: torch.device
    timer: Timer[Any]
    floor: ReadFloor
    ceilings: Mapping[str, Ceiling]
    operations: Mapping[str, Operation]
    generator: torch.Generator
    cache: int
    archs: Sequence[str] = ("auto",)
    peer_names: Sequence[str] = ()

    def peers(self, operation: Operation) -> dict[str, Binder]:
        return {name: p for name, p in operation.peers.items() if not self.peer_names or name in self.peer_names}

    def run(self, case: Case) -> Iterator[Row]:
        """Yield a row per arch (several only for matrix products); peers are timed once.

        The row of a forced arch has epiloq's own choice, named "epiloq", among its peers.
        """
        operation = self.operations[case.operation]
        sets, cold = rotate(operation.inputs(case, self.generator), self.cache)
        own = [self._own(operation, case, sets, cold, arch) for arch in self._archs(operation)]
        peers = {name: self._peer(binder, case, sets) for name, binder in self.peers(operation).items()}
        self._take_turns([*(contender for _, contender in own), *peers.values()])
        auto = {row.arch: contender.us for row, contender in own}.get("auto")
        for row, contender in own:
            row.time_us = contender.us
            if row.arch != "auto" and auto is not None:
                row.peers["epiloq"] = _relate(auto, "", row.time_us)
            row.peers |= {name: _relate(peer.us, peer.note, row.time_us) for name, peer in peers.items()}
            if row.time_us is not None:
                self._relate_to_floor(row, operation, case, contender.nbytes)
            yield row

    def _archs(self, operation: Operation) -> Sequence[str]:
        return self.archs if operation.has_weight else ("auto",)

    def _own(
        self, operation: Operation, case: Case, sets: Sequence[Inputs], cold: bool, arch: str
    ) -> tuple[Row, _Contender]:
        row = Row(case.operation, case.variant, case.layer, case.m, case.n, case.k, arch, copies=len(sets), cold=cold)
        own = _Contender()
        try:
            with _forced(arch):
                calls = operation.bind(case, sets).calls
                result = calls[0]()
                error = operation.error(case, sets[0], result, self.generator)
                if not error <= 1:
                    row.status, row.reason = "FAILED", f"error {error:.3g} times the tolerance"
                    return row, own
                row.error = error
                row.kernel = explanation(calls[0])
                prepared = self.timer.prepare(calls)
                row.host_us = self.timer.host_us(calls[0]) if self.device.type == "cuda" else None
                own.nbytes = _bytes_of([*sets[0].values(), *(result if isinstance(result, tuple) else (result,))])
                own.prepared = prepared
        except NotImplementedError as refusal:
            row.status, row.reason = "unsupported", str(refusal)
        except (ValueError, RuntimeError) as failure:
            row.status, row.reason = "FAILED", _first_line(failure)
        return row, own

    def _peer(self, binder: Binder, case: Case, sets: Sequence[Inputs]) -> _Contender:
        # Other projects' code may raise anything; the message explains the empty column.
        try:
            bound = binder(case, sets)
            return _Contender(bound.note, self.timer.prepare(bound.calls))
        except Unavailable as reason:
            return _Contender(str(reason))
        except Exception as error:
            return _Contender(_first_line(error))

    def _take_turns(self, contenders: Sequence[_Contender]) -> None:
        able = [c for c in contenders if c.prepared is not None]
        for contender, us in zip(able, self.timer.take_turns([c.prepared for c in able]), strict=True):
            contender.us = us

    def _relate_to_floor(self, row: Row, operation: Operation, case: Case, nbytes: int) -> None:
        assert row.time_us is not None
        work = operation.work(case)
        floors = {"read": self.floor.us(nbytes)}
        if operation.ceiling:
            floors["arithmetic"] = self.ceilings[operation.ceiling].us(work)
            row.tops = work / row.time_us / 1e6
        row.bound = max(floors, key=floors.__getitem__)
        row.floor_us = floors[row.bound]
        percent = 100 * row.floor_us / row.time_us
        # A CPU's floor is measured; a case that beats it, for example with inputs in a cache, gets no percentage.
        row.percent_of_floor = percent if self.device.type == "cuda" or percent <= MEASURED_TO else None
        row.gb_s = nbytes / row.time_us / 1e3

    def host_times(self, cases: Sequence[Case]) -> Iterator[HostTime]:
        """Yield each contender's eager host time for M = 1, N = 64, K = 128, once per operation and variant."""
        for name, variant in dict.fromkeys((case.operation, case.variant) for case in cases):
            operation = self.operations[name]
            case = Case(name, variant, "tiny", 1, 64 if operation.has_weight else 0, 128)
            inputs = operation.inputs(case, self.generator)
            for contender, binder in {"epiloq": operation.bind, **self.peers(operation)}.items():
                try:
                    bound = binder(case, [inputs])
                    yield HostTime(name, variant, contender, self.timer.host_us(bound.calls[0]), bound.note)
                except Unavailable as reason:
                    yield HostTime(name, variant, contender, None, str(reason))
                except Exception as error:
                    yield HostTime(name, variant, contender, None, _first_line(error))


@dataclass
class _Contender:
    """A contender of one case; ``prepared`` belongs to the timer, and is None if there is nothing to time.

    ``nbytes`` counts the bytes that epiloq's call reads and writes.
    """

    note: str = ""
    prepared: Any = None
    nbytes: int = 0
    us: float | None = None


def explanation(call: Call) -> str:
    """First line of ``epiloq.explain`` for a bound call; empty for an operation with a single kernel."""
    assert isinstance(call, partial)
    try:
        return epiloq.explain(call.func.__name__, *call.args, **call.keywords).partition("\n")[0]
    except (TypeError, ValueError, NotImplementedError):
        return ""


def _forced(arch: str) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if arch == "auto" else epiloq.config(arch=arch)


def _relate(us: float | None, note: str, own_us: float | None) -> PeerTime:
    return PeerTime(us, us / own_us if us is not None and own_us is not None else None, note)


def _bytes_of(values: Sequence[object]) -> int:
    return sum(t.nbytes for t in values if isinstance(t, torch.Tensor))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
