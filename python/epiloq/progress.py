"""Progress callbacks: what long work calls after each step, whoever displays it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Advance = Callable[[], None]
Stage = Callable[[str, int], AbstractContextManager[Advance]]
"""Opens a progress display: ``stage(title, steps)`` is a context whose value is called after each step."""


def unseen(title: str, steps: int) -> AbstractContextManager[Advance]:
    """A Stage without a display."""
    return nullcontext(lambda: None)
