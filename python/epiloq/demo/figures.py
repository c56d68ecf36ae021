"""Figures of the report, as SVG for HTML: text remains text and has the page's colour."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from epiloq.demo.results import Measured, Results
from epiloq.pages.figures import COLOURS, FAINT, FLOAT_COLOUR, canvas, count_along_x, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def colours(results: Results) -> dict[str, str]:
    """Assign a colour to each scheme."""
    names = [scheme.name for scheme in results.schemes]
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def block_of(name: str) -> int:
    """Index of the decoder block that contains a layer: the first number in its name, or 0."""
    number = re.search(r"\d+", name)
    return int(number.group()) if number else 0


def layer_errors(results: Results) -> str:
    """Draw the relative output error of every quantised linear layer by block, and a line through the worst ones."""
    palette = colours(results)
    with canvas(3.6) as figure:
        axes = figure.subplots()
        for scheme in results.schemes:
            _draw_errors(axes, scheme, palette[scheme.name])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        count_along_x(axes)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_xlabel("block of the model")
        axes.set_ylabel("relative output error")
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9.5, columnspacing=1.2)
        return to_svg(figure, "Relative output error of each quantised layer")


def _draw_errors(axes: Axes, scheme: Measured, colour: str) -> None:
    worst: dict[int, float] = {}
    for name, error in scheme.layer_errors.items():
        worst[block_of(name)] = max(error, worst.get(block_of(name), 0.0))
    blocks = [block_of(name) for name in scheme.layer_errors]
    axes.scatter(blocks, list(scheme.layer_errors.values()), s=6, color=colour, alpha=0.55, linewidths=0)
    axes.plot(list(worst), list(worst.values()), color=colour, linewidth=1.3, label=scheme.name)
    if scheme.worst_layer is not None:
        name, error = scheme.worst_layer
        axes.scatter([block_of(name)], [error], s=60, facecolors="none", edgecolors=colour, linewidths=1.4)


def speeds(results: Results) -> str:
    """Draw prefill and decode speed of every run relative to the fp32 teacher, as two rows of bars."""
    palette = colours(results)
    bars = [
        (f"{measured.name}\n{run.place}", run, palette.get(measured.name, FLOAT_COLOUR))
        for measured in (results.teacher, *results.schemes)
        for run in measured.runs
    ]
    labels, tints = [bar[0] for bar in bars], [bar[2] for bar in bars]
    panels = (
        ("prefill", [run.speed.prefill_speedup for _, run, _ in bars]),
        ("decode", [run.speed.decode_speedup for _, run, _ in bars]),
    )
    with canvas(0.9 + 0.42 * len(bars)) as figure:
        for axes, (title, values) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            drawn = axes.barh(labels, values, color=tints, height=0.62)
            axes.bar_label(drawn, fmt="%.2fx", padding=3)
            axes.set_title(title, loc="left", fontsize="medium")
            axes.set_xlim(0, 1.35 * max(values))
            axes.xaxis.set_visible(False)
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        return to_svg(figure, "Prefill and decode speed of each model")
