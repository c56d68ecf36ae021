"""Report of the demonstration as one self-contained HTML page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from epiloq import pages
from epiloq.demo.results import Measured, Results, Run
from epiloq.pages.figures import COLOURS, FLOAT_COLOUR, canvas, errors_along_y, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Headline(NamedTuple):
    """A figure at the top of the page; `tone` is its colour: of a gain (empty), "worse" for a loss, or plain "cost"."""

    value: str
    label: str
    detail: str
    tone: str = ""


def headlines(results: Results) -> list[Headline]:
    """Return four figures that compare the scheme of lowest perplexity with the fp32 teacher."""
    scheme, teacher = results.best_scheme, results.teacher.first
    run = scheme.first
    found = [
        Headline(
            f"{results.change_percent(run):+.2f} %",
            "perplexity",
            f"{teacher.perplexity:.2f} to {run.perplexity:.2f}",
            "cost",
        ),
        Headline(
            f"{100 * run.weight_bytes / teacher.weight_bytes:.0f} %",
            "of the bytes",
            f"{megabytes(teacher.weight_bytes)} to {megabytes(run.weight_bytes)} MB",
        ),
        Headline(
            f"{run.speed.prefill_speedup:.2f}x",
            "prefill speed",
            f"{run.speed.prefill_tokens_per_s:.0f} tokens/s; decode {run.speed.decode_speedup:.2f}x",
            "worse" if run.speed.prefill_speedup < 1 else "",
        ),
    ]
    if scheme.worst_layer is not None:
        name, error = scheme.worst_layer
        found.append(Headline(f"{100 * error:.1f} %", "worst layer's error", name, "cost"))
    return found


def megabytes(count: int) -> str:
    """Format bytes as whole megabytes (10^6)."""
    return f"{count / 1e6:.0f}"


def rows(results: Results) -> list[dict[str, str]]:
    """Return the cells of the table by column, a row per run; the template has the same column names."""

    def row(measured: Measured, run: Run) -> dict[str, str]:
        worst = measured.worst_layer
        return {
            "Model": measured.name,
            "On": run.place,
            "Perplexity": f"{run.perplexity:.2f}",
            "Change": f"{results.change_percent(run):+.2f} %",
            "Weights, MB": megabytes(run.weight_bytes),
            "Prefill": f"{run.speed.prefill_tokens_per_s:.0f} ({run.speed.prefill_speedup:.2f}x)",
            "Decode": f"{run.speed.decode_tokens_per_s:.1f} ({run.speed.decode_speedup:.2f}x)",
            "Worst layer": f"{100 * worst[1]:.1f} %" if worst else "none",
        }

    return [row(measured, run) for measured in (results.teacher, *results.schemes) for run in measured.runs]


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
        errors_along_y(axes, "block of the model")
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


def render(results: Results) -> str:
    """Render the page as HTML."""
    return pages.render(
        "epiloq.demo/report.html",
        results=results,
        headlines=headlines(results),
        rows=rows(results),
        error_picture=layer_errors(results),
        speed_picture=speeds(results),
    )
