"""Int8Conv2d: a convolution with int8 weights and activations, and optionally int8 output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

import epiloq
from epiloq._torch.calls import is_transformed
from epiloq.nn.base.quantized_layer import FILES_SAY_WEIGHT
from epiloq.nn.convolutions.conv2d import Clamp, QuantizedConv2d, check_conv2d, padding_of
from epiloq.ops.convolutions.conv2d import Padding, Pair
from epiloq.ops.convolutions.conv2d_int8 import convolve
from epiloq.weights.prepared_int8_weight import (
    Int8Parameters,
    PreparedInt8Weight,
    Quantizer,
    derive,
    nearest_int8,
    quantizer_of,
)

# Largest number of products in a sum that cannot overflow int32; see include/epiloq/conv2d_int8.h.
_MAX_TERMS = (2**31 - 1) // (255 * 128)


class Int8Conv2d(QuantizedConv2d):
    """``y = clamp(conv2d(x, W) + bias)`` with int8 weights (one scale per output channel) and int8 x (one scale).

    `x` is ``[B, in_channels, H, W]`` in float32, float16 or bfloat16, which is then quantised, or int8 that was
    quantised with `input_scale` and `input_zero_point`. `y` is ``[B, out_channels, P, Q]`` in channels_last memory:
    int8 if the layer has an output quantiser, otherwise of x's dtype (`dtype` for int8 `x`). See
    ``epiloq.conv2d_int8``.

    Parameters without gradients, which form the state dict (C = in_channels / groups):
        weight_q            int8 [out_channels, Kh, Kw, C]
        weight_scale        float32 [out_channels]
        bias float32 [out_channels], not quantised
        input_scale         float32 [1]
        input_zero_point    int32 [1] in [-128, 127]
        output_scale float32 [1], only with an output quantiser
        output_zero_point   int32 [1]
    None of them follows ``.to(dtype)``. Other tensors for the kernels are derived from these before the next call.
    `set_quantizers` changes the scales and does not need the float weight. `weight` is the dequantised weight
    ``[out_channels, C, Kh, Kw]``, computed on access.

    Raises ValueError for invalid sizes, or sums of more than 65793 products, which could overflow int32.
    """

    weight_scale: Tensor
    RENAMED = FILES_SAY_WEIGHT
    # Float tensors do not follow casts, since they define the values of the layer's integers.
    FOLLOWS = frozenset()

    input_scale: Tensor
    input_zero_point: Tensor
    output_scale: Tensor | None
    output_zero_point: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Padding = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        clamp: Clamp | None = None,
        quantized_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, clamp, dtype)
        n, channels = out_channels, in_channels // groups
        _check_terms(self.kernel_size[0] * self.kernel_size[1] * channels)
        weight = torch.zeros(n, *self.kernel_size, channels, dtype=torch.int8, device=device)
        ones, one = (torch.ones(count, dtype=torch.float32, device=device) for count in (n, 1))
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        self._store("weight_q", weight)
        self._store("weight_scale", ones)
        self._store("bias", torch.zeros_like(ones) if bias else None)
        self._store("input_scale", one)
        self._store("input_zero_point", zero)
        self._store("output_scale", one.clone() if quantized_output else None)
        self._store("output_zero_point", zero.clone() if quantized_output else None)
        self._settle()

    @classmethod
    @torch.no_grad()
    def from_conv2d(
        cls,
        conv: nn.Conv2d,
        *,
        input_scale: float | Tensor,
        input_zero_point: int | Tensor,
        output: Quantizer | None = None,
        clamp: Clamp | None = None,
    ) -> Int8Conv2d:
        """Round `conv` (which is not changed) to the nearest int8 weights, on its device.

        ``weight_scale = max |W| / 127`` for each output channel, at least 2^-126. x is about
        ``input_scale * (q - input_zero_point)``; `output` is y's scale and zero point, for a layer with int8 output.

        Raises ValueError unless `conv` is a float ``nn.Conv2d`` with zero padding.
        """
        cls.check_convertible(conv)
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            _pair(conv.kernel_size),
            _pair(conv.stride),
            padding_of(conv),
            _pair(conv.dilation),
            conv.groups,
            conv.bias is not None,
            clamp=clamp,
            device=conv.weight.device,
            dtype=conv.weight.dtype,
        ).train(conv.training)
        q, scale = nearest_int8(conv.weight.float().permute(0, 2, 3, 1))
        layer.weight_q.copy_(q)
        layer.weight_scale.copy_(scale)
        if layer.bias is not None and conv.bias is not None:
            layer.bias.copy_(conv.bias)
        layer.set_quantizers((float(input_scale), int(input_zero_point)), output)
        return layer

    @staticmethod
    def check_convertible(conv: nn.Module, **options: Any) -> None:
        """Raise ValueError unless ``from_conv2d`` supports `conv`."""
        check_conv2d("Int8Conv2d", conv)
        assert isinstance(conv, nn.Conv2d)
        _check_terms(conv.weight[0].numel())

    @property
    def input(self) -> Quantizer:
        """x's scale and zero point."""
        return float(self.input_scale), int(self.input_zero_point)

    @property
    def output(self) -> Quantizer | None:
        """y's scale and zero point, for a layer with int8 output."""
        if self.output_scale is None or self.output_zero_point is None:
            return None
        return float(self.output_scale), int(self.output_zero_point)

    @torch.no_grad()
    def set_quantizers(self, input: Quantizer | None = None, output: Quantizer | None = None) -> None:
        """Change the scale and zero point of x, y or both. Raises ValueError if they are out of range."""
        into = None if input is None else quantizer_of("Int8Conv2d", "input", *input)
        onto = None if output is None else quantizer_of("Int8Conv2d", "output", *output)
        if into is not None:
            self.input_scale.fill_(into[0])
            self.input_zero_point.fill_(into[1])
        if onto is not None:
            self._store("output_scale", torch.full_like(self.input_scale, onto[0]))
            self._store("output_zero_point", torch.full_like(self.input_zero_point, onto[1]))
        self._settle()

    def _of_images(self, x: Tensor) -> Tensor:
        tensors = (self.weight_q, self.weight_scale, self.input_scale, self.input_zero_point, *self._made[:3])
        if self.output_scale is None:
            return self._call(x, tensors)
        if is_transformed() and x.requires_grad:
            raise NotImplementedError("epiloq.nn.Int8Conv2d has no gradient with int8 output; set no output")
        return self._run(x, *tensors)

    def _run(self, x: Tensor, *tensors: Any) -> Tensor:
        weight_q, _, input_scale, input_zero_point, *made = tensors
        out_dtype = self.dtype if x.dtype == torch.int8 else x.dtype
        if x.dtype != torch.int8:
            # Quantise in x's memory order, so that only a quarter of the bytes are transposed.
            by_pixels = not is_transformed() and x.is_contiguous(memory_format=torch.channels_last)
            rows = x.permute(0, 2, 3, 1) if by_pixels else x.contiguous()
            x, *_ = epiloq.quantize_int8(rows, scale=input_scale, azp=input_zero_point)
            x = x.permute(0, 3, 1, 2) if by_pixels else x
        if self.output_scale is not None:
            out_dtype = torch.int8
        parameters = Int8Parameters(*made, *self._made[3:])
        return convolve("conv2d_int8", x, weight_q, parameters, self.geometry, out_dtype)

    def _taps(self, *tensors: Any) -> Tensor:
        weight_q, weight_scale, *_ = tensors
        taps: Tensor = weight_q.permute(0, 3, 1, 2).to(torch.float32) * weight_scale.view(-1, 1, 1, 1)
        return taps

    @property
    def weight_bytes(self) -> int:
        """Size of the quantised weight in memory, in bytes."""
        return self.weight_q.nbytes + 2 * self.weight_scale.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the layer that this one replaces; casts change it."""
        return self._dtype

    def dequantized_weight(self) -> Tensor:
        return (self.weight_q.float() * self.weight_scale.view(-1, 1, 1, 1)).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}, quantized_output={self.output_scale is not None}"

    def _make(self) -> Any:
        """The kernels' arguments; reads the zero points on the host, so not during graph capture."""
        if is_compiling() and self._held is not None:
            # Numbers are constants of the graph.
            input_zero, output_zero, lo, hi = self._held.value[3:]
            output = None if self.output_scale is None else (self.output_scale.double(), output_zero)
            sums = self.weight_q.sum((1, 2, 3), dtype=torch.int32)
            derived = derive(sums, self.weight_scale, self.bias, (self.input_scale.double(), input_zero), output)
            return *derived, input_zero, output_zero, lo, hi
        if self.weight_q.is_meta:
            return torch.empty_like(self.weight_scale), None, None, 0, 0, 0.0, 0.0
        prepared = PreparedInt8Weight.prepare(
            self.weight_q, self.weight_scale, self.bias, input=self.input, output=self.output
        )
        p = prepared.parameters("conv2d_int8", to_int8=self.output_scale is not None, clamp=self.clamp)
        return p.scale, p.bias, p.correction, p.input_zero, p.output_zero, p.lo, p.hi

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        # The loaded tensors decide whether a layer has int8 output; some of them may be missing.
        outputs = {"output_scale": self.input_scale, "output_zero_point": self.input_zero_point}
        names = {name.removeprefix(prefix) for name in state_dict}
        given = {self.RENAMED.get(name, name) for name in names}
        whole = {name for name, held in self._parameters.items() if held is not None} - outputs.keys() <= given
        for name, like in outputs.items():
            if name in given and self._parameters[name] is None:
                self._store(name, torch.empty_like(like))
            elif name not in given and whole:
                self._store(name, None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def _check_terms(terms: int) -> None:
    if terms > _MAX_TERMS:
        raise ValueError(
            f"Int8Conv2d: conv: expected at most {_MAX_TERMS} products per sum (the exact range of int32), got {terms}"
        )


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    height, width = values
    return height, width
