"""One layer's quantised weight as exchanged between formats: on an integer grid, in FP8 blocks, or as the state of an
epiloq module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from epiloq.formats.layouts.base import FormatError
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.weights.grid import QuantizedWeight
from epiloq.weights.packed_weight import PackedWeight


def dequantized(q: Tensor, scale: Tensor, spans: tuple[int, int]) -> Tensor:
    """``scale * q`` in float32 for q ``[N, K]``, with one scale per span of rows and columns; -1 for all."""
    for dim, (span, size) in enumerate(zip(spans, q.shape, strict=True)):
        length = size if span == -1 else span
        scale = scale.float().repeat_interleave(max(length, 1), dim).narrow(dim, 0, size)
    return q.float() * scale


@dataclass(frozen=True)
class BlockWeight:
    """``W = scale * q``: q float8_e4m3fn ``[N, K]``, scale ``[ceil(N / rows), ceil(K / 128)]`` of any float type.

    rows
        128, or 1.
    """

    q: Tensor
    scale: Tensor
    rows: int = FP8_BLOCK

    def dequantize(self) -> Tensor:
        """The weight, float32 ``[N, K]``."""
        return dequantized(self.q, self.scale, (self.rows, FP8_BLOCK))


@dataclass(frozen=True)
class ModuleWeight:
    """The weight of a module of ``epiloq.nn``, as the module's state.

    state
        The module's state dict without the bias.
    values
        Returns the weight that it represents, float32; activations may also be quantised.
    columns
        Number of input features, if it does not follow from the state's shapes.
    """

    module: str
    options: Mapping[str, Any]
    state: Mapping[str, Tensor]
    values: Callable[[], Tensor]
    columns: int | None = field(default=None, kw_only=True)

    def dequantize(self) -> Tensor:
        """The weight, float32."""
        return self.values()

    @property
    def described(self) -> str:
        """Description, for messages."""
        return f"{self.module}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


@dataclass(frozen=True)
class ScaledWeight(ModuleWeight):
    """A weight whose inputs are multiplied by `scale` ``[K]`` first; `inner` is the weight after that.

    `dequantize` gives the product of both.
    """

    inner: QuantizedWeight | ModuleWeight
    scale: Tensor


@dataclass(frozen=True)
class OffsetWeight(ModuleWeight):
    """Integers with a real offset for each group, ``W = scale * q + offset``, which `nn.WeightOnlyLinear` runs."""

    packed: PackedWeight

    @classmethod
    def of(cls, packed: PackedWeight) -> OffsetWeight:
        """The weight of a layer that was packed with offsets."""
        options = {"bits": packed.bits, "group_size": packed.group_size, "zeros": "offset"}
        state = {f"weight_{name}": tensor for name, tensor in packed.state_dict().items()}
        return cls("WeightOnlyLinear", options, state, packed.dequantize, packed)

    @property
    def described(self) -> str:
        """Description, for messages."""
        bits, size = self.packed.bits, self.packed.group_size
        return f"integers of {bits} bits with a real offset for each group of {size}, which the format epiloq can"


Weight: TypeAlias = QuantizedWeight | BlockWeight | ModuleWeight


def on_grid(weight: Weight, name: str) -> QuantizedWeight:
    """Check and return a weight on an integer grid. Raises FormatError for other kinds."""
    if isinstance(weight, BlockWeight):
        raise FormatError(f"{name}: cannot represent FP8 values in blocks, only integers on a grid")
    if isinstance(weight, ModuleWeight):
        raise FormatError(f"{name}: cannot represent {weight.described}")
    if weight.zero is not None and bool((weight.zero >> weight.bits).any()):
        raise FormatError(
            f"{name}: cannot represent a zero point of {1 << weight.bits} (some files of gptq's first version have it):"
            f" it has {weight.bits} bits for one"
        )
    return weight


def exact(scale: Tensor, dtypes: tuple[torch.dtype, ...], name: str) -> torch.dtype:
    """The first of some dtypes that represents every scale exactly. Raises FormatError if none does."""
    for dtype in dtypes:
        if torch.equal(scale.to(dtype).float(), scale.float()):
            return dtype
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise FormatError(f"{name}: cannot represent these scales: some are not {expected} numbers and would be rounded")


def narrowest(scale: Tensor) -> Tensor:
    """The same scales in float16 if it holds them, otherwise in bfloat16 or float32."""
    return scale.to(exact(scale, (torch.float16, torch.bfloat16, torch.float32), "scales"))
