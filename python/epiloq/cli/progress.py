"""Progress of a command on standard error: bars with the time left on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from epiloq.cli.output import display, say
from epiloq.progress import Stage, unseen

if TYPE_CHECKING:
    from rich.console import Console

LINES = 100
"""Largest number of lines per stage."""
PAUSE = 1.0
"""Seconds between two lines, except before the last of a stage."""


@contextmanager
def progress_stages(console: Console | None = None) -> Iterator[Stage]:
    """A display of stages: finished bars stay; without a terminal there is a line for each step, or hundredth of them,
    and at most one a second.

    Each says how long the rest will take if it goes on as it did. Nothing is displayed with ``--quiet``. `console` is
    standard error by default.
    """
    if display.quiet:
        yield unseen
        return
    if console is None:
        from rich.console import Console as RichConsole

        console = RichConsole(stderr=True, markup=False)
    if not console.is_terminal:
        yield lambda title, steps: _lines(console, title, steps)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:

        @contextmanager
        def stage(title: str, steps: int) -> Iterator[Callable[[], None]]:
            task = progress.add_task(title, total=steps)
            yield lambda: progress.advance(task)

        yield stage


@contextmanager
def _lines(console: Console, title: str, steps: int) -> Iterator[Callable[[], None]]:
    start, done, every, last = time.monotonic(), 0, -(-steps // LINES) or 1, -PAUSE

    def advance() -> None:
        nonlocal done, last
        done += 1
        passed = time.monotonic() - start
        if done != steps and (done % every or passed - last < PAUSE):
            return
        last = passed
        left = time_left(done, steps, passed)
        line = f"{title}: {done}/{steps}, {clock(passed)}" + (f", about {clock(left)} left" if done < steps else "")
        say(console, line)

    yield advance


def time_left(done: int, steps: int, passed: float) -> float:
    """Seconds for the other steps if they take as long as those that are `done`, at least one."""
    return passed / done * (steps - done)


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds: 0:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
