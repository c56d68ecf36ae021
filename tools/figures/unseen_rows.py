"""Prints a Markdown table of the output error of a model's first blocks, on the calibration windows and on others.

Each algorithm rounds the weights to `w4a16-g64`. The error is the root mean square over tokens of the relative error of
each token's hidden state, as `autoround` measures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from algorithm_rows import GRIDS, LENGTH
from epiloq.evaluation.text import load_tokenizer, read_texts, sample, windows
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load_float
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate

HELD_OUT = 4
"""Windows of the calibration text that are not used for calibration."""
COMPARED = ("gptq", "gptq+ranges", "gptq+refine")


@torch.no_grad()
def hidden(model: Any, texts: Sequence[Tensor], blocks: int) -> list[Tensor]:
    """The hidden states after the first blocks."""
    return [model(window, output_hidden_states=True, use_cache=False).hidden_states[blocks][0] for window in texts]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The root mean square over tokens of relative errors."""
    lost = torch.cat([(x - y).square().sum(-1) / y.square().sum(-1) for x, y in zip(found, exact, strict=True)])
    return float(lost.mean().sqrt())


def main(
    model: Path,
    texts: Annotated[Path, typer.Option(help="The folder that scheme_table.py text makes.")],
    blocks: Annotated[int, typer.Option(help="How many blocks are quantised; fewer than the model has.")] = 3,
    count: Annotated[int, typer.Option(help="Calibration windows of 256 tokens.")] = 8,
) -> None:
    """Measure and print each algorithm's errors."""
    text = windows(load_tokenizer(model), read_texts(texts / "calibration.txt"), 512)
    cut = [window[:, :LENGTH] for window in sample(text, count + HELD_OUT, 0)]
    exact = hidden(load_float(Checkpoint(model)).float().eval(), cut, blocks)
    print("| | calibration windows | others |\n|---|--:|--:|")
    for name in COMPARED:
        student = load_float(Checkpoint(model)).float().eval()
        for _ in islice(calibrate(student, cut[:count], GRIDS["w4a16-g64"], ALGORITHMS[name]), blocks):
            pass
        found = hidden(student, cut, blocks)
        parts = (slice(None, count), slice(count, None))
        print(f"| {name} | {' | '.join(f'{error(found[part], exact[part]):.4f}' for part in parts)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
