"""The layouts of FP8 layers: ``float-quantized`` of compressed-tensors, DeepSeek's, AutoFP8's, fbgemm's, ModelOpt's.

They differ in the names and the shapes of their scales. The class and the options of the module that runs a layer are
those of its `Description`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epiloq.formats.description import Description
from epiloq.formats.layouts.base import Expected, FormatError, check_multiple, require
from epiloq.formats.weights import BlockWeight, ModuleWeight, Weight, dequantized
from epiloq.nn.base.prepared_linear import FP8_BLOCK

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Names:
    """Names of a layout's scales, and of further tensors that it may have, which are ignored if they are zero.

    scalar
        Whether a scale per tensor has zero dimensions rather than one.
    limit
        The tensor that repeats the limit of activations.
    flat
        Whether scales per channel have one dimension rather than two.
    apart
        Whether scales per block have four dimensions, with a 1 after each of rows and columns.
    exponents
        Whether scales may be the bytes of E8M0, powers of two.
    in_bytes
        Whether scales are written as such bytes.
    """

    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    zeros: tuple[str, ...] = ()
    scalar: bool = False
    limit: str | None = None
    flat: bool = False
    apart: bool = False
    exponents: bool = False
    in_bytes: bool = False

    def parts(self, described: Description) -> frozenset[str]:
        """Every tensor that a layer may have other than its bias, by the last part of its name."""
        inputs = {self.input_scale} if described.is_static else set()
        return frozenset({"weight", self.scale, *inputs, *self.zeros} | ({self.limit} if self.limit else set()))

    def expected(self, described: Description, shape: tuple[int, int]) -> Expected:
        """Dtypes and shapes of the tensors of a layer ``[N, K]``; a scale per tensor may have no dimension or one."""
        inputs: Expected = {self.input_scale: (None, (1,))} if described.is_static else {}
        return {"weight": (FP8, shape), self.scale: (None, _scales(described, shape)), **inputs}


def _scales(described: Description, shape: tuple[int, int]) -> tuple[int, ...]:
    if described.strategy == "tensor":
        return (1,)
    rows, columns = (whole if size == -1 else size for size, whole in zip(described.spans, shape, strict=True))
    return -(-shape[0] // max(rows, 1)), -(-shape[1] // max(columns, 1))


def from_tensors(
    tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int], names: Names
) -> BlockWeight | ModuleWeight:
    """The weight that a layer's tensors represent. Raises FormatError for inconsistent tensors."""
    found = checked(tensors, described, shape, names)
    for name in names.zeros:
        if name in found and bool(found[name].float().any()):
            raise FormatError(f"{name}: expected zeros of symmetric FP8")
    _check_limit(found, described, names)
    weight, scale = found["weight"], found[names.scale].float()
    if names.exponents and not bool(scale.isfinite().all()):
        raise FormatError(f"{names.scale}: expected finite numbers, got NaN or infinity")
    module, options = described.module
    if module == "Fp8BlockLinear":
        assert described.block is not None and described.rows is not None
        rows = described.block[0]
        if rows != described.rows:
            # Expanded to the kernel's blocks, each of which lies in one of the file's blocks.
            first = torch.arange(0, shape[0], described.rows, device=scale.device)
            scale = scale[first // rows].contiguous()
        return BlockWeight(weight, scale, described.rows)
    inputs = {"input_scale": found[names.input_scale].float()} if described.is_static else {}
    if module == "Fp8WeightOnlyLinear":
        state = {"weight": weight, "weight_scale": scale.view(1, 1) if scale.ndim == 1 else scale}
        return ModuleWeight(module, options, state, lambda: dequantized(weight, state["weight_scale"], described.spans))
    state = {"weight": weight, "weight_scale": scale.flatten(), **inputs}
    return ModuleWeight(module, options, state, lambda: weight.float() * state["weight_scale"].view(-1, 1))


def checked(
    tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int], names: Names
) -> dict[str, Tensor]:
    """A layer's tensors, with a scale per tensor as one-dimensional. Raises FormatError for other dtypes and shapes."""
    found = {name: t.reshape(1) if t.ndim == 0 else t for name, t in tensors.items()}
    if names.flat and names.scale in found and found[names.scale].ndim == 1:
        found[names.scale] = found[names.scale].unsqueeze(1)
    if names.apart and names.scale in found and found[names.scale].shape[1::2] == (1, 1):
        found[names.scale] = found[names.scale][:, 0, :, 0]
    if names.exponents and names.scale in found and found[names.scale].dtype == torch.uint8:
        found[names.scale] = found[names.scale].view(torch.float8_e8m0fnu)
    require(found, names.expected(described, shape))
    return found


def _check_limit(tensors: Mapping[str, Tensor], described: Description, names: Names) -> None:
    if names.limit not in tensors:
        return
    limit = described.inputs.limit if described.inputs is not None else None
    found = tensors[str(names.limit)].float().flatten().tolist()
    if found != [limit]:
        raise FormatError(f"{names.limit}: expected {limit}, as config.json has it, got {found}")


def to_tensors(weight: Weight, described: Description, names: Names) -> dict[str, Tensor]:
    """The inverse of `from_tensors`, scales in float32. Raises FormatError for another kind of weight."""
    if isinstance(weight, BlockWeight):
        if described.block is None or described.rows != weight.rows:
            raise FormatError(f"{described.layout}: cannot represent FP8 in blocks of {weight.rows} x {FP8_BLOCK}")
        scale = weight.scale.float()
        if described.block[0] != weight.rows:
            every = torch.arange(0, weight.q.shape[0], described.block[0], device=scale.device) // weight.rows
            scale = scale[every]
        return {"weight": weight.q, names.scale: scale}
    if not isinstance(weight, ModuleWeight) or (weight.module, dict(weight.options)) != (
        described.module[0],
        dict(described.module[1]),
    ):
        actual = weight.described if isinstance(weight, ModuleWeight) else f"integers of {weight.bits} bits"
        raise FormatError(f"{described.layout}: cannot represent {actual}")
    state = weight.state
    shape = _scales(described, (weight.state["weight"].shape[0], weight.state["weight"].shape[1]))
    one = () if names.scalar else (1,)
    stored = one if shape == (1,) else shape[:1] if names.flat else shape
    stored = (shape[0], 1, shape[1], 1) if names.apart else stored
    scale = state["weight_scale"].reshape(stored)
    tensors = {"weight": state["weight"], names.scale: _bytes(scale) if names.in_bytes else scale}
    if "input_scale" in state:
        tensors[names.input_scale] = state["input_scale"].reshape(one)
    return tensors


def _bytes(scale: Tensor) -> Tensor:
    """The bytes of E8M0 of powers of two. Raises FormatError for other numbers."""
    exponents = scale.to(torch.float8_e8m0fnu)
    if not torch.equal(exponents.float(), scale.float()):
        raise FormatError("weight_scale: expected powers of two, which E8M0 can represent")
    return exponents.view(torch.uint8)


def whole_groups(columns: int) -> None:
    """Raise FormatError unless the number of inputs is a multiple of 128, as compressed-tensors' reader requires."""
    check_multiple("in_features", columns, FP8_BLOCK, "compressed-tensors")
