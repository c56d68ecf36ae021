"""Figures of the report: detections on a page, errors by layer, speeds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from itertools import chain

from epiloq.demo.vision.results import Found, Results, Run
from epiloq.pages.figures import COLOURS, FAINT, FLOAT_COLOUR, canvas, errors_along_y, to_svg

LABEL_PIXELS = 13


def detections(results: Results, run: Run) -> str:
    """Draw the first page with the boxes of a run and the text read in each; dashed boxes are mistakes.

    A text counts as correct if that word is on the page.
    """
    width, height = results.page_size
    image = base64.b64encode(results.page_jpeg).decode("ascii")
    words = set(results.page_words)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Words found by the {escape(run.name)} networks">'
        f'<image href="data:image/jpeg;base64,{image}" width="{width}" height="{height}"/>'
        f"{''.join(_box(found, found.text.strip() in words, width) for found in run.first_page)}</svg>"
    )


def _box(found: Found, right: bool, width: int) -> str:
    left, top, end, bottom = found.box
    dashes = ' stroke-dasharray="5 3"'
    colour = COLOURS[0] if right else COLOURS[3]
    # The width of a monospaced letter is about 0.6 of the font size.
    label = round(0.6 * LABEL_PIXELS * len(found.text)) + 6
    # Above the box, or below it at the upper edge of the page, and not beyond its right edge.
    x, y = max(0, min(left, width - label)), top - LABEL_PIXELS if top >= LABEL_PIXELS else bottom - 1
    return (
        f'<rect x="{left}" y="{top}" width="{end - left}" height="{bottom - top}" fill="none" stroke="{colour}" '
        f'stroke-width="2"{"" if right else dashes}/>'
        f'<rect x="{x}" y="{y}" width="{label}" height="{LABEL_PIXELS + 1}" fill="{colour}"/>'
        f'<text x="{x + 3}" y="{y + LABEL_PIXELS - 2}" font-family="monospace" font-size="{LABEL_PIXELS}" fill="#fff" '
        f'xml:space="preserve">{escape(found.text)}</text>'
    )


def layer_errors(runs: Sequence[Run]) -> str:
    """Draw the relative output error of every quantised layer: the detector's, then the recogniser's."""
    with canvas(3.6) as figure:
        axes = figure.subplots()
        for run, colour in zip(runs, COLOURS, strict=False):
            errors = [*run.detector.errors.values(), *run.recogniser.errors.values()]
            axes.plot(errors, ".", markersize=3.5, color=colour, label=run.name)
        boundary = len(runs[0].detector.errors) - 0.5
        axes.axvline(boundary, color=FAINT, linewidth=1)
        axes.set_yscale("log")
        errors_along_y(axes, "layers of the detector, then of the recogniser")
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9.5, markerscale=3)
        return to_svg(figure, "Relative output error of each quantised layer")


def speeds(results: Results) -> str:
    """Draw the speed of every run relative to the float networks, as two panels of bars."""
    runs = results.runs
    panels = (
        ("detector", [run.detector.speedup for run in runs]),
        ("recogniser", [run.recogniser.speedup for run in runs]),
    )
    names = list(dict.fromkeys(run.name for run in runs))
    palette = dict(zip(names, chain((FLOAT_COLOUR,), COLOURS), strict=False))
    with canvas(0.9 + 0.42 * len(runs)) as figure:
        for axes, (title, values) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            bars = axes.barh(range(len(runs)), values, color=[palette[run.name] for run in runs], height=0.62)
            axes.bar_label(bars, fmt="%.2fx", padding=3, fontsize=9)
            axes.margins(x=0.28)
            axes.set_title(title, fontsize=10.5, loc="left")
            axes.set_yticks(range(len(runs)), [f"{run.name}\n{run.place}" for run in runs])
            axes.tick_params(length=0)
            axes.set_xticks([])
            axes.spines[["bottom", "left"]].set_visible(False)
        figure.axes[0].invert_yaxis()
        return to_svg(figure, "Speed in multiples of the float networks")
