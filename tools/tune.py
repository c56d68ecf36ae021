"""Times kernels of matrix products on this card, fits weight_only_mm's cost model, and judges its choices.

    python tools/tune.py time times.json [--operations weight_only_mm,scaled_mm] [--seconds 240]
    python tools/tune.py judge times.json ... [--model]
    python tools/tune.py fit times.json ... [--write]
    python tools/tune.py add times.json ...

`time` needs a GPU. Some of its layers are marked "held" (held out): `fit` ignores them, and `judge` reports how good
the choices are for them. `fit --write` writes the parameters to src/dispatch/weight_only_mm/cost/costs.h, and to
measured.h the layers for which the model does not choose the fastest kernel. `add` writes these layers of further
cards, by the parameters that there are. The sweeps in tests/kernel_choice/measured
can be given, too; they contain only kernels within 15 % of the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from cost_fit import Timed, add, fit, load, loss, write
from epiloq import _core
from epiloq.tuning.problems import Options, Problem
from epiloq.tuning.tuner import worth_timing

# N x K of real layers.
FIT = """6144x4096 4096x4096 28672x4096 4096x14336 14336x4096 1024x4096 10240x8192 8192x8192 8192x28672 5120x5120
4608x3584 3584x3584 2048x2048 896x4864 2560x9728 19456x2560 6144x2560 576x1536 1536x576 16384x2048 9216x3072 3072x8192
7168x2048 24576x1536 34816x5120"""
HELD = """7168x5120 5120x25600 51200x5120 10240x5120 3584x18944 37888x3584 4608x4608 1280x8192 8192x3584 5120x2880
8192x1024 57344x8192 2112x7168 7168x16384 7168x18432 18432x7168 4096x7168 1536x7168 32768x512 6144x1024 1024x2816
3072x3072 2048x8192 8192x2048 2560x4096 4096x2560 3072x1024 21504x3840 3840x15360 4096x3840 8192x3840 5376x21504
4096x5376 2304x9216 18432x2304 4096x2304 2304x2048 12288x4096 4096x12288 22016x4096 4096x11008 1000x2048 3200x8640
5760x2304 11008x2048 896x896 13312x5120"""
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 200, 256, 384, 512, 1024, 2048, 4096)
EVERY = 3  # each layer is timed with every third of TOKENS, starting at a different one for the next layer
OPTIONS: Mapping[str, Sequence[Options]] = {
    "weight_only_mm": tuple((("bits", bits), ("group_size", 128), ("dtype", "bfloat16")) for bits in (4, 8)),
    "scaled_mm": ((("dtype", "int8"),), (("dtype", "float8_e4m3fn"),)),
    "groupwise_mm": ((("column_scales", False),),),
    "w4a8_mm": ((("group_size", 128),),),
    "online_quant_mm": ((("bits", 8), ("group_size", 128)),),
}


def problems(operations: Sequence[str]) -> Iterator[tuple[str, Problem]]:
    """Yield "fit" or "held" and a problem, for all problems that `time` measures."""
    for operation in operations:
        for part, shapes in (("fit", FIT), ("held", HELD)):
            for i, shape in enumerate(shapes.split()):
                n, k = map(int, shape.split("x"))
                for j, m in enumerate(TOKENS):
                    if (i + j) % EVERY == 0:
                        options = OPTIONS[operation][(i + m.bit_length()) % len(OPTIONS[operation])]
                        yield part, Problem(operation, m, n, k, options)


def time_all(operations: Sequence[str], seconds: float, path: Path) -> None:
    """Time problems in random order until the seconds are over; the file is updated after each one."""
    import torch

    from epiloq.tuning.timer import CudaTimer

    timer, rows, end = CudaTimer(0), [], time.monotonic() + seconds
    record = {"gpu": torch.cuda.get_device_name(0), "memory_gb_s": _core.device_properties(0)["memory_gb_s"]}
    jobs = list(problems(operations))
    random.Random(1).shuffle(jobs)
    for part, problem in jobs:
        if time.monotonic() > end:
            break
        candidates = problem.candidates(0)
        names = worth_timing(candidates)
        us = timer(problem, names)
        row = {"operation": problem.operation, **dict(problem.options), "m": problem.m, "n": problem.n, "k": problem.k}
        rows.append({"part": part, **row, "chosen": candidates.chosen, "us": dict(zip(names, us, strict=True))})
        path.write_text(json.dumps({**record, "sweep": rows}))
    print(f"{len(rows)} of {len(jobs)} problems timed")


def judge(all_problems: Sequence[Timed], costs: Sequence[float] | None = None) -> None:
    """Print the losses of the library's choices, or of those by the cost model with these parameters."""
    for (memory, complete, part), some in itertools.groupby(
        sorted(all_problems, key=lambda p: (p.memory_gb_s, not p.complete, p.part)),
        key=lambda p: (p.memory_gb_s, p.complete, p.part),
    ):
        of = list(some)
        lost = np.array([loss(p, costs) for p in of])
        worst = of[int(lost.argmax())]
        print(
            f"{memory} GB/s, {part if complete else 'sweep'}: "
            f"{len(of)} problems of {len({p.layer for p in of})} layers, "
            f"{100 * lost.mean():.2f} % behind the fastest on average, {(lost > 0.05).sum()} by more than 5 %, "
            f"{(lost > 0.12).sum()} by more than 12 %; {100 * lost.max():.0f} % at worst, "
            f"{worst.n}x{worst.k} of {worst.bits} bits at M = {worst.m}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    timing = commands.add_parser("time")
    timing.add_argument("path", type=Path)
    timing.add_argument("--operations", default="weight_only_mm")
    timing.add_argument("--seconds", type=float, default=240)
    for name in ("judge", "fit", "add"):
        command = commands.add_parser(name)
        command.add_argument("paths", type=Path, nargs="+")
        if name == "judge":
            command.add_argument("--model", action="store_true", help="without the measured layers of measured.h")
        elif name == "fit":
            command.add_argument("--write", action="store_true")
            command.add_argument("--iterations", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.command == "time":
        return time_all(arguments.operations.split(","), arguments.seconds, arguments.path)
    everything = [problem for path in arguments.paths for problem in load(path)]
    if arguments.command == "judge":
        model = [value for _, value in _core.weight_only_mm_costs()]
        return judge(everything, model if arguments.model else None)
    if arguments.command == "add":
        return add(everything)
    held = {problem.layer for problem in everything if problem.part == "held"}
    costs = fit([problem for problem in everything if problem.layer not in held], arguments.iterations)
    print("\n".join(f"{name:24} {value:.3g}" for name, value in costs.items()))
    judge(everything, list(costs.values()))
    if arguments.write:
        write(everything, costs)


if __name__ == "__main__":
    main()
