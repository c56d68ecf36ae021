"""The plots of a quantisation report, from the figures of ``epiloq quantize --json``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from epiloq.pages.figures import COLOURS, FAINT, FLOAT_COLOUR, canvas, errors_along_y, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINEAR = 8
"""Ratio between an axis' ends below which it is linear; a logarithmic one would have labels at one end only."""
NUMBER = re.compile(r"\.(\d+)\.")


def layer_errors(report: Mapping[str, Any]) -> str:
    """Every layer's relative error by block, a colour for each kind of layer."""
    errors: Mapping[str, float] = report["layer_errors"]
    with canvas(3.6) as figure:
        axes = figure.subplots()
        for position, (kind, names) in enumerate(kinds(list(errors)).items()):
            line = "-" if position < len(COLOURS) else ":"
            blocks, values = [block_of(name) for name in names], [errors[name] for name in names]
            axes.plot(
                blocks, values, line, color=COLOURS[position % len(COLOURS)], label=kind, lw=1.2, marker=".", ms=4
            )
        _by_block(axes, "relative error")
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9.5, columnspacing=1.2)
        return to_svg(figure, f"Relative error of each of {len(errors)} layers by block of the model")


def input_errors(report: Mapping[str, Any]) -> str:
    """Error with one scale for all tokens and with a scale per token, for each input; circles: kept dynamic."""
    errors: Mapping[str, Mapping[str, Any]] = report["input_errors"]
    with canvas(3.4) as figure:
        axes = figure.subplots()
        blocks = [block_of(name) for name in errors]
        for colour, kind, label in (
            (COLOURS[1], "static", "one scale"),
            (COLOURS[0], "dynamic", "a scale for each token"),
        ):
            axes.scatter(blocks, [found[kind] for found in errors.values()], s=9, color=colour, lw=0, label=label)
        kept = {name: found["static"] for name, found in errors.items() if found["kept_dynamic"]}
        if kept:
            at = [block_of(name) for name in kept], list(kept.values())
            axes.scatter(*at, s=60, facecolors="none", edgecolors=COLOURS[1], linewidths=1.4, label="kept dynamic")
        _by_block(axes, "error of a token's output")
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9.5, columnspacing=1.2)
        return to_svg(figure, "Error of static and of dynamic activations by block of the model")


def sizes(report: Mapping[str, Any]) -> str:
    """Bytes of weight files before and after."""
    before, after = report["bytes_before"] / 1e6, report["bytes_after"] / 1e6
    with canvas(1.5) as figure:
        axes = figure.subplots()
        _bars(axes, ["before", "after"], [before, after], "%.1f MB", [FLOAT_COLOUR, COLOURS[0]])
        return to_svg(figure, f"Weights: {before:.1f} MB before, {after:.1f} MB after")


def frontier(report: Mapping[str, Any]) -> str:
    """Estimated divergence of the best choice for every budget, of one scheme for all layers, and what was measured."""
    budget = report["budget"]
    curve, uniform = budget["frontier"], budget["uniform"]
    with canvas(3.4) as figure:
        axes = figure.subplots()
        axes.plot([size / 1e6 for size, _ in curve], [loss for _, loss in curve], color=COLOURS[0], label="best choice")
        if uniform:
            points = [size / 1e6 for size, _ in uniform.values()], [loss for _, loss in uniform.values()]
            axes.scatter(*points, s=20, color=FLOAT_COLOUR, label="one scheme")
            for name, (size, loss) in uniform.items():
                axes.annotate(name, (size / 1e6, loss), (4, 3), textcoords="offset points", fontsize=8)
        at = budget["bytes"] / 1e6
        axes.scatter([at], [budget["estimated"]], s=36, color=COLOURS[0], label="chosen")
        if budget["measured"] > 0:
            axes.scatter([at], [budget["measured"]], s=40, marker="x", color=COLOURS[1], label="measured")
        axes.set_yscale("log")
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.set_xlabel("MB of weight files" if budget["counts_all"] else "MB of quantised layers")
        axes.set_ylabel("KL divergence")
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9.5, columnspacing=1.2)
        return to_svg(figure, f"Divergence by bytes of weights; {budget['asked']} gives {budget['measured']:.4f}")


def perplexities(report: Mapping[str, Any]) -> str:
    """Perplexity before and after."""
    found = report["perplexity"]
    with canvas(1.5) as figure:
        axes = figure.subplots()
        values = [found["before"], found["after"]]
        _bars(axes, ["before", "after"], values, "%.3f", [FLOAT_COLOUR, COLOURS[0]])
        return to_svg(figure, f"Perplexity: {values[0]:.3f} before, {values[1]:.3f} after")


def times(report: Mapping[str, Any]) -> str:
    """Seconds of each stage."""
    stages: Mapping[str, float] = report["stages"]
    with canvas(0.7 + 0.36 * len(stages)) as figure:
        axes = figure.subplots()
        _bars(axes, list(stages), list(stages.values()), "%.1f s", [COLOURS[4]] * len(stages))
        return to_svg(figure, "Seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in stages.items()))


def scales(report: Mapping[str, Any]) -> str:
    """Histogram of the scales of all groups of all layers."""
    histogram = report["scales"]
    counts: Sequence[int] = histogram["counts"]
    edges = [2.0**edge for edge in histogram["log2_edges"]]
    with canvas(2.6) as figure:
        axes = figure.subplots()
        axes.stairs(counts, edges, fill=True, color=COLOURS[0])
        axes.set_xscale("log", base=2)
        axes.set_xlabel("scale")
        axes.set_ylabel("groups")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.locator_params(axis="y", nbins=5)
        return to_svg(figure, f"Histogram of {sum(counts)} scales between {edges[0]:.3g} and {edges[-1]:.3g}")


def kinds(names: Sequence[str]) -> dict[str, list[str]]:
    """Kinds of layers: the last part of their names, or more parts if the last one is ambiguous."""
    inside = {name: NUMBER.split(name, maxsplit=1)[-1] for name in names}
    leaves = {path: path.rpartition(".")[2] for path in inside.values()}
    of_leaf = Counter(leaves.values())
    found: dict[str, list[str]] = {}
    for name, path in inside.items():
        found.setdefault(path if of_leaf[leaves[path]] > 1 else leaves[path], []).append(name)
    return found


def block_of(name: str) -> int:
    """The first number in a layer's name."""
    number = NUMBER.search(f".{name}.")
    return int(number.group(1)) if number else 0


def _by_block(axes: Axes, label: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.dataLim.intervaly
    if high > 0 and not 0 < low <= high <= LINEAR * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    errors_along_y(axes, "block of the model", label)


def _bars(axes: Axes, labels: list[str], values: list[float], form: str, colours: list[str]) -> None:
    axes.bar_label(axes.barh(labels, values, color=colours, height=0.6), fmt=form, padding=3)
    axes.set_xlim(0, 1.3 * max(*values, 1e-9))
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
