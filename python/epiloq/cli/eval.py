"""``epiloq eval``: the perplexity of a model directory, quantised or not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epiloq.cli.common import check_device, check_target, failures, json_option, quiet, warn
from epiloq.cli.output import results_console, write_json
from epiloq.cli.progress import progress_stages

if TYPE_CHECKING:
    from epiloq.progress import Stage

ALL = 0


def measure(
    folder: Path, text: Path, tokens: int, length: int, device: str, force: bool, stage: Stage
) -> dict[str, Any]:
    """The figures as a JSON-ready dictionary. Raises ValueError for too little text, unless forced."""
    from epiloq.demo.layers import weight_bytes
    from epiloq.evaluation.perplexity import perplexity
    from epiloq.evaluation.text import first_tokens, load_tokenizer, read_texts, windows
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.io.model import load
    from epiloq.quantize.checks import check_generates
    from epiloq.quantize.texts import check_positions, tokens_in, too_little_to_evaluate

    checkpoint = Checkpoint(folder)
    parts = windows(load_tokenizer(folder), read_texts(text), length)
    if tokens != ALL:
        parts = first_tokens(parts, max(tokens, 2))
    check_positions(checkpoint, parts)
    warnings = too_little_to_evaluate(parts, force)
    for warning in warnings:
        warn(warning)
    model, quantization = load(checkpoint)
    check_generates(model, folder)
    model.to(device)
    start = time.perf_counter()
    with stage("windows", len(parts)) as advance:
        found = perplexity(model, parts, advance)
    return {
        "model": str(folder),
        "text": str(text),
        "perplexity": found,
        "tokens": tokens_in(parts),
        "warnings": warnings,
        "window": length,
        "quantization": (checkpoint.quantization or {}).get("quant_method"),
        "bits": quantization.grid.bits if quantization else None,
        "file_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "memory_bytes": weight_bytes(model),
        "device": device,
        "seconds": time.perf_counter() - start,
    }


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory, quantised or not.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Text file, or a folder of them.")],
    tokens: Annotated[int, typer.Option(min=ALL, help="Tokens to evaluate at most; 0 for all.")] = 16384,
    length: Annotated[int, typer.Option(min=2, help="Tokens per window; windows are independent.")] = 512,
    device: Annotated[str, typer.Option(metavar="D", help="cpu or cuda.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Go on although the text is too short to tell much.")] = False,
    json_file: Annotated[Path | None, json_option()] = None,
) -> None:
    """Measure a model's perplexity on a text, quantised or not.

    Examples:\n
      epiloq eval model-w4 --text other.txt\n
      epiloq eval model-w4 --text other.txt --tokens 0 --json figures.json\n
    """
    check_target(json_file)
    check_device(device)
    console = results_console(json_file)
    with failures("eval"):
        quiet()
        with progress_stages() as stage:
            found = measure(folder, text, tokens, length, device, force, stage)
        console.print(
            f"perplexity {found['perplexity']:.3f} over {found['tokens']} tokens; "
            f"{found['file_bytes'] / 1e6:.1f} MB of weights",
            highlight=False,
        )
        write_json(json_file, found)
