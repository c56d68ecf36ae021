"""``epiloq quantize``: turn a Hugging Face model directory into a smaller one."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epiloq.cli.env import check_json_target

if TYPE_CHECKING:
    from rich.console import Console

REQUIRED = ("transformers", "safetensors")
GO_ON = "; what was finished is kept, and the same command goes on from there"
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def _disk_failures() -> tuple[type[Exception], ...]:
    """What a disk that fails or is full raises: safetensors has an exception of its own for it."""
    from safetensors import SafetensorError

    return OSError, SafetensorError


@contextmanager
def failures(command: str, hint: str = "", refused: int = FAILED) -> Iterator[None]:
    """Say in a sentence what went wrong, and leave with a code that is not 0, `refused` for bad input.

    `hint` says what can be done when the machine or the user, not a wrong request, ended it.
    """
    from rich.console import Console

    def say(message: str) -> None:
        text = f"epiloq {command}: {message}"
        Console(stderr=True).print(text, style="red", highlight=False, markup=False, soft_wrap=True)

    try:
        missing = [name for name in REQUIRED if find_spec(name) is None]
        if missing:
            raise ValueError(f"needs {', '.join(missing)}: pip install 'epiloq[hf]'")
        yield
    except ValueError as error:
        say(str(error))
        raise typer.Exit(refused) from None
    except _disk_failures() as error:
        say(f"{error}{hint}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say(f"interrupted{hint}")
        raise typer.Exit(INTERRUPTED) from None


def one_of(value: str, known: dict[str, Any], option: str) -> str:
    """`value` if it is a name in a table; otherwise an error that lists them."""
    if value not in known:
        raise typer.BadParameter(f"no {value!r}; there are {', '.join(known)}", param_hint=option)
    return value


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    import torch

    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise typer.BadParameter(f"expected cpu, or cuda where torch sees one, got {device!r}", param_hint="--device")


def quiet() -> None:
    """Keep transformers off the network and its bars and warnings off our display."""
    from epiloq.demo.teacher import keep_offline

    keep_offline()
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def show(report: dict[str, Any], console: Console) -> None:
    """Print what came of it."""
    before, after = report["bytes_before"], report["bytes_after"]
    lines = [
        f"{report['output']}: {after / 1e6:.1f} MB of weights, {before / 1e6:.1f} MB before ({before / after:.2f}x)",
        f"{report['seconds']:.0f} s, at most {report['peak_memory_bytes'] / 1e9:.2f} GB of memory",
    ]
    if report["perplexity"]:
        first, last = report["perplexity"]["before"], report["perplexity"]["after"]
        lines.append(f"perplexity {first:.3f} before, {last:.3f} after ({100 * (last / first - 1):+.2f} %)")
    name, error = max(report["layer_errors"].items(), key=lambda item: item[1])
    lines.append(f"worst layer {name}: its {report['error_of']} is off by {100 * error:.1f} %")
    kept = [name for name, found in report["input_errors"].items() if found["kept_dynamic"]]
    if kept:
        lines.append(f"{len(kept)} layers keep a scale for each token: {', '.join(kept)}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face model directory.")],
    scheme: Annotated[
        str, typer.Option(metavar="S", help="w4a16-g64, w8a8-int8, fp8-block, .. (a wrong one lists them).")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The directory to make. It must not exist.")],
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="A",
            help="gptq, awq, awq+gptq, smoothquant, rtn, .. (a wrong one lists them). By default gptq, or rtn.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text, or a folder of it; not for rtn.", show_default=False),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="F",
            help="compressed-tensors, gptq, awq, deepseek-fp8 or epiloq: the first that can say the scheme.",
            show_default=False,
        ),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="int4 weights without zero points: a little faster, less exact.")
    ] = False,
    alpha: Annotated[
        float, typer.Option(min=0, max=1, help="SmoothQuant: how much of the range moves into weights.")
    ] = 0.5,
    keep_dynamic: Annotated[
        str | None,
        typer.Option(
            metavar="P|auto",
            help="w8a8-int8-static: layers with a scale for each token, by a pattern of names ('*.down_proj') or where "
            "one scale costs much.",
            show_default=False,
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Calibration windows.")] = 32,
    length: Annotated[int, typer.Option(min=8, help="Tokens in a window.")] = 512,
    seed: Annotated[int, typer.Option(help="Which windows of the text are taken.")] = 0,
    blocks: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The list of repeated layers, where it is not found.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(metavar="D", help="Where each block is worked on: cpu or cuda.")] = "cpu",
    evaluation: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Other text, to measure perplexity on before and after.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to FILE.", show_default=False)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the report, DIR/report.html, to FILE.", show_default=False),
    ] = None,
) -> None:
    """Quantise a model's weights: epiloq quantize MODEL --scheme w4a16-g64 --calibration TEXT --output DIR.

    Run the same command again to go on with a run that was interrupted.
    """
    from rich.console import Console

    check_json_target(json_file)
    check_json_target(report, "--report")
    check_device(device)
    console = Console()
    with failures("quantize", GO_ON):
        quiet()
        from epiloq.cli.demo import progress_stages
        from epiloq.demo.results import write_text
        from epiloq.formats.table import FORMATS
        from epiloq.quantize import direct
        from epiloq.quantize import report as page
        from epiloq.quantize.calibrate import ALGORITHMS
        from epiloq.quantize.job import Job, Settings, perform, prepare
        from epiloq.quantize.outputs import choose, schemes
        from epiloq.quantize.targets import TARGETS

        one_of(scheme, schemes(), "--scheme")
        layout = choose(scheme, None if layout is None else one_of(layout, FORMATS, "--format"), symmetric)
        calibrated = scheme in TARGETS
        algorithm = one_of(algorithm or ("gptq" if calibrated else "rtn"), ALGORITHMS, "--algorithm")
        settings = Settings(
            model,
            output,
            scheme,
            algorithm,
            layout,
            calibration,
            symmetric,
            windows,
            length,
            seed,
            alpha,
            keep_dynamic,
            blocks,
            device,
            evaluation,
            shlex.join(["epiloq", *sys.argv[1:]]),
        )
        with progress_stages(console) as stage:
            with stage("load and check", 1) as advance:
                job = prepare(settings) if calibrated else direct.prepare(settings)
                advance()
            found = perform(job, stage) if isinstance(job, Job) else direct.perform(job, stage)
        show(found, console)
        if json_file is not None:
            write_text(json_file, json.dumps(found, indent=2) + "\n")
        if page.missing():
            console.print(
                f"No report: it needs {', '.join(page.missing())} (pip install 'epiloq[demo]')", soft_wrap=True
            )
        else:
            console.print(f"Report: {output / page.FILE}", highlight=False, soft_wrap=True)
            if report is not None:
                write_text(report, (output / page.FILE).read_text(encoding="utf-8"))
