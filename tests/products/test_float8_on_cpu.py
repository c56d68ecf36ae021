"""float8 products on the CPU against float64: every code, and operands of any layout by one thread and by two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import epiloq
from float8_reference import FLOAT8
from groupwise_reference import RECIPES, Recipe
from reference import poisoned


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matrix(data: st.DataObject, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A view of wider rows, perhaps of numbers most of which have no exponent."""
    few_normal = data.draw(st.booleans())
    return (torch.randn(rows, columns + 7) * (0.01 if few_normal else 1)).to(dtype)[:, :columns]


def blocks_of(scale: Tensor, rows: int, shape: torch.Size) -> Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]].double()


def assert_near(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within what float32 sums of K terms may be off."""
    expected, span = x @ weight.t(), x.abs() @ weight.abs().t()
    assert ((out - expected).abs() <= 2**-24 * (8 + x.shape[1] ** 0.5) * span + 1e-30).all()


@pytest.mark.parametrize("dtype", FLOAT8)
@settings(max_examples=60)
@given(m=st.integers(1, 70), n=st.integers(1, 300), k=st.integers(1, 700), data=st.data())
def test_whole_rows(dtype: torch.dtype, m: int, n: int, k: int, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    x, weight = matrix(data, m, k, data.draw(st.sampled_from(FLOAT8))), matrix(data, n, k, dtype)
    scale_x, scale = torch.rand(m, 1) + 0.1, torch.rand(n) + 0.1
    bias = torch.randn(n) if data.draw(st.booleans()) else None
    for count in (1, 2):
        with threads(count):
            out = poisoned((m, n + 3), torch.float32, "cpu")
            epiloq.scaled_mm(x, weight.t(), scale_x, scale, bias, out=out[:, :n])
        assert out[:, n:].isnan().all()
        plain = out[:, :n].double() if bias is None else out[:, :n].double() - bias.double()
        if bias is None:
            assert_near(plain, x.double() * scale_x.double(), weight.double() * scale.double()[:, None])
        else:
            assert torch.allclose(plain, (x.double() @ weight.double().t()) * scale_x * scale, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=40)
@given(m=st.integers(1, 200), n=st.integers(1, 300), k=st.integers(1, 700), data=st.data())
def test_groups(recipe: Recipe, m: int, n: int, k: int, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    x, weight = matrix(data, m, k, torch.float8_e4m3fn), matrix(data, n, k, torch.float8_e4m3fn)
    blocks = -(-k // 128)
    scale_x = torch.rand(2 * -(-m // recipe[0]), blocks)[::2] + 0.1
    scale = (torch.rand(blocks, -(-n // recipe[1])) + 0.1).t()
    for count in (1, 2):
        with threads(count):
            out = epiloq.groupwise_mm(x, weight.t(), scale_x, scale.t(), recipe=recipe, out_dtype=torch.float32)
        exact_x = x.double() * blocks_of(scale_x, recipe[0], x.shape)
        assert_near(out.double(), exact_x, weight.double() * blocks_of(scale, recipe[1], weight.shape))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code(dtype: torch.dtype) -> None:
    """Rows of 256 codes by unit vectors: each value comes out as it is, infinities and NaN in their own row alone."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    weight = codes.view(256, 1).expand(256, 64).contiguous()  # One code a row.
    one = torch.ones(1)
    for m in (1, 3, 8, 9, 30):
        x = torch.zeros(m, 64)
        x[:, 7] = 1
        found = epiloq.scaled_mm(x.to(dtype), weight.t(), one, one, out_dtype=torch.float32)
        expected = codes.float().expand(m, 256)
        finite = expected.isfinite()
        assert torch.equal(found[finite], expected[finite])
        # 0 times an infinity, in the other columns, is NaN.
        assert found[~finite].isnan().all()


def test_long_sums_at_small_and_large_m(seed: int) -> None:
    """More columns than stay in a cache, for each number of tokens that another kernel takes."""
    for m in (1, 2, 5, 17, 130):
        x, weight = torch.randn(m, 9000).to(torch.float8_e4m3fn), torch.randn(70, 9000).to(torch.float8_e4m3fn)
        out = epiloq.scaled_mm(x, weight.t(), torch.ones(1), torch.ones(1), out_dtype=torch.float32)
        assert_near(out.double(), x.double(), weight.double())
