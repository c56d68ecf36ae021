"""``epiloq compare``: two directories of one model, by their weights and their predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epiloq.cli.common import check_device, check_target, failures, json_option, optional, quiet, warn
from epiloq.cli.inspect import shortened
from epiloq.cli.output import plain_table, results_console, say, write_json
from epiloq.cli.progress import progress_stages

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.progress import Stage

WORST = 5


def compare(
    a: Annotated[Path, typer.Argument(metavar="DIR_A", help="A model directory, quantised or not.")],
    b: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another directory of the same model.")],
    text: Annotated[
        Path | None, optional("FILE", "Text file, or a folder of them, on which to compare predictions.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Maximum number of tokens to evaluate.")] = 4096,
    length: Annotated[int, typer.Option(min=2, help="Tokens per window; windows are independent.")] = 512,
    device: Annotated[str, typer.Option(metavar="D", help="Device on which the models run: cpu or cuda.")] = "cpu",
    json_file: Annotated[Path | None, json_option()] = None,
) -> None:
    """Compare two directories of the same model: weights by layer, sizes and, with --text, predictions.

    Dequantised weights are compared, one layer at a time. Algorithms that fold scales (awq, smoothquant) change weights
    and norms together, so only predictions can be compared with the original.

    Examples:\n
      epiloq compare model model-w4\n
      epiloq compare model model-w4 --text other.txt --json figures.json\n

    Exit codes: 0 compared, whatever the result; 2 a directory is invalid, or they contain different models.
    """
    check_target(json_file, inputs=(a, b, text))
    check_device(device)
    console = results_console(json_file)
    with failures("compare"):
        quiet()
        from epiloq.formats.io.checkpoint import Checkpoint

        with progress_stages() as stage:
            # Everything is checked before the work starts.
            checkpoints = [Checkpoint(folder) for folder in (a, b)]
            parts = None if text is None else _windows(checkpoints, text, tokens, length)
            found = _weights(a, b, checkpoints, stage)
            if parts is not None:
                found["answers"] = _answers(checkpoints, parts, device, stage) | {"text": str(text), "window": length}
        show(found, console)
        write_json(json_file, found)


def _weights(a: Path, b: Path, checkpoints: Sequence[Checkpoint], stage: Stage) -> dict[str, Any]:
    from epiloq.evaluation.comparison import other_tensors, weight_errors
    from epiloq.formats.layers import Layers

    sides = Layers(checkpoints[0]), Layers(checkpoints[1])
    errors = []
    with stage("layers", len(sides[0].linears)) as advance:
        for error in weight_errors(*sides):
            errors.append(error)
            advance()
    sizes = [sum(entry.nbytes for entry in side.checkpoint.entries.values()) for side in sides]
    return {
        "a": {"model": str(a), "format": sides[0].format, "bytes": sizes[0]},
        "b": {"model": str(b), "format": sides[1].format, "bytes": sizes[1]},
        "layers": [asdict(error) for error in errors],
        "equal_layers": sum(error.equal for error in errors),
        "other_tensors_that_differ": other_tensors(*sides),
    }


def _windows(checkpoints: Sequence[Checkpoint], text: Path, tokens: int, length: int) -> list[Tensor]:
    """The windows of the text on which predictions are compared. Raises ValueError for text that does not fit."""
    from epiloq.evaluation.text import first_tokens, load_tokenizer, read_texts, windows
    from epiloq.quantize.texts import FEW, check_positions, tokens_in

    parts = first_tokens(windows(load_tokenizer(checkpoints[0].folder), read_texts(text), length), tokens)
    if tokens_in(parts) < FEW:
        warn(f"answers to only {tokens_in(parts)} tokens; the comparison is inaccurate")
    for checkpoint in checkpoints:
        check_positions(checkpoint, parts)
    return parts


def _answers(checkpoints: Sequence[Checkpoint], parts: list[Tensor], device: str, stage: Stage) -> dict[str, Any]:
    from epiloq.evaluation.comparison import answers
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.io.model import load
    from epiloq.quantize.checks import check_generates

    models = []
    for folder in (checkpoint.folder for checkpoint in checkpoints):
        model = load(Checkpoint(folder))[0].to(device)  # opened again, because comparing layers renames tensors
        check_generates(model, folder)
        models.append(model)
    with stage("windows", len(parts)) as advance:
        return answers(models[0], models[1], parts, advance)


def show(found: dict[str, Any], console: Console) -> None:
    """Print the worst layers, the means by kind of layer, the sizes and the answers."""
    a, b, layers = found["a"], found["b"], found["layers"]
    for name, side in (("A", a), ("B", b)):
        say(console, f"{name}: {side['model']}, {side['format'] or 'floating point'}, {side['bytes'] / 1e6:.1f} MB")
    say(console, f"B takes {b['bytes'] / a['bytes']:.3f} of A's bytes")
    if found["equal_layers"] == len(layers):
        say(console, f"All {len(layers)} linear layers have the same weights, bit for bit")
    else:
        console.print(_table(layers))
        say(console, f"{found['equal_layers']} of {len(layers)} linear layers have the same weights, bit for bit")
    differing = found["other_tensors_that_differ"]
    say(console, f"Other tensors that differ: {shortened(differing) or 'none'}")
    if "answers" in found:
        both = found["answers"]
        say(
            console,
            f"Perplexity {both['perplexity_a']:.3f} and {both['perplexity_b']:.3f} "
            f"({100 * (both['perplexity_b'] / both['perplexity_a'] - 1):+.2f} %) over {both['tokens']} tokens; "
            f"KL(A || B) {both['kl_mean']:.5f} nats per token, at most {both['kl_largest']:.3f}; "
            f"same top-1 token {100 * both['top1_agreement']:.2f} %",
        )


def _table(layers: list[dict[str, Any]]) -> Table:
    """A row for each kind of layer with its root mean square, and for the worst layers."""
    table = plain_table(("layers",), ("count", "relative error", "largest difference"))
    kinds: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        kinds.setdefault(layer["name"].rpartition(".")[2], []).append(layer)
    for kind, found in sorted(kinds.items()):
        relative = math.sqrt(sum(layer["relative"] ** 2 for layer in found) / len(found))
        largest = max(layer["largest"] for layer in found)
        table.add_row(kind, str(len(found)), f"{100 * relative:.3f} %", f"{largest:.3g}")
    table.add_section()
    for layer in sorted(layers, key=lambda layer: -layer["relative"])[:WORST]:
        table.add_row(layer["name"], "", f"{100 * layer['relative']:.3f} %", f"{layer['largest']:.3g}")
    return table
