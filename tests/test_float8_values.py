"""float8 on the CPU: its values against torch's own conversion, its products against float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from epiloq import _core
from epiloq.ops.float8 import Scales, product, to_float32
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


def scaled(data: st.DataObject, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Scales | None, Tensor]:
    """A view of float8, its scales (one a block, a row, or none), and in float64 what they mean."""
    few_normal, scale_rows = data.draw(st.booleans()), data.draw(st.sampled_from([0, 1, 128]))
    wide = (torch.randn(rows, columns + 5) * (0.01 if few_normal else 1)).to(dtype)  # Most have no exponent then.
    view = wide[:, 3 : columns + 3]
    if not scale_rows:
        return view, None, view.double()
    scale = torch.rand(2 * -(-rows // scale_rows), -(-columns // 128))[::2] + 0.1
    exact = view.double() * blocks_of(scale.double(), scale_rows, view.shape)
    assert torch.equal(to_float32(view, scale, scale_rows), exact.float())
    return view, Scales(scale, scale_rows), exact


@pytest.mark.parametrize("dtype", FLOAT8)
@settings(max_examples=60)
@given(m=st.integers(1, 60), n=st.integers(1, 300), k=st.integers(1, 700), data=st.data())
def test_products(dtype: torch.dtype, m: int, n: int, k: int, data: st.DataObject) -> None:
    """Within what float32 sums of K terms may be off, with the CPU's pairs of bfloat16 and without."""
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    weight, scales, exact = scaled(data, n, k, dtype)
    x, scales_x, exact_x = scaled(data, m, k, data.draw(st.sampled_from(FLOAT8)))
    expected, span = exact_x @ exact.t(), exact_x.abs() @ exact.abs().t()
    threads = torch.get_num_threads()
    for count, pairs in ((1, _core.multiplies_float8()), (2, _core.multiplies_float8()), (2, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_core, "multiplies_float8", lambda pairs=pairs: pairs)
            try:
                torch.set_num_threads(count)
                found = product(x, weight, scales_x, scales)
            finally:
                torch.set_num_threads(threads)
        assert ((found - expected).abs() <= 2**-24 * (6 + k**0.5) * span + 1e-30).all()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_products_of_every_code(dtype: torch.dtype) -> None:
    """Rows of 256 codes by unit vectors: each value comes out as it is, infinities and NaN in their own row alone."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    weight = codes.view(256, 1).expand(256, 64).contiguous()  # One code a row.
    for m in (1, 3, 8, 9, 30):
        x = torch.zeros(m, 64)
        x[:, 7] = 1
        found, expected = product(x.to(dtype), weight), codes.float().expand(m, 256)
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
    if not _core.multiplies_float8():
        return
    for changed, message in (
        ({"out": torch.empty(2, 5)}, "out: expected \\[2, 4\\]"),
        ({"x": weight[:2, :63]}, "x: expected 64 columns"),
        ({"x": x}, "values: expected float8"),
        ({"scale_x": torch.ones(2, 2)}, "scale: expected one for each block"),
    ):
        arguments = {"out": torch.empty(2, 4), "x": weight[:2], "scale_x": None, "scale_rows_x": 1, "values": weight}
        with pytest.raises(ValueError, match=message):
            _core.multiply_float8_by_float8(**(arguments | {"scale": None, "scale_rows": 1} | changed))
