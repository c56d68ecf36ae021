"""FP4 weights by their definitions, in float64 and one number after the other."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
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
