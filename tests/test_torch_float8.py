"""The FP8 quantisers inside torch: compilation and fakes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import epiloq
from test_torch_layer import fresh_compiler, same, shapes

__all__ = ["fresh_compiler"]


def float8(x: Tensor) -> tuple[Tensor, ...]:
    """The FP8 quantiser's paths; its codes as float32, which can be compared."""
    q, scale = epiloq.quantize_fp8(x, granularity="group", group_size=4, scale_layout="column")
    again, _ = epiloq.quantize_fp8(x, granularity="group", group_size=4, scale=scale, pad_to=8)
    block, block_scale = epiloq.quantize_fp8(x, granularity="block", ue8m0=True, dtype=torch.float8_e5m2)
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(1)
    epiloq.quantize_fp8(x, out=out)
    return q.float(), scale, again.float(), block.float(), block_scale, out[0].float(), out[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_float8_compiles_whole(seed: int, device: str, dynamic: bool) -> None:
    compiled = torch.compile(float8, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (5, 9, 1, 64):
        x = torch.randn(m, 17, device=device)
        assert same(compiled(x), float8(x)) and shapes(compiled(x)) == shapes(float8(x))
    assert shapes(float8(x)) == shapes(float8(x.to("meta")))
