"""Report of the demonstration as one self-contained HTML page."""

from __future__ import annotations

from epiloq import pages
from epiloq.demo.report import Headline
from epiloq.demo.vision import figures
from epiloq.demo.vision.measure import FLOAT
from epiloq.demo.vision.networks import VARIANTS, Variant
from epiloq.demo.vision.results import Cost, Results, Run

SHOWN = VARIANTS[0].name
"""The variant that the page compares with the float networks."""


def headlines(results: Results) -> list[Headline]:
    """Return four figures of the int8 networks."""
    whole, run = results.run(FLOAT), results.run(SHOWN)
    right = f"right: {percent(whole.characters_right)} by float, {percent(run.characters_right)} by int8"
    size = f"{megabytes(whole.weight_bytes)} to {megabytes(run.weight_bytes)} MB"
    lowest = f"the lowest of {results.drawn['pages']} pages {run.lowest_map_iou:.3f}"
    recogniser = f"recogniser {run.recogniser.speedup:.2f}x"
    return [
        Headline(f"{run.map_iou:.3f}", "detector's map IoU", lowest),
        Headline(percent(run.characters_equal), "of characters read alike", right),
        Headline(f"{100 * run.weight_bytes / whole.weight_bytes:.0f} %", "of the bytes", size),
        Headline(
            f"{run.detector.speedup:.2f}x", "detector's speed", recogniser, "worse" if run.detector.speedup < 1 else ""
        ),
    ]


def percent(part: float) -> str:
    """Format a fraction of 1 as percent."""
    return f"{100 * part:.1f} %"


def megabytes(count: int) -> str:
    """Format bytes as megabytes (10^6)."""
    return f"{count / 1e6:.1f}"


def milliseconds(cost: Cost) -> str:
    """Format the time per image in milliseconds, and the speed-up over the float network."""
    return f"{1e3 * cost.seconds_per_image:.1f} ({cost.speedup:.2f}x)"


def rows(results: Results) -> list[dict[str, str]]:
    """Return the cells of the table by column, a row per run."""

    def row(run: Run) -> dict[str, str]:
        return {
            "Networks": run.name,
            "On": run.place,
            "Map IoU": f"{run.map_iou:.3f}",
            "As float": percent(run.characters_equal),
            "Right": percent(run.characters_right),
            "Page words": percent(run.page_words_right),
            "MB": megabytes(run.weight_bytes),
            "Detector": milliseconds(run.detector),
            "Recogniser": milliseconds(run.recogniser),
        }

    return [row(run) for run in results.runs]


def explain(variant: Variant, run: Run) -> str:
    """Describe a variant's schemes and its worst layers in a sentence."""
    parts = [f"{variant.name}: convolutions {variant.convolutions}, linear layers {variant.linears}"]
    if variant.limit is not None:
        parts.append(
            f"{variant.otherwise} for the {len(run.detector.exceptions)} convolutions of the detector and the "
            f"{len(run.recogniser.exceptions)} of the recogniser whose error would exceed {100 * variant.limit:g} %"
        )
    linked = run.detector.linked, run.recogniser.linked
    if any(linked):
        parts.append(f"{linked[0]} and {linked[1]} convolutions pass int8 to the next")
    for name, cost in (("detector", run.detector), ("recogniser", run.recogniser)):
        if cost.worst is not None:
            parts.append(f"the {name}'s worst layer {cost.worst[0]}, {percent(cost.worst[1])}")
    return "; ".join(parts) + "."


def render(results: Results) -> str:
    """Render the page as HTML."""
    variants = [variant for variant in VARIANTS if any(run.name == variant.name for run in results.runs)]
    runs = [results.run(variant.name) for variant in variants]
    return pages.render(
        "epiloq.demo.vision/report.html",
        results=results,
        headlines=headlines(results),
        rows=rows(results),
        explanations=[explain(variant, run) for variant, run in zip(variants, runs, strict=True)],
        float_picture=figures.detections(results, results.run(FLOAT)),
        int8_picture=figures.detections(results, results.run(SHOWN)),
        error_picture=figures.layer_errors(runs),
        speed_picture=figures.speeds(results),
    )
