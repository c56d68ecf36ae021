"""The FP8 quantisers inside torch: compilation and fakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_torch_layer import fresh_compiler, same, shapes
from torch import Tensor

import epiloq

__all__ = ["fresh_compiler"]


def float8(x: Tensor) -> tuple[Tensor, ...]:
    """The FP8 quantiser's paths; its codes as float32, which can be compared."""
    q, scale = epiloq.quantize_fp8(x, granularity="group", group_size=4, scale_layout="column")
    again, _ = epiloq.quantize_fp8(x, granularity="group", group_size=4, scale=scale, pad_to=8)
    block, block_scale = epiloq.quantize_fp8(x, granularity="block", ue8m0=True, dtype=torch.float8_e5m2)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(1)
    epiloq.quantize_fp8(x, out=out)
    return q.float(), scale, again.float(), block.float(), block_scale, out[0].float(), out[1]


def fused(x: Tensor) -> tuple[Tensor, ...]:
    """The fused producers' paths."""
    weight, residual = x[0] + 2, x.flip(0)
    q, scale = epiloq.rms_norm_quant(x, weight, pad_to=8)
    added, added_scale, total = epiloq.rms_norm_quant(
        x, weight, residual=residual, dtype=torch.float8_e4m3fn, granularity="group", group_size=4
    )
    gated, gated_scale = epiloq.silu_and_mul_quant(
        torch.cat([x, x], -1), dtype=torch.float8_e4m3fn, granularity="group", group_size=8, scale_layout="column"
    )
    out = torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], 1), residual.clone()
    epiloq.rms_norm_quant(x, weight, residual=out[2], out=out)
    plain = epiloq.rms_norm(x, weight), *epiloq.rms_norm(x, weight, residual=residual)
    plain = (*plain, epiloq.silu_and_mul(torch.cat([x, x], -1)))
    return q, scale, added.float(), added_scale, total, gated.float(), gated_scale, *out, *plain


@pytest.mark.slow
@pytest.mark.parametrize("f", [float8, fused])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(seed: int, device: str, dynamic: bool, f: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (5, 9, 1, 64):
        x = torch.randn(m, 17, device=device)
        assert same(compiled(x), f(x)) and shapes(compiled(x)) == shapes(f(x))
    assert shapes(f(x)) == shapes(f(x.to("meta")))
