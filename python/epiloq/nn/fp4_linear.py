"""Fp4Linear: a linear layer with FP4 weights, MXFP4 or NVFP4, and floating-point activations."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

import epiloq
from epiloq import _core
from epiloq.nn.base.dense_rows import dense_rows
from epiloq.nn.base.leaf import as_leaf, is_symbolic
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES, PreparedLinear, check_choice
from epiloq.nn.base.scaled_input import SCALE, begin, scaled_input
from epiloq.weights.fp4 import FORMATS, divisor_of
from epiloq.weights.packed_fp4_weight import (
    PackedFp4Weight,
    pack_codes,
    packed_scales,
    shapes_of_parts,
    unpacked_codes,
    unpacked_scales,
    without_codes_of_zeros,
)

_Layer = TypeVar("_Layer", bound="Fp4Linear")


def packed_part(name: str, given: Tensor, format: str, n: int, k: int) -> Tensor | str | None:
    """`weight_q` or `weight_scale` of a layer ``[n, k]`` from the file's tensor, or an error text. None if the tensor
    is not in the files' form.
    """
    chosen = FORMATS[format]
    if name == "weight_q" and given.dtype == torch.uint8 and given.shape == (n, -(-k // 2)):
        return pack_codes(given, k)
    if name != "weight_scale" or given.shape != (n, -(-k // chosen.block_size)):
        return None
    kinds = (torch.uint8, chosen.scale_dtype, torch.float8_e8m0fnu)
    if given.dtype not in (kinds[1:] if chosen.has_global_scale else kinds):
        return f"expected {chosen.scale_dtype} {list(given.shape)}, got {given.dtype}"
    try:
        return packed_scales(given, chosen, k)
    except ValueError as error:
        return str(error)


class Fp4Linear(PreparedLinear):
    """``y = x W^T + bias`` with E2M1 weights in blocks that share a scale; uses `epiloq.packed_fp4_mm`.

    `x` is ``[…, in_features]`` in float32, float16 or bfloat16, and `y` ``[…, out_features]`` in the
    dtype of `x`.

    format
        "mxfp4" (blocks of 32, E8M0 scales: powers of two) or "nvfp4" (blocks of 16, E4M3 scales, and one scale for
        the whole weight).
    reciprocal
        Whether the scale for the whole weight is stored as the *reciprocal* of the global scale, by which
        numbers are multiplied, as compressed-tensors does, or as it is, as ModelOpt does.
    scaled_input
        Whether `x` is first multiplied by `pre_quant_scale`, in float32 and rounded to the dtype of `x`.

    Parameters without gradients, which form the state dict:
        weight_q, weight_scale  uint8, as in ``epiloq.PackedFp4Weight``
        weight_global_scale     float32 [1], for "nvfp4": the global scale or, by default, its reciprocal
        bias                    [N], of the layer's float dtype; the only parameter that ``.to(dtype)`` converts
        pre_quant_scale         [K], floating point, with `scaled_input`: ones at first
    Files store, and loading also accepts, the rows in order (N = out_features, K = in_features): "weight", uint8
    ``[N, ceil(K / 2)]`` with an even column in the low half of a byte, and "weight_scale", uint8 or float8_e4m3fn
    ``[N, ceil(K / block)]``.

    Raises ValueError for sizes below 1, other formats, and negative scales.
    """

    WEIGHT_DTYPE = torch.uint8
    PARTS: ClassVar[tuple[str, ...]] = ("weight_q", "bias", "weight_scale", "weight_global_scale")

    weight_scale: Tensor
    weight_global_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "nvfp4",
        reciprocal: bool = True,
        scaled_input: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, dtype)
        check_choice(self._class(), "format", format, tuple(FORMATS))
        self.format, self.reciprocal = format, reciprocal
        for name, shape in shapes_of_parts(format, out_features, in_features).items():
            self._hold(f"weight_{name}", shape, (1,) * len(shape), torch.uint8, device)
        chosen = FORMATS[format]
        self._hold("weight_global_scale", (1,), (1,), torch.float32, device, wanted=chosen.has_global_scale)
        self._hold("bias", (out_features,), (1,), dtype, device, wanted=bias)
        self._store(SCALE, None)
        if scaled_input:
            begin(self, in_features, device)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, *, format: str = "nvfp4", divisor: Tensor | None = None) -> Fp4Linear:
        """Round `linear` (which is not changed) to the nearest numbers, as `epiloq.fp4_quantize` does.

        `divisor`, float32 ``[1]``, for "nvfp4": the reciprocal of the global scale, for layers that share one; by
        default it is computed for the layer.

        Raises ValueError unless `linear` is a float32, float16 or bfloat16 ``nn.Linear`` that is called, and for other
        formats.
        """
        return cls._rounded(linear, format, divisor)

    @classmethod
    def _rounded(cls: type[_Layer], linear: nn.Linear, format: str, divisor: Tensor | None, **options: Any) -> _Layer:
        cls.check_convertible(linear)
        weight, layer = linear.weight, cls._like(linear, format=format, **options)
        if not weight.is_meta:
            if not FORMATS[format].has_global_scale:
                divisor = None
            elif divisor is None:
                divisor = divisor_of(weight)
            global_scale = None if divisor is None else divisor.reciprocal()
            codes, scale, _ = epiloq.fp4_quantize(weight.detach(), format, global_scale=global_scale)
            packed = epiloq.pack_fp4_weight(codes, scale, in_features=layer.in_features)
            layer._fill(weight_q=packed.q, weight_scale=packed.scale, weight_global_scale=divisor, bias=linear.bias)
        return layer

    @property
    def scaled_input(self) -> bool:
        """Whether inputs are multiplied by `pre_quant_scale`."""
        return self._stored(SCALE) is not None

    def forward(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return as_leaf(self, input)
        if self._parameters.get(SCALE, self) is not None:  # also where it is an attribute instead
            input = scaled_input(self, input)
        if not is_dynamo_compiling() and (y := _core.fp4_linear(self, input)) is not None:
            return y
        return super().forward(input)

    @property
    def padded_in_features(self) -> int:
        return self.in_features

    @property
    def packed(self) -> PackedFp4Weight:
        """The weight as a value, which shares the parameters' memory where possible."""
        return self._value(*self._made)

    def _make(self) -> Any:
        codes, bias, scale, global_scale = (self._padded(name) for name in Fp4Linear.PARTS)
        assert codes is not None and scale is not None
        codes = without_codes_of_zeros(codes, scale, FORMATS[self.format])
        return (
            codes,
            bias,
            scale,
            global_scale.reciprocal() if global_scale is not None and self.reciprocal else global_scale,
        )

    def _value(self, *tensors: Any) -> PackedFp4Weight:
        codes, _, scale, global_scale = tensors[:4]
        return PackedFp4Weight(codes, scale, global_scale, self.format, self.out_features, self.in_features)

    def file_state(self) -> dict[str, Tensor]:
        state = super().file_state()
        state["weight"] = unpacked_codes(state["weight"], self.out_features, self.in_features)
        sizes = self.out_features, self.in_features
        state["weight_scale"] = unpacked_scales(state["weight_scale"], self.format, *sizes)
        return state

    def _fitting(self, name: str, given: Tensor, held: Tensor) -> Tensor | str:
        if name == SCALE and given.shape == held.shape and given.dtype in FLOAT_DTYPES:
            self._store(name, torch.empty_like(held, dtype=given.dtype))
            return given
        found = packed_part(name, given, self.format, self.out_features, self.in_features)
        return super()._fitting(name, given, held) if found is None else found

    def _rows(self, first: int, last: int, *tensors: Any) -> Tensor:
        return self._value(*tensors).row_slice(first, last).dequantize()

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        bias = None if tensors[1] is None else tensors[1].to(x.dtype)
        rows = dense_rows(x.reshape(-1, self.in_features))
        y = epiloq.packed_fp4_mm(rows, self._value(*tensors), bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        reciprocal = "" if self.reciprocal else ", reciprocal=False"
        scaled = ", scaled_input=True" if self.scaled_input else ""
        return f"{super().extra_repr()}, format={self.format}{reciprocal}{scaled}"
