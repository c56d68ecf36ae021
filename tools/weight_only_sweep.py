"""Times every weight-only kernel on a GPU, table rows x splits of K, beside the one that the tables choose.

    python tools/weight_only_sweep.py [--variant w4_g128] [--shapes 6144x4096,8192x8192] [--tokens 1,8,64]

Weights are cold in L2, replays of a CUDA graph. Percentages are of the read floor for the packed weight.
"""

from __future__ import annotations

import argparse
import itertools
import math
from functools import partial

import torch

import epiloq
from epiloq import _core
from epiloq.bench.cases import H200, Case
from epiloq.bench.contract import Inputs
from epiloq.bench.floor import ReadFloor, measure_read_floor
from epiloq.bench.operations.weight_only_mm import OPERATION, VARIANTS
from epiloq.bench.timing import CudaTimer, cache_bytes, rotate

ROWS = {False: 4, True: 5}  # of the tables in src/ops/weight_only_mm/configs.h
SHAPES = ",".join(f"{shape.n}x{shape.k}" for shape in H200)


def bind(case: Case, inputs: Inputs, kernel: tuple[bool, int, int] | None) -> partial[bool]:
    variant = VARIANTS[case.variant]
    numbers = (variant.bits, case.n, case.k, variant.group_size, -math.inf, math.inf)
    out = inputs["x"].new_empty((case.m, case.n))
    parts = (inputs["x"], inputs["q"], inputs["scale"], inputs.get("zero"), None, None)
    return partial(_core.weight_only_mm, out, *parts, *numbers, kernel=kernel)


def sweep(case: Case, timer: CudaTimer, floor: ReadFloor, generator: torch.Generator) -> None:
    sets, _ = rotate(OPERATION.inputs(case, generator), cache_bytes(generator.device))
    nbytes = sum(tensor.nbytes for tensor in sets[0].values())
    times: dict[str, float] = {}
    for tiled in (False, True):
        for row, split in itertools.product(range(ROWS[tiled]), range(1, 9)):
            try:
                calls = [bind(case, inputs, (tiled, row, split)) for inputs in sets]
                calls[0]()
            except ValueError:
                continue
            times[f"{'tiled' if tiled else 'stream'} {row} split {split}"] = timer.kernel_us(calls)
    own = timer.kernel_us(OPERATION.bind(case, sets).calls)
    dense = timer.kernel_us(OPERATION.peers["dense"](case, sets).calls)
    chosen = epiloq.explain("weight_only_mm", m=case.m, n=case.n, k=case.k, bits=VARIANTS[case.variant].bits)
    lowest = floor.us(nbytes)
    print(f"{case}: floor {lowest:.1f} us, 16-bit product {dense:.1f}, chosen {own:.1f} ({100 * lowest / own:.0f} %)")
    print(f"    {chosen}")
    for name in sorted(times, key=times.__getitem__)[:6]:
        print(f"    {times[name]:7.1f} us {100 * lowest / times[name]:3.0f} %  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="w4_g128")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128,256,512")
    arguments = parser.parse_args()
    device, timer = torch.device("cuda"), CudaTimer()
    floor = measure_read_floor(device, timer)
    generator = torch.Generator(device).manual_seed(0)
    for shape, tokens in itertools.product(arguments.shapes.split(","), arguments.tokens.split(",")):
        n, k = map(int, shape.split("x"))
        sweep(Case("weight_only_mm", arguments.variant, "", int(tokens), n, k), timer, floor, generator)


if __name__ == "__main__":
    main()
