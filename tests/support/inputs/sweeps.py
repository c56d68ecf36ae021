"""Kernel times measured on a GPU, in tests/kernel_choice/measured/: a card's rows of one problem each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

MEASURED = Path(__file__).parents[2] / "kernel_choice" / "measured"


def measured(name: str) -> list[Any]:
    """The rows of a file; where a row has `us`, that is microseconds by the kernel's name."""
    return cast(list[Any], json.loads((MEASURED / f"{name}.json").read_text())["sweep"])
