"""Table of checkpoint formats: what each can represent, and how it is written. `readers` is for reading."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats import deepseek_fp8, epiloq_modules
from epiloq.formats.configs import awq as awq_config
from epiloq.formats.configs import compressed_tensors as compressed_config
from epiloq.formats.configs import fp8
from epiloq.formats.configs import gptq as gptq_config
from epiloq.formats.configs import modelopt as modelopt_config
from epiloq.formats.description import INPUTS_OF_FP4, Description, Inputs, of_grid
from epiloq.formats.layout_table import LAYOUTS
from epiloq.formats.layouts import awq, compressed_tensors, float8, gptq
from epiloq.formats.layouts.base import FormatError, Quantization
from epiloq.formats.weights import BlockWeight, ModuleWeight, ScaledWeight, Weight, exact, on_grid
from epiloq.models.parent_reads import initialisation_reads
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.w4a8_layer import STATIC
from epiloq.weights.fp4 import FORMATS as FP4_FORMATS
from epiloq.weights.grid import QuantizedWeight


@dataclass(frozen=True)
class Written:
    """The quantised layers of a model, for the configuration that describes them.

    quantised
        Every quantised layer by name, with its class and its options in epiloq's own format.
    ignored
        Linear layers that stay in floating point, by all names that a reader may match.
    described
        Descriptions of every quantised layer, by all names that a reader may match.
    blocks
        The shapes ``[N, K]`` of layers in FP8 blocks.
    tables
        Names of quantised embeddings among them, in the model and in the files.
    shared
        Layers without a weight of their own, and the embeddings whose weights they share.
    model
        The model to which they belong, or None where only layers are judged.
    """

    quantised: Mapping[str, tuple[str, Mapping[str, Any]]]
    ignored: Sequence[str]
    described: Mapping[str, Description]
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tables: Collection[str] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    model: nn.Module | None = None


@dataclass(frozen=True)
class Format:
    """A checkpoint format. Callables raise FormatError for what it cannot represent.

    scale_dtype
        The type to which scales should be rounded, given the model's and how layers are quantised.
    widens
        Whether a layer may have float32 scales instead.
    to_tensors
        A layer's tensors by the last part of their names, given how layers are quantised (None: not on an integer
        grid) and the model's type.
    config
        The ``quantization_config``.
    describe
        The `Description` of a weight in this format; None in epiloq's own.
    conv1d
        Whether readers support GPT-2's ``Conv1D`` as a linear layer.
    vocabulary
        Whether readers support a quantised output head and a quantised embedding.
    shares
        Whether a head tied to a quantised embedding has no tensors of its own.
    """

    name: str
    scale_dtype: Callable[[torch.dtype, Quantization | None], torch.dtype]
    to_tensors: Callable[[Weight, Quantization | None, torch.dtype], dict[str, Tensor]]
    config: Callable[[Written], dict[str, Any]]
    describe: Callable[[Weight, Quantization | None], Description] | None = None
    conv1d: bool = False
    widens: bool = False
    vocabulary: bool = False
    shares: bool = False


def blank(quantization: Quantization, shape: tuple[int, int], ordered: bool = False) -> QuantizedWeight:
    """A weight of ones on a grid, optionally with groups in activation order."""
    grid, (rows, columns) = quantization.grid, shape
    groups = -(-columns // grid.length(columns))
    zero = None if grid.symmetric else torch.ones(rows, groups, dtype=torch.int32)
    perm = torch.arange(columns) if ordered else None
    return QuantizedWeight(torch.ones(rows, columns, dtype=grid.dtype), torch.ones(rows, groups), zero, grid, perm)


def _half(dtype: torch.dtype, quantization: Quantization | None) -> torch.dtype:
    return torch.float16


def _as_model(dtype: torch.dtype, quantization: Quantization | None) -> torch.dtype:
    if quantization is not None and quantization.activations and not quantization.w4a8:
        return torch.float32
    # float16 values are exact in float32, which other formats support.
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _weights_only(name: str, weight: Weight, quantization: Quantization | None) -> QuantizedWeight:
    """Check and return a weight for a format with float16 scales and without activations."""
    if quantization is not None and quantization.activations:
        raise FormatError(f"{name}: cannot represent quantised activations; use compressed-tensors or epiloq")
    value = on_grid(weight, name)
    exact(value.scale, (torch.float16,), name)
    return value


def _describe_gptq(weight: Weight, quantization: Quantization | None) -> Description:
    described = _grid_of(quantization)
    # Asymmetric groups of positive weights have zero point 0, which version 1 cannot represent.
    version = "gptq" if described.grid.symmetric else "gptq_v2"
    return of_grid(described, version, isinstance(weight, QuantizedWeight) and weight.perm is not None)


def _to_gptq(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    value = _weights_only("gptq", weight, quantization)
    return gptq.to_tensors(value, _describe_gptq(value, quantization).layout)


def _describe_compressed(weight: Weight, quantization: Quantization | None) -> Description:
    if isinstance(weight, (BlockWeight, ModuleWeight)):
        return _describe_float8(weight)
    on_grid(weight, "compressed-tensors")
    described = _grid_of(quantization)
    # As vLLM reads them: packed words with FP8 activations, bytes with int8.
    in_bytes = described.activations not in (None, "fp8")
    return of_grid(described, compressed_tensors.INTEGER if in_bytes else compressed_tensors.PACKED)


def _describe_float8(weight: BlockWeight | ModuleWeight, name: str = "compressed-tensors") -> Description:
    """FP8 and FP4 weights of a module that `Description.module` names, for the format `name`."""
    if isinstance(weight, ScaledWeight):
        raise FormatError(f"{name}: cannot represent inputs that are scaled first (pre_quant_scale)")
    layout, group = compressed_config.FLOAT, Inputs("fp8", "group", group_size=FP8_BLOCK)
    if isinstance(weight, BlockWeight):
        return Description(layout, "fp8", strategy="block", block=(weight.rows, FP8_BLOCK), inputs=group)
    if weight.module in ("Fp4Linear", "W4A8Fp4Linear"):
        chosen = FP4_FORMATS[weight.options["format"]]
        layout = compressed_config.NVFP4 if chosen.has_global_scale else compressed_config.MXFP4
        inputs = INPUTS_OF_FP4.get(weight.options.get("activation", ""))
        return Description(layout, "fp4", 4, "group", chosen.block_size, inputs=inputs)
    if weight.module == "Fp8Linear" and weight.options.get("limit") is None:
        activation = weight.options["activation"]
        inputs = Inputs("fp8", "token" if activation == "token" else "tensor", dynamic=activation != "static")
        return Description(layout, "fp8", strategy=weight.options["weight"], inputs=inputs)
    if weight.module == "Fp8WeightOnlyLinear":
        rows, columns = block = tuple(weight.options["block"])
        strategy = {(-1, -1): "tensor", (1, -1): "channel"}.get(block, "block")
        if min(block) > 0 or strategy != "block":
            return Description(layout, "fp8", strategy=strategy, block=(rows, columns) if strategy == "block" else None)
    raise FormatError(f"{name}: cannot represent {weight.described}")


def _to_compressed(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(weight, BlockWeight):
        float8.whole_groups(weight.q.shape[1])
    if isinstance(weight, QuantizedWeight) and weight.perm is not None:
        # The package's own reader ignores it since 0.20.
        raise FormatError("compressed-tensors: cannot represent groups in activation order; use static groups")
    described = _describe_compressed(weight, quantization)
    return LAYOUTS[described.layout].to_tensors(weight, described, dtype)


_EXPERT = re.compile(r"\.experts\.\d+\.")


def _compressed_config(written: Written) -> dict[str, Any]:
    global_scales = {name: one for name, one in written.described.items() if one.layout == compressed_config.NVFP4}
    if any(described.inputs is not None for described in global_scales.values()):
        warnings.warn(
            "vLLM refuses NVFP4 weights with 8-bit activations (transformers and epiloq read them): use w4a16-nvfp4 "
            "for it, or w4a8-mxfp4-fp8, whose weights it reads",
            stacklevel=4,
        )
    if any(map(_EXPERT.search, global_scales)):
        warnings.warn(
            "transformers itself leaves out the global scales of experts in NVFP4 and computes wrong results without "
            "an error (epiloq's integration does not): use w4a16-mxfp4 there",
            stacklevel=4,
        )
    packed = [name for name, one in written.described.items() if one.layout in compressed_config.WITHOUT_WEIGHT]
    reads = written.model is not None and bool(packed) and initialisation_reads(written.model, packed)
    config = compressed_config.config(written.described, written.ignored, written.tables, restored=reads)
    if reads and not config.get("dequantize"):
        warnings.warn(
            "transformers without epiloq's integration cannot open several groups of this model, because it "
            "initialises packed layers as if they had weights: use one scheme for all layers there",
            stacklevel=4,
        )
    return config


def _describe_blocks(weight: Weight, quantization: Quantization | None) -> Description:
    inputs = Inputs("fp8", "group", group_size=FP8_BLOCK)
    return Description(fp8.BLOCKS, "fp8", strategy="block", block=(FP8_BLOCK, FP8_BLOCK), inputs=inputs)


def _to_blocks(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(weight, BlockWeight) and weight.rows == FP8_BLOCK:
        return {"weight": weight.q, deepseek_fp8.SCALE: weight.scale.float()}
    if isinstance(weight, BlockWeight):
        actual = f"FP8 in blocks of {weight.rows} x {FP8_BLOCK}"
    else:
        actual = weight.described if isinstance(weight, ModuleWeight) else f"integers of {weight.bits} bits"
    raise FormatError(
        f"deepseek-fp8: cannot represent {actual}, only FP8 in blocks of {FP8_BLOCK} x {FP8_BLOCK}, activations too"
    )


def _blocks_config(written: Written) -> dict[str, Any]:
    deepseek_fp8.warn_of(written.blocks)
    return fp8.config(written.ignored)


# Key: granularity of weight scales, of activation scales, and whether the latter are computed at run time.
_MODELOPT_FP8 = {
    ("tensor", "tensor", False): modelopt_config.TENSORS,
    ("channel", "token", True): modelopt_config.ROWS,
}


def _describe_modelopt(weight: Weight, quantization: Quantization | None) -> Description:
    if not isinstance(weight, ModuleWeight):
        actual = "FP8 values in blocks" if isinstance(weight, BlockWeight) else f"integers of {weight.bits} bits"
        raise FormatError(f"modelopt: cannot represent {actual}, only NVFP4, and FP8 per tensor, channel or block")
    described = _describe_float8(weight, "modelopt")
    inputs = described.inputs
    if described.layout == compressed_config.NVFP4 and inputs in (None, INPUTS_OF_FP4[STATIC]):
        return replace(described, layout=modelopt_config.NVFP4)
    if inputs is None and described.block == (FP8_BLOCK, FP8_BLOCK):
        return replace(described, layout=modelopt_config.BLOCKS)
    if inputs is not None and (described.strategy, inputs.strategy, inputs.dynamic) in _MODELOPT_FP8:
        return replace(described, layout=_MODELOPT_FP8[described.strategy, inputs.strategy, inputs.dynamic])
    raise FormatError(f"modelopt: cannot represent {weight.described}")


def _to_modelopt(weight: Weight, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Tensor]:
    described = _describe_modelopt(weight, quantization)
    return LAYOUTS[described.layout].to_tensors(weight, described, dtype)


def _grid_of(quantization: Quantization | None) -> Quantization:
    assert quantization is not None  # `on_grid` refused everything else
    return quantization


# In order of preference.
_TABLE = (
    Format("deepseek-fp8", _as_model, _to_blocks, _blocks_config, _describe_blocks),
    Format(
        "compressed-tensors",
        _as_model,
        _to_compressed,
        _compressed_config,
        _describe_compressed,
        widens=True,
        vocabulary=True,
    ),
    Format(
        "gptq",
        _half,
        _to_gptq,
        lambda written: gptq_config.config(written.described, written.ignored),
        _describe_gptq,
        conv1d=True,
    ),
    Format(
        "awq",
        _half,
        lambda weight, quantization, dtype: awq.to_tensors(_weights_only("awq", weight, quantization)),
        lambda written: awq_config.config(written.described, written.ignored),
        lambda weight, quantization: replace(of_grid(_grid_of(quantization), "gemm"), symmetric=False),
    ),
    Format(
        modelopt_config.METHOD,
        _as_model,
        _to_modelopt,
        lambda written: modelopt_config.config(written.described, written.ignored),
        _describe_modelopt,
    ),
    Format(
        "epiloq",
        _as_model,
        lambda weight, quantization, dtype: epiloq_modules.state_of(weight, quantization),
        lambda written: epiloq_modules.config(epiloq_modules.groups_of(written.quantised), written.shared),
        conv1d=True,
        widens=True,
        vocabulary=True,
        shares=True,
    ),
)
FORMATS = {layout.name: layout for layout in _TABLE}
# Names of the formats in config.json.
METHODS = {name: name for name in FORMATS} | {fp8.METHOD: "deepseek-fp8"}
METHODS |= dict.fromkeys(modelopt_config.METHODS, modelopt_config.METHOD)
