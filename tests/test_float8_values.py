"""float8 on the CPU: its values against torch's own conversion, its products against float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from epiloq import _core
from epiloq.ops.float8 import product, to_float32
from float8_reference import FLOAT8


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("has_nan", [True, False])
def test_every_code_in_every_order(dtype: torch.dtype, has_nan: bool, seed: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    x = codes if has_nan else codes[codes.view(dtype).float().isfinite()]
    x = x[torch.randperm(len(x))].repeat(17)[: 16 * 256].view(16, 256).view(dtype)
    for view in (x, x.t(), x[:, 3:200], x[2:9].t(), x[::2, ::3], x[:0], x[:, :0]):
        expected, found = view.to(torch.float32), to_float32(view)
        assert found.stride() == expected.stride() or found.numel() == 0
        assert torch.equal(found.isnan(), expected.isnan())
        # Zeros have signs.
        assert torch.equal(torch.signbit(found), torch.signbit(expected)) or has_nan
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def blocks_of(scale: torch.Tensor, rows: int, shape: torch.Size) -> torch.Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("dtype", FLOAT8)
@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 300),
    k=st.integers(1, 700),
    rows=st.sampled_from([0, 1, 128]),
    data=st.data(),
)
def test_products(dtype: torch.dtype, m: int, n: int, k: int, rows: int, data: st.DataObject) -> None:
    """Of views, with a scale a block, a row, or none: within what float32 sums of K terms may be off."""
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    few_normal = data.draw(st.booleans())  # Most numbers of this size have no exponent.
    wide = (torch.randn(n, k + 5) * (0.01 if few_normal else 1)).to(dtype)
    weight, x = wide[:, 3 : k + 3], torch.randn(m, k)
    scale = torch.rand(2 * -(-n // rows), -(-k // 128))[::2] + 0.1 if rows else None
    exact = weight.double() if scale is None else weight.double() * blocks_of(scale.double(), rows, weight.shape)
    if scale is not None:
        assert torch.equal(to_float32(weight, scale, rows), exact.float())
    expected, span = x.double() @ exact.t(), x.double().abs() @ exact.abs().t()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found = product(x, weight, scale, max(rows, 1))
            assert ((found - expected).abs() <= 2**-24 * (4 + k**0.5) * span + 1e-30).all()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_products_of_every_code(dtype: torch.dtype) -> None:
    """Rows of 256 codes by unit vectors: each value comes out as it is, infinities and NaN in their own row alone."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    weight = codes.view(256, 1).expand(256, 64).contiguous()  # One code a row.
    for m in (1, 3, 8, 9):
        x = torch.zeros(m, 64)
        x[:, 7] = 1
        found, expected = product(x, weight), codes.float().expand(m, 256)
        finite = expected.isfinite()
        assert torch.equal(found[finite], expected[finite])
        # 0 times an infinity, in the other columns, is NaN.
        assert found[~finite].isnan().all()


def test_bad_products() -> None:
    weight, x = torch.zeros(4, 64).to(torch.float8_e4m3fn), torch.zeros(2, 64)
    for change, message in (
        ({"out": torch.empty(2, 5)}, "out: expected \\[2, 4\\]"),
        ({"x": torch.zeros(2, 63)}, "x: expected \\[2, 64\\]"),
        ({"x": x.double()}, "x: expected float32"),
        ({"values": weight.to(torch.int8)}, "values: expected float8"),
        ({"scale": torch.ones(4, 2)}, "scale: expected one for each block"),
    ):
        call = {"out": torch.empty(2, 4), "x": x, "values": weight} | change
        with pytest.raises(ValueError, match=message):
            _core.multiply_float8(**call)
