"""FP4 weights: 4-bit numbers (E2M1) in blocks that share a scale, as in MXFP4 and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epiloq._torch.calls import direct, expect_tensors
from epiloq._torch.dense import row_chunks
from epiloq._torch.library import register
from epiloq.weights.tensor_checks import check_memory, described, refuse

_DEQUANTIZE, _QUANTIZE = "fp4_dequantize", "fp4_quantize"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 6.0
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, LARGEST)
# For each pair of neighbouring E2M1 numbers, the largest float32 that rounds down; ties go to the even code.
_LAST_DOWN = (0.25, 0.75 - 2.0**-24, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0)
# Exponent bias of E8M0, and its NaN.
BIAS, NAN = 127, 255
# Exponent of E2M1's largest number, 6 = 1.5 * 2^2.
_LARGEST_EXPONENT = 2
_E4M3 = torch.finfo(torch.float8_e4m3fn)
_SMALLEST_E4M3 = 2.0**-9
# Number of weights that are converted to float32 at a time.
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Fp4Format:
    """Scaling of blocks of E2M1 numbers.

    block_size
        Weights of a row that share a scale.
    scale_dtype
        Type of the scales; uint8 means E8M0 bytes.
    has_global_scale
        Whether there is a float32 scale for the whole weight.
    """

    name: str
    block_size: int
    scale_dtype: torch.dtype
    has_global_scale: bool


FORMATS = {
    "mxfp4": Fp4Format("mxfp4", 32, torch.uint8, False),
    "nvfp4": Fp4Format("nvfp4", 16, torch.float8_e4m3fn, True),
}
_BY_DTYPE = {one.scale_dtype: one for one in FORMATS.values()} | {torch.float8_e8m0fnu: FORMATS["mxfp4"]}


def format_of(scale: Tensor, operation: str) -> Fp4Format:
    """The format whose block scales have this type. Raises ValueError for other types."""
    found = _BY_DTYPE.get(scale.dtype)
    if found is None:
        wanted = "uint8 or float8_e8m0fnu (E8M0, blocks of 32), or float8_e4m3fn (blocks of 16)"
        refuse(operation, "scale", wanted, described(scale))
    return found


def check_weight(codes: Tensor, scale: Tensor, global_scale: Tensor | None, k: int, operation: str) -> None:
    """Raise ValueError unless these tensors are one weight ``[N, k]``."""
    device = codes.device
    if codes.dtype != torch.uint8 or codes.ndim != 2 or codes.shape[1] != -(-k // 2) or not codes.is_contiguous():
        refuse(operation, "codes", f"uint8 [N, {-(-k // 2)}] for {k} columns, dense", described(codes))
    check_memory("codes", codes, device, operation)
    n, blocks = codes.shape[0], -(-k // format_of(scale, operation).block_size)
    if scale.shape != (n, blocks) or not scale.is_contiguous():
        refuse(operation, "scale", f"[{n}, {blocks}], dense", described(scale))
    check_memory("scale", scale, device, operation)
    if global_scale is None:
        return
    if global_scale.dtype != torch.float32 or (global_scale.numel() != 1 and global_scale.shape != (n,)):
        refuse(operation, "global_scale", f"float32, one element or [{n}]", described(global_scale))
    if not global_scale.is_contiguous():
        refuse(operation, "global_scale", "dense memory", described(global_scale))
    check_memory("global_scale", global_scale, device, operation)


def scale_values(scale: Tensor) -> Tensor:
    """Convert block scales to float32 exactly: E8M0 bytes are 2^(byte - 127), with 255 for NaN."""
    if scale.dtype == torch.float8_e4m3fn:
        return scale.float()
    byte = scale.view(torch.uint8).int()
    # 2^-127 is a subnormal number of float32.
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    return torch.where(byte == NAN, 0x7FC00000, bits).view(torch.float32)


def code_values(codes: Tensor, k: int) -> Tensor:
    """Convert codes ``[N, ceil(k / 2)]`` to E2M1 numbers ``[N, k]`` in float32; even columns are in low halves."""
    byte = torch.arange(256, device=codes.device, dtype=torch.int16)
    halves = torch.stack((byte & 15, byte >> 4), 1)
    # E2M1's exponent and fraction become the low exponent bit and upper fraction bits of a small float16.
    bits = ((halves & 7) << 9) | ((halves & 8) << 12)
    pairs = (bits.view(torch.float16).float() * 2.0**14).view(torch.int64).flatten()
    # The two numbers of a byte are looked up together, as one element of 8 bytes.
    values = pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32)
    return values.view(codes.shape[0], 2 * codes.shape[1])[:, :k]


def dequantized_rows(
    codes: Tensor, scale: Tensor, global_scale: Tensor | None, k: int, dtype: torch.dtype, rows: slice
) -> Tensor:
    """Dequantise some rows of a checked weight: code times product of scales in float32, rounded once to `dtype`."""
    values, factors = code_values(codes[rows], k), scale_values(scale[rows])
    if global_scale is not None:
        factors.mul_(global_scale if global_scale.numel() == 1 else global_scale[rows, None])
    size = _BY_DTYPE[scale.dtype].block_size
    whole = k // size
    values[:, : whole * size].unflatten(1, (whole, size)).mul_(factors[:, :whole, None])
    if k % size:
        values[:, whole * size :].mul_(factors[:, whole:])
    return values.to(dtype)


def fp4_dequantize(
    codes: Tensor,
    scale: Tensor,
    *,
    in_features: int,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``W[n, k] = e2m1(codes[n, k]) * (scale[n, k // block] * global_scale)``: products in float32, rounded once.

    The sixteen codes are ``0, 0.5, 1, 1.5, 2, 3, 4, 6`` and, from 8 on, their negatives. A NaN scale (byte 255 of
    E8M0, 127 and 255 of E4M3) makes its block NaN. Without a global scale every W is exact in float32, except for
    magnitudes of 2^128 and more, which become infinite.

    Args:
        codes: uint8 ``[N, ceil(K / 2)]``: column ``2 i`` in the low half of byte ``i``, column ``2 i + 1`` in the high
            half. For odd K the last high half is not read.
        scale: a scale for each block of a row; the last block may be short. uint8 or float8_e8m0fnu ``[N, ceil(K /
            32)]``: MXFP4, blocks of 32, ``2^(byte - 127)``. float8_e4m3fn ``[N, ceil(K / 16)]``: NVFP4, blocks of 16.
        in_features: K.
        global_scale: float32, one element, or ``[N]``: one for each row. This is the factor; compressed-tensors
            stores its reciprocal.
        dtype: type of the result: float32, float16 or bfloat16.

    Returns:
        ``[N, K]`` of ``dtype``.

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: an argument is not a tensor.
    """
    arguments = (codes, scale, global_scale, in_features, dtype)
    if type(in_features) is not int or in_features < 0:
        refuse(_DEQUANTIZE, "in_features", "an integer from 0", in_features)
    if not direct((codes, scale), (global_scale,)):
        expect_tensors(_DEQUANTIZE, {"codes": codes, "scale": scale}, {"global_scale": global_scale}, writes=False)
        result: Tensor = torch.ops.epiloq.fp4_dequantize(*arguments)
        return result
    return _dequantize(*arguments)


@torch.no_grad()
def _dequantize(codes: Tensor, scale: Tensor, global_scale: Tensor | None, k: int, dtype: torch.dtype) -> Tensor:
    check_weight(codes, scale, global_scale, k, _DEQUANTIZE)
    if dtype not in FLOATS:
        refuse(_DEQUANTIZE, "dtype", "float32, float16 or bfloat16", dtype)
    out = codes.new_empty((codes.shape[0], k), dtype=dtype)
    for rows in row_chunks(codes.shape[0], k, _AT_ONCE):
        out[rows] = dequantized_rows(codes, scale, global_scale, k, dtype, rows)
    return out


def _fake_dequantize(codes: Tensor, scale: Tensor, global_scale: Tensor | None, k: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], k), dtype=dtype)


@torch.no_grad()
def fp4_quantize(
    weight: Tensor, format: str = "nvfp4", *, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise a weight ``[N, K]`` to codes, block scales and a global scale; rounding is to nearest, ties to even.

    "mxfp4" uses the scale of the Open Compute specification (OCP MX 1.0): ``2^(floor(log2(max|W|)) - 2)`` for a
    block, and numbers beyond 6 become 6. "nvfp4" uses the rule of compressed-tensors and ModelOpt: ``global_scale = 1
    / (6 * 448 / max|W|)`` for the weight, ``scale = max|W| / 6 / global_scale`` for a block, rounded to E4M3 and at
    least 2^-9. Numbers are divided by the stored scale, in float32. A block of zeros has scale 1. A block with NaN or
    an infinity, which E2M1 cannot represent, has a NaN scale.

    Args:
        weight: float32, float16 or bfloat16 ``[N, K]``.
        format: "mxfp4" (E8M0 scales for 32 numbers) or "nvfp4" (E4M3 scales for 16 numbers).
        global_scale: for "nvfp4" only: positive float32, one element, to be used instead of the computed one, for
            layers whose weights are merged.

    Returns:
        ``(codes, scale, global_scale)`` for `fp4_dequantize`: uint8 ``[N, ceil(K / 2)]``; uint8 or
        float8_e4m3fn ``[N, ceil(K / block)]``; float32 ``[1]``, or None for "mxfp4".

    Raises:
        ValueError: an argument is invalid; the message names it.
        TypeError: ``weight`` is not a tensor.
    """
    chosen = _checked(weight, format, global_scale)
    n, k = weight.shape
    if chosen.has_global_scale:
        global_scale = divisor_of(weight).reciprocal() if global_scale is None else global_scale.reshape(1)
    codes = weight.new_empty((n, -(-k // 2)), dtype=torch.uint8)
    scale = weight.new_empty((n, -(-k // chosen.block_size)), dtype=chosen.scale_dtype)
    for rows in row_chunks(n, k, _AT_ONCE):
        codes[rows], found = _quantized(weight[rows].float(), chosen, global_scale)
        scale[rows].view(torch.uint8).copy_(found.view(torch.uint8))
    return codes, scale, global_scale


def _checked(weight: Tensor, format: str, global_scale: Tensor | None) -> Fp4Format:
    expect_tensors(_QUANTIZE, {"weight": weight}, {"global_scale": global_scale}, writes=False)
    if format not in FORMATS:
        refuse(_QUANTIZE, "format", f"one of {', '.join(FORMATS)}", repr(format))
    if weight.dtype not in FLOATS or weight.ndim != 2:
        refuse(_QUANTIZE, "weight", "float32, float16 or bfloat16 [N, K]", described(weight))
    check_memory("weight", weight, weight.device, _QUANTIZE)
    if global_scale is None:
        return FORMATS[format]
    if not FORMATS[format].has_global_scale:
        refuse(_QUANTIZE, "global_scale", f"None for {format}", described(global_scale))
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1 or global_scale.device != weight.device:
        refuse(_QUANTIZE, "global_scale", f"float32, one element on {weight.device}", described(global_scale))
    if not 0 < (value := global_scale.item()) < float("inf"):
        refuse(_QUANTIZE, "global_scale", "a positive number", value)
    return FORMATS[format]


def divisor_of(*weights: Tensor) -> Tensor:
    """``6 * 448 / max|W|`` over the finite numbers of all weights, float32 ``[1]``; 1 if all of them are 0.

    This is the reciprocal of the global scale, which compressed-tensors stores. It is at most 2^126, so that its
    reciprocal is normal.
    """
    highest = weights[0].new_zeros(1, dtype=torch.float32)
    for weight in weights:
        for rows in row_chunks(weight.shape[0], weight.shape[1], _AT_ONCE) if weight.numel() else ():
            size = weight[rows].abs()
            highest = torch.maximum(highest, size.where(size.isfinite(), 0).amax().float().to(highest.device))
    divisor = highest.new_tensor(LARGEST * _E4M3.max) / highest
    return torch.where(highest == 0, 1.0, divisor.clamp(max=2.0**126))


def _quantized(weight: Tensor, chosen: Fp4Format, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantise float32 rows to codes and scales."""
    (n, k), size = weight.shape, chosen.block_size
    blocks = torch.nn.functional.pad(weight, (0, -k % size)).view(n, -(-k // size), size)
    highest = blocks.abs().amax(2) if blocks.numel() else blocks.new_zeros(blocks.shape[:2])
    scale = e8m0_scales(highest) if global_scale is None else e4m3_scales(highest, global_scale)
    factor = scale_values(scale)
    if global_scale is not None:
        factor = factor * global_scale
    # Division by 2^-127, a subnormal number, is exact as well.
    quotients = (blocks / factor.unsqueeze(2)).view(n, -1)
    return packed(codes_of(quotients)[:, : k + k % 2]), scale


def e8m0_scales(highest: Tensor) -> Tensor:
    """E8M0 bytes of block scales for the blocks' largest magnitudes: ``2^(floor(log2(highest)) - 2)``."""
    exponent = torch.frexp(highest).exponent - 1 - _LARGEST_EXPONENT
    byte = (exponent + BIAS).clamp(0, NAN - 1)
    byte = torch.where(highest == 0, BIAS, byte)
    return torch.where(highest.isfinite(), byte, NAN).to(torch.uint8)


def e4m3_scales(highest: Tensor, global_scale: Tensor) -> Tensor:
    """float8_e4m3fn block scales for the blocks' largest magnitudes: ``highest / 6 / global_scale``."""
    # A tensor as divisor: see grid.Grid.
    scale = (highest / highest.new_tensor(LARGEST) / global_scale).clamp(_SMALLEST_E4M3, _E4M3.max)
    scale = torch.where(highest == 0, 1.0, scale)
    return torch.where(highest.isfinite(), scale, torch.nan).to(torch.float8_e4m3fn)


def codes_of(values: Tensor) -> Tensor:
    """Codes (uint8, one per value) of the nearest E2M1 numbers; ties to even, saturating at 6, NaN becomes 0."""
    between = torch.tensor(_LAST_DOWN, device=values.device)
    size = torch.bucketize(values.abs().nan_to_num(nan=0.0).contiguous(), between, out_int32=True).to(torch.uint8)
    return size | (values.signbit().to(torch.uint8) << 3)


def nearest(values: Tensor) -> Tensor:
    """The nearest E2M1 numbers in float32, rounded like `codes_of`."""
    sizes = torch.tensor(_SIZES, device=values.device)
    return sizes[(codes_of(values) & 7).int()].copysign(values)


def packed(codes: Tensor) -> Tensor:
    """Pack codes ``[N, K]`` with even K to bytes ``[N, K / 2]``, the even columns in the low halves."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


register(
    _DEQUANTIZE,
    f"{_DEQUANTIZE}(Tensor codes, Tensor scale, Tensor? global_scale, SymInt k, ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
