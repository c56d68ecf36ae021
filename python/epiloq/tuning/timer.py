"""Timing of a problem's candidates on a GPU: replays of CUDA graphs, with the L2 cache flushed before each."""

# torch.cuda's streams and events are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Protocol

import torch

from epiloq import _core
from epiloq.tuning.calls import Call, calls_of
from epiloq.tuning.problems import Problem


class Timer(Protocol):
    """Microseconds for each candidate; infinity for one that cannot run."""

    def __call__(self, problem: Problem, candidates: Sequence[str]) -> list[float]: ...


@contextmanager
def forced(kernel: str) -> Iterator[None]:
    """Context in which products of this thread use the named candidate."""
    _core.force_kernel(kernel)
    try:
        yield
    finally:
        _core.force_kernel("")


class CudaTimer:
    """Times each candidate by a CUDA graph of several calls, each with its own weight, so that the cache is cold.

    The result is the median of replays in random order. Candidates that are much slower in the first round are left
    out of the second one.
    """

    CALLS, MOST_BYTES = 10, 600 << 20  # calls per graph; limit for all operands
    FIRST, SECOND, BEHIND = 2, 9, 1.2

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.stream = torch.cuda.Stream(self.device)
        self.flushed = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device=self.device)
        self.random = random.Random(0)

    def __call__(self, problem: Problem, candidates: Sequence[str]) -> list[float]:
        weight = problem.n * problem.k + problem.m * (problem.k + 2 * problem.n)
        count = max(2, min(self.CALLS, self.MOST_BYTES // max(weight, 1)))
        times = [float("inf")] * len(candidates)
        with torch.cuda.device(self.device), _without_collection():
            calls = calls_of(problem, self.device, count)
            graphs = {}
            for i, candidate in enumerate(candidates):
                if (graph := self._capture(calls, candidate)) is not None:
                    graphs[i] = graph
            for i, us in self._replay(graphs, self.FIRST, count).items():
                times[i] = us
            near = {i: graphs[i] for i in graphs if times[i] <= self.BEHIND * min(times)}
            for i, us in self._replay(near, self.SECOND, count).items():
                times[i] = us
        return times

    def _capture(self, calls: list[Call], candidate: str) -> torch.cuda.CUDAGraph | None:
        """Capture the calls; None if the device cannot run the kernel, for example because of shared memory."""
        graph = torch.cuda.CUDAGraph()
        with forced(candidate):
            try:
                with torch.cuda.stream(self.stream):
                    calls[0]()
                    torch.cuda.synchronize(self.device)
            except (NotImplementedError, RuntimeError):
                return None
            with torch.cuda.graph(graph, stream=self.stream):
                for call in calls:
                    call()
        return graph

    def _replay(self, graphs: dict[int, torch.cuda.CUDAGraph], rounds: int, calls: int) -> dict[int, float]:
        taken: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {i: [] for i in graphs}
        with torch.cuda.stream(self.stream):
            for i in graphs:
                graphs[i].replay()
            for _ in range(rounds):
                for i in self.random.sample(list(graphs), len(graphs)):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    self.flushed.fill_(1)
                    begin.record()
                    graphs[i].replay()
                    end.record()
                    taken[i].append((begin, end))
        torch.cuda.synchronize(self.device)
        return {i: 1e3 * median(a.elapsed_time(b) for a, b in pairs) / calls for i, pairs in taken.items()}


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection, which capturing a graph triggers and which can take longer than the timing."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
