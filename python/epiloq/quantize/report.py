"""The page that says what a quantisation cost and gained; from the figures of ``epiloq quantize --json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from epiloq import pages
from epiloq.quantize import figures

FILE = "report.html"
REQUIRED = ("matplotlib", "jinja2")
SHOWN = 8
"""Layers in the list of the worst."""
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
    "keep dynamic": "keep_dynamic",
    "evaluation text": "evaluation",
    "device": "device",
}
"""Key of the figures by what a reader is told it is."""


def missing() -> list[str]:
    """Packages that the page needs and that are not there."""
    return [name for name in REQUIRED if find_spec(name) is None]


def cards(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Value, name and detail of the figures at the top."""
    before, after = report["bytes_before"], report["bytes_after"]
    found = [(f"{100 * after / before:.0f} %", "of the bytes", f"{before / 1e6:.1f} to {after / 1e6:.1f} MB")]
    perplexity = report["perplexity"]
    if perplexity is not None:
        first, last = perplexity["before"], perplexity["after"]
        detail = f"{first:.3f} to {last:.3f}"
        found.insert(0, (f"{100 * (last / first - 1):+.2f} %", "perplexity", detail))
    memory = f"{report['peak_memory_bytes'] / 1e9:.2f} GB of memory at most"
    found.append((f"{report['seconds']:.0f} s", "in all", memory))
    name, error = max(report["layer_errors"].items(), key=lambda item: item[1])
    return [*found, (f"{100 * error:.1f} %", f"worst layer's {report['error_of']} error", name)]


def settings(report: Mapping[str, Any]) -> dict[str, str]:
    """What decided the result, in words."""
    found = {name: "none" if report[key] is None else str(report[key]) for name, key in SETTINGS.items()}
    if report["budget"]:
        found["scheme"] = f"chosen for each layer by {report['budget']['asked']}"
    found["calibrated on"] = f"{report['calibration_tokens']} tokens in {report['calibration_windows']} windows"
    ends = report.get("vocabulary")
    if ends is not None:
        found |= {name: str(ends[name]) for name in ("head", "embedding") if ends[name] is not None}
        if ends["kl"] is not None:
            found["KL of head and embedding"] = (
                f"{ends['kl']['kl_mean']:.2g} nats a token on {ends['kl']['tokens']} tokens"
            )
    if report["blocks_resumed"]:
        found["blocks kept of an interrupted run"] = str(report["blocks_resumed"])
    environment: dict[str, str] = report["environment"]
    return found | environment


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
        worst=worst(report),
        kept=[name for name, found in static.items() if found["kept_dynamic"]],
        errors=figures.layer_errors(report),
        inputs=figures.input_errors(report) if static else None,
        sizes=figures.sizes(report),
        perplexities=figures.perplexities(report) if report["perplexity"] else None,
        times=figures.times(report),
        scales=figures.scales(report),
    )
