"""Prints a Markdown table of a model's KL divergence by GPTQ's ranges, for several draws of the calibration windows.

It shows which differences between algorithms are larger than those between draws. Packages that are not installed are
left out; see algorithm_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from torch import Tensor

from algorithm_rows import GRIDS, LENGTH, PEERS, Rounding
from clipping_rows import CLIPS
from epiloq.evaluation.divergence import divergence
from epiloq.evaluation.text import first_tokens, load_tokenizer, read_texts, sample, windows
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load_float
from epiloq.quantize.algorithms import one_weight
from epiloq.quantize.algorithms.gptq import gptq
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.weights.grid import Grid, QuantizedWeight

WINDOW, EVALUATED = 512, 6 * 512


def clipped(choose: Callable[[Tensor], Any]) -> Rounding:
    """GPTQ with ranges clipped by what is computed from the Hessian."""

    def rounded(weight: Tensor, hessian: Tensor, grid: Grid, moments: Tensor | None = None) -> QuantizedWeight:
        return gptq(weight, hessian, grid, moments=choose(hessian))

    return rounded


def main(
    model: Path,
    texts: Annotated[Path, typer.Option(help="The folder that scheme_table.py text makes.")],
    grid: Annotated[str, typer.Option(help=f"One of {', '.join(GRIDS)}.")] = "w4a16-g64",
    draws: Annotated[int, typer.Option(help="Draws of the calibration windows.", min=1)] = 2,
    count: Annotated[int, typer.Option(help=f"Calibration windows of {LENGTH} tokens.")] = 32,
) -> None:
    """Measure and print the divergence for each choice of ranges and each draw."""
    tokenizer, teacher = load_tokenizer(model), load_float(Checkpoint(model)).float()
    calibration = windows(tokenizer, read_texts(texts / "calibration.txt"), WINDOW)
    evaluation = first_tokens(windows(tokenizer, read_texts(texts / "evaluation.txt"), WINDOW), EVALUATED)
    compared = {name: clipped(choose) for name, choose in CLIPS.items()}
    compared |= {name: found for name, make in PEERS.items() if (found := make()) is not None}
    print(f"| ranges | {' | '.join(f'draw {draw}' for draw in range(draws))} |\n|---|{'--:|' * draws}")
    for name, rounding in compared.items():
        cells = []
        for draw in range(draws):
            student = load_float(Checkpoint(model)).float()
            cut = [window[:, :LENGTH] for window in sample(calibration, count, draw)]
            with patch.object(one_weight, "gptq", rounding):
                for _ in calibrate(student, cut, GRIDS[grid], ALGORITHMS["gptq"]):
                    pass
            cells.append(f"{1e6 * divergence(teacher, student, evaluation):.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
