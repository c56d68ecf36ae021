"""``epiloq demo --vision``: quantise real convolutional networks and show what that costs and gains."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from epiloq.cli.output import installed_by, plain_table, say, write_json
from epiloq.cli.progress import progress_stages
from epiloq.environment import collect
from epiloq.files import write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from epiloq.demo.vision.results import Results

REQUIRED = {"onnx": "onnx", "PIL": "pillow", "matplotlib": "matplotlib", "jinja2": "jinja2", "rich": "rich"}


def check_packages() -> None:
    """Raise DemoError with the installation command when a package or the networks are missing."""
    from epiloq.demo import DemoError

    missing = [package for module, package in REQUIRED.items() if find_spec(module) is None]
    if missing:
        raise DemoError(f"the demonstration needs {', '.join(missing)}: {installed_by('vision')}")
    from epiloq.demo.vision import networks

    networks.find(networks.RECOGNISER)


def results_table(results: Results) -> Table:
    """The figures as a rich table, a row for each form and device."""
    # Fits 80 columns.
    table = plain_table(("networks", "device"), ("IoU", "as float", "right", "MB", "detect", "read"))
    table.columns[0].style = "bold"
    for run in results.runs:
        table.add_row(
            run.name,
            run.place,
            f"{run.map_iou:.3f}",
            f"{100 * run.characters_equal:.1f} %",
            f"{100 * run.characters_right:.1f} %",
            f"{run.weight_bytes / 1e6:.1f}",
            *(f"{1e3 * cost.seconds_per_image:.1f} ({cost.speedup:.1f}x)" for cost in (run.detector, run.recogniser)),
        )
    return table


def perform(output: Path, json_file: Path | None, devices: Sequence[str], console: Console) -> None:
    """Measure, print and write. Raises DemoError when something is missing."""
    check_packages()
    from epiloq.demo.vision import material, measure, report

    output.mkdir(parents=True, exist_ok=True)
    page = output / "vision.html"
    with progress_stages() as stage:
        with stage("draw words and pages", 1) as advance:
            drawn = material.draw()
            advance()
        found = measure.measure(devices, drawn, collect(), stage)
        with stage("write the report", 1) as advance:
            write_text(page, report.render(found))
            write_json(json_file, found.to_json())
            advance()
    console.print(results_table(found))
    console.print(
        "IoU: of the detector's map with the float32 network's. As float: characters of drawn words read as by the "
        "float32 network; right: read correctly. Detect, read: milliseconds for a page and for a word, alternating "
        "with the float networks.",
        highlight=False,
    )
    say(console, f"Report: {page} ({found.seconds:.0f} s)")
