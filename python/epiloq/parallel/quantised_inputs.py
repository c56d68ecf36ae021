"""All-gather of quantised tokens: bytes and scales are sent instead of 16-bit numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from epiloq.nn import Fp8Linear, Int8Linear, W4A8Fp4Linear, W4A8Linear
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.prepared_linear import kernel_dtype
from epiloq.nn.base.quantized_layer import convert_input
from epiloq.nn.base.w4a8_layer import STATIC, W4A8Layer

_NAME = "epiloq.parallel: quantise_first"
# torch 2.13 renamed the function, and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Tokens(NamedTuple):
    """Bytes ``[M, K padded]``, and per token a scale float32 ``[M, 1]`` (or one per group, ``[M, groups]``) and a zero
    point int32 ``[M, 1]``; None if static."""

    q: Tensor
    scale: Tensor | None
    zero: Tensor | None

    def gathered(self, mesh: DeviceMesh) -> _Tokens:
        """Gather the tokens of all ranks, which have the same number each, in one message."""
        parts = [None if t is None else t.contiguous().view(torch.uint8) for t in self]
        own = torch.cat([part for part in parts if part is not None], 1)
        whole = own.new_empty((mesh.size() * own.shape[0], own.shape[1]))
        _all_gather(whole, own, group=mesh.get_group())
        found: list[Tensor | None] = []
        begin = 0
        for part, like in zip(parts, self, strict=True):
            if part is None or like is None:
                found.append(None)
                continue
            found.append(whole[:, begin : begin + part.shape[1]].contiguous().view(like.dtype))
            begin += part.shape[1]
        q, scale, zero = found
        assert q is not None
        return _Tokens(q, scale, zero)


def _int8(layer: Int8Linear, x: Tensor) -> _Tokens:
    q, scale, azp = layer._quantised(x, *layer._made)
    return _Tokens(q, None if layer.activation == "static" else scale, azp)


def _int8_product(layer: Int8Linear, tokens: _Tokens, dtype: torch.dtype) -> Tensor:
    scale = tokens.scale if tokens.scale is not None else layer._made[-2]
    return layer._product(tokens.q, scale, tokens.zero, dtype, *layer._made)


def _fp8(layer: Fp8Linear, x: Tensor) -> _Tokens:
    q, scale = layer._quantised(layer._limited(x), *layer._made)
    return _Tokens(q, scale if layer.activation == "token" else None, None)


def _fp8_product(layer: Fp8Linear, tokens: _Tokens, dtype: torch.dtype) -> Tensor:
    scale = tokens.scale if tokens.scale is not None else layer._made[-1]
    return layer._product(tokens.q, scale, dtype, *layer._made)


def _w4a8(layer: W4A8Layer, x: Tensor) -> _Tokens:
    q, scale = layer.quantise(x)
    return _Tokens(q, None if layer.activation == STATIC else scale, None)


def _w4a8_product(layer: W4A8Layer, tokens: _Tokens, dtype: torch.dtype) -> Tensor:
    scale = tokens.scale if tokens.scale is not None else cast(Tensor, layer._parts()[-1])
    return layer.multiply(tokens.q, scale, dtype)


_Kind = tuple[Callable[[Any, Tensor], _Tokens], Callable[[Any, _Tokens, torch.dtype], Tensor]]
_KINDS: Mapping[type[nn.Module], _Kind] = {
    Int8Linear: (_int8, _int8_product),
    Fp8Linear: (_fp8, _fp8_product),
    W4A8Linear: (_w4a8, _w4a8_product),
    W4A8Fp4Linear: (_w4a8, _w4a8_product),
}


def check_takes(layer: nn.Module) -> None:
    """Raise ValueError for layers that do not quantise tokens independently."""
    if type(layer) not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise ValueError(f"{_NAME}: expected one of {known}, got {type(layer).__name__}")
    if isinstance(layer, Fp8Linear) and layer.activation == "tensor":
        raise ValueError(f"{_NAME}: expected activations with a scale per token or a static one, got one per tensor")


def gathered_products(layer: Any, dim: int, mesh: DeviceMesh) -> None:
    """Make a layer accept inputs sharded evenly along the token dimension `dim`, and return all tokens' product."""
    check_takes(layer)
    quantise, multiply = _KINDS[type(layer)]

    def forward(input: Tensor) -> Tensor:
        x = convert_input(layer, input)
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{_NAME}: gradients: expected none, because integers are sent")
        first = x.movedim(dim, 0)
        layer._check_width(first)
        tokens = quantise(layer, dense_rows(first.reshape(-1, layer.in_features))).gathered(mesh)
        y = multiply(layer, tokens, kernel_dtype(x, x.dtype))[:, : layer.out_features].to(x.dtype)
        return y.reshape(-1, *first.shape[1:-1], layer.out_features).movedim(0, dim).contiguous()

    layer.forward = forward
