"""Fp4Linear: a linear layer with FP4 weights, MXFP4 or NVFP4, and floating-point activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES, PreparedLinear, as_stored, check_choice, check_linear
from epiloq.nn.base.quantized_layer import convert_input
from epiloq.weights.fp4 import FORMATS, divisor_of


class Fp4Linear(PreparedLinear):
    """``y = x W^T + bias`` with W of E2M1 numbers in blocks that share a scale, by `epiloq.fp4_mm`.

    For inference. `x` is ``[.., in_features]`` in float32, float16 or bfloat16, and `y` ``[.., out_features]`` in the
    dtype of `x`.

    format
        "mxfp4" (blocks of 32, scales of E8M0: powers of two) or "nvfp4" (blocks of 16, scales of E4M3, and one scale
        for the whole weight).

    Parameters without gradients, which are the state dict (N = out_features, K = in_features):
        weight_q             uint8 [N, ceil(K / 2)]: an even column in the low half of a byte, an odd one in the high
        weight_scale         uint8 [N, ceil(K / block)], the bytes of E8M0 or E4M3 scales
        weight_global_scale  float32 [1], of "nvfp4": the *reciprocal* of the factor, as compressed-tensors stores it
        bias                 [N], of the layer's float dtype; the only one that ``.to(dtype)`` converts
    Files have `weight_q` under "weight", and scales of E4M3 as float8_e4m3fn.

    Raises ValueError for sizes below 1 and other formats.
    """

    WEIGHT_DTYPE = torch.uint8
    PARTS = ("weight_q", "bias", "weight_scale", "weight_global_scale")

    weight_scale: Tensor
    weight_global_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "nvfp4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        check_choice(self._class(), "format", format, tuple(FORMATS))
        self.format = format
        chosen = FORMATS[format]
        self._hold("weight_q", (out_features, -(-in_features // 2)), (1, 1), torch.uint8, device)
        self._hold(
            "weight_scale", (out_features, -(-in_features // chosen.block_size)), (1, 1), chosen.scale_dtype, device
        )
        self._hold("weight_global_scale", (1,), (1,), torch.float32, device, wanted=chosen.has_global_scale)
        self._hold("bias", (out_features,), (1,), dtype, device, wanted=bias)

    @classmethod
    def check_convertible(cls, linear: nn.Module, **options: Any) -> None:
        """Raise ValueError unless ``from_linear`` can take `linear` as it is."""
        check_linear(cls.__name__, linear)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, *, format: str = "nvfp4") -> Fp4Linear:
        """Round `linear` (left as it is) to the nearest numbers, as `epiloq.fp4_quantize` does.

        Raises ValueError for what is not a float32, float16 or bfloat16 ``nn.Linear`` that is called, and for other
        formats.
        """
        cls.check_convertible(linear)
        weight, has_bias = linear.weight, linear.bias is not None
        layer = cls(
            linear.in_features, linear.out_features, has_bias, format=format, device=weight.device, dtype=weight.dtype
        )
        if not weight.is_meta:
            divisor = divisor_of(weight) if FORMATS[format].has_global_scale else None
            factor = None if divisor is None else divisor.reciprocal()
            codes, scale, _ = epiloq.fp4_quantize(weight.detach(), format, global_scale=factor)
            layer._fill(weight_q=codes, weight_scale=scale, weight_global_scale=divisor, bias=linear.bias)
        return layer.train(linear.training)

    @property
    def padded_in_features(self) -> int:
        return self.in_features

    def _make(self) -> Any:
        codes, bias, scale, divisor = (self._padded(name) for name in self.PARTS)
        assert scale is not None
        factor = None if divisor is None else divisor.reciprocal()
        return codes, bias, scale.view(FORMATS[self.format].scale_dtype), factor

    def file_state(self) -> dict[str, Tensor]:
        state = super().file_state()
        return state | {"weight_scale": state["weight_scale"].view(FORMATS[self.format].scale_dtype)}

    def _fitting(self, name: str, given: Tensor, held: Tensor) -> Tensor | str:
        if name == "weight_scale" and given.dtype in (FORMATS[self.format].scale_dtype, torch.float8_e8m0fnu):
            given = as_stored(given, held.dtype)
        return super()._fitting(name, given, held)

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        codes, _, scale, factor = tensors
        rows = slice(first, last)
        return epiloq.fp4_dequantize(codes[rows], scale[rows], in_features=self.in_features, global_scale=factor)

    def forward(self, x: Tensor) -> Tensor:
        x = convert_input(self, x)
        self._check_width(x)
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{self._class()}: x: expected one of {', '.join(map(str, FLOAT_DTYPES))}, got {x.dtype}")
        return self._call(x, self._made)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        codes, bias, scale, factor = tensors
        bias = None if bias is None else bias.to(x.dtype)
        rows = dense_rows(x.reshape(-1, self.in_features))
        y = epiloq.fp4_mm(rows, codes, scale, bias, global_scale=factor)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.format}"
        )
