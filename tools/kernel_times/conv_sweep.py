"""Times every tile of conv2d_int8 on a GPU, table rows x split-K slices, and the one that the table's rule chooses.

    python tools/kernel_times/conv_sweep.py [--suites resnet50,resnet50-1,pp-ocr] [--rows 0,1,2] [--splits 1,2,4,8]
                               [--json sweep.json]

Calls are replays of a CUDA graph, with inputs cold in L2 if an input set has at least about 0.4 MB. The chosen tile's
result must equal a float64 reference, and every other tile's result the chosen one's. cuDNN's convolution of the same
values in fp16 is timed for comparison. The summary has the geometric means of cuDNN's time over the chosen tile's and
over the best tile's, and how often each row was best. The JSON file contains all times.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epiloq
from epiloq import _core
from epiloq.bench.cases import SUITES, Case
from epiloq.bench.contract import Call
from epiloq.bench.convolutions import LAYERS
from epiloq.bench.operations.convolution import INT8
from epiloq.bench.timing import CudaTimer, cache_bytes, kernel_us, rotate
from epiloq.ops.convolutions.conv2d import geometry

NAME = "conv2d_int8"
MOST_SETS = 160
# Pixels and channels of a CTA tile, by row of the table in src/dispatch/conv2d_int8/tables.h.
TILES = (
    (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (128, 128), (128, 64), (128, 32), (64, 64),
    (64, 64), (64, 64),
)  # fmt: skip
Kernel = tuple[int, int]


class QuickTimer(CudaTimer):
    """Faster timer for hundreds of kernels: two runs of 6 ms after 3 ms of warm-up.

    Capturing a graph collects garbage, so imported objects are frozen first; otherwise that would take longer.
    """

    MEASURE_MS = 6.0
    FEWEST_TURNS = MOST_TURNS = 2

    def __init__(self) -> None:
        super().__init__(settle_ms=3.0)
        gc.freeze()


@dataclass
class Row:
    layer: str
    batch: int
    cudnn: float
    chosen: float
    words: str
    times: dict[str, float] = field(default_factory=dict)  # by "row/split"

    def best(self) -> list[tuple[float, str]]:
        return sorted((time, kernel) for kernel, time in self.times.items())


def bind(call: partial[Tensor], kernel: Kernel) -> tuple[Call, Tensor]:
    """Convert a call of the operation to a call of one kernel, and return it with its output."""
    x: Tensor
    weight: epiloq.PreparedInt8Weight
    x, weight = call.args
    given: dict[str, Any] = call.keywords
    where = geometry(NAME, weight.q.shape[1:3], given["stride"], given["padding"], 1, given["groups"])
    size = where.output_size(x.shape[1:3], weight.q.shape[1:3])
    out = x.new_empty((x.shape[0], *size, weight.q.shape[0]))
    parameters = weight.parameters(NAME, to_int8=True, clamp=given["clamp"])
    return lambda: _core.conv2d_int8(out, x, weight.q, *parameters, *where, kernel=kernel), out


def candidates(case: Case, rows: list[int], splits: list[int], sm_count: int) -> list[Kernel]:
    """Kernels to time, without tiles much wider than the layer and without split-K beyond one wave."""
    layer = LAYERS[case.layer]
    if layer.groups > 1:
        return []
    pixels, kernels = case.m * math.prod(layer.output_image), []
    for row in rows:
        tile_m, tile_n = TILES[row]
        blocks = math.ceil(pixels / tile_m) * math.ceil(case.n / tile_n)
        if tile_n <= 2 * max(case.n, 32):
            kernels += [(row, split) for split in splits if split == 1 or blocks * split <= 6 * sm_count]
    return kernels


def sweep(case: Case, kernels: list[Kernel], timer: CudaTimer, generator: torch.Generator) -> Row:
    sets = rotate(INT8.inputs(case, generator), cache_bytes(generator.device))[0][:MOST_SETS]
    calls = INT8.bind(case, sets).calls
    reference: Any = calls[0]()
    error = INT8.error(case, sets[0], reference, generator)
    if not error <= 1:
        print(f"    WRONG: the chosen tile, {error:.3g} times the tolerance")
    x, weight = calls[0].args  # type: ignore[attr-defined]
    words = epiloq.explain(NAME, x, weight, **calls[0].keywords)  # type: ignore[attr-defined]
    cudnn = kernel_us(timer, INT8.peers["conv2d fp16"](case, sets).calls)
    row = Row(case.layer, case.m, cudnn, kernel_us(timer, calls), words)
    for kernel in kernels:
        try:
            bound = [bind(call, kernel) for call in calls]  # type: ignore[arg-type]
            bound[0][1].fill_(-77)
            bound[0][0]()
        except ValueError:
            continue
        if torch.equal(bound[0][1], reference):
            row.times["/".join(map(str, kernel))] = kernel_us(timer, [call for call, _ in bound])
        else:
            print(f"    WRONG: row {kernel[0]} split {kernel[1]}")
    return row


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summarise(found: list[Row]) -> None:
    for batch in sorted({row.batch for row in found}):
        rows = [row for row in found if row.batch == batch and row.times]
        chosen = mean([row.cudnn / row.chosen for row in rows])
        best = mean([row.cudnn / row.best()[0][0] for row in rows])
        wins = Counter(row.best()[0][1].split("/")[0] for row in rows)
        print(f"batch {batch}: cuDNN / chosen {chosen:.2f}, / best {best:.2f}; best rows {dict(wins.most_common())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="resnet50,resnet50-1,pp-ocr")
    parser.add_argument("--rows", default=",".join(map(str, range(len(TILES)))))
    parser.add_argument("--splits", default="1,2,3,4,5,6,8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, timer = torch.device("cuda"), QuickTimer()
    generator = torch.Generator(device).manual_seed(0)
    rows, splits = ([int(n) for n in text.split(",")] for text in (arguments.rows, arguments.splits))
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for suite in (SUITES[name] for name in arguments.suites.split(",")):
        for shape in suite.shapes:
            case = Case(NAME, "relu", shape.layer, suite.tokens[0], shape.n, shape.k)
            row = sweep(case, candidates(case, rows, splits, sm_count), timer, generator)
            found.append(row)
            print(f"{row.layer} x {row.batch}: cuDNN fp16 {row.cudnn:.1f} us, chosen {row.chosen:.1f}, {row.words}")
            print("    " + "  ".join(f"{kernel} {time:.1f}" for time, kernel in row.best()[:8]), flush=True)
    summarise(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
