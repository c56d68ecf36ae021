"""Prints a Markdown table of GPTQ's output error on held-out text by the clipping of ranges.

It measures a sample of rows of each layer of a few blocks of the floating-point model, each layer by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from algorithm_rows import GRIDS
from epiloq.evaluation.text import load_tokenizer, read_texts, sample, windows
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load_float
from epiloq.quantize import InputStatistics
from epiloq.quantize.algorithms.gptq import gptq, uncompensated

LENGTH, EVALUATED, ROWS = 512, 8, 192
LAYERS = ("q_proj", "o_proj", "up_proj", "down_proj")
CLIPS: dict[str, Any] = {
    "diagonal": lambda hessian: hessian.diagonal(),
    "whole": lambda hessian: None,
    "uncompensated": uncompensated,
    "best by row": lambda hessian: "best",
}
"""The argument `moments` of `gptq`, computed from a Hessian; errors are relative to the first entry's."""


@torch.no_grad()
def statistics_of(model: Any, layers: dict[str, nn.Linear], texts: Sequence[Tensor]) -> dict[str, InputStatistics]:
    """Collect statistics of the layers' inputs over the texts."""
    found = {name: InputStatistics(layer.in_features) for name, layer in layers.items()}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: found[name].add(args[0]))
        for name, layer in layers.items()
    ]
    for window in texts:
        model(window, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def errors(weight: Tensor, seen: Tensor, unseen: Tensor, grid: Any) -> list[float]:
    """Squared output error on inputs with the Hessian `unseen`, for each clipping calibrated with `seen`."""
    rows = torch.linspace(0, len(weight) - 1, min(ROWS, len(weight))).long()
    part, found = weight[rows].float(), []
    for moments in CLIPS.values():
        lost = gptq(part, seen, grid, moments=moments(seen)).dequantize() - part
        found.append(float(((lost @ unseen) * lost).sum()))
    return found


def main(
    model: Path,
    texts: Annotated[Path, typer.Option(help="The folder that scheme_table.py text makes.")],
    blocks: Annotated[str, typer.Option(help="Numbers of blocks, separated by commas.")] = "1,4,7",
    count: Annotated[int, typer.Option(help="Calibration windows of 512 tokens.")] = 32,
) -> None:
    """Print the geometric mean over layers of each clipping's error, relative to the first one's."""
    tokenizer, floating = load_tokenizer(model), load_float(Checkpoint(model)).float().eval()
    calibration = sample(windows(tokenizer, read_texts(texts / "calibration.txt"), LENGTH), count, 0)
    evaluation = windows(tokenizer, read_texts(texts / "evaluation.txt"), LENGTH)[:EVALUATED]
    chosen = {f".layers.{block}." for block in blocks.split(",")}
    layers = {
        name: layer
        for name, layer in floating.named_modules()
        if isinstance(layer, nn.Linear) and name.endswith(LAYERS) and any(block in name for block in chosen)
    }
    seen, unseen = (statistics_of(floating, layers, text) for text in (calibration, evaluation))
    print(f"| | {' | '.join(CLIPS)} |\n|---|{'--:|' * len(CLIPS)}")
    for name, grid in GRIDS.items():
        logs = torch.zeros(len(CLIPS))
        for layer, linear in layers.items():
            found = errors(linear.weight.detach(), seen[layer].shrunk[0], unseen[layer].hessian, grid)
            logs += torch.tensor([math.log(error / found[0]) for error in found])
        print(
            f"| `{name}` | {' | '.join(f'{value:.3f}' for value in (logs / len(layers)).exp().tolist())} |", flush=True
        )


if __name__ == "__main__":
    typer.run(main)
