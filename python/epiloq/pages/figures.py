"""Pictures in files, and as SVG to place inside HTML: text stays text and takes the page's colour."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epiloq.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour while matplotlib draws."""
FAINT = "#8888884d"
FLOAT_COLOUR = "#8a8f98"
# Mid-tones of distinct lightness: legible on white and on near-black, and to colour-blind readers.
COLOURS = ("#1f9e89", "#e0812b", "#8a6fdf", "#d1495b", "#3d8bd4", "#a3a02f", "#c05fa8", "#7a5230")
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
    """A figure in the page's style, without pyplot and its global state."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")


def count_along_x(axes: Axes) -> None:
    """Label the x-axis with whole numbers, which count blocks or layers; a single one has a single label."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def errors_along_y(axes: Axes, along_x: str, label: str = "relative output error") -> None:
    """Label both axes of errors, in percent, of blocks or layers that are counted along x."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    count_along_x(axes)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_xlabel(along_x)
    axes.set_ylabel(label)


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's name ends in, PNG without one; never a part of it."""
    path = path if path.suffix else path.with_suffix(".png")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], dpi=110)
    write_bytes(path, content.getvalue())


def to_svg(figure: Figure, label: str) -> str:
    """The figure as an ``<svg>`` element that scales with its container; ``label`` is for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Creator": None, "Date": None, "Type": None})
    svg = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Names such as "axes_1" come again in every picture; what a picture refers to has other names.
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    opening = re.sub(r' (width|height|version|xmlns(:xlink)?)="[^"]*"', "", svg[: svg.index(">")])
    drawn = svg[svg.index(">") :].replace(INK, "currentColor").strip()
    return f'{opening} role="img" aria-label="{escape(label)}"{drawn}'
