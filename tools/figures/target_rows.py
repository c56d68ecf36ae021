"""Targets for SmolLM2 and what was measured: each is computed from rows of the results' file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from scheme_rows import BUDGET, FLOAT, ROTATED, SHORT_GROUPS, SHORTLY_TUNED, TUNED, Row

Results = dict[str, Any]


class Target(NamedTuple):
    """What is aimed at, and rows that may reach it.

    measured
        The figure of a row, from all results and the row's name.
    reached
        Whether a figure is good enough.
    """

    what: str
    aim: str
    rows: tuple[str, ...]
    measured: Callable[[Results, str], float]
    reached: Callable[[float], bool]
    form: str


def _gap_closed(found: Results, name: str) -> float:
    exact, nearest = (found[row]["perplexity"] for row in (FLOAT, Row("w4a16-g64", "rtn").name))
    return 100 * (nearest - found[name]["perplexity"]) / (nearest - exact)  # type: ignore[no-any-return]


def _change(found: Results, name: str) -> float:
    return 100 * (found[name]["perplexity"] / found[FLOAT]["perplexity"] - 1)  # type: ignore[no-any-return]


def _to_groups(found: Results, name: str) -> float:
    return found[name]["kl"] / found[Row("w4a16-g128", "gptq", SHORT_GROUPS).name]["kl"]  # type: ignore[no-any-return]


def _less(found: Results, name: str) -> float:
    uniform, chosen = (found[BUDGET][f"{name}, {which}"]["kl"] for which in ("uniform", "chosen"))
    return 100 * (1 - chosen / uniform)  # type: ignore[no-any-return]


STATIC = "w8a8-int8-static"
TARGETS = (
    Target(
        "`w4a16-g64`, gap closed",
        "92 %",
        (
            *(Row("w4a16-g64", algorithm).name for algorithm in ("gptq", "awq+gptq", "gptq-guided", "awq+gptq-guided")),
            Row("w4a16-g64", "gptq", SHORTLY_TUNED).name,
            *(Row("w4a16-g64", algorithm, TUNED).name for algorithm in ("gptq", "awq+gptq")),
        ),
        _gap_closed,
        lambda value: value >= 92,
        "{:.0f} %",
    ),
    Target(
        "`w8a8-int8`, perplexity",
        "+0.5 %",
        (
            *(Row("w8a8-int8", f"smoothquant{more}").name for more in ("", "+gptq", "-search", "-search+gptq")),
            Row("w8a8-int8", "smoothquant", TUNED).name,
        ),
        _change,
        lambda value: value <= 0.5,
        "{:+.1f} %",
    ),
    Target(
        "`w4a16` per channel, KL as a multiple of that of `w4a16-g128` by GPTQ",
        "1.6",
        tuple(Row("w4a16", "gptq", options).name for options in ((), ROTATED)),
        _to_groups,
        lambda value: value <= 1.6,
        "{:.2f}",
    ),
    Target(
        f"`{STATIC}`, no layer dynamic, perplexity",
        "+1.5 %",
        (
            *(Row(STATIC, algorithm).name for algorithm in ("smoothquant-search", "smoothquant-search+gptq")),
            Row(STATIC, "smoothquant-search", TUNED).name,
        ),
        _change,
        lambda value: value <= 1.5,
        "{:+.1f} %",
    ),
    Target(
        "budget, compared with uniform `w4a16-g64` at equal size: reduction of KL",
        "25 %",
        ("embedding and head in float", "embedding and head in 8 bits"),
        _less,
        lambda value: value >= 25,
        "{:.0f} %",
    ),
)


def table(found: Results) -> str:
    """A line for each row that was measured."""
    lines = ["| | target | measured | with | reached |", "|---|--:|--:|---|---|"]
    for target in TARGETS:
        what = target.what
        for name in target.rows:
            if name in found or f"{name}, chosen" in found.get(BUDGET, {}):
                value = target.measured(found, name)
                reached = "yes" if target.reached(value) else "no"
                lines.append(f"| {what} | {target.aim} | {target.form.format(value)} | `{name}` | {reached} |")
                what = ""
    return "\n".join(lines)
