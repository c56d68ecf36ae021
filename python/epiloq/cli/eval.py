"""``epiloq eval``: perplexity, divergence from a teacher and tasks of a model directory, quantised or not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epiloq.cli.common import check_device, check_installed, check_target, failures, json_option, optional, quiet, warn
from epiloq.cli.output import results_console, write_json
from epiloq.cli.progress import progress_stages
from epiloq.evaluation.tasks import PACKAGES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.progress import Stage

ALL = 0


@dataclass(frozen=True)
class Request:
    """The measurements of a model that were requested.

    text, tokens, length
        The text for perplexity and the divergence from `teacher`, a model directory; None leaves either out.
    tasks, limit
        Tasks of lm-evaluation-harness and how many documents of each at most (`ALL`: all); see `evaluation.tasks`.
    """

    text: Path | None
    tokens: int
    length: int
    teacher: Path | None = None
    tasks: Path | None = None
    limit: int = ALL
    device: str = "cpu"
    force: bool = False


def measure(folder: Path, request: Request, stage: Stage) -> dict[str, Any]:
    """Return the figures, ready for JSON. Raises ValueError for too little text, unless forced."""
    from epiloq.demo.layers import weight_bytes
    from epiloq.evaluation.tasks import scores, task_files
    from epiloq.evaluation.text import load_tokenizer
    from epiloq.formats.io.architecture import transformers_config
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.io.model import load
    from epiloq.quantize.checks import check_generates

    if request.tasks is not None:
        task_files(request.tasks)
    checkpoint = Checkpoint(folder)
    transformers_config(checkpoint)  # transformers reads it for the tokenizer too, whose error would name that
    parts = _windows(folder, checkpoint, request)
    teacher = None if request.teacher is None else _teacher(folder, request.teacher, parts)
    model, quantization = load(checkpoint)
    check_generates(model, folder)
    model.to(request.device)
    start = time.perf_counter()
    found: dict[str, Any] = {"model": str(folder), "device": request.device}
    if parts:
        found |= _on_text(model, teacher, parts, request, stage)
    if request.tasks is not None:
        with stage("tasks", 1) as advance:
            found["tasks"] = scores(model, load_tokenizer(folder), request.tasks, limit=request.limit or None)
            advance()
    return found | {
        "quantization": (checkpoint.quantization or {}).get("quant_method"),
        "bits": quantization.grid.bits if quantization else None,
        "file_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "memory_bytes": weight_bytes(model),
        "seconds": time.perf_counter() - start,
    }


def _windows(folder: Path, checkpoint: Checkpoint, request: Request) -> list[Tensor]:
    """Return the windows of the text, if there is one. Raises ValueError for too little, unless forced."""
    from epiloq.evaluation.text import first_tokens, load_tokenizer, read_texts, windows
    from epiloq.quantize.texts import check_positions, too_little_to_evaluate

    if request.text is None:
        return []
    parts = windows(load_tokenizer(folder), read_texts(request.text), request.length)
    if request.tokens != ALL:
        parts = first_tokens(parts, max(request.tokens, 2))
    check_positions(checkpoint, parts)
    for warning in too_little_to_evaluate(parts, request.force):
        warn(warning)
    return parts


def _teacher(folder: Path, teacher: Path, parts: list[Tensor]) -> nn.Module:
    """Load the model to compare with. Raises ValueError if its tokenizer differs, or if it is no language model."""
    import torch

    from epiloq.evaluation.text import load_tokenizer
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.io.model import load
    from epiloq.quantize.checks import check_generates
    from epiloq.quantize.texts import check_positions

    checkpoint = Checkpoint(teacher)
    text = load_tokenizer(folder).decode(parts[0][0])
    ours, theirs = (load_tokenizer(f)(text, return_tensors="pt")["input_ids"] for f in (folder, teacher))
    if not torch.equal(ours, theirs):
        raise ValueError(f"--kl: {teacher}: expected a model with the tokens of {folder}, got other ones")
    check_positions(checkpoint, parts)
    found, _ = load(checkpoint)
    check_generates(found, teacher)
    return found


def _on_text(
    model: nn.Module, teacher: nn.Module | None, parts: list[Tensor], request: Request, stage: Stage
) -> dict[str, Any]:
    from epiloq.evaluation.divergence import divergence
    from epiloq.evaluation.perplexity import perplexity
    from epiloq.quantize.texts import tokens_in, too_little_to_evaluate

    with stage("windows", len(parts)) as advance:
        found: dict[str, Any] = {
            "text": str(request.text),
            "perplexity": perplexity(model, parts, advance),
            "tokens": tokens_in(parts),
            "warnings": too_little_to_evaluate(parts, request.force),
            "window": request.length,
        }
    if teacher is not None:
        teacher.to(request.device)
        with stage("divergence", len(parts)) as advance:
            found |= {"teacher": str(request.teacher), "kl": divergence(teacher, model, parts, advance)}
    return found


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A model directory, quantised or not.")],
    text: Annotated[Path | None, optional("FILE", "Text file, or a folder of them.")] = None,
    tokens: Annotated[int, typer.Option(min=ALL, help="Maximum number of tokens to evaluate; 0 for all.")] = 16384,
    length: Annotated[int, typer.Option(min=2, help="Tokens per window; windows are independent.")] = 512,
    kl: Annotated[Path | None, optional("DIR", "Also measure the KL divergence from this model's predictions.")] = None,
    tasks: Annotated[
        Path | None,
        optional(
            "FILE", "A task of lm-evaluation-harness (YAML), or a folder of them. Python code named there is executed."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=ALL, help="Maximum number of documents per task; 0 for all.")] = ALL,
    device: Annotated[str, typer.Option(metavar="D", help="Device: cpu or cuda.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Evaluate although the text is too short.")] = False,
    json_file: Annotated[Path | None, json_option()] = None,
) -> None:
    """Measure a model's perplexity on a text, its divergence from another model, or its results in tasks.

    Examples:\n
      epiloq eval model-w4 --text other.txt\n
      epiloq eval model-w4 --text other.txt --kl model --json figures.json\n
      epiloq eval model-w4 --tasks tasks/ --limit 200\n

    Exit codes: 0 measured, whatever the result; 2 bad usage or input; 130 interrupted.
    """
    check_target(json_file, inputs=(folder, text, kl, tasks))
    check_device(device)
    console = results_console(json_file)
    with failures("eval"):
        if text is None and tasks is None:
            raise ValueError("expected --text, --tasks or both, got neither")
        if text is None and kl is not None:
            raise ValueError("--kl: expected --text FILE as well, on which predictions are compared")
        quiet()
        if tasks is not None:
            check_installed("eval --tasks", [name for name in PACKAGES if find_spec(name) is None], "tasks")
        with progress_stages() as stage:
            found = measure(folder, Request(text, tokens, length, kl, tasks, limit, device, force), stage)
        for line in lines_of(found):
            console.print(line, highlight=False)
        write_json(json_file, found)


def lines_of(found: dict[str, Any]) -> list[str]:
    """The figures, a line each."""
    size = f"{found['file_bytes'] / 1e6:.1f} MB of weights"
    lines = [size]
    if "perplexity" in found:
        lines = [f"perplexity {found['perplexity']:.3f} over {found['tokens']} tokens; {size}"]
    if "kl" in found:
        lines.append(f"KL divergence from {found['teacher']}: {found['kl']:.5f} nats per token")
    for task, metrics in found.get("tasks", {}).items():
        for name, value in metrics.items():
            metric, _, how = name.partition(",")
            if not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{how}")
                lines.append(f"{task}: {metric} {value:.4f}" + (f" (standard error {error:.4f})" if error else ""))
    return lines
