"""The formats of whole checkpoints, as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from epiloq.formats import awq, compressed_tensors, deepseek_fp8, epiloq_modules, gptq
from epiloq.formats.checkpoint import Checkpoint
from epiloq.formats.layouts import FormatError, Quantization, require
from epiloq.formats.weights import BlockWeight, ModuleWeight, Weight, exact, on_grid
from epiloq.nn.prepared_linear import FP8_BLOCK
from epiloq.quantize.grid import QuantizedWeight

Tensors: TypeAlias = Mapping[str, Tensor]
Shape: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """What became of a model's layers, for the configuration that describes them.

    quantised
        Every quantised layer by name, with its class and its options in epiloq's own format.
    ignored
        Linear layers that stay in floating point.
    act_order
        Whether any layer's groups are in activation order.
    """

    quantised: Mapping[str, tuple[str, Mapping[str, Any]]]
    ignored: Sequence[str]
    act_order: bool = False


@dataclass(frozen=True)
class Format:
    """How one format says things. Callables raise FormatError for what it cannot say.

    scale_dtype
        The type to which scales should be rounded, given the model's and how activations are quantised.
    to_tensors
        A layer's tensors by the last part of their names, given how layers are quantised (None: not as integers on a
        grid) and the model's type.
    """

    name: str
    scale_dtype: Callable[[torch.dtype, str | None], torch.dtype]
    to_tensors: Callable[[Weight, Quantization | None, torch.dtype], dict[str, Tensor]]
    config: Callable[[Quantization | None, Written], dict[str, Any]]

    def check(self, quantization: Quantization, shapes: Collection[Shape], dtype: torch.dtype) -> None:
        """Raise FormatError unless layers of these shapes ``[N, K]`` can be written: it is tried with blank ones."""
        for shape in sorted(set(shapes)):
            self.to_tensors(blank(quantization, shape), quantization, dtype)


def blank(quantization: Quantization, shape: Shape) -> QuantizedWeight:
    """A weight of ones on a grid."""
    grid, (rows, columns) = quantization.grid, shape
    groups = -(-columns // grid.length(columns))
    zero = None if grid.symmetric else torch.ones(rows, groups, dtype=torch.int32)
    return QuantizedWeight(torch.ones(rows, columns, dtype=grid.dtype), torch.ones(rows, groups), zero, grid)


@dataclass(frozen=True)
class Reader:
    """How the layers of one checkpoint, or some of them, are read.

    quantization
        How they are quantised; None where that is not to integers on a grid.
    marker
        The tensor that only a quantised layer has, by the last part of its name.
    from_tensors
        What a layer's tensors stand for, given its shape ``[N, K]``. Raises FormatError for tensors that disagree.
    parts
        Every tensor that a layer may have, by the last part of its name, beside its bias; None: `from_tensors` knows.
    build
        The module whose state a layer's tensors are, in the place of a linear layer; None: they are no module's state.
    module
        Without a quantization, the class of the module that runs a layer, and its options, as in epiloq's own format.
    """

    quantization: Quantization | None
    marker: str
    from_tensors: Callable[[Tensors, Shape], Weight]
    parts: frozenset[str] | None
    build: Callable[[nn.Linear, Tensors], nn.Module] | None = None
    module: tuple[str, Mapping[str, Any]] = ("", {})


def _half(dtype: torch.dtype, activations: str | None) -> torch.dtype:
    return torch.float16


def _as_model(dtype: torch.dtype, activations: str | None) -> torch.dtype:
    if activations:
        return torch.float32
    # float16 values are float32 values too, and then other formats can hold them.
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _weights_only(name: str, weight: Weight, quantization: Quantization | None) -> QuantizedWeight:
    """A weight that a format can take which knows float16 scales and nothing of activations."""
    if quantization is not None and quantization.activations:
        raise FormatError(f"{name}: quantised activations cannot be said; use compressed-tensors or epiloq")
    value = on_grid(weight, name)
    exact(value.scale, (torch.float16,), name)
    return value


def _gptq_version(quantization: Quantization) -> str:
    # Asymmetric groups of positive weights have the zero point 0.
    return "gptq" if quantization.grid.symmetric else "gptq_v2"


def _to_gptq(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    value = _weights_only("gptq", weight, quantization)
    return gptq.to_tensors(value, _gptq_version(_grid_of(quantization)))


def _gptq_config(quantization: Quantization | None, written: Written) -> dict[str, Any]:
    described = _grid_of(quantization)
    return gptq.config(described.grid, _gptq_version(described), written.act_order)


def _to_awq(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    value = _weights_only("awq", weight, quantization)
    if value.bits != awq.BITS:
        raise FormatError(f"awq: cannot say {value.bits} bits, only 4 bits")
    if value.perm is not None:
        raise FormatError("awq: cannot say groups in activation order (act-order)")
    return awq.to_tensors(value)


def _to_compressed(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    value, described = on_grid(weight, "compressed-tensors"), _grid_of(quantization)
    # Its reader multiplies in the scale's type, then rounds to the model's.
    holds = exact(value.scale, (dtype, torch.float32), "compressed-tensors")
    return compressed_tensors.to_tensors(value, described, holds)


def _to_blocks(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(weight, BlockWeight):
        return {"weight": weight.q, deepseek_fp8.SCALE: weight.scale.float()}
    said = weight.described if isinstance(weight, ModuleWeight) else f"integers of {weight.bits} bits"
    raise FormatError(f"deepseek-fp8: cannot say {said}, only FP8 in blocks of {FP8_BLOCK} x {FP8_BLOCK}")


def _to_epiloq(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    return epiloq_modules.state_of(weight, quantization)


def _epiloq_config(quantization: Quantization | None, written: Written) -> dict[str, Any]:
    return epiloq_modules.config(epiloq_modules.groups_of(written.quantised))


def _grid_of(quantization: Quantization | None) -> Quantization:
    assert quantization is not None  # on_grid refused everything else.
    return quantization


_TABLE = (
    Format(
        "compressed-tensors",
        _as_model,
        _to_compressed,
        lambda quantization, written: compressed_tensors.config(_grid_of(quantization), written.ignored),
    ),
    Format("gptq", _half, _to_gptq, _gptq_config),
    Format(
        "awq",
        _half,
        _to_awq,
        lambda quantization, written: awq.config(_grid_of(quantization).grid, written.ignored),
    ),
    Format(
        "deepseek-fp8",
        _as_model,
        _to_blocks,
        lambda quantization, written: deepseek_fp8.config(written.ignored),
    ),
    Format("epiloq", _as_model, _to_epiloq, _epiloq_config),
)
FORMATS = {layout.name: layout for layout in _TABLE}
# The names that config.json has for them.
METHODS = {name: name for name in FORMATS} | {deepseek_fp8.METHOD: "deepseek-fp8"}


def reader(config: Mapping[str, Any]) -> Reader:
    """The reader for a ``quantization_config`` of layers that are all alike, integers on a grid or FP8 in blocks.

    Raises FormatError for one that epiloq does not read.
    """
    method = config.get("quant_method")
    if method == "compressed-tensors":
        found = compressed_tensors.parse(config)
        return Reader(
            found,
            "weight_scale",
            lambda t, shape: compressed_tensors.from_tensors(t, found, shape),
            compressed_tensors.parts(found),
        )
    if method == "gptq":
        described, version = gptq.parse(config)
        return Reader(
            described,
            "qweight",
            lambda t, shape: gptq.from_tensors(t, described.grid, version, shape),
            frozenset({"qweight", "qzeros", "scales", "g_idx"}),
        )
    if method == "awq":
        said = awq.parse(config)
        return Reader(
            said,
            "qweight",
            lambda t, shape: awq.from_tensors(t, said.grid, shape),
            frozenset({"qweight", "qzeros", "scales"}),
        )
    if method == deepseek_fp8.METHOD:
        deepseek_fp8.parse(config)
        parts = frozenset({"weight", deepseek_fp8.SCALE})
        return Reader(None, deepseek_fp8.SCALE, _from_blocks, parts, module=("Fp8BlockLinear", {}))
    raise FormatError(f"quantization_config: quant_method: expected one of {', '.join(METHODS)}, got {method!r}")


def readers(checkpoint: Checkpoint) -> dict[str, Reader]:
    """How each quantised layer of a checkpoint is read, by name; layers that are alike share theirs.

    Raises FormatError for a configuration that epiloq does not read, or no quantised layers.
    """
    found = checkpoint.quantization or {}
    try:
        if found.get("quant_method") == epiloq_modules.METHOD:
            return {
                layer: shared
                for group in epiloq_modules.parse(found)
                for shared in [_module_reader(group)]
                for layer in group.layers
            }
        shared = reader(found)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{checkpoint.folder / 'config.json'}: {error}") from error
    end = f".{shared.marker}"
    names = [name.removesuffix(end) for name in checkpoint.files if name.endswith(end)]
    layers = {name: _one_layer(shared, name) for name in names}
    if not layers:
        raise FormatError(f"{checkpoint.folder}: expected quantised linear layers, found no {shared.marker}")
    return layers


def _one_layer(shared: Reader, name: str) -> Reader:
    """The reader of a layer among others that are not quite alike."""
    if shared.quantization is None or shared.quantization.activations != "int8-static":
        return shared
    own = shared.quantization.of(name)

    def read(tensors: Tensors, shape: Shape) -> Weight:
        if (own.activations == "int8-static") != ("input_scale" in tensors):
            wanted = "a tensor, found none" if own.activations == "int8-static" else "none with dynamic activations"
            raise FormatError(f"input_scale: expected {wanted}")
        return shared.from_tensors(tensors, shape)

    return replace(shared, quantization=own, from_tensors=read)


def _from_blocks(tensors: Tensors, shape: Shape) -> Weight:
    blocks = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
    require(tensors, {"weight": (torch.float8_e4m3fn, shape), deepseek_fp8.SCALE: (None, blocks)})
    return BlockWeight(tensors["weight"], tensors[deepseek_fp8.SCALE])


def _from_module(group: epiloq_modules.Group, tensors: Tensors, shape: Shape) -> Weight:
    outline = nn.Linear(shape[1], shape[0], bias=False, device="meta", dtype=torch.float32)
    module = group.kind.build(outline, group.options, tensors, torch.device("cpu"))
    return group.kind.weight(module, group.options)


def _module_reader(group: epiloq_modules.Group) -> Reader:
    """A module refuses by itself tensors that it does not take, so all are read."""
    kind, options = group.kind, group.options
    return Reader(
        kind.described(options),
        "",
        partial(_from_module, group),
        None,
        lambda linear, tensors: kind.build(linear, options, tensors, linear.weight.device),
        (group.module, options),
    )
