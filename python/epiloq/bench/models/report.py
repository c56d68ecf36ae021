"""Figures of whole models: a JSON file, a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

from epiloq.bench.models.plan import Extras, Measured
from epiloq.cli import output
from epiloq.pages import figures


def write_json(
    path: Path, environment: Mapping[str, Any], results: Sequence[Measured], extras: Extras | None = None
) -> None:
    """Write the environment, a row per result, the reasons of absent peers and the shares of time."""
    found = {"environment": dict(environment), "rows": [asdict(r) for r in results]}
    output.write_json(path, found | asdict(Extras() if extras is None else extras))


def draw_models(results: Sequence[Measured], path: Path) -> None:
    """Draw tokens per second of each contender, a panel per mode, phase and batch. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((r.mode, r.phase, r.batch) for r in results))
    figure = Figure(figsize=(3.2 * len(panels) + 1.6, 3.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = [r for r in results if (r.mode, r.phase, r.batch) == panel]
        axes.barh([_label(r) for r in rows], [r.tokens_per_second for r in rows], color="tab:blue")
        axes.invert_yaxis()
        axes.set_title(f"{panel[1]}, batch {panel[2]}, {panel[0]}", fontsize=9)
        axes.set_xlabel("tokens/s")
    figures.save(figure, path)


def _label(result: Measured) -> str:
    return result.scheme + (" optimised" if result.optimized else "")


def table(results: Sequence[Measured]) -> str:
    """A line per result, with its speed-up over the 16-bit model in the same mode, phase and batch."""
    base = {(r.mode, r.phase, r.batch): r.milliseconds for r in results if r.scheme == "none"}
    lines = [f"{'scheme':22}{'mode':9}{'phase':9}{'batch':>6}{'ms':>10}{'tokens/s':>11}{'us/layer':>10}{'MB':>9}  x"]
    for r in results:
        own = base.get((r.mode, r.phase, r.batch))
        ratio = "" if own is None else f"{own / r.milliseconds:.2f}"
        a_layer = "-" if isnan(r.us_a_layer) else f"{r.us_a_layer:.1f}"
        lines.append(
            f"{_label(r):22}{r.mode:9}{r.phase:9}{r.batch:6}{r.milliseconds:10.3f}{r.tokens_per_second:11.0f}"
            f"{a_layer:>10}{r.weight_megabytes:9.0f}  {ratio}"
        )
    return "\n".join(lines)
