"""Timers for kernels with cold inputs, and for the host time of a call."""

# torch.cuda's streams and events are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from epiloq.bench.contract import Call, Inputs

# Input sets together are this many times the last-level cache, so that each one is evicted before it is used again. A
# GPU's cache retains parts of a rotation if kernels load with an evict-first policy.
CACHE_MULTIPLE = {"cuda": 20, "cpu": 4}
FEWEST_SETS = 3
# Limits graph size and set-up time of tiny problems, which then run warm; their rows note it.
MOST_SETS = 4096


Prepared = TypeVar("Prepared")


class Timer(Protocol[Prepared]):
    """Times contenders in microseconds per call.

    A contender is a sequence of calls, one per input set. Contenders are prepared one by one, since each may fail, and
    timed together.
    """

    def prepare(self, calls: Sequence[Call]) -> Prepared: ...

    def take_turns(self, contenders: Sequence[Prepared]) -> list[float]: ...

    def host_us(self, call: Call) -> float: ...


def kernel_us(timer: Timer[Any], calls: Sequence[Call]) -> float:
    """Time one contender alone, in microseconds per call."""
    return timer.take_turns([timer.prepare(calls)])[0]


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache in bytes; 32 MiB if Linux does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


def rotate(inputs: Inputs, cache: int) -> tuple[list[Inputs], bool]:
    """Return copies of an input set with the same strides, and whether they are enough for cold inputs."""
    nbytes = sum(t.nbytes for t in inputs.values())
    multiple = CACHE_MULTIPLE[next(iter(inputs.values())).device.type]
    wanted = max(FEWEST_SETS, math.ceil(multiple * cache / nbytes))
    sets = [inputs] + [{k: _copy(t) for k, t in inputs.items()} for _ in range(min(wanted, MOST_SETS) - 1)]
    return sets, wanted <= MOST_SETS


def _copy(t: torch.Tensor) -> torch.Tensor:
    # clone() would drop the padding of rows, and a peer that requires padding would then copy in every call.
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


_HOST_ROUNDS = 7


def _host_us(call: Call, synchronise: Callable[[], None]) -> float:
    """Wall-clock time per call without synchronisation, in rounds short enough not to fill the launch queue."""
    call()
    synchronise()
    start = time.perf_counter()
    call()
    synchronise()
    count = max(10, min(200, int(0.005 / (time.perf_counter() - start))))
    times = []
    for _ in range(_HOST_ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
        synchronise()
    return 1e6 * median(times)


class CpuTimer:
    """Times every call by itself, rotating through the input sets, and reports the lowest decile.

    Other work on the machine only ever adds time, and on a shared machine it affects more than half of the calls.
    ``budget_s`` bounds the time spent on one contender.
    """

    TURNS = 3
    FEWEST = 2  # calls a turn

    def __init__(self, budget_s: float = 0.15) -> None:
        self.budget_s = budget_s

    def prepare(self, calls: Sequence[Call]) -> Sequence[Call]:
        for call in calls[:2]:
            call()
        return calls

    def take_turns(self, contenders: Sequence[Sequence[Call]]) -> list[float]:
        times: list[list[float]] = [[] for _ in contenders]
        for turn in range(self.TURNS):
            for i in _in_order(turn, len(contenders)):
                calls, taken = contenders[i], times[i]
                fewest, begin = len(taken) + self.FEWEST, time.perf_counter()
                while len(taken) < fewest or time.perf_counter() - begin < self.budget_s / self.TURNS:
                    call = calls[len(taken) % len(calls)]
                    start = time.perf_counter()
                    call()
                    taken.append(time.perf_counter() - start)
        return [1e6 * sorted(taken)[len(taken) // 10] for taken in times]

    def host_us(self, call: Call) -> float:
        return _host_us(call, lambda: None)


@dataclass(frozen=True)
class Replay:
    """CUDA graph of several rounds of calls, and its duration. The calls keep the memory alive that it reads."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Call]
    rounds: int
    ms: float

    def count(self, ms: float) -> int:
        """Number of replays that take at least this long."""
        return math.ceil(ms / self.ms)


class CudaTimer:
    """Times back-to-back replays of a CUDA graph that contains several rounds of the calls of all input sets.

    Events are recorded between replays, so that a replay's launch overlaps the previous one; the result is the median
    interval divided by the calls in the graph. Contenders alternate in random order, because at the power limit a GPU's
    clock depends on the work of the last tenths of a second, and is a tenth higher after a pause. The first `settle_ms`
    of each run do not count: by default contenders run at a common clock, from about 100 ms on each at its own.
    """

    SHORT_US = 200.0
    CALLS_IF_SHORT = 64
    CALLS_IF_LONG = 8
    # Graphs of calls that take milliseconds hold fewer rounds, down to one call per set.
    LONG_US = 4000.0
    MEASURE_MS = 12.0
    # Each contender runs about this long in total, within these numbers of runs.
    TURNS_MS = 160.0
    FEWEST_TURNS = 3
    MOST_TURNS = 8
    FEWEST = 3
    MOST = 20

    def __init__(self, settle_ms: float = 8.0) -> None:
        self.settle_ms = settle_ms
        turns = round(self.TURNS_MS / (settle_ms + self.MEASURE_MS))
        self.turns = max(self.FEWEST_TURNS, min(self.MOST_TURNS, turns))
        # Warm-up and capture share a stream: libraries allocate a workspace for each one.
        self.stream = torch.cuda.Stream()
        self.random = random.Random(0)

    def prepare(self, calls: Sequence[Call]) -> Replay:
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for call in calls[:2]:
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            calls[-1]()
            torch.cuda.synchronize()
        us = 1e6 * (time.perf_counter() - start)
        wanted = self.CALLS_IF_SHORT if us < self.SHORT_US else min(self.CALLS_IF_LONG, self.LONG_US / us)
        rounds = math.ceil(wanted / len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        return Replay(graph, calls, rounds, self._replay_ms(graph, 1)[0])

    def take_turns(self, contenders: Sequence[Replay]) -> list[float]:
        for replay in contenders:
            self._replay_ms(replay.graph, replay.count(self.settle_ms))
        intervals: list[list[float]] = [[] for _ in contenders]
        for _ in range(self.turns):
            for i in self.random.sample(range(len(contenders)), len(contenders)):
                replay = contenders[i]
                self._replay_ms(replay.graph, replay.count(self.settle_ms))
                count = max(self.FEWEST, min(self.MOST, replay.count(self.MEASURE_MS)))
                intervals[i] += self._replay_ms(replay.graph, count)
        return [
            1e3 * median(taken) / (replay.rounds * len(replay.calls))
            for replay, taken in zip(contenders, intervals, strict=True)
        ]

    def _replay_ms(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def host_us(self, call: Call) -> float:
        return _host_us(call, torch.cuda.synchronize)


def _in_order(turn: int, contenders: int) -> Sequence[int]:
    """Order of the contenders, reversed in every other round."""
    return range(contenders)[:: 1 if turn % 2 == 0 else -1]


TIMERS: dict[str, Callable[[], Timer[Any]]] = {"cpu": CpuTimer, "cuda": CudaTimer}
