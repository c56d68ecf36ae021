"""``epiloq demo``: quantise a real language model (``--vision``: text recognition networks) and show the effect."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from epiloq.cli.common import FAILED, check_target, complain, json_option, optional
from epiloq.cli.output import installed_by, plain_table, results_console, say, write_json
from epiloq.cli.progress import progress_stages
from epiloq.environment import collect
from epiloq.files import nearest_parent, why_in_no_folder, why_not_made, write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from epiloq.demo.measure import Settings
    from epiloq.demo.results import Measured, Results, Run

REQUIRED = ("transformers", "safetensors", "matplotlib", "jinja2", "rich")
REQUIRED_TO_CONVERT = ("gguf", "accelerate")
FEWEST_TOKENS, MOST_TOKENS = 64, 65536


def choose_schemes(requested: str | None) -> tuple[str, ...]:
    """The schemes named in a comma-separated list; all of them when none is given."""
    from epiloq import schemes

    known = tuple(schemes.available())
    if requested is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in requested.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"no scheme named {', '.join(map(repr, unknown))}; there are {', '.join(known)}", param_hint="--schemes"
        )
    return names


def choose_devices(requested: str) -> tuple[str, ...]:
    """The devices to measure on: ``auto`` is the CPU and, if there is one, the GPU."""
    import torch

    if requested == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device", param_hint="--device")
    if requested != "auto":
        return (requested,)
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def check_folders(output: Path, teacher: Path | None) -> None:
    """Refuse an output that is a file and a teacher that is no model."""
    from epiloq.demo.teacher import is_model

    if output.exists() and not output.is_dir():
        raise typer.BadParameter(f"{output} is not a folder", param_hint="--output")
    reason = why_in_no_folder(output) or why_not_made(output if output.exists() else nearest_parent(output))
    if reason is not None:
        raise typer.BadParameter(f"{output}: {reason}", param_hint="--output")
    if teacher is not None and not is_model(teacher):
        raise typer.BadParameter(
            f"{teacher} contains no model: expected config.json, *.safetensors and a tokenizer", param_hint="--teacher"
        )


def check_packages(converts: bool) -> None:
    """Raise DemoError with the installation command when a package is missing."""
    from epiloq.demo import DemoError

    missing = [name for name in REQUIRED + REQUIRED_TO_CONVERT * converts if find_spec(name) is None]
    if missing:
        raise DemoError(f"the demonstration needs {', '.join(missing)}: {installed_by('demo')}")


def results_table(results: Results) -> Table:
    """The figures as a rich table, a row for each model and device."""
    # Fits 80 columns.
    table = plain_table(("model", "device"), ("ppl", "change", "MB", "prefill", "decode", "err %"))
    table.columns[0].style = "bold"

    def add(measured: Measured, run: Run) -> None:
        worst = measured.worst_layer
        table.add_row(
            measured.name,
            run.place,
            f"{run.perplexity:.2f}",
            f"{results.change_percent(run):+.2f}",
            f"{run.weight_bytes / 1e6:.0f}",
            f"{run.speed.prefill_tokens_per_s:.0f} ({run.speed.prefill_speedup:.1f}x)",
            f"{run.speed.decode_tokens_per_s:.1f} ({run.speed.decode_speedup:.1f}x)",
            f"{100 * worst[1]:.1f}" if worst else "",
        )

    for measured in (results.teacher, *results.schemes):
        for run in measured.runs:
            add(measured, run)
    return table


def show(results: Results, console: Console) -> None:
    """Print the table, the worst layers by name, and which text was used for what."""
    console.print(results_table(results))
    console.print(
        "ppl: perplexity, change in percent of the teacher's. Prefill, decode: tokens per second for one sequence, "
        "alternating with the fp32 teacher on the same device (ratio in brackets). "
        "err: the worst layer's output error.",
        highlight=False,
    )
    for scheme in results.schemes:
        if scheme.worst_layer:
            name, error = scheme.worst_layer
            say(console, f"{scheme.name}: worst layer {name}, relative error {100 * error:.1f} %")
    source, evaluation, calibration = (results.text[key] for key in ("source", "evaluation", "calibration"))
    say(
        console,
        f"Text: {source}; evaluated on {span(evaluation)} in windows of {evaluation['window']}, "
        f"calibrated (static schemes) on {span(calibration)}.",
    )


def span(part: dict[str, Any]) -> str:
    """Description of a part of the text."""
    first = part["first_token"]
    return f"tokens {first} to {first + part['tokens'] - 1}"


def perform(settings: Settings, output: Path, json_file: Path | None, converts: bool, console: Console) -> None:
    """Quantise if necessary, measure, print and write. Arguments have been checked."""
    from epiloq.demo import report, teacher
    from epiloq.demo.measure import measure

    output.mkdir(parents=True, exist_ok=True)
    if converts:
        # Outside our progress display: transformers shows a bar of its own that cannot be turned off.
        say(console, f"Converting the teacher to {settings.teacher}, once")
        teacher.prepare(settings.teacher)
    with progress_stages() as stage:
        found = measure(settings, collect(), stage)
        with stage("write the report", 1) as advance:
            write_text(output / "report.html", report.render(found))
            write_json(json_file, found.to_json())
            advance()
    show(found, console)
    say(console, f"Report: {output / 'report.html'} ({found.seconds:.0f} s)")


def demo(
    vision: Annotated[
        bool, typer.Option("--vision", help="Use text recognition networks instead of a language model.")
    ] = False,
    json_file: Annotated[Path | None, json_option()] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for report.html (vision.html) and the converted teacher.")
    ] = Path("build/demo"),
    teacher: Annotated[
        Path | None, optional("DIR", "A Hugging Face causal language model to use instead of SmolLM2-135M-Instruct.")
    ] = None,
    schemes: Annotated[
        str | None, optional("A,B,..", "Schemes to measure, separated by commas; all by default.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=FEWEST_TOKENS, max=MOST_TOKENS, help="Number of tokens of text to evaluate on.")
    ] = 3072,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the CPU and, if there is one, the GPU.")
    ] = "auto",
) -> None:
    """Quantise a real language model: perplexity, size, speed and layer errors, compared with the original."""
    from epiloq.demo import DemoError
    from epiloq.demo.teacher import NAME, find_gguf, is_model, keep_offline

    console = results_console(json_file)
    chosen, devices = choose_schemes(schemes), choose_devices(device)
    check_target(json_file, inputs=(teacher,))
    check_folders(output, teacher)
    if vision and (teacher or schemes):
        raise typer.BadParameter("expected without --teacher and --schemes", param_hint="--vision")
    folder = teacher or output / "teacher"
    converts = not is_model(folder)
    keep_offline()
    try:
        if vision:
            from epiloq.cli import demo_vision

            demo_vision.perform(output, json_file, devices, console)
            return
        check_packages(converts)
        if converts:
            find_gguf()
        from epiloq.demo.measure import Settings

        name = NAME if teacher is None else teacher.resolve().name
        perform(Settings(name, folder, chosen, devices, tokens), output, json_file, converts, console)
    except DemoError as error:
        complain("demo", str(error))
        raise typer.Exit(FAILED) from None
