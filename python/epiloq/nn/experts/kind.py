"""Kinds of quantised linear layers whose experts are computed together, and the classes that compute them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.w4a8_layer import STATIC
from epiloq.nn.experts.fp8_block_experts import Fp8BlockExperts
from epiloq.nn.experts.packed_experts import PackedExperts, W4A8Experts
from epiloq.nn.experts.packed_fp4_experts import PackedFp4Experts, W4A8Fp4Experts
from epiloq.nn.experts.row_experts import Experts, Fp8Experts, Int8Experts
from epiloq.nn.fp4_linear import Fp4Linear
from epiloq.nn.fp8_block_linear import Fp8BlockLinear
from epiloq.nn.fp8_linear import Fp8Linear
from epiloq.nn.int8_linear import Int8Linear
from epiloq.nn.w4a8_fp4_linear import W4A8Fp4Linear
from epiloq.nn.w4a8_linear import W4A8Linear
from epiloq.nn.weight_only_linear import WeightOnlyLinear

_Linears: TypeAlias = Fp4Linear | Fp8BlockLinear | Fp8Linear | Int8Linear | W4A8Linear | WeightOnlyLinear


@dataclass(frozen=True)
class Kind:
    """Kind of linear layers that can be computed together: their class, its options, and the class that does so."""

    linear: type[_Linears]
    experts: type[Experts]
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: torch.dtype | None = None
    """The dtype of the layers' biases; None without biases."""

    @classmethod
    def of(cls, layer: nn.Module) -> Kind | None:
        """The kind of a layer; None if no class computes such layers together."""
        if getattr(layer, "scaled_input", False):
            return None
        found, bias = cls._without_bias(layer), getattr(layer, "bias", None)
        return found if found is None or bias is None else replace(found, bias=bias.dtype)

    @classmethod
    def _without_bias(cls, layer: nn.Module) -> Kind | None:
        if isinstance(layer, Fp8BlockLinear):
            return cls(Fp8BlockLinear, Fp8BlockExperts) if layer.rows == FP8_BLOCK else None
        if isinstance(layer, Fp8Linear) and layer.activation != "static" and layer.limit is None:
            return cls(Fp8Linear, Fp8Experts, {"activation": layer.activation, "weight": layer.weight_scales})
        if isinstance(layer, Int8Linear) and layer.activation == "dynamic" and layer.symmetric:
            return cls(Int8Linear, Int8Experts, {"activation": "dynamic", "symmetric": True})
        if isinstance(layer, Fp4Linear):
            fp4 = {"format": layer.format, "reciprocal": layer.reciprocal}
            if isinstance(layer, W4A8Fp4Linear):
                if layer.activation == STATIC:
                    return None
                return cls(W4A8Fp4Linear, W4A8Fp4Experts, fp4 | {"activation": layer.activation})
            return cls(Fp4Linear, PackedFp4Experts, fp4)
        if isinstance(layer, (W4A8Linear, WeightOnlyLinear)) and layer.weight_perm is None:
            options: dict[str, Any] = {"group_size": layer.group_size, "zeros": layer.zeros}
            options["dtype"] = layer.weight_scale.dtype
            if isinstance(layer, W4A8Linear):
                return cls(W4A8Linear, W4A8Experts, options | {"activation": layer.activation})
            return cls(WeightOnlyLinear, PackedExperts, options | {"bits": layer.bits})
        return None

    def stacked(
        self, experts: int, in_features: int, out_features: int, matrices: int, device: torch.device | str | None
    ) -> Experts:
        """Create stacked layers for `experts` experts with `matrices` matrices each, without values."""
        options = self.options if self.experts.IN_PANELS else {}
        if issubclass(self.experts, PackedFp4Experts):
            options = {**options, "matrices": matrices}
        return self.experts(experts, in_features, out_features, **options, device=device)
