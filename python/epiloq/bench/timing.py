"""Time of a kernel with cold inputs, and of the host's part of a call."""

# torch.cuda's streams and events are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

from epiloq.bench.contract import Call, Inputs

# Input sets rotate through this many times the last-level cache, so that each one has left it before it comes again.
CACHE_MULTIPLE = 4
FEWEST_SETS = 3
# Bounds the graph and the set-up of tiny problems; they then run warm, and their rows say so.
MOST_SETS = 1024


class Timer(Protocol):
    """Both answers are microseconds a call."""

    def kernel_us(self, calls: Sequence[Call]) -> float: ...

    def host_us(self, call: Call) -> float: ...


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
    wanted = max(FEWEST_SETS, math.ceil(CACHE_MULTIPLE * cache / nbytes))
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

    def __init__(self, budget_s: float = 0.15) -> None:
        self.budget_s = budget_s

    def kernel_us(self, calls: Sequence[Call]) -> float:
        for call in calls[:2]:
            call()
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begin < self.budget_s:
            call = calls[len(times) % len(calls)]
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e6 * sorted(times)[len(times) // 10]

    def host_us(self, call: Call) -> float:
        return _host_us(call, lambda: None)


class CudaTimer:
    """Replays of one CUDA graph that holds every set's call, several rounds of them, replays queued back to back.

    An event stands between neighbouring replays, so that a replay's launch hides behind the one before; the median of
    the intervals over the calls in the graph. Replays that only warm the clocks up come first.
    """

    SHORT_US = 200.0
    CALLS_IF_SHORT = 64
    CALLS_IF_LONG = 8
    # Where a call takes milliseconds, fewer calls are as good, down to one of each set.
    LONG_US = 4000.0
    WARM_MS = 20.0
    MEASURE_MS = 60.0

    def __init__(self) -> None:
        # Warm-up and capture share a stream: libraries allocate a workspace for each one.
        self.stream = torch.cuda.Stream()

    def kernel_us(self, calls: Sequence[Call]) -> float:
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
        once_ms = self._replay_ms(graph, 1)[0]
        self._replay_ms(graph, math.ceil(self.WARM_MS / once_ms))
        intervals = self._replay_ms(graph, max(7, min(50, math.ceil(self.MEASURE_MS / once_ms))))
        return 1e3 * median(intervals) / (rounds * len(calls))

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


TIMERS: dict[str, Callable[[], Timer]] = {"cpu": CpuTimer, "cuda": CudaTimer}
