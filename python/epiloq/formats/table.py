"""The formats of whole checkpoints, as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epiloq.formats import awq, compressed_tensors, gptq
from epiloq.formats.layouts import FormatError, Quantization
from epiloq.quantize.grid import QuantizedWeight

Tensors = Mapping[str, Tensor]
Shape = tuple[int, int]


@dataclass(frozen=True)
class Format:
    """How one format says things. Callables raise FormatError for what it cannot say.

    scale_dtype
        The type to which scales should be rounded, given the model's and how activations are quantised.
    """

    name: str
    scale_dtype: Callable[[torch.dtype, str | None], torch.dtype]
    to_tensors: Callable[[QuantizedWeight, Quantization, torch.dtype], dict[str, Tensor]]
    config: Callable[[Quantization, Sequence[str]], dict[str, Any]]

    def check(self, quantization: Quantization, shapes: Collection[Shape], dtype: torch.dtype) -> None:
        """Raise FormatError unless layers of these shapes ``[N, K]`` can be written: it is tried with blank ones."""
        grid = quantization.grid
        for rows, columns in sorted(set(shapes)):
            groups = -(-columns // grid.length(columns))
            zero = None if grid.symmetric else torch.ones(rows, groups, dtype=torch.int32)
            blank = QuantizedWeight(torch.ones(rows, columns, dtype=grid.dtype), torch.ones(rows, groups), zero, grid)
            self.to_tensors(blank, quantization, dtype)


@dataclass(frozen=True)
class Reader:
    """How the layers of one checkpoint are read.

    marker
        The tensor that only a quantised layer has, by the last part of its name.
    """

    quantization: Quantization
    marker: str
    from_tensors: Callable[[Tensors, Shape], QuantizedWeight]


def _half(dtype: torch.dtype, activations: str | None) -> torch.dtype:
    return torch.float16


def _as_model(dtype: torch.dtype, activations: str | None) -> torch.dtype:
    if activations:
        return torch.float32
    # float16 values are float32 values too, and then other formats can hold them.
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _weights_only(name: str, quantization: Quantization) -> None:
    if quantization.activations:
        raise FormatError(f"{name}: quantised activations cannot be said; use compressed-tensors")


def _gptq_version(quantization: Quantization) -> str:
    # Asymmetric groups of positive weights have the zero point 0.
    return "gptq" if quantization.grid.symmetric else "gptq_v2"


def _to_gptq(weight: QuantizedWeight, quantization: Quantization, dtype: torch.dtype) -> dict[str, Tensor]:
    _weights_only("gptq", quantization)
    return gptq.to_tensors(weight, _gptq_version(quantization))


def _to_awq(weight: QuantizedWeight, quantization: Quantization, dtype: torch.dtype) -> dict[str, Tensor]:
    _weights_only("awq", quantization)
    return awq.to_tensors(weight)


_TABLE = (
    Format("compressed-tensors", _as_model, compressed_tensors.to_tensors, compressed_tensors.config),
    Format(
        "gptq",
        _half,
        _to_gptq,
        lambda quantization, ignore: gptq.config(quantization.grid, _gptq_version(quantization), desc_act=False),
    ),
    Format("awq", _half, _to_awq, lambda quantization, ignore: awq.config(quantization.grid, ignore)),
)
FORMATS = {layout.name: layout for layout in _TABLE}


def reader(config: Mapping[str, Any]) -> Reader:
    """The reader for a ``quantization_config``. Raises FormatError for one that epiloq does not read."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        found = compressed_tensors.parse(config)
        return Reader(found, "weight_scale", lambda t, shape: compressed_tensors.from_tensors(t, found, shape))
    if method == "gptq":
        described, version = gptq.parse(config)
        return Reader(described, "qweight", lambda t, shape: gptq.from_tensors(t, described.grid, version, shape))
    if method == "awq":
        said = awq.parse(config)
        return Reader(said, "qweight", lambda t, shape: awq.from_tensors(t, said.grid, shape))
    raise FormatError(f"quantization_config: quant_method: expected one of {', '.join(FORMATS)}, got {method!r}")
