"""Roofline floors: the time to read a case's bytes once, cold, and the time for its arithmetic.

The memory floor t = a + S / B is fitted to the fastest of several simple readers, timed in the same run as the cases.
On a CPU a is 0 and B the best measured rate: there a would be the cost of waking torch's threads rather than of a
launch, which other code need not pay. The arithmetic rate is the datasheet's, or the best measured one for a device
that is not listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import epiloq
from epiloq.bench.contract import Call
from epiloq.bench.timing import CACHE_MULTIPLE, Timer, cache_bytes, kernel_us

READ_MIB = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 448), "cpu": (1, 4, 16, 64)}

# Dense int8 TOPS (10^12 multiplications and additions a second) at boost clock, from NVIDIA's datasheets. 16-bit
# floating point with fp16 sums is half as fast on all of them.
# A device belongs to the entry that shares the most words with its name.
DATASHEET_INT8 = {
    "T4": 130.0,
    "A10": 250.0,
    "A30": 330.0,
    "A40": 299.3,
    "A100": 624.0,
    "RTX 3090": 284.0,
    "RTX 4090": 660.6,
    "L4": 242.0,
    "L40": 362.0,
    "L40S": 733.0,
    "H20": 296.0,
    "H100": 1979.0,
    "H100 PCIe": 1513.0,
    "H100 NVL": 1671.0,
    "H200": 1979.0,
    "H200 NVL": 1671.0,
    "B200": 4500.0,
}
MEASURED_EDGE = {"cuda": 8192, "cpu": 2048}

Reader = Callable[[torch.Tensor], Call]


_REDUCTIONS: Mapping[str, Reader] = {
    "torch.sum": lambda x: partial(torch.sum, x),
    "torch.amax": lambda x: partial(torch.amax, x),
    "torch.dot": lambda x: partial(torch.dot, x, x),
}


@dataclass(frozen=True)
class ReadSample:
    """Time of the fastest reader for this many bytes."""

    nbytes: int
    us: float
    reader: str


@dataclass(frozen=True)
class ReadFloor:
    """Memory floor t = overhead_us + bytes / bytes_per_us, fitted to ``samples``."""

    overhead_us: float
    bytes_per_us: float
    samples: tuple[ReadSample, ...]

    def us(self, nbytes: int) -> float:
        return self.overhead_us + nbytes / self.bytes_per_us


@dataclass(frozen=True)
class Ceiling:
    """Arithmetic rate in TOPS (10^12 operations per second), and its source."""

    tops: float
    source: str

    def us(self, work: int) -> float:
        return work / self.tops / 1e6


def fit(samples: Sequence[ReadSample]) -> ReadFloor:
    """Fit by least squares of the relative error, so that all sizes count alike; the overhead is at least 0.

    If the times do not grow with the size, because the machine was busy, the best measured rate is returned.
    """
    points = [(s.nbytes, s.us, 1 / s.us**2) for s in samples]
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    covariance = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points)
    slope = covariance / sum(w * (x - mean_x) ** 2 for x, _, w in points)
    if slope <= 0:
        return best_rate(samples)
    return ReadFloor(max(0.0, mean_y - slope * mean_x), 1 / slope, tuple(samples))


def best_rate(samples: Sequence[ReadSample]) -> ReadFloor:
    """Return the best rate of all sizes, with no overhead."""
    return ReadFloor(0.0, max(s.nbytes / s.us for s in samples), tuple(samples))


def _readers(device: torch.device) -> Mapping[str, Reader]:
    """Readers for a device: Triton's where available, which are faster than any reduction of torch."""
    if device.type == "cuda":
        try:
            from epiloq.bench.peers.triton_readers import readers
        except ImportError:
            return _REDUCTIONS
        return readers(device)
    return _REDUCTIONS


def measure_read_floor(device: torch.device, timer: Timer[Any], sizes_mib: Sequence[int] = ()) -> ReadFloor:
    """Time every reader on every size; inputs rotate through slices of one buffer several times the cache size."""
    sizes = [mib << 20 for mib in sizes_mib or READ_MIB[device.type]]
    span = max(CACHE_MULTIPLE[device.type] * cache_bytes(device), 3 * max(sizes))
    arena = torch.rand(span // 4, device=device)
    readers = _readers(device)
    samples = []
    for nbytes in sizes:
        words = nbytes // 4
        slices = [arena[begin : begin + words] for begin in range(0, arena.numel() - words + 1, words)]
        times = {name: kernel_us(timer, [bind(s) for s in slices]) for name, bind in readers.items()}
        best = min(times, key=times.__getitem__)
        samples.append(ReadSample(nbytes, times[best], best))
    return fit(samples) if device.type == "cuda" else best_rate(samples)


def datasheet_entry(name: str) -> str | None:
    """Key of ``DATASHEET_INT8`` for a device name as CUDA reports it; None if not listed."""
    words = set(re.split(r"[\s-]+", name))
    return max((key for key in DATASHEET_INT8 if words.issuperset(key.split())), key=len, default=None)


def _int8(device: torch.device, timer: Timer[Any]) -> Ceiling:
    listed = datasheet_entry(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if listed:
        return Ceiling(DATASHEET_INT8[listed], f"datasheet {listed}, dense, at boost clock")
    edge = MEASURED_EDGE[device.type]
    a = torch.randint(-128, 128, (edge, edge), dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    calls: Mapping[str, Call] = {
        "torch._int_mm": partial(torch._int_mm, a, a.t()),
        "epiloq.scaled_mm": partial(epiloq.scaled_mm, a, a.t(), one, one, out_dtype=torch.bfloat16),
    }
    times = {name: kernel_us(timer, [call] * 3) for name, call in calls.items()}
    best = min(times, key=times.__getitem__)
    return Ceiling(2 * edge**3 / times[best] / 1e6, f"measured: {best} {edge}^3, the fastest of {', '.join(times)}")


def _half(device: torch.device, timer: Timer[Any]) -> Ceiling:
    listed = datasheet_entry(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if listed:
        return Ceiling(DATASHEET_INT8[listed] / 2, f"datasheet {listed}, dense, at boost clock")
    edge = MEASURED_EDGE[device.type]
    a = torch.randn((edge, edge), dtype=torch.bfloat16, device=device)
    us = kernel_us(timer, [partial(torch.mm, a, a.t())] * 3)
    return Ceiling(2 * edge**3 / us / 1e6, f"measured: bfloat16 torch.mm {edge}^3")


CEILINGS: Mapping[str, Callable[[torch.device, Timer[Any]], Ceiling]] = {"half": _half, "int8": _int8}
