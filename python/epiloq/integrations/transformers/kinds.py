"""How the quantised layers of each kind of checkpoint become epiloq's modules, and how they become tensors again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from epiloq.formats import awq, compressed_tensors, deepseek_fp8, gptq
from epiloq.formats.checkpoint import Checkpoint
from epiloq.formats.layouts import FormatError, Quantization, require
from epiloq.formats.model import MODULES
from epiloq.formats.table import Reader, reader
from epiloq.nn import Fp8BlockLinear, Int8Linear, WeightOnlyLinear
from epiloq.nn.prepared_linear import FP8_BLOCK
from epiloq.quantize.grid import QuantizedWeight

Tensors = Mapping[str, Tensor]
Say = Callable[[QuantizedWeight, Quantization, torch.dtype], dict[str, Tensor]]


@dataclass(frozen=True)
class Kind:
    """The layers of one checkpoint.

    marker
        The tensor that only a quantised layer has, by the last part of its name.
    parts
        All the tensors that it may have, beside a bias.
    build
        ``build(linear, tensors)``: the module in the place of a linear layer, of which only the sizes, the type of
        the weight and the bias count. Raises ValueError for tensors that do not fit.
    tensors
        ``tensors(module, dtype)``: the inverse, for a model of type `dtype`. Raises FormatError for what the format
        cannot say.
    """

    marker: str
    parts: frozenset[str]
    build: Callable[[nn.Linear, Tensors], nn.Module]
    tensors: Callable[[nn.Module, torch.dtype], dict[str, Tensor]]


def kind(checkpoint: Checkpoint) -> Kind:
    """What a config.json says of the layers. Raises FormatError, which names the file, for what epiloq cannot read."""
    config = checkpoint.quantization
    if config is None:
        raise FormatError(f"{checkpoint.folder / 'config.json'}: quantization_config: expected an object, found none")
    method = config.get("quant_method")
    if method == deepseek_fp8.METHOD:
        deepseek_fp8.check_config(checkpoint)
        return Kind(deepseek_fp8.SCALE, frozenset({"weight", deepseek_fp8.SCALE}), _open_fp8, _fp8_tensors)
    try:
        found = reader(config)
        parts, say = _INTEGERS[str(method)](config)
    except ValueError as error:
        raise FormatError(f"{checkpoint.folder / 'config.json'}: {error}") from error
    return Kind(found.marker, parts, partial(_open_integers, found), partial(_integer_tensors, found, say))


def _open_fp8(linear: nn.Linear, tensors: Tensors) -> nn.Module:
    shape = (linear.out_features, linear.in_features)
    blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
    require(tensors, {"weight": (torch.float8_e4m3fn, shape), deepseek_fp8.SCALE: (None, blocks)})
    layer = Fp8BlockLinear(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        device=tensors["weight"].device,
        dtype=linear.weight.dtype,
    )
    layer.load_state_dict(dict(tensors) | ({} if linear.bias is None else {"bias": linear.bias.detach()}))
    return layer


def _fp8_tensors(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    if not isinstance(module, Fp8BlockLinear):
        raise FormatError(f"{deepseek_fp8.METHOD}: expected Fp8BlockLinear, got {type(module).__name__}")
    return {name: tensor for name, tensor in module.state_dict().items() if name != "bias"}


def _compressed_tensors(config: Mapping[str, object]) -> tuple[frozenset[str], Say]:
    parts = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    return frozenset(parts), compressed_tensors.to_tensors


def _gptq(config: Mapping[str, object]) -> tuple[frozenset[str], Say]:
    _, version = gptq.parse(config)
    parts = frozenset(("qweight", "qzeros", "scales", "g_idx"))
    return parts, lambda weight, quantization, dtype: gptq.to_tensors(weight, version)


def _awq(config: Mapping[str, object]) -> tuple[frozenset[str], Say]:
    return frozenset(("qweight", "qzeros", "scales")), lambda weight, quantization, dtype: awq.to_tensors(weight)


# By quant_method: the parts of a layer, and how a weight is said.
_INTEGERS: dict[str, Callable[[Mapping[str, object]], tuple[frozenset[str], Say]]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}


def _open_integers(found: Reader, linear: nn.Linear, tensors: Tensors) -> nn.Module:
    weight = found.from_tensors(tensors, (linear.out_features, linear.in_features))
    return MODULES[found.quantization.activations](linear, weight, found.quantization)


def _integer_tensors(found: Reader, say: Say, module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(module, Int8Linear):
        state = module.state_dict()
        scale_dtype = torch.float32
        weight = QuantizedWeight(state["weight"], state["weight_scale"][:, None], None, found.quantization.grid)
    elif isinstance(module, WeightOnlyLinear):
        q, scale, zero = module.weight.unpack()
        scale_dtype = dtype if torch.equal(scale.to(dtype).to(scale.dtype), scale) else scale.dtype
        zeros = None if zero is None else zero.int()
        weight = QuantizedWeight(q, scale.float(), zeros, found.quantization.grid, module.weight_perm)
    else:
        raise FormatError(f"expected layers as they were opened, got {type(module).__name__}")
    tensors = say(weight, found.quantization, scale_dtype)
    again = found.from_tensors(tensors, cast("tuple[int, int]", tuple(weight.q.shape)))
    if not _same(again, weight):
        raise FormatError("the format of the directory that was opened cannot say this weight")
    return tensors


def _same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    pairs = ((one.q, other.q), (one.scale, other.scale), (one.zero, other.zero), (one.perm, other.perm))
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
