"""float8's values in float32, on the CPU, against torch's own conversion."""

from __future__ import annotations

import pytest
import torch

from epiloq.ops.float8 import to_float32
from float8_reference import FLOAT8


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("has_nan", [True, False])
def test_every_code_in_every_order(dtype: torch.dtype, has_nan: bool, seed: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    x = codes if has_nan else codes[codes.view(dtype).float().isfinite()]
    x = x[torch.randperm(len(x))].repeat(17)[: 16 * 256].view(16, 256).view(dtype)
    for view in (x, x.t(), x[:, 3:200], x[2:9].t(), x[::2, ::3], x[:0], x[:, :0], x[0]):
        expected, found = view.to(torch.float32), to_float32(view)
        assert found.stride() == expected.stride() or found.numel() == 0
        assert torch.equal(found.isnan(), expected.isnan())
        # Zeros have signs.
        assert torch.equal(torch.signbit(found), torch.signbit(expected)) or has_nan
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
