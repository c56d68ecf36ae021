"""Times every kernel of online_quant_mm on a GPU, tiles x split-K slices, and the one that is chosen.

    python tools/kernel_times/online_quant_sweep.py [--shapes 4096x4096,8192x8192] [--tokens 16,64,256]
                                       [--variants w8g128,w4g128] [--splits 1,2,3,4,5,6,7,8] [--json sweep.json]

Times are microseconds of a whole call including the quantising pass, in replays of a CUDA graph with weights cold in
L2. Every kernel's result is first compared with the float64 product. The summary tells how much slower the choice is
than the fastest. online_quant_fit.py fits the times in costs.h to what --json writes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from conv_sweep import MOST_SETS, QuickTimer
from epiloq import _core
from epiloq.bench.cases import H200, Case
from epiloq.bench.contract import Inputs
from epiloq.bench.operations.online_quant_mm import KINDS, OPERATION
from epiloq.bench.timing import CudaTimer, cache_bytes, kernel_us, rotate

# Tokens per CTA tile, by row of the tables in src/dispatch/online_quant_mm/tables.h.
TILES = {"sm80": (16, 16, 32, 64, 64, 64, 128, 64), "sm90": (64, 80, 96, 112, 128)}
SM90_ROWS, SM90_GROUP = 128, 128
SHAPES = ",".join(f"{shape.n}x{shape.k}" for shape in H200)


class Kernel(NamedTuple):
    family: str
    row: int
    split: int = 1
    last_wave: bool = False


def candidates(case: Case, splits: list[int], sm_count: int) -> Iterator[Kernel]:
    """Kernels to time, without mostly empty or far too narrow tiles, and without clusters beyond one wave."""
    for family, tiles in TILES.items():
        if family == "sm90" and KINDS[case.variant][1] != SM90_GROUP:
            continue
        for row, tokens in enumerate(tiles):
            if tokens > 2 * max(case.m, 32) or (family == "sm80" and case.m > 16 * tokens):
                continue
            yield Kernel(family, row)
            if family == "sm80":
                continue
            count = math.ceil(case.m / tokens) * math.ceil(case.n / SM90_ROWS)
            yield from (Kernel(family, row, split) for split in splits if split > 1 and count * split <= sm_count)
            if count > sm_count:
                yield Kernel(family, row, 2, last_wave=True)


def arguments_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    bits, group = KINDS[case.variant]
    numbers = {"in_features": case.k, "group_size": group, "bits": bits, "lo": -math.inf, "hi": math.inf}
    return {**inputs, **numbers, "out": inputs["x"].new_empty((case.m, case.n)), "bias": None, "staged": False}


def name_of(explained: str) -> str:
    return explained.partition(" blocks of ")[2].partition(" ")[2]


def sweep(case: Case, splits: list[int], timer: CudaTimer, generator: torch.Generator) -> tuple[str, dict[str, float]]:
    """Return the chosen kernel, and microseconds by the description of a kernel in `explain`."""
    sets = rotate(OPERATION.inputs(case, generator), cache_bytes(generator.device))[0][:MOST_SETS]
    calls = [arguments_of(case, inputs) for inputs in sets]
    sm_count = torch.cuda.get_device_properties(generator.device).multi_processor_count
    times: dict[str, float] = {}
    for kernel in candidates(case, splits, sm_count):
        try:
            name = name_of(_core.explain_online_quant_mm(**calls[0], kernel=kernel))
        except ValueError:
            continue
        bound = [partial(_core.online_quant_mm, **call, kernel=kernel) for call in calls]
        calls[0]["out"].fill_(math.nan)
        bound[0]()
        error = OPERATION.error(case, sets[0], calls[0]["out"], generator)
        if error <= 1:
            times[name] = kernel_us(timer, bound)
        else:
            print(f"    WRONG: {name}, {error:.3g} times the tolerance")
    return name_of(_core.explain_online_quant_mm(**calls[0])), times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="8,16,32,64,96,128,256,512,1024")
    parser.add_argument("--variants", default="w8g128,w4g128")
    parser.add_argument("--splits", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, timer = torch.device("cuda"), QuickTimer()
    generator = torch.Generator(device).manual_seed(0)
    splits = [int(split) for split in arguments.splits.split(",")]
    rows: list[dict[str, Any]] = []
    record = {
        "what": "online_quant_mm with its quantising pass, tokens of bfloat16, by online_quant_sweep.py: microseconds.",
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device),
        "sweep": rows,
    }
    behind = []
    lists = (arguments.variants.split(","), arguments.shapes.split(","), map(int, arguments.tokens.split(",")))
    for variant, shape, m in itertools.product(*lists):
        n, k = map(int, shape.split("x"))
        case = Case("online_quant_mm", variant, "", m, n, k)
        chosen, times = sweep(case, splits, timer, generator)
        ordered = sorted(times, key=times.__getitem__)
        behind.append(times.get(chosen, math.nan) / times[ordered[0]])
        print(f"{variant} {shape} by {m}: chosen {100 * (behind[-1] - 1):.1f} % behind, {chosen}")
        print("    " + "; ".join(f"{times[name]:.2f} {name}" for name in ordered[:4]), flush=True)
        bits, group = KINDS[variant]
        rows.append({"bits": bits, "group": group, "n": n, "k": k, "m": m, "us": times})
        if arguments.json:  # written after each problem, so that an aborted run keeps its results
            arguments.json.write_text(json.dumps(record))
    known = [ratio - 1 for ratio in behind if not math.isnan(ratio)]
    print(f"{fmean(known):.2%} slower than the fastest on average of {len(known)} problems, {max(known):.1%} at worst;")
    print(f"for {len(behind) - len(known)} problems the chosen kernel was not timed")


if __name__ == "__main__":
    main()
