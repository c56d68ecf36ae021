"""Report of the demonstration as one self-contained HTML page."""

from __future__ import annotations

from typing import NamedTuple

from epiloq import pages
from epiloq.demo import figures
from epiloq.demo.results import Measured, Results, Run


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


def render(results: Results) -> str:
    """Render the page as HTML."""
    return pages.render(
        "epiloq.demo/report.html",
        results=results,
        headlines=headlines(results),
        rows=rows(results),
        error_picture=figures.layer_errors(results),
        speed_picture=figures.speeds(results),
    )
