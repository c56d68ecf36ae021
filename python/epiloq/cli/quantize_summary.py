"""Lines that ``epiloq quantize`` prints after a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from epiloq.cli.common import how_to_open
from epiloq.cli.output import say

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 3
"""Names of layers in a line."""


def show(report: dict[str, Any], console: Console) -> None:
    """Print the result."""
    before, after = report["bytes_before"], report["bytes_after"]
    lines = [
        f"{report['output']}: {after / 1e6:.1f} MB of weights, {before / 1e6:.1f} MB before ({before / after:.2f}x)",
        f"{report['seconds']:.0f} s, at most {report['peak_memory_bytes'] / 1e9:.2f} GB of memory",
    ]
    budget = report["budget"]
    if budget:
        counts = ", ".join(f"{count} of {name}" for name, count in budget["counts"].items())
        lines.append(f"{budget['asked']}: {counts}")
        lines.append(
            f"KL divergence {budget['measured']:.4f} nats per token on {budget['measured_on']} text, "
            f"{budget['estimated']:.4f} estimated"
        )
    tuning = report["tuning"]
    if tuning:
        lines.append(
            f"tuned in {tuning['steps']} steps: KL divergence on calibration text {tuning['kl_before']:.4f} before, "
            f"{tuning['kl_after']:.4f} after"
        )
    if report["perplexity"]:
        first, last = report["perplexity"]["before"], report["perplexity"]["after"]
        lines.append(f"perplexity {first:.3f} before, {last:.3f} after ({100 * (last / first - 1):+.2f} %)")
    if report["calibration_windows"]:
        lines.append(f"calibrated on {report['calibration_tokens']} tokens in {report['calibration_windows']} windows")
    name, error = max(report["layer_errors"].items(), key=lambda item: item[1])
    lines.append(f"worst layer {name}: its {report['error_of']} has a relative error of {100 * error:.1f} %")
    lines += vocabulary_lines(report["vocabulary"])
    kept = [name for name, found in report["input_errors"].items() if found["kept_dynamic"]]
    if kept:
        lines.append(f"{len(kept)} layers keep a scale for each token: {', '.join(kept)}")
    lines += [f"experts in floating point: {name}: {reason}" for name, reason in report["float_experts"].items()]
    lines += left_in_floating_point(report["float_layers"])
    lines.append(how_to_open(Path(report["output"]), report["layout"]))
    for line in lines:
        say(console, line)


def vocabulary_lines(found: dict[str, Any] | None) -> list[str]:
    """Return how the embedding and the output head were quantised, and the error that this adds."""
    if found is None:
        return []
    schemes = ", ".join(f"{name} {found[name]}" for name in ("embedding", "head") if found[name])
    once = ", one stored weight" if found["stored_once"] else ""
    if found["kl"] is None:
        return [f"{schemes}{once}; no text to measure what it costs (--evaluation FILE)"]
    cost = f"KL {found['kl']['kl_mean']:.2g} nats a token on {found['kl']['tokens']} tokens"
    return [f"{schemes}{once}: {cost}, {100 * found['kl']['top1_agreement']:.1f} % the same likeliest token"]


def left_in_floating_point(layers: dict[str, str]) -> list[str]:
    """A line for each reason why layers were left, with the first of their names."""
    from epiloq.models.choice import by_reason

    def line(reason: str, names: list[str]) -> str:
        more = ", …" if len(names) > SHOWN else ""
        return f"{len(names)} layers in floating point: {', '.join(names[:SHOWN])}{more}: {reason}"

    return [line(reason, names) for reason, names in by_reason(layers).items()]
