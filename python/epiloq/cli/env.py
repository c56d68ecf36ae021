"""``epiloq env``: what this installation contains and what this machine offers. A bug report begins with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from epiloq.cli.common import check_target, json_option
from epiloq.cli.output import results_console, write_json
from epiloq.environment import collect, rows


def env(json_file: Annotated[Path | None, json_option()] = None) -> None:
    """Show versions, GPUs, the kernels in this build and the CPU's instruction sets.

    Examples:\n
      epiloq env\n
      epiloq env --json -\n

    Include the output in bug reports.
    """
    from rich.table import Table

    check_target(json_file)
    facts = collect()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows(facts):
        table.add_row(name, value)
    results_console(json_file).print(table)
    write_json(json_file, facts)
