"""Plot of a run: percent of the floor and ratio to every peer over M, a line per shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from epiloq.bench.runner import Row
from epiloq.pages import figures

Value = Callable[[Row], float | None]


def _ratio(name: str) -> Value:
    return lambda row: row.peers[name].ratio if name in row.peers else None


def _panel(axes: Any, rows: Sequence[Row], value: Value, title: str, level: float) -> None:
    tokens = sorted({row.m for row in rows})
    for shape in dict.fromkeys((row.n, row.k) for row in rows):
        points = {row.m: value(row) for row in rows if (row.n, row.k) == shape}
        drawn = [(x, points[m]) for x, m in enumerate(tokens) if points.get(m) is not None]
        label = f"{shape[0]}x{shape[1]}" if shape[0] else f"K={shape[1]}"
        axes.plot([x for x, _ in drawn], [y for _, y in drawn], marker="o", markersize=3, linewidth=1, label=label)
    axes.axhline(level, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(tokens)), [str(m) for m in tokens])
    axes.set_xlabel("M")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG or SVG (by suffix), a row of panels per operation, variant and arch. Needs matplotlib."""
    from matplotlib.figure import Figure

    done = [row for row in rows if row.percent_of_floor is not None]
    if not done:
        raise ValueError("bench: plot: expected at least one row that was timed, got none")
    kinds = list(dict.fromkeys((row.operation, row.variant, row.arch) for row in done))
    groups = [[row for row in done if (row.operation, row.variant, row.arch) == kind] for kind in kinds]
    panels: list[list[tuple[str, Value, float]]] = []
    for (operation, variant, arch), group in zip(kinds, groups, strict=True):
        names = dict.fromkeys(name for row in group for name, peer in row.peers.items() if peer.ratio is not None)
        label = f"{operation} {variant}" + ("" if arch == "auto" else f" ({arch})")
        first: tuple[str, Value, float] = (f"{label}\npercent of floor", lambda row: row.percent_of_floor, 100)
        panels.append([first, *((f"{label}\ntime of {name} / epiloq", _ratio(name), 1) for name in names)])
    columns = max(map(len, panels))
    figure = Figure(figsize=(3.6 * columns + 1.2, 3 * len(kinds)), layout="constrained")
    grid = figure.subplots(len(kinds), columns, squeeze=False)
    for line, group, contents in zip(grid, groups, panels, strict=True):
        for axes, (name, value, level) in zip(line, contents, strict=False):
            _panel(axes, group, value, name, level)
        for axes in line[len(contents) :]:
            axes.set_axis_off()
        line[0].legend(fontsize=6)
    figure.suptitle(title, fontsize=10)
    figures.save(figure, path)
