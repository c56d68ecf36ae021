"""Arguments of int8 products, for tests of what is refused and of strided views."""

from __future__ import annotations

from typing import Any

import torch


def product(zero_point: bool, m: int = 6, n: int = 10, k: int = 24) -> dict[str, Any]:
    arguments = {
        "a": torch.randint(-128, 128, (m, k), dtype=torch.int8),
        "b": torch.randint(-128, 128, (n, k), dtype=torch.int8).t(),
        "scale_a": torch.rand(m, 1) * 0.02 + 1e-3,
        "scale_b": torch.rand(n) * 0.02 + 1e-3,
        "bias": torch.randn(n).to(torch.bfloat16),
        "out": torch.full((m, n), 7.0, dtype=torch.bfloat16),
    }
    if zero_point:
        arguments["azp_adj"] = arguments["b"].sum(0, dtype=torch.int32)
        arguments["azp"] = torch.randint(-128, 128, (m, 1), dtype=torch.int32)
    return arguments
