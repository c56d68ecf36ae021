"""The report's pictures, as SVG to place inside HTML: text stays text and takes the page's colour."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from epiloq.demo.results import Measured, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour while matplotlib draws."""
FAINT = "#8888884d"
FLOAT_COLOUR = "#8a8f98"
# Mid-tones of distinct lightness: legible on white and on near-black, and to colour-blind readers.
SCHEME_COLOURS = ("#1f9e89", "#e0812b", "#8a6fdf", "#d1495b", "#3d8bd4", "#a3a02f")
# About as wide as a phone shows them, so that the text stays readable there.
WIDTH_INCHES = 4.4
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "epiloq",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


@contextmanager
def canvas(height_inches: float) -> Iterator[Figure]:
    """A figure in the report's style, without pyplot and its global state."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")


def to_svg(figure: Figure, label: str) -> str:
    """The figure as an ``<svg>`` element that scales with its container; ``label`` is for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Creator": None, "Date": None, "Type": None})
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening = re.sub(r' (width|height|version|xmlns(:xlink)?)="[^"]*"', "", svg[: svg.index(">")])
    return f'{opening} role="img" aria-label="{label}"{svg[svg.index(">") :]}'.replace(INK, "currentColor").strip()


def colours(results: Results) -> dict[str, str]:
    """A colour for each scheme, in order."""
    names = [scheme.name for scheme in results.schemes]
    return {name: SCHEME_COLOURS[index % len(SCHEME_COLOURS)] for index, name in enumerate(names)}


def block_of(name: str) -> int:
    """Index of the repeated block that a layer is in: the first number in its name, 0 without one."""
    number = re.search(r"\d+", name)
    return int(number.group()) if number else 0


def layer_errors(results: Results) -> str:
    """Relative output error of every quantised linear by block: a dot each, a line through the worst of each block."""
    from matplotlib.ticker import MaxNLocator

    palette = colours(results)
    with canvas(3.6) as figure:
        axes = figure.subplots()
        for scheme in results.schemes:
            _draw_errors(axes, scheme, palette[scheme.name])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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
    """Prefill and decode speed of every run in multiples of the fp32 teacher's, as two rows of bars."""
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
