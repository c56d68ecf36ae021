"""Time of a kernel with cold inputs, and of the host's part of a call."""

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

# Input sets rotate through so many times the last-level cache, so that each one has left it before it comes again. A
# GPU's holds on to parts of a rotation where kernels ask it to evict first what they load.
CACHE_MULTIPLE = {"cuda": 20, "cpu": 4}
FEWEST_SETS = 3
# Bounds the graph and the set-up of tiny problems; they then run warm, and their rows say so.
MOST_SETS = 4096


Prepared = TypeVar("Prepared")


class Timer(Protocol[Prepared]):
    """Answers are microseconds a call.

    A contender is a call for each input set. Contenders are prepared one by one, since each may fail for reasons of its
    own, and timed together.
    """

    def prepare(self, calls: Sequence[Call]) -> Prepared: ...

    def take_turns(self, contenders: Sequence[Prepared]) -> list[float]: ...

    def host_us(self, call: Call) -> float: ...


def kernel_us(timer: Timer[Any], calls: Sequence[Call]) -> float:
    """The time of one contender alone."""
    return timer.take_turns([timer.prepare(calls)])[0]


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache; 32 MiB where Linux does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


def rotate(inputs: Inputs, cache: int) -> tuple[list[Inputs], bool]:
    """Copies of an input set in memory of their own, strides kept, and whether they are enough to stay cold."""
    nbytes = sum(t.nbytes for t in inputs.values())
    multiple = CACHE_MULTIPLE[next(iter(inputs.values())).device.type]
    wanted = max(FEWEST_SETS, math.ceil(multiple * cache / nbytes))
    sets = [inputs] + [{k: _copy(t) for k, t in inputs.items()} for _ in range(min(wanted, MOST_SETS) - 1)]
    return sets, wanted <= MOST_SETS


def _copy(t: torch.Tensor) -> torch.Tensor:
    # Where rows are padded, clone() drops the padding, and a peer that wants it would copy in every call.
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def _host_us(call: Call, synchronise: Callable[[], None], *, rounds: int = 7) -> float:
    """Wall clock a call, nothing waited for: few enough calls a round that the launch queue never fills."""
    call()
    synchronise()
    start = time.perf_counter()
    call()
    synchronise()
    count = max(10, min(200, int(0.005 / (time.perf_counter() - start))))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count)
        synchronise()
    return 1e6 * median(times)


class CpuTimer:
    """Every call is timed by itself, the sets in turn; the lowest decile.

    Other work on the machine only ever adds, milliseconds where a thread waits for a busy core, and on a shared
    machine it reaches past the median. ``budget_s`` bounds what one contender takes.
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
    """A CUDA graph of several rounds of calls, and how long it took once. The calls hold the memory that it reads."""

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Call]
    rounds: int
    ms: float

    def count(self, ms: float) -> int:
        """Replays that take at least so long."""
        return math.ceil(ms / self.ms)


class CudaTimer:
    """Replays of one CUDA graph that holds every set's call, several rounds of them, replays queued back to back.

    An event stands between neighbouring replays, so that a replay's launch hides behind the one before; the median of
    the intervals over the calls in the graph. Contenders take turns in random order: a GPU at its power limit runs at
    the clock that the work of the last tenths of a second left it, a tenth higher after a pause. The first `settle_ms`
    of a turn do not count: by default all run at the clock of their mixture, from some 100 ms on each at its own.
    """

    SHORT_US = 200.0
    CALLS_IF_SHORT = 64
    CALLS_IF_LONG = 8
    # Where a call takes milliseconds, fewer calls are as good, down to one of each set.
    LONG_US = 4000.0
    MEASURE_MS = 12.0
    # Turns: as many as take so long, but for these.
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
    """There and back."""
    return range(contenders)[:: 1 if turn % 2 == 0 else -1]


TIMERS: dict[str, Callable[[], Timer[Any]]] = {"cpu": CpuTimer, "cuda": CudaTimer}
