"""Compares byte budgets with one scheme everywhere at equal bytes; see `scheme_table.py budget`."""

from __future__ import annotations

from typing import Any, NamedTuple

from scheme_rows import nats

WINDOWS = 8
"""Number of calibration windows."""
ENDS = ("--head", "w8a16", "--embedding", "w8a16")
AUTO = ("--head", "auto", "--embedding", "auto")


class Pair(NamedTuple):
    """A model with one scheme everywhere, and one chosen within the same number of bytes."""

    name: str
    scheme: str
    options: tuple[str, ...]
    chosen: tuple[str, ...]
    """Options of the chosen model in addition to the budget."""


PAIRS = (
    Pair("embedding and head in float", "w4a16-g64", (), AUTO),
    Pair("embedding and head in 8 bits", "w4a16-g64", ENDS, AUTO),
)
UNIFORM, CHOSEN = "uniform", "chosen"


def table(found: dict[str, Any]) -> str:
    """Format KL divergence, perplexity and bytes of each pair."""
    heads = ("`w4a16-g64` with", "MB", "KL, uniform", "KL, chosen", "reduction", "perplexity", "chosen")
    lines = [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    for pair in PAIRS:
        one, other = (found.get(f"{pair.name}, {which}") for which in (UNIFORM, CHOSEN))
        if one is None or other is None:
            continue
        cells = [
            f"{one['bytes'] / 1e6:.2f} and {other['bytes'] / 1e6:.2f}",
            nats(one["kl"]),
            nats(other["kl"]),
            f"{100 * (1 - other['kl'] / one['kl']):.0f} %",
            f"{one['perplexity']:.2f}",
            f"{other['perplexity']:.2f}",
        ]
        lines.append(f"| {pair.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
