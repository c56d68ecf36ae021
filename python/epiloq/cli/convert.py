"""``epiloq convert``: rewrite a quantised model losslessly in another format."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from epiloq.cli.common import check_installed, check_target, choices, failures, how_to_open, json_option, one_of, quiet
from epiloq.cli.output import say, summary_console, write_json
from epiloq.cli.progress import progress_stages
from epiloq.formats.table import FORMATS


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A quantised model directory, or a GGUF file.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to create. It must not exist.")],
    layout: Annotated[str, choices("The format to write", FORMATS, "--format", "FORMAT")],
    json_file: Annotated[Path | None, json_option()] = None,
) -> None:
    """Rewrite a quantised model losslessly in another format, or explain why that format cannot represent it.

    Examples:\n
      epiloq convert model-awq model-ct --format compressed-tensors\n
      epiloq convert model-gptq model-epiloq --format epiloq --json report.json\n
      epiloq convert model-q4_k_m.gguf model-epiloq --format epiloq\n

    Exit codes: 0 converted; 1 disk error; 2 invalid input, or the format cannot represent it; 130 interrupted.
    OUT is created only on success.
    """
    check_target(json_file, inputs=(source,))
    console = summary_console(json_file)
    with failures("convert"):
        quiet()
        from epiloq.formats.convert import perform, prepare
        from epiloq.formats.io.gguf_file import is_gguf

        if is_gguf(source):
            check_installed("convert", [] if find_spec("gguf") else ["gguf"], "gguf")
        conversion = prepare(source, output, one_of(layout, FORMATS, "--format"))
        with (
            progress_stages() as stage,
            stage(f"{conversion.layers.format} to {layout}: layers", conversion.steps) as advance,
        ):
            report = perform(conversion, advance)
        with failures("convert", f"; {output} is complete"):
            say(
                console,
                f"{report['output']}: {report['layers']} layers, {report['bytes_after'] / 1e6:.1f} MB of weights, "
                f"{report['bytes_before'] / 1e6:.1f} MB before",
            )
            say(console, how_to_open(output, layout))
            write_json(json_file, report)
