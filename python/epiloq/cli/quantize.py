"""``epiloq quantize``: quantise a Hugging Face model directory."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epiloq.cli.common import (
    BAD_INPUT,
    FAILED,
    check_installed,
    check_target,
    choices,
    complain,
    failures,
    json_option,
    one_of,
    optional,
    quiet,
    warn,
)
from epiloq.cli.output import display, installed_by, say, summary_console, write_json
from epiloq.cli.progress import progress_stages
from epiloq.cli.quantize_summary import show
from epiloq.files import write_text
from epiloq.formats.table import FORMATS
from epiloq.quantize.algorithms.table import ALGORITHMS, MOST_SLICES
from epiloq.quantize.budget.amount import Budget, parse_bytes
from epiloq.quantize.budget.candidates import AUTO, BASE, DEFAULT
from epiloq.schemes import SCHEMES, available
from epiloq.vocabulary import weight_only_schemes

if TYPE_CHECKING:
    from epiloq.quantize.settings import Settings


def ready() -> list[str]:
    """Schemes of an output head."""
    return [name for name in available() if not SCHEMES[name].static]


def weight_only() -> list[str]:
    """Schemes of an embedding."""
    return weight_only_schemes(SCHEMES)


_ROUNDED = "rounded to nearest"
_CHOSEN = f"{AUTO}: --bytes chooses"
GO_ON = "; finished blocks are kept, and the same command continues from there"


def run(settings: Settings) -> dict[str, Any] | None:
    """Quantise by checked settings and return the report; None on ranks other than the first."""
    from epiloq.quantize.calibration.joining import joined
    from epiloq.quantize.job import perform, prepare

    with failures("quantize", GO_ON), joined(settings.device, _end) as ranks:
        if ranks.rank:
            display.quiet = True
        try:
            with progress_stages() as stage, stage("load and check", 1) as advance:
                job = prepare(settings, ranks)
                advance()
            for warning in job.warnings if ranks.rank == 0 else ():
                warn(warning)
            with progress_stages() as stage:
                return perform(job, stage)
        except ValueError as error:
            if ranks.rank and str(error) == ranks.agreed:
                raise typer.Exit(BAD_INPUT) from None  # The first rank displays it.
            raise


def _end(reason: str) -> None:
    """End the process from another thread: the main thread waits for a rank that will not answer."""
    complain("quantize", f"{reason}{GO_ON}")
    os._exit(FAILED)


def budget_of(scheme: str | None, file_bytes: str | None, bits: float | None, candidates: str | None) -> Budget | None:
    """Return the size budget of the options, or None if they name a scheme. Raises ValueError unless they do exactly
    one of these."""
    given = {"--scheme": scheme, "--bytes": file_bytes, "--bits": bits}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ValueError(f"expected one of {', '.join(given)}, got {' and '.join(named) or 'none'}")
    if scheme is not None:
        if candidates is not None:
            raise ValueError("--candidates: expected --bytes or --bits with it, got --scheme")
        return None
    names = DEFAULT if candidates is None else tuple(name.strip() for name in candidates.split(","))
    return Budget(None if file_bytes is None else parse_bytes(file_bytes), bits, names)


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face model directory.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The directory to create. It must not exist.")],
    scheme: Annotated[
        str | None,
        choices("Scheme of the layers; or give a budget, --bytes or --bits", available(), "--scheme", "SCHEME"),
    ] = None,
    file_bytes: Annotated[
        str | None,
        optional(
            "SIZE",
            "A budget instead of a scheme: the size of the weight files, such as 90MB. A scheme is chosen for each "
            "layer to minimise the KL divergence.",
            "--bytes",
        ),
    ] = None,
    bits: Annotated[
        float | None, optional("BITS", "A budget in bits per weight of the quantised layers, including scales.")
    ] = None,
    candidates: Annotated[
        str | None,
        optional(
            "LIST",
            "Schemes from which a budget chooses, separated by commas: w<bits>a16 or w<bits>a16-g<size>. By default "
            f"{', '.join(DEFAULT)}.",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        choices(
            "How weights are rounded",
            ALGORITHMS,
            "--algorithm",
            "NAME",
            "gptq, or rtn for w8a8-block, w4a8-block-g32, fp8* and w8a16-fp8*",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        optional(
            "FILE", "Calibration text: a file or a folder. rtn needs it only for static scales, --tune or a budget."
        ),
    ] = None,
    head: Annotated[
        str | None,
        choices(
            f"Scheme of the output head, {_ROUNDED}", [*ready(), AUTO], "--head", "SCHEME", f"unchanged; {_CHOSEN}"
        ),
    ] = None,
    embedding: Annotated[
        str | None,
        choices(
            f"Scheme of the input embedding, {_ROUNDED}", [*weight_only(), AUTO], "--embedding", "SCHEME", "unchanged"
        ),
    ] = None,
    layout: Annotated[
        str | None,
        choices("The format to write", FORMATS, "--format", "FORMAT", "the first that can represent the layers"),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="int4 weights without zero points: slightly faster, less accurate.")
    ] = False,
    alpha: Annotated[
        float, typer.Option(min=0, max=1, help="Migration strength of SmoothQuant, from activations to weights.")
    ] = 0.5,
    keep_dynamic: Annotated[
        str | None,
        optional(
            "P|auto",
            "For w8a8-int8-static: layers that keep a scale per token, as a name pattern ('*.down_proj'), or auto for "
            "those where a single scale costs much accuracy.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Number of calibration windows.")] = 32,
    length: Annotated[int, typer.Option(min=8, help="Tokens per window.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed for choosing windows of the text.")] = 0,
    ignore: Annotated[
        list[str] | None,
        optional(
            "PATTERN",
            "Layers to leave in floating point: a name, a pattern like '*.down_proj', or a regular expression after "
            "'re:'. May be repeated.",
        ),
    ] = None,
    blocks: Annotated[
        str | None, optional("NAME", "Name of the list of repeated layers, if it is not found automatically.")
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate",
            help="First fold Hadamard rotations into the weights (llama, mistral, qwen2); useful with one scale per "
            "channel. A tied output head becomes a separate tensor.",
        ),
    ] = False,
    tune: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Then train scales and norms on the calibration text, one window per step, to minimise the KL "
            "divergence from the original. 64 steps help much and take twice as long as gptq. Language models with "
            "integer weights.",
        ),
    ] = 0,
    slices: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_SLICES,
            help="For *-guided: slices of each layer's output rows with Hessians of their own. Each takes memory for a "
            "K x K matrix per layer of a block, and time.",
        ),
    ] = 1,
    device: Annotated[
        str, typer.Option(metavar="D", help="Device on which blocks are quantised: cpu, cuda or auto.")
    ] = "cpu",
    evaluation: Annotated[Path | None, optional("FILE", "Different text, for perplexity before and after.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Continue with too little text, or with evaluation text that overlaps the calibration text."
        ),
    ] = False,
    json_file: Annotated[Path | None, json_option()] = None,
    report: Annotated[Path | None, optional("FILE", "Also write the report, DIR/report.html, to FILE.")] = None,
) -> None:
    """Quantise the linear layers of a model's repeated blocks, and write a new model directory.

    Everything outside the blocks is unchanged, except an output head or an embedding with a scheme of its own. If the
    model ties them, either option quantises both.

    To resume an interrupted run, run the same command again.

    Examples:\n
      epiloq quantize model --scheme w8a8-int8 --algorithm rtn --output model-w8\n
      epiloq quantize model --scheme w4a16-g64 --calibration text.txt --output model-w4\n
      epiloq quantize model --scheme w4a16-g64 --tune 64 --calibration text.txt --output model-w4t\n
      epiloq quantize model --bytes 90MB --calibration text.txt --output model-90\n
      epiloq quantize model --scheme fp8-block --output model-fp8\n
      epiloq quantize model --scheme w4a16-g64 --head w8a16 --calibration text.txt --output model-w4h8\n
      epiloq quantize model --scheme w4a8-block --algorithm gptq --calibration text.txt --output model-w4a8\n

    Exit codes: 0 quantised; 1 disk error; 2 bad usage or input; 130 interrupted.
    """
    for target, option in ((json_file, "--json"), (report, "--report")):
        check_target(target, option, inputs=(model, calibration, evaluation))
    console = summary_console(json_file)
    with failures("quantize"):
        quiet()
        from epiloq.quantize import report as page
        from epiloq.quantize.calibration.joining import device_of
        from epiloq.quantize.outputs import schemes
        from epiloq.quantize.settings import Settings
        from epiloq.quantize.targets import TARGETS

        try:
            device = device_of(device)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--device") from None
        budget = budget_of(scheme, file_bytes, bits, candidates)
        scheme = BASE if scheme is None else scheme
        one_of(scheme, schemes(), "--scheme")
        for name, value, known in (("--head", head, ready()), ("--embedding", embedding, weight_only())):
            if value is not None:
                one_of(value, dict.fromkeys([*known, AUTO]), name)
        if layout is not None:
            one_of(layout, FORMATS, "--format")
        algorithm = one_of(algorithm or TARGETS[scheme].algorithm, ALGORITHMS, "--algorithm")
        absent = page.missing()
        if report is not None:
            check_installed("quantize: the report", absent, "demo")
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
            force,
            tuple(ignore or ()),
            shlex.join(["epiloq", *sys.argv[1:]]),
            head,
            embedding,
            rotate,
            budget,
            tune,
            slices,
        )
        found = run(settings)
        if found is None:
            return
        with failures("quantize", f"; {output} is complete"):
            show(found, console)
            write_json(json_file, found)
            if absent:
                console.print(f"No report: it needs {', '.join(absent)} ({installed_by('demo')})", soft_wrap=True)
                return
            say(console, f"Report: {output / page.FILE}")
            if report is not None:
                write_text(report, (output / page.FILE).read_text(encoding="utf-8"))
