"""Input of the next layer: tokens quantised by the kernel of a norm or a gated activation, or that activation alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

import epiloq
from epiloq._torch.calls import direct, is_batch_invariant
from epiloq.nn import Fp8BlockLinear, Fp8Linear, Int8Linear, W4A8Fp4Linear, W4A8Linear
from epiloq.nn.base.prepared_linear import FP8_BLOCK, HALF_DTYPES, K_MULTIPLE
from epiloq.nn.base.w4a8_layer import ACTIVATIONS, GROUPS, W4A8Layer
from epiloq.ops.quantizers.rms_norm_quant import run as norm_and_quantize
from epiloq.ops.quantizers.silu_and_mul import run as run_silu_and_mul
from epiloq.ops.quantizers.silu_and_mul_quant import run as activate_and_quantize
from epiloq.ops.scaled_mm import run as run_scaled_mm
from epiloq.ops.w4a8_mm import FLOAT8_TOKENS
from epiloq.optimize.guards import decodes_in_graph, in_rows, wants_gradient


class Quantized(NamedTuple):
    """Tokens ``[M, K padded]`` and their scales, as described by `measure_of` for a layer."""

    q: Tensor
    scale: Tensor
    leading: torch.Size
    """Dimensions of the tokens before K."""
    dtype: torch.dtype
    """Dtype of the product."""


# Options of ``rms_norm_quant`` and ``silu_and_mul_quant``, in the order in which their ``run`` takes them.
_OPTIONS = ("granularity", "group_size", "ue8m0", "scale_layout", "dtype", "pad_to")
_TOKENS = {dtype: ("token", FP8_BLOCK, False, "row", dtype, K_MULTIPLE) for dtype in (torch.int8, torch.float8_e4m3fn)}
_GROUPS = ("group", FP8_BLOCK, False, "column", torch.float8_e4m3fn, K_MULTIPLE)
_W4A8 = {name: _TOKENS[dtype] for name, dtype in ACTIVATIONS.items()}
_W4A8[GROUPS] = ("group", FP8_BLOCK, False, "row", torch.float8_e4m3fn, K_MULTIPLE)
# Layers whose product is `scaled_mm`.
_SCALED = (Int8Linear, Fp8Linear)


def measure_of(layer: nn.Module) -> tuple[Any, ...] | None:
    """Values of `_OPTIONS` with which a norm or an activation quantises as `layer` does.

    None if the layer quantises in a way that they do not support, or does not quantise.
    """
    if isinstance(layer, Int8Linear) and layer.activation == "dynamic" and layer.symmetric:
        return _TOKENS[torch.int8]
    if isinstance(layer, Fp8Linear) and layer.activation == "token":
        return _TOKENS[torch.float8_e4m3fn]
    if isinstance(layer, W4A8Layer):
        return _W4A8.get(layer.activation)
    if isinstance(layer, Fp8BlockLinear):
        return _GROUPS
    return None


def _quantizer_of(layer: nn.Module) -> dict[str, Any]:
    measure = measure_of(layer)
    assert measure is not None
    return dict(zip(_OPTIONS, measure, strict=True))


def quantises(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer with a result from `measure_of` is to be handed this input quantised.

    Few tokens of a `W4A8Linear` are not, in eager mode, nor on CUDA those of a `W4A8Fp4Linear`: the layer's own call is
    one C++ function, and takes a fraction of the host's time for the operations of a handed product.
    """
    if isinstance(layer, W4A8Layer) and not layer.quantises(x):
        return False
    if not isinstance(layer, (W4A8Linear, W4A8Fp4Linear)):
        return True
    if isinstance(layer, W4A8Fp4Linear) and (not x.is_cuda or layer.activation == GROUPS):
        return True
    return is_compiling() or is_batch_invariant() or x.numel() >= FLOAT8_TOKENS * layer.in_features


def normed(
    norm: Any, x: Tensor, residual: Tensor | None, layer: nn.Module, checked: bool = False
) -> tuple[Quantized, Tensor]:
    """``norm(x + residual)`` quantised as by `layer`, and the sum. `checked`: all are plain, contiguous tensors."""
    weight, eps = norm.weight, norm.variance_epsilon
    if checked:
        measure = measure_of(layer)
        assert measure is not None
        result = norm_and_quantize(x, weight, eps, residual, *measure)
        return Quantized(result[0], result[1], x.shape[:-1], x.dtype), x if residual is None else result[2]
    flat, options = x.reshape(-1, x.shape[-1]), _quantizer_of(layer)
    if residual is None:
        q, scale = epiloq.rms_norm_quant(flat, weight, eps, **options)
        return Quantized(q, scale, x.shape[:-1], x.dtype), x
    q, scale, total = epiloq.rms_norm_quant(flat, weight, eps, residual=residual.reshape(flat.shape), **options)
    return Quantized(q, scale, x.shape[:-1], x.dtype), total.view(x.shape)


def activated(gate_up: Tensor, layer: nn.Module, checked: bool = False) -> Quantized:
    """``silu(gate) * up`` quantised as by `layer`. `checked`: `gate_up` is a plain, contiguous tensor."""
    if checked:
        measure = measure_of(layer)
        assert measure is not None
        q, scale = activate_and_quantize(gate_up, *measure)
    else:
        q, scale = epiloq.silu_and_mul_quant(gate_up.view(-1, gate_up.shape[-1]), **_quantizer_of(layer))
    return Quantized(q, scale, gate_up.shape[:-1], gate_up.dtype)


def gated(activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """``activate(gate) * up``: by one kernel for SiLU, in eager mode and in the graph of a decode step. In other graphs
    inductor fuses torch's operations."""
    if activate is nn.functional.silu:
        if not is_compiling() and direct((gate_up,)) and in_rows(gate_up):
            return run_silu_and_mul(gate_up)
        if decodes_in_graph(gate_up) and not wants_gradient(gate_up):
            return epiloq.silu_and_mul(gate_up.contiguous())
    gate, up = gate_up.chunk(2, -1)
    return activate(gate) * up


def multiply(layer: Any, tokens: Quantized, checked: bool = False) -> Tensor:
    """``forward`` of a layer on quantised tokens: ``[…, out_features]`` of their dtype. `checked`: as for `normed`,
    whose tokens keep their leading dimensions."""
    q, scale, leading, dtype = tokens
    widened = q.is_cuda and dtype not in HALF_DTYPES and not isinstance(layer, Fp8BlockLinear)
    if checked:
        if type(layer) in _SCALED and not widened:
            weight, bias, weight_scale = layer._made[:3]
            if (bias is None or bias.dtype == dtype) and weight.shape[0] == layer.out_features:
                return run_scaled_mm(q, weight.t(), scale, weight_scale, bias, False, True, out_dtype=dtype)
        q, scale = q.flatten(0, -2), scale.flatten(0, -2)
    if isinstance(layer, W4A8Layer):
        return layer.multiply(q, scale, dtype).view(*leading, layer.out_features)
    weight, bias, weight_scale = layer._made[:3]
    out_dtype = torch.bfloat16 if widened else dtype
    bias = None if bias is None else bias.to(out_dtype)
    options: dict[str, Any] = {"out_dtype": out_dtype, "constant_b": True}
    if isinstance(layer, Fp8BlockLinear):
        y = epiloq.groupwise_mm(q, weight.t(), scale, weight_scale.t(), bias, **options)
    else:
        y = epiloq.scaled_mm(q, weight.t(), scale, weight_scale, bias, **options)
    y = y[:, : layer.out_features].contiguous().to(dtype)
    return y.view(*leading, layer.out_features)
