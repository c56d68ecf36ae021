"""The report of a finished run: the figures of ``epiloq quantize --json``, and the HTML page rendered from them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from epiloq import pages
from epiloq.evaluation.divergence import divergence
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.model import load, load_float
from epiloq.formats.table import FORMATS
from epiloq.quantize import figures
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.budget import search
from epiloq.quantize.calibration.tally import Tally
from epiloq.quantize.measures import environment, peak_memory, weight_bytes
from epiloq.quantize.targets import TARGETS
from epiloq.quantize.texts import evaluated_length, tokens_in
from epiloq.quantize.vocabulary import costs
from epiloq.weights.codebooks import OffsetGrid
from epiloq.weights.grid import Grid

if TYPE_CHECKING:
    from epiloq.quantize.job import Job

FILE = "report.html"
COMPARED = 4
"""Number of calibration windows on which a quantised head is compared if there is no evaluation text."""
REQUIRED = ("matplotlib", "jinja2")
SHOWN = 8
"""Length of the list of layers with the largest errors."""
SETTINGS = {
    "model": "model",
    "output": "output",
    "scheme": "scheme",
    "algorithm": "algorithm",
    "format": "layout",
    "symmetric weights": "symmetric",
    "calibration text": "calibration",
    "windows at most": "count",
    "tokens in a window": "length",
    "seed": "seed",
    "alpha": "alpha",
    "slices of output rows": "slices",
    "keep dynamic": "keep_dynamic",
    "evaluation text": "evaluation",
    "device": "device",
}
"""Label in the page, and key in the figures."""
CALIBRATION_ONLY = ("windows at most", "tokens in a window", "seed")
"""Settings without effect if nothing was calibrated."""


def missing() -> list[str]:
    """Packages that the page needs and that are not installed."""
    return [name for name in REQUIRED if find_spec(name) is None]


def cards(report: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Value, name, detail and tone of the figures at the top: gains are coloured, costs are plain."""
    before, after = report["bytes_before"], report["bytes_after"]
    found = [(f"{100 * after / before:.0f} %", "of the bytes", f"{before / 1e6:.1f} to {after / 1e6:.1f} MB", "")]
    perplexity = report["perplexity"]
    if perplexity is not None:
        first, last = perplexity["before"], perplexity["after"]
        detail = f"{first:.3f} to {last:.3f}"
        found.insert(0, (f"{100 * (last / first - 1):+.2f} %", "perplexity", detail, "cost"))
    memory = f"{report['peak_memory_bytes'] / 1e9:.2f} GB of memory at most"
    found.append((f"{report['seconds']:.0f} s", "in all", memory, "cost"))
    name, error = max(report["layer_errors"].items(), key=lambda item: item[1])
    return [*found, (f"{100 * error:.1f} %", f"worst layer's {report['error_of']} error", name, "cost")]


def in_words(value: object) -> str:
    """A setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def settings(report: Mapping[str, Any]) -> dict[str, str]:
    """The settings that had an effect, as text."""
    found = {name: in_words(report[key]) for name, key in SETTINGS.items()}
    if not report["calibration_tokens"]:
        found = {name: text for name, text in found.items() if name not in CALIBRATION_ONLY}
    if ALGORITHMS[report["algorithm"]].fold != "smoothquant":
        del found["alpha"]
    if not ALGORITHMS[report["algorithm"]].guided:
        del found["slices of output rows"]
    if report["scheme"] in TARGETS:
        target = TARGETS[report["scheme"]]
        grid = target.grid(report["symmetric"])
        if isinstance(grid, (Grid, OffsetGrid)):
            found["symmetric weights"] = in_words(grid.symmetric)
        else:  # floating-point grids have no zero points
            del found["symmetric weights"]
        if not target.static:
            del found["keep dynamic"]
    if report["budget"]:
        found["scheme"] = f"chosen for each layer by {report['budget']['asked']}"
    tokens, windows = report["calibration_tokens"], report["calibration_windows"]
    found["calibrated on"] = f"{tokens} tokens in {windows} windows" if tokens else "no text"
    vocabulary = report.get("vocabulary")
    if vocabulary is not None:
        found |= {name: str(vocabulary[name]) for name in ("head", "embedding") if vocabulary[name] is not None}
        if vocabulary["kl"] is not None:
            found["KL of head and embedding"] = (
                f"{vocabulary['kl']['kl_mean']:.2g} nats a token on {vocabulary['kl']['tokens']} tokens"
            )
    if report["blocks_resumed"]:
        found["blocks kept of an interrupted run"] = str(report["blocks_resumed"])
    environment: dict[str, str] = report["environment"]
    return found | environment


def floating(report: Mapping[str, Any]) -> str:
    """What else than linear layers of blocks stays in floating point, as the beginning of a sentence."""
    schemes = report.get("vocabulary") or {"head": None, "embedding": None}
    names = [name for name, key in (("embeddings", "embedding"), ("the output head", "head")) if schemes[key] is None]
    *first, last = ["Norms", "routers", *names]
    return f"{', '.join(first)} and {last}"


def worst(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The layers with the largest errors."""
    ordered = sorted(report["layer_errors"].items(), key=lambda item: -item[1])
    return [(name, f"{100 * error:.2f} %") for name, error in ordered[:SHOWN]]


def render(report: Mapping[str, Any]) -> str:
    """The page as HTML text."""
    static = report["input_errors"]
    return pages.render(
        "epiloq.quantize/report.html",
        report=report,
        scheme=report["budget"]["asked"] if report["budget"] else report["scheme"],
        frontier=figures.frontier(report) if report["budget"] else None,
        name=Path(report["model"]).resolve().name,
        cards=cards(report),
        settings=settings(report),
        floating=floating(report),
        worst=worst(report),
        kept=[name for name, found in static.items() if found["kept_dynamic"]],
        errors=figures.layer_errors(report),
        inputs=figures.input_errors(report) if static else None,
        sizes=figures.sizes(report),
        perplexities=figures.perplexities(report) if report["perplexity"] else None,
        times=figures.times(report),
        scales=figures.scales(report),
    )


def finished(job: Job, whole: Path, tally: Tally, before: float | None, start: float) -> dict[str, Any]:
    """Result of the run, given the directory that it wrote; the HTML page goes there too."""
    settings = job.settings
    found = {
        **{key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()},
        "layout": job.plan.layout,
        "calibration_windows": len(job.texts.calibration),
        "calibration_tokens": tokens_in(job.texts.calibration),
        "warnings": job.warnings,
        "float_layers": dict(job.plan.left),
        "blocks": len(tally.blocks),
        "blocks_resumed": tally.resumed,
        "error_of": tally.error_of,
        "layer_errors": tally.errors,
        "input_errors": tally.input_errors,
        "float_experts": job.float_experts,
        "vocabulary": None,
        "scales": tally.histogram,
        "bytes_before": job.bytes_before,
        "bytes_after": weight_bytes(whole),
        "perplexity": None,
        "budget": None,
        "tuning": tally.tuning,
    }
    vocabulary = job.plan.vocabulary
    loaded = (
        load(Checkpoint(whole))[0].to(settings.device) if before is not None or vocabulary.names or job.choice else None
    )
    if loaded is not None and vocabulary.names:
        texts = job.texts.evaluation or job.texts.calibration[:COMPARED]
        found["vocabulary"] = costs(job.model, loaded, vocabulary, texts, FORMATS[job.plan.layout])
    if loaded is not None and job.choice is not None:
        found["budget"] = search.report(job, job.choice, _divergence(job, loaded, tally))
    if before is not None and loaded is not None:
        after = job.perplexity(loaded, tally, "evaluate after")
        found["perplexity"] = {
            "before": before,
            "after": after,
            "tokens": tokens_in(job.texts.evaluation),
            "window": evaluated_length(job.source),
        }
    found |= {
        "stages": tally.seconds,
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": peak_memory(),
        "environment": environment(settings.device),
    }
    if not missing():
        (whole / FILE).write_text(render(found), encoding="utf-8")
    return found


def _divergence(job: Job, model: nn.Module, tally: Tally) -> tuple[float, str]:
    """KL divergence of the written model from the original, and the text on which it was measured."""
    text = "evaluation" if job.texts.evaluation else "calibration"
    windows = (job.texts.evaluation or job.texts.calibration)[: search.WINDOWS]
    teacher = load_float(job.source).to(job.settings.device)
    with tally.timed("measure divergence", len(windows)) as advance:
        return divergence(teacher, model, windows, advance), text
