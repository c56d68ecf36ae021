"""A tiny model rounded to a grid, in any format, and what a directory stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint, Writer
from epiloq.formats.io.model import Target
from epiloq.formats.layers import Layers
from epiloq.formats.layouts.base import Quantization
from epiloq.formats.table import FORMATS
from epiloq.layer_filter import default_filter
from epiloq.quantize import Grid, QuantizedWeight, gptq, rtn


def written(
    teacher: Path, folder: Path, layout: str, quantization: Quantization, change: Callable[[QuantizedWeight], Any]
) -> Path:
    """The teacher rounded to a grid (and changed), in a format."""
    checkpoint = Checkpoint(teacher)
    model = models.load_float(checkpoint)
    takes = default_filter(model)
    target = Target(FORMATS[layout], torch.float32, Writer(folder), checkpoint)
    grid = replace(quantization.grid, scale_dtype=torch.float16)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linears.items():
        if takes(module, name):
            target.layer(name, change(rtn(module.weight, grid)), quantization)
    for name, tensor in checkpoint.tensors():
        if name.removesuffix(".weight") not in target.quantised:
            target.writer.add(name, tensor)
    target.close(linears, model)
    checkpoint.copy_other_files(folder)
    return folder


def unchanged(weight: QuantizedWeight) -> QuantizedWeight:
    return weight


def ordered(weight: QuantizedWeight) -> QuantizedWeight:
    """Groups in activation order, as GPTQ makes them without static groups."""
    x = torch.randn(200, weight.q.shape[1]) * torch.rand(weight.q.shape[1])
    grid = replace(weight.grid, scale_dtype=torch.float16)
    return gptq(weight.dequantize(), x.t() @ x, grid, static_groups=False)


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor that a directory stands for, quantised layers dequantised."""
    layers = Layers(Checkpoint(folder))
    found = {f"{name}.weight": layers.weight(name).dequantize() for name in layers.readers}
    return found | {name: layers.checkpoint.tensor(name) for name in layers.rest}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


INT4 = Quantization(Grid(4, 32, symmetric=False))


SAYABLE = {
    "int4 asymmetric": (INT4, ("compressed-tensors", "gptq", "awq", "epiloq")),
    "int4 symmetric": (Quantization(Grid(4, 32, symmetric=True)), ("compressed-tensors", "gptq", "epiloq")),
    "int4 channel": (Quantization(Grid(4)), ("compressed-tensors", "gptq", "awq", "epiloq")),
    "int8 channel": (Quantization(Grid(8, -1, symmetric=True)), ("compressed-tensors", "gptq", "epiloq")),
    "int8 asymmetric": (Quantization(Grid(8, 32, symmetric=False)), ("compressed-tensors", "gptq", "epiloq")),
    "w4a8 fp8": (Quantization(Grid(4, 32, symmetric=True), "fp8"), ("compressed-tensors", "epiloq")),
    "w4a8 fp8 asymmetric": (Quantization(INT4.grid, "fp8"), ("compressed-tensors", "epiloq")),
    "w4a8 int8": (Quantization(Grid(4, 32, symmetric=True), "int8"), ("compressed-tensors", "epiloq")),
    "w8a8": (Quantization(Grid(8, -1, symmetric=True), "int8"), ("compressed-tensors", "epiloq")),
    "w8a8 azp": (Quantization(Grid(8, -1, symmetric=True), "int8-azp"), ("compressed-tensors", "epiloq")),
}
