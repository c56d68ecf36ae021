"""Tables and 4-bit blocks of odd sizes in code of inductor, which may read past their ends."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from epiloq.nn import OnlineQuantLinear, TableLinear


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor(seed: int) -> None:
    table = TableLinear(37, 21, block_size=64)
    with torch.no_grad():
        table.weight_q.random_(0, 256)
        table.weight_table.normal_()
        table.weight_scale.uniform_(0.01, 0.03)
    blocks = OnlineQuantLinear.from_linear(nn.Linear(37, 21), bits=4, group_size=32, symmetric=False)

    def both(x: torch.Tensor) -> torch.Tensor:
        return (table(x) * blocks(x)).sum()

    torch._dynamo.reset()
    x, y = (torch.ones(6, 37, requires_grad=True) for _ in range(2))
    total, expected = torch.compile(both)(x), both(y)
    torch.testing.assert_close(total, expected)
    total.backward()
    expected.backward()
    torch.testing.assert_close(x.grad, y.grad)
