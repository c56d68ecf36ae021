"""The product by a weight in memory, which operations take on a GPU where no kernel fits."""

from __future__ import annotations

import pytest
import torch

from epiloq._torch.dense import multiply_dense
from reference import poisoned


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 20), (2, 3, 20), (1, 20)])
def test_writes_into_strided_rows(seed: int, device: str, shape: tuple[int, ...], has_bias: bool) -> None:
    x = torch.randn((*shape[:-1], 25), device=device)[..., :20]
    dense = torch.randn(7, 20, device=device)
    bias = torch.randn(7, device=device) if has_bias else None
    memory = poisoned((*shape[:-1], 9), torch.float32, device)
    before = memory.clone()
    with torch.autocast(device, torch.bfloat16):
        product = multiply_dense(memory[..., :7], x, dense, bias)
    exact = x.double() @ dense.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(memory[..., :7].double(), exact, rtol=1e-4, atol=1e-4)
    assert product.shape == (memory[..., :7].numel() // 7, 7) and product.data_ptr() == memory.data_ptr()
    assert torch.equal(memory[..., 7:].view(torch.int32), before[..., 7:].view(torch.int32))
