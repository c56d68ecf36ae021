"""Prints results and JSON. Importing it needs nothing but the standard library."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epiloq.files import write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STDOUT = Path("-")
"""The file name that means standard output."""


@dataclass
class Display:
    """Output options, shared by all commands."""

    quiet: bool = False


display = Display()


def unknown(value: str, known: Iterable[str]) -> str:
    """The middle of an error message for a name that is not in a table: the nearest one, and all of them.

    Names that continue the given one are nearer than those that look alike: w4a16-g128 than w8a16, for w4a16.
    """
    names = list(known)
    return f"{value!r}{suggestion(value, names)}; there are {', '.join(names)}"


def suggestion(value: str, known: Iterable[str]) -> str:
    """The nearest name in a table as a question in parentheses, or nothing."""
    names = list(known)
    near = [name for name in names if value and name.startswith(value)] or get_close_matches(value, names, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def installed_by(extra: str) -> str:
    """How to install what an extra brings: by no name, because epiloq is on no package index."""
    return f"pip install '.[{extra}]' in epiloq's sources"


def results_console(json_file: Path | None = None) -> Console:
    """Return the console for results: standard output, or standard error while ``--json -`` needs the former."""
    from rich.console import Console

    return Console(stderr=json_file == STDOUT, markup=False)


def plain_table(left: Iterable[str] = (), right: Iterable[str] = ()) -> Table:
    """A table without a frame, with columns of text, then of right-aligned figures, none of which is wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def say(console: Console, text: str) -> None:
    """Print text as it is: without markup, colours or new line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def summary_console(json_file: Path | None = None) -> Console:
    """Return the console for the summary of a command that writes a directory; ``--quiet`` suppresses it."""
    from rich.console import Console

    return Console(stderr=json_file == STDOUT, quiet=display.quiet, markup=False)


def write_json(file: Path | None, found: dict[str, Any]) -> None:
    """Write the figures for ``--json``, if given: to a file, or to standard output for ``-``.

    NaN and infinities, which JSON cannot represent, become null.
    """
    if file is None:
        return
    text = json.dumps(_representable(found), indent=2, allow_nan=False) + "\n"
    if file == STDOUT:
        sys.stdout.write(text)
    else:
        write_text(file, text)


def _representable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _representable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_representable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
