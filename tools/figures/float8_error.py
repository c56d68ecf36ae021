"""Measures the error of float8 sums against K on a GPU, and draws it.

    python tools/figures/float8_error.py measure errors.json     (on a GPU)
    python tools/figures/float8_error.py draw errors.json docs/float8_error.png

Errors are relative to the root of the sum of squared terms, the typical magnitude of a random sum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

import epiloq

DEPTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SHAPE = (512, 4096)  # kernels with fast accumulation support it for every K
app = typer.Typer(add_completion=False, help=__doc__)


def operands(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw normal values over much of e4m3's range, as in quantised layers."""
    m, n = SHAPE
    return tuple((torch.randn(rows, k, device="cuda") * 64).to(torch.float8_e4m3fn) for rows in (m, n))  # type: ignore[return-value]


def errors(k: int) -> dict[str, dict[str, float]]:
    a, weight = operands(k)
    left, right = a.double(), weight.double().t()
    reference, span = left @ right, (left.square() @ right.square()).sqrt()
    one = torch.ones(1, device="cuda")
    groups = torch.ones(SHAPE[0], -(-k // 128), device="cuda")
    blocks = torch.ones(-(-k // 128), -(-SHAPE[1] // 128), device="cuda")
    # A power of two scales outputs into float16's range, so that their rounding is small relative to the error.
    down = torch.full((1,), 2.0**-12 / k**0.5, device="cuda").log2().round().exp2()
    outputs = {
        "fast": epiloq.scaled_mm(a, weight.t(), down, one, out_dtype=torch.float16, fast_accum=True),
        "accurate": epiloq.scaled_mm(a, weight.t(), down, one, out_dtype=torch.float16),
        "groupwise": epiloq.groupwise_mm(a, weight.t(), groups * down, blocks, out_dtype=torch.float32),
    }
    result = {}
    for name, output in outputs.items():
        difference = (output.double() / down.double() - reference) / span
        result[name] = {"rms": float(difference.square().mean().sqrt()), "max": float(difference.abs().max())}
    return result


@app.command()
def measure(target: Path) -> None:
    torch.manual_seed(0)
    rows = {k: errors(k) for k in DEPTHS}
    device = torch.cuda.get_device_name()
    target.write_text(json.dumps({"device": device, "shape": SHAPE, "errors": rows}, indent=1) + "\n")


@app.command()
def draw(source: Path, target: Annotated[Path, typer.Argument()] = Path("docs/float8_error.png")) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    data = json.loads(source.read_text())
    depths = [int(k) for k in data["errors"]]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, colour in (("fast", "tab:red"), ("accurate", "tab:blue"), ("groupwise", "tab:green")):
        for kind, style in (("max", "--"), ("rms", "-")):
            values = [row[name][kind] for row in data["errors"].values()]
            axes.plot(depths, values, style, color=colour, marker="o", markersize=3, label=f"{name}, {kind}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="K", ylabel="error / root of the sum of squared terms", title=f"float8 sums on {data['device']}")
    axes.grid(alpha=0.3)
    axes.legend(ncols=3, fontsize=8)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    app()
