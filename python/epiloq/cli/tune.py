"""``epiloq tune``: time the kernels for a model on this GPU, and keep the fastest."""

from __future__ import annotations

import re
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epiloq.cli.common import BAD_INPUT, check_target, complain, failures, json_option, quiet
from epiloq.cli.output import results_console, say, write_json
from epiloq.cli.progress import progress_stages

if TYPE_CHECKING:
    from rich.console import Console

    from epiloq.tuning.tuner import Tuned

SHAPE = re.compile(r"(\d+)x(\d+)")
SHOWN = 20


def read_tokens(text: str) -> tuple[int, ...]:
    """``1,16,256`` as numbers."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise typer.BadParameter(f"expected numbers with commas between, got {text!r}", param_hint="--tokens")
    return tuple(map(int, text.split(",")))


def read_what(text: str) -> Any:
    """A shape NxK, or a model directory, which is loaded."""
    if found := SHAPE.fullmatch(text):
        return int(found[1]), int(found[2])
    from epiloq.formats.io.checkpoint import Checkpoint
    from epiloq.formats.io.model import load

    return load(Checkpoint(Path(text)))[0]


def tune(
    what: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|NxK…", help="Model directories, or shapes as out_features x in_features."),
    ],
    tokens: Annotated[str, typer.Option(metavar="M,…", help="Numbers of tokens.")] = "1,16,256,2048",
    scheme: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Scheme for shapes and float models; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the choices; by default in the user's cache.")
    ] = None,
    device: Annotated[int | None, typer.Option(metavar="I", min=0, help="Index of the CUDA device.")] = None,
    json_file: Annotated[Path | None, json_option()] = None,
) -> None:
    """Time all kernels for a model's layers on this GPU; the fastest are used from then on.

    Examples:\n
      epiloq tune model-w4\n
      epiloq tune 4096x4096 28672x4096 --scheme w8a8-int8 --tokens 1,8,64,1000\n

    Exit codes: 2 for invalid input, or without a CUDA device.
    """
    check_target(json_file, inputs=what)
    counts = read_tokens(tokens)
    with failures("tune"):
        quiet()
        from epiloq.tuning.problems import DEFAULT_SCHEMES
        from epiloq.tuning.tuner import check_device
        from epiloq.tuning.tuner import tune as run

        try:
            check_device()
            with progress_stages() as stage:
                given = [read_what(each) for each in what]
                found = run(given, counts, scheme or DEFAULT_SCHEMES, path=file, device=device, stage=stage)
        except RuntimeError as error:
            complain("tune", str(error).removeprefix("epiloq.tune: "))
            raise typer.Exit(BAD_INPUT) from None
        show(found, results_console(json_file))
        write_json(json_file, facts(found))


def facts(found: Tuned) -> dict[str, Any]:
    """Return the measurements, ready for JSON."""
    rows = [{**vars(each), "problem": str(each.problem), "better": each.better} for each in found.measured]
    return {"card": str(found.card), "file": found.path and str(found.path), "measured": rows}


def show(found: Tuned, console: Console) -> None:
    """Print the largest gains, and the total."""
    better = sorted((each for each in found.measured if each.better), key=lambda each: each.us / each.default_us)
    lines = [f"{found.card}: {len(found.measured)} products, {len(better)} have a faster kernel than the default"]
    lines += [f"  {each.problem}: {each.default_us:.1f} -> {each.us:.1f} us, {each.kernel}" for each in better[:SHOWN]]
    if better:
        gain = exp(sum(log(each.default_us / each.us) for each in better) / len(better))
        more = f"; {len(better) - SHOWN} more" if len(better) > SHOWN else ""
        lines.append(f"  {gain:.2f} times as fast on average{more}")
    lines.append(f"kept in {found.path}" if found.path else "kept for this process only (EPILOQ_TUNING is off)")
    say(console, "\n".join(lines))
