"""Random sequences of kernels that overlap through programmatic dependent launch, disturbed from other streams.

A hunt for faults that depend on timing: a "misaligned address" was seen once in such a sequence and never again
(docs/lessons.md). Every result is compared with the same sequence run one kernel at a time. EPILOQ_HUNT_SECONDS sets
how long each case runs; run as a script, this file is what compute-sanitizer watches.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear, OnlineQuantLinear, WeightOnlyLinear

SECONDS = float(os.environ.get("EPILOQ_HUNT_SECONDS", 4))
LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": Int8Linear.from_linear,
    "fp8": Fp8Linear.from_linear,
    "fp8 groups": Fp8BlockLinear.from_linear,
    "int8 blocks": lambda linear: OnlineQuantLinear.from_linear(linear, bits=8),
    "int4 weights": lambda linear: WeightOnlyLinear.from_linear(linear, bits=4, group_size=128),
}
# Square layers so that any may follow any; these widths reach split-K clusters, pairs of CTAs and single waves.
WIDTHS = (1024, 1536, 4096)
ROWS = (1, 3, 16, 64, 65, 130, 512)
# Cycles that a disturbing stream sleeps: from less than a launch to longer than a product.
SLEEPS = (0, 500, 5_000, 50_000)


def sequence(kinds: tuple[str, ...], width: int, draw: random.Random) -> list[nn.Module]:
    """Layers in random order, several of them twice."""
    made = [LAYERS[kind](nn.Linear(width, width, dtype=torch.bfloat16, device="cuda")) for kind in kinds for _ in "ab"]
    return [draw.choice(made) for _ in range(12)]


def run(layers: list[nn.Module], x: Tensor, one_at_a_time: bool = False) -> Tensor:
    for layer in layers:
        x = layer(x)
        if one_at_a_time:
            torch.cuda.synchronize()
    return x


def disturb(streams: list[torch.cuda.Stream], memory: Tensor, draw: random.Random) -> None:
    """SMs occupied for a random time, and traffic in L2, beside the sequence."""
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(draw.choice(SLEEPS))
            part = draw.randrange(1, memory.numel())
            memory[:part].mul_(1)


def hunt(kinds: tuple[str, ...], seconds: float, seed: int) -> int:
    """Sequences that were compared. Raises where one differs from itself run one kernel at a time."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    streams = [torch.cuda.Stream() for _ in range(2)]
    memory = torch.zeros(1 << 22, device="cuda")
    count, end = 0, time.monotonic() + seconds
    with torch.no_grad():
        while count == 0 or time.monotonic() < end:
            width = draw.choice(WIDTHS)
            layers = sequence(kinds, width, draw)
            x = torch.randn(draw.choice(ROWS), width, device="cuda", dtype=torch.bfloat16)
            expected = run(layers, x, one_at_a_time=True)
            for _ in range(8):
                disturb(streams, memory, draw)
                actual = run(layers, x)
                assert torch.equal(actual, expected), (kinds, width, x.shape[0], seed)
                count += 1
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = run(layers, x)
            for _ in range(8):
                disturb(streams, memory, draw)
                graph.replay()
                assert torch.equal(y, expected), ("graph", kinds, width, x.shape[0], seed)
                count += 1
            torch.cuda.synchronize()
    return count


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(kind,) for kind in LAYERS] + [tuple(LAYERS)], ids=", ".join)
def test_disturbed_sequences(seed: int, kinds: tuple[str, ...]) -> None:
    assert hunt(kinds, SECONDS, seed) > 0


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_under_compute_sanitizer(seed: int, tool: str) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [program, "--tool", tool, "--error-exitcode", "99", sys.executable, str(Path(__file__)), str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


if __name__ == "__main__":
    print(hunt(tuple(LAYERS), SECONDS, int(sys.argv[1])), "sequences")
