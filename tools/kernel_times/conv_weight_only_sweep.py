"""Times every kernel of conv2d_weight_only on a GPU, table rows x split-K slices, and the one that its model chooses.

    python tools/kernel_times/conv_weight_only_sweep.py [--variant w4_g128] [--batches 1] [--layers "3 3x3,4 3x3"]
                                           [--families wgmma,patches] [--splits 1,2,4,8] [--json sweep.json]

Calls are replays of a CUDA graph, with inputs cold in L2 (except for "dense") if an input set has at least about
0.4 MB. Every result is compared with torch's convolution of the dequantised weight; the "dense" time includes
dequantisation, and cuDNN's convolution in the same dtype is timed without it. --json writes the times to which those
in costs.h are fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epiloq
from conv_sweep import MOST_SETS, QuickTimer, Row, summarise
from epiloq import _core
from epiloq.bench.cases import Case
from epiloq.bench.contract import Call
from epiloq.bench.convolutions import LAYERS
from epiloq.bench.operations.convolution import KINDS, WEIGHT_ONLY
from epiloq.bench.timing import CudaTimer, cache_bytes, kernel_us, rotate
from epiloq.ops.convolutions.conv2d import Geometry, geometry

NAME = "conv2d_weight_only"
# Weight rows and pixels of a CTA tile, by row of the tables in src/dispatch/conv2d_weight_only/tables.h.
TILES = {"wgmma": ((128, 64), (64, 64), (64, 64)), "patches": ((128, 64), (128, 32))}
Kernel = tuple[str, int, int]


def place_of(call: partial[Tensor]) -> Geometry:
    given: dict[str, Any] = call.keywords
    return geometry(NAME, call.args[1].kernel, given["stride"], given["padding"], 1, given["groups"])


def bind(call: partial[Tensor], kernel: Kernel) -> tuple[Call, Tensor]:
    """Convert a call of the operation to a call of one kernel, and return it with its output ``[B, Co, P, Q]``."""
    x: Tensor
    w: epiloq.PackedConv2dWeight
    x, w = call.args
    where = place_of(call)
    pixels = x.permute(0, 2, 3, 1)
    out = x.new_empty((x.shape[0], *where.output_size(x.shape[2:], w.kernel), w.n))
    sizes = (w.bits, w.n, w.kernel, w.channels, w.padded_channels, w.group_size, w.depthwise)
    given: tuple[Any, ...] = (w.q, w.scale, w.zero, w.offset, None, *sizes, -math.inf, math.inf, *where, 1, kernel)
    return partial(_core.conv2d_weight_only, out, pixels, *given), out.permute(0, 3, 1, 2)


def dense(call: partial[Tensor]) -> Tensor:
    x, w = call.args
    where = place_of(call)
    top, left = where.padding[0], where.padding[2]
    return torch.nn.functional.conv2d(x, w.dequantize(x.dtype), None, where.stride, (top, left))


def candidates(case: Case, families: list[str], splits: list[int], sm_count: int) -> list[Kernel]:
    """Kernels to time, without split-K beyond one wave."""
    pixels, kernels = case.m * math.prod(LAYERS[case.layer].output_image), []
    for family in families:
        for row, (tile_n, tile_m) in enumerate(TILES[family]):
            blocks = math.ceil(pixels / tile_m) * math.ceil(case.n / tile_n)
            kernels += [(family, row, split) for split in splits if split == 1 or blocks * split <= 4 * sm_count]
    return kernels


def sweep(case: Case, kernels: list[Kernel], timer: CudaTimer, generator: torch.Generator) -> Row:
    sets = rotate(WEIGHT_ONLY.inputs(case, generator), cache_bytes(generator.device))[0][:MOST_SETS]
    calls: list[Any] = list(WEIGHT_ONLY.bind(case, sets).calls)
    reference = dense(calls[0]).float()
    words = epiloq.explain(NAME, *calls[0].args, **calls[0].keywords)
    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}[KINDS[case.variant][2]]
    cudnn = kernel_us(timer, WEIGHT_ONLY.peers[f"conv2d {kind}"](case, sets).calls)
    row = Row(case.layer, case.m, cudnn, kernel_us(timer, calls), words)
    row.times["dense"] = kernel_us(timer, [partial(dense, call) for call in calls[:8]])
    for kernel in kernels:
        try:
            bound = [bind(call, kernel) for call in calls]
            bound[0][1].fill_(math.nan)
            bound[0][0]()
        except ValueError:
            continue
        name = "/".join(map(str, kernel))
        error = float((bound[0][1].float() - reference).norm() / reference.norm())
        if error < 0.02:
            row.times[name] = kernel_us(timer, [run for run, _ in bound])
        else:
            print(f"    WRONG by {error:.3g}: {name}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=sorted(KINDS), default="w4_g128")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--layers", default="3x3,1x1/2,1x3", help="those whose names have one of these parts")
    parser.add_argument("--families", default=",".join(TILES))
    parser.add_argument("--splits", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, timer = torch.device("cuda"), QuickTimer()
    generator = torch.Generator(device).manual_seed(0)
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    splits = [int(split) for split in arguments.splits.split(",")]
    parts = arguments.layers.split(",")
    named = [name for name, layer in LAYERS.items() if layer.groups == 1 and any(part in name for part in parts)]
    found = []
    for batch, name in itertools.product(map(int, arguments.batches.split(",")), named):
        case = Case(NAME, arguments.variant, name, batch, LAYERS[name].outputs, LAYERS[name].k)
        row = sweep(case, candidates(case, arguments.families.split(","), splits, sm_count), timer, generator)
        found.append(row)
        print(f"{row.layer} x {row.batch}: cuDNN {row.cudnn:.1f} us, chosen {row.chosen:.1f}, {row.words}")
        print("    " + "  ".join(f"{kernel} {time:.1f}" for time, kernel in row.best()[:10]), flush=True)
    summarise(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
