"""Times every weight-only kernel on a GPU, table rows x splits of K, beside the one that the tables choose.

    python tools/kernel_times/weight_only_sweep.py [--variant w4_g128] [--shapes 6144x4096,8192x8192] [--tokens 1,8,64]
                                      [--families tiled,wgmma] [--splits 1,2,4,8]

Weights are cold in L2, replays of a CUDA graph. Percentages are of the read floor for the packed weight; every kernel's
result is compared with the dense product first. At the end stands each family's mean over the shapes, with how often
each of its rows was best. The times in costs.h are fitted to what --json writes, of more layers than those of the
benchmark (tests/kernel_choice/test_weight_only_choice.py names the sweeps), by weight_only_fit.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

import epiloq
from conv_sweep import MOST_SETS, QuickTimer
from epiloq import _core
from epiloq.bench.cases import H200, Case
from epiloq.bench.contract import Inputs
from epiloq.bench.floor import ReadFloor, measure_read_floor
from epiloq.bench.operations.weight_only_mm import OPERATION, VARIANTS
from epiloq.bench.timing import CudaTimer, cache_bytes, kernel_us, rotate

Kernel = tuple[str, int, int]
# Tokens of a tile, by row of the tables in src/dispatch/weight_only_mm/tables.h.
TILES = {
    "stream": (2,) * 5 + (8,) * 9,
    "tiled": (16, 32, 64, 128, 32),
    "ring": (8,) * 3 + (16,) * 4,
    "wgmma": (32,) * 4 + (64,) * 4 + (128,) * 3 + (256,),
}
SHAPES = ",".join(f"{shape.n}x{shape.k}" for shape in H200)
DENSE = "dense"


# Blocks that an SM holds, which end a stream's name in the sweep and which explain leaves out, of the rows in
# src/dispatch/weight_only_mm/tables.h.
BLOCKS = {
    **{"4,16,2": 1, "4,8,3": 2, "7,4,3": 1, "7,4,2": 2, "8,4,2": 2, "4,4,2": 4, "4,4,3": 3},
    **{"2,16,2": 1, "2,8,3": 2, "2,4,3": 4, "1,16,3": 2, "1,16,2": 2, "1,4,2": 2},
}

STREAM = re.compile(r"stream (\d+) panels of 16 weight rows, (\d+) warps along K, stages (\d+)(, tokens as digits)?")
RING = re.compile(r"ring (\d+) weight rows x (\d+) tokens, (\d+) warps, (\d) along K")
WGMMA = re.compile(r"wgmma (\d+) weight rows x (\d+) tokens, (\d+) warpgroups(?:, (\d) along K)?(, weights rounded.*)?")


def name_in_sweep(explained: str) -> str:
    """As in the sweeps: "stream panels,warps,stages,blocks", "ring teams,ways along K,panels,tokens", "wgmma
    warpgroups,ways along K,blocks of rows,tokens"."""
    kernel, _, split = explained.partition(", K over clusters of ")
    if found := STREAM.fullmatch(kernel):
        row = ",".join(found.groups()[:3])
        name = f"stream {row},{BLOCKS[row]}" + (",d" if found[4] else "")
    elif found := RING.fullmatch(kernel):
        rows, tokens, warps, ways = map(int, found.groups())
        name = f"ring {warps // ways},{ways},{rows * ways // warps // 16},{tokens}"
    else:
        found = WGMMA.fullmatch(kernel)
        assert found, kernel
        rows, tokens, teams, ways = (int(number or 1) for number in found.groups()[:4])
        teams //= ways
        name = f"wgmma {teams},{ways},{rows // teams // 64},{tokens}" + (",r" if found[5] else "")
    return f"{name} split {split}" if split else name


def arguments_of(case: Case, inputs: Inputs, kernel: Kernel) -> dict[str, Any]:
    variant = VARIANTS[case.variant]
    numbers = {"bits": variant.bits, "n": case.n, "k": case.k, "group_size": variant.group_size}
    parts = {"zero": None, "offset": None, "bias": None, "lo": -math.inf, "hi": math.inf, **inputs}
    return {**parts, **numbers, "out": inputs["x"].new_empty((case.m, case.n)), "kernel": kernel}


def candidates(m: int, families: list[str], splits: list[int]) -> list[Kernel]:
    """Tiles neither half empty nor many times too narrow."""
    return [
        (family, row, split)
        for family in families
        for row, tile in enumerate(TILES[family])
        for split in splits
        if tile < 2 * max(m, 9) and (2 * tile >= min(m, 128) if family != "stream" else m <= tile)
    ]


def sweep(
    case: Case, kernels: list[Kernel], timer: CudaTimer, floor: ReadFloor, generator: torch.Generator
) -> tuple[dict[Kernel, float], dict[Kernel, str]]:
    """Microseconds, and what kernels are called."""
    sets = rotate(OPERATION.inputs(case, generator), cache_bytes(generator.device))[0][:MOST_SETS]
    nbytes = sum(tensor.nbytes for tensor in sets[0].values())
    dense = OPERATION.peers["dense"](case, sets).calls
    reference = dense[0]()
    assert isinstance(reference, torch.Tensor)
    times: dict[Kernel, float] = {}
    names: dict[Kernel, str] = {}
    for kernel in kernels:
        try:
            calls = [arguments_of(case, inputs, kernel) for inputs in sets]
            _core.weight_only_mm(**calls[0])
        except ValueError:
            continue
        error = float((calls[0]["out"] - reference).float().norm() / reference.float().norm())
        if not error < 0.02:
            print(f"    WRONG by {error:.3f}: {kernel}")
            continue
        times[kernel] = kernel_us(timer, [partial(_core.weight_only_mm, **call) for call in calls])
        names[kernel] = _core.explain_weight_only_mm(**calls[0])
    own = kernel_us(timer, OPERATION.bind(case, sets).calls)
    chosen = epiloq.explain("weight_only_mm", m=case.m, n=case.n, k=case.k, bits=VARIANTS[case.variant].bits)
    lowest = floor.us(nbytes)
    x = sets[0]["x"]
    weights = [torch.randn(case.n, case.k, dtype=x.dtype, device=x.device) for _ in range(3)]
    half = kernel_us(timer, [partial(torch.nn.functional.linear, x, weight) for weight in weights])
    print(f"{case}: floor {lowest:.1f} us, 16-bit product {half:.1f}, chosen {own:.1f} ({100 * lowest / own:.0f} %)")
    print(f"    {chosen}")
    for kernel in sorted(times, key=times.__getitem__)[:6]:
        family, row, split = kernel
        print(f"    {times[kernel]:7.1f} us {100 * lowest / times[kernel]:3.0f} %  {family} {row} split {split}")
    return {**times, (DENSE, 0, 1): kernel_us(timer, dense)}, names


def row_of(case: Case, times: dict[Kernel, float], names: dict[Kernel, str]) -> dict[str, Any]:
    """As records have it; the dense product apart, as it is no kernel, and without those of other architectures."""
    named = {name_in_sweep(names[kernel]): us for kernel, us in times.items() if kernel[0] not in (DENSE, "tiled")}
    problem = {"bits": VARIANTS[case.variant].bits, "n": case.n, "k": case.k, "m": case.m}
    return {**problem, "us": named, DENSE: times[DENSE, 0, 1]}


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summarise(found: dict[int, list[dict[Kernel, float]]]) -> None:
    """By tokens, each family's best kernel, and how often each of its rows was best."""
    for m, shapes in sorted(found.items()):
        for family in (*TILES, DENSE):
            best = [
                min((t, kernel) for kernel, t in times.items() if kernel[0] == family)
                for times in shapes
                if any(kernel[0] == family for kernel in times)
            ]
            if len(best) < len(shapes):
                continue
            rows = Counter(f"row {kernel[1]} split {kernel[2]}" for _, kernel in best)
            print(f"{m:5} tokens: {family:6} {mean([t for t, _ in best]):7.1f} us  {dict(rows.most_common(4))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="w4_g128")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128,256,512")
    parser.add_argument("--families", default=",".join(TILES))
    parser.add_argument("--splits", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--json", type=Path, help="all times, by problem and name_in_sweep's names")
    arguments = parser.parse_args()
    device, timer = torch.device("cuda"), QuickTimer()
    floor = measure_read_floor(device, timer)
    generator = torch.Generator(device).manual_seed(0)
    splits = [int(split) for split in arguments.splits.split(",")]
    found: dict[int, list[dict[Kernel, float]]] = defaultdict(list)
    rows: list[dict[str, Any]] = []
    record = {
        "what": f"weight_only_mm's kernels by themselves, {arguments.variant}, by weight_only_sweep.py: microseconds.",
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(device),
        "sweep": rows,
    }
    for shape, tokens in itertools.product(arguments.shapes.split(","), arguments.tokens.split(",")):
        n, k = map(int, shape.split("x"))
        case = Case("weight_only_mm", arguments.variant, "", int(tokens), n, k)
        times, names = sweep(case, candidates(case.m, arguments.families.split(","), splits), timer, floor, generator)
        found[case.m].append(times)
        rows.append(row_of(case, times, names))
        if arguments.json:  # anew after each problem, so that a run that is cut short keeps what it had
            arguments.json.write_text(json.dumps(record))
    summarise(found)


if __name__ == "__main__":
    main()
