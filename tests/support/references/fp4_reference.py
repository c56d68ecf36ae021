"""FP4 weights by their definitions, in float64 and one number after the other."""

from __future__ import annotations

import torch
from torch import Tensor

import epiloq
from epiloq.weights.packed_fp4_weight import PackedFp4Weight

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KINDS = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}
"""Types of scales."""
BLOCK = {torch.uint8: 32, torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}


def e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def scale_number(byte: int, dtype: torch.dtype) -> float:
    """Of a byte of E8M0 or E4M3."""
    if dtype != torch.float8_e4m3fn:
        return float("nan") if byte == 255 else 2.0 ** (byte - 127)
    sign, exponent, fraction = byte >> 7, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def dequantized(codes: Tensor, scale: Tensor, global_scale: Tensor | None, k: int) -> Tensor:
    """W in float64 ``[N, K]``."""
    numbers = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
    scales = torch.tensor([scale_number(byte, scale.dtype) for byte in range(256)], dtype=torch.float64)
    low, high = codes.cpu() & 15, codes.cpu() >> 4
    values = numbers[torch.stack((low, high), 2).flatten(1).long()][:, :k]
    of_blocks = scales[scale.cpu().view(torch.uint8).long()].repeat_interleave(BLOCK[scale.dtype], 1)[:, :k]
    if global_scale is not None:  # The product of the scales is rounded to float32.
        of_blocks = (of_blocks * global_scale.cpu().double().reshape(-1, 1)).float().double()
    return (values * of_blocks).to(codes.device)


def every_code(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes ``[S, block / 2]`` with all 16 in each block, and scales ``[S, 1]``: all bytes of E8M0, or those of E4M3
    without a sign."""
    block, scales = BLOCK[dtype], 128 if dtype == torch.float8_e4m3fn else 256
    codes = (torch.arange(0, 16, 2) | (torch.arange(1, 16, 2) << 4)).to(torch.uint8).repeat(scales, block // 16)
    return codes, torch.arange(scales).to(torch.uint8).view(scales, 1).view(dtype)


def weight(
    n: int, k: int, dtype: torch.dtype, device: str = "cpu", global_scale: str = "none"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random codes, scales that a product in float16 holds, and "none", "one" or "rows" of global scales."""
    codes = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8, device=device)
    blocks = (n, -(-k // BLOCK[dtype]))
    if dtype == torch.float8_e4m3fn:
        scale = (torch.rand(blocks, device=device) * 3 + 0.05).to(dtype)
    else:
        scale = torch.randint(119, 130, blocks, dtype=torch.uint8, device=device).view(dtype)
    count = {"none": 0, "one": 1, "rows": n}[global_scale]
    return codes, scale, torch.rand(count, device=device) + 0.1 if count or global_scale == "rows" else None


def packed(n: int, k: int, form: str, device: str, matrices: int = 1) -> tuple[PackedFp4Weight, Tensor]:
    """A weight, perhaps of several stacked matrices, and W in float64."""
    codes, scale, _ = weight(n, k, KINDS[form], device)
    factor = torch.rand(matrices, device=device) + 0.1 if form == "nvfp4" else None
    each = None if factor is None else factor.repeat_interleave(n // matrices)
    exact = dequantized(codes, scale, each, k)
    return epiloq.pack_fp4_weight(codes, scale, in_features=k, global_scale=factor), exact
