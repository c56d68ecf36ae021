"""int8 convolutions that requantise, and 16-bit convolutions with low-bit weights, compared with cuDNN."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.contract import Binder, Bound, Inputs, Operation, Unavailable, sample, worst
from epiloq.bench.convolutions import LAYERS, Layer
from epiloq.weights.packed_conv2d_weight import PackedConv2dWeight, block_of

INPUT, OUTPUT = (0.02, -3), (0.05, 4)
# Weight-only variants: bits, columns per group, and dtype of activations and scales.
KINDS = {
    "w4_g128": (4, 128, torch.bfloat16),
    "w4_g128_fp16": (4, 128, torch.float16),
    "w8": (8, -1, torch.bfloat16),
}


def _layer(case: Case) -> Layer:
    """The case's layer, or for an unknown name a 1x1 convolution of K channels."""
    return LAYERS.get(case.layer) or Layer(case.k, case.n, (2, 2))


def _where(layer: Layer) -> dict[str, Any]:
    return {"stride": layer.stride, "padding": layer.padding, "groups": layer.groups}


def _work(case: Case) -> int:
    height, width = _layer(case).output_image
    return 2 * case.m * height * width * case.n * case.k


def _int8_inputs(case: Case, generator: torch.Generator) -> Inputs:
    layer, device = _layer(case), generator.device
    draw = partial(torch.randint, generator=generator, device=device, dtype=torch.int8)
    x = draw(-128, 128, (case.m, *layer.image, layer.channels))
    weight = draw(-127, 128, (case.n, layer.kernel, layer.kernel, layer.channels // layer.groups))
    spread = 5000 * case.k**0.5 * INPUT[0] / OUTPUT[0]  # of the sums in output steps, were the scale 1
    scale = torch.rand(case.n, generator=generator, device=device).add_(0.5) * (40 / spread)
    return {"x": x, "weight": weight, "scale": scale, "bias": torch.randn(case.n, generator=generator, device=device)}


def _prepared(inputs: Inputs) -> epiloq.PreparedInt8Weight:
    return epiloq.PreparedInt8Weight.prepare(
        inputs["weight"], inputs["scale"], inputs["bias"], input=INPUT, output=OUTPUT
    )


def _int8(case: Case, sets: Sequence[Inputs]) -> Bound:
    where, clamp = _where(_layer(case)), (0.0, float("inf"))
    bound = [partial(epiloq.conv2d_int8, s["x"].permute(0, 3, 1, 2), _prepared(s), clamp=clamp, **where) for s in sets]
    return Bound(bound)


def _real(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Dequantised x ``[B, Ci, H, W]`` and W ``[Co, Ci / groups, Kh, Kw]``, channels last."""
    x = (inputs["x"].permute(0, 3, 1, 2).float() - INPUT[1]) * INPUT[0]
    return x, inputs["weight"].permute(0, 3, 1, 2).float() * inputs["scale"].view(-1, 1, 1, 1)


def _sampled(case: Case, x: Tensor, weight: Tensor, bias: Tensor | None, n: Tensor) -> Tensor:
    """Output channels ``n`` of the first image in float64, ``[P, Q, channels]``."""
    layer = _layer(case)
    x, weight = x[:1].double(), weight[n].double()
    groups = 1
    if layer.groups > 1:
        x, groups = x[:, n], len(n)  # depthwise
    offset = None if bias is None else bias[n].double()
    exact = F.conv2d(x, weight, offset, layer.stride, layer.padding, 1, groups)
    return exact[0].permute(1, 2, 0)


def _int8_error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against float64; tolerance: half an output step, and float32's rounding of the scale."""
    layer = _layer(case)
    if result.shape != (case.m, case.n, *layer.output_image) or result.dtype != torch.int8:
        return float("inf")
    n = sample(case.n, 14, generator)
    exact = _sampled(case, *_real(inputs), inputs["bias"], n).clamp_(min=0) / OUTPUT[0]
    expected = (exact + OUTPUT[1]).clamp_(-128, 127)
    return worst((result[0, n].permute(1, 2, 0).double() - expected).abs(), torch.full_like(expected, 0.5 + 1e-3))


def _packed(case: Case, inputs: Inputs) -> PackedConv2dWeight:
    layer, (bits, group_size, _) = _layer(case), KINDS[case.variant]
    channels, kernel = layer.channels // layer.groups, (layer.kernel, layer.kernel)
    block, padded = block_of(group_size, kernel, channels)
    q, scale = inputs["q"], inputs["w_scale"]
    return PackedConv2dWeight(
        q, scale, None, None, bits, case.n, kernel, channels, padded, -1 if channels == 1 else block
    )


def _few_bits_inputs(case: Case, generator: torch.Generator) -> Inputs:
    layer, (bits, group_size, dtype) = _layer(case), KINDS[case.variant]
    device, channels = generator.device, layer.channels // layer.groups
    high = 1 << (bits - 1)
    shape = (case.n, layer.kernel, layer.kernel)
    q = torch.randint(-high, high, (*shape, channels), generator=generator, device=device, dtype=torch.int16)
    per_channel = group_size == -1 or channels == 1
    blocks = (case.n,) if per_channel else (*shape, -(-channels // group_size))
    scale = 0.002 + 0.02 * torch.rand(blocks, generator=generator, device=device)
    packed = epiloq.pack_conv2d_weight(q, scale.to(dtype), bits=bits, group_size=group_size)
    x = torch.randn((case.m, *layer.image, layer.channels), generator=generator, device=device).to(dtype)
    return {"x": x, "q": packed.q, "w_scale": packed.scale}


def _few_bits(case: Case, sets: Sequence[Inputs]) -> Bound:
    where = _where(_layer(case))
    return Bound(
        [partial(epiloq.conv2d_weight_only, s["x"].permute(0, 3, 1, 2), _packed(case, s), **where) for s in sets]
    )


def _few_bits_error(case: Case, inputs: Inputs, result: Any, generator: torch.Generator) -> float:
    """Error against float64; tolerance: one output ulp, and the random sum of the weights' roundings."""
    layer, dtype = _layer(case), KINDS[case.variant][2]
    if result.shape != (case.m, case.n, *layer.output_image) or result.dtype != dtype:
        return float("inf")
    n = sample(case.n, 14, generator)
    weight, x = _packed(case, inputs).dequantize(), inputs["x"].permute(0, 3, 1, 2)
    exact = _sampled(case, x, weight, None, n)
    size = _sampled(case, x.double().square(), weight.double().square(), None, n).sqrt()
    tolerance = torch.finfo(dtype).eps * (exact.abs() + 2 * size) + 1e-30
    return worst((result[0][n].permute(1, 2, 0).double() - exact).abs(), tolerance)


def _cudnn(dtype: torch.dtype, *, few_bits: bool) -> Binder:
    """torch's convolution of the same values in ``dtype``, with the algorithm that cuDNN measures as fastest."""

    def bind(case: Case, sets: Sequence[Inputs]) -> Bound:
        layer = _layer(case)
        if few_bits and KINDS[case.variant][2] != dtype:
            raise Unavailable(f"the activations are {KINDS[case.variant][2]}")

        def call(inputs: Inputs) -> partial[Tensor]:
            if few_bits:
                x, weight, bias = inputs["x"].permute(0, 3, 1, 2), _packed(case, inputs).dequantize(dtype), None
            else:
                (x, weight), bias = _real(inputs), inputs["bias"].to(dtype)
            x, weight = (t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (x, weight))
            return partial(F.conv2d, x, weight, bias, layer.stride, layer.padding, 1, layer.groups)

        torch.backends.cudnn.benchmark = True
        calls = [call(s) for s in sets]
        calls[0]()
        return Bound(calls)

    return bind


HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
INT8 = Operation(
    name="conv2d_int8",
    variants=("relu",),
    inputs=_int8_inputs,
    bind=_int8,
    error=_int8_error,
    work=_work,
    ceiling="int8",
    peers={f"conv2d {name}": _cudnn(dtype, few_bits=False) for name, dtype in HALVES.items()},
)
WEIGHT_ONLY = Operation(
    name="conv2d_weight_only",
    variants=tuple(KINDS),
    inputs=_few_bits_inputs,
    bind=_few_bits,
    error=_few_bits_error,
    work=_work,
    ceiling="half",
    peers={f"conv2d {name}": _cudnn(dtype, few_bits=True) for name, dtype in HALVES.items()},
)
