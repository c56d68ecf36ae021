"""quantize_int8 against the definition; the GPU's bits against the CPU's."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from int8_reference import awkward_rows

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SMALLEST = float(np.finfo(np.float32).tiny)


def define_row(x: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.float32, int]:
    """One finite float32 row, step by step in scalar float32 arithmetic."""
    one = np.float32
    lo, hi = one(min(x.min(), 0)), one(max(x.max(), 0))
    if symmetric:
        scale, azp = one(one(max(-lo, hi)) / one(127)), 0
        scale = max(scale, one(SMALLEST))
    else:
        scale = max(one(one(hi - lo) / one(255)), one(SMALLEST))
        azp = round(float(one(-128) - one(lo / scale)))
    q = [min(max(round(float(one(v / scale))) + azp, -128), 127) for v in x]
    return np.array(q, dtype=np.int8), scale, azp


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 100), (7, 576), (2, 4095), (2, 16384)])
def test_dynamic_per_token(seed: int, shape: tuple[int, ...], symmetric: bool, dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype) + (0 if symmetric else 0.5)
    q, scale, azp = epiloq.quantize_int8(x, symmetric=symmetric)
    assert q.shape == shape and scale.shape == (*shape[:-1], 1)
    assert (azp is None) == symmetric
    for i, row in enumerate(x.float().reshape(-1, shape[-1]).numpy()):
        expected_q, expected_scale, expected_azp = define_row(row, symmetric)
        assert scale.reshape(-1)[i] == expected_scale
        assert azp is None or azp.reshape(-1)[i] == expected_azp
        np.testing.assert_array_equal(q.reshape(-1, shape[-1])[i].numpy(), expected_q)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
@settings(max_examples=200)
def test_any_finite_row(row: np.ndarray) -> None:
    """All of float32: subnormals, huge ranges, zeros; symmetric values come back within half a step."""
    with np.errstate(over="ignore"):
        x = torch.from_numpy(row)[None]
        q, scale, _ = epiloq.quantize_int8(x)
        expected, expected_scale, _ = define_row(row, True)
        assert scale.item() == expected_scale >= np.float32(SMALLEST)
        np.testing.assert_array_equal(q[0].numpy(), expected)
        error = (q.double() * scale.double() - x.double()).abs().max().item()
        assert error <= 0.5000001 * scale.item()


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = a.cpu(), b.cpu()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan() if a.is_floating_point() else a == b)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 8, 17, 100, 576, 1536, 2048, 4095, 8192, 16384, 32768, 40960])
def test_gpu_bits_are_the_cpus(seed: int, columns: int, dtype: torch.dtype) -> None:
    x = awkward_rows(33, columns, dtype)
    for symmetric in (True, False):
        for pad_to in (1, 16):
            for with_zero in (True, False):
                kwargs = {"symmetric": symmetric, "pad_to": pad_to, "range_includes_zero": with_zero}
                cpu = epiloq.quantize_int8(x, **kwargs)
                gpu = epiloq.quantize_int8(x.cuda(), **kwargs)
                assert all(same_bits(a, b) for a, b in zip(cpu, gpu, strict=True)), kwargs
    for scale in (torch.tensor([0.013]), torch.rand(33, 1) + 0.01):
        for azp in (None, torch.randint(-128, 128, scale.shape, dtype=torch.int32), torch.full(scale.shape, -70000)):
            azp = None if azp is None else azp.to(torch.int32)
            cpu = epiloq.quantize_int8(x, scale=scale, azp=azp)
            gpu = epiloq.quantize_int8(x.cuda(), scale=scale.cuda(), azp=None if azp is None else azp.cuda())
            assert same_bits(cpu[0], gpu[0])


@pytest.mark.gpu
def test_gpu_strided_rows(seed: int) -> None:
    wide = torch.randn(40, 640, dtype=torch.bfloat16)
    for view in (wide[:, 64:576], wide[::2, 8:520], wide[:, 3:515], wide.view(5, 8, 640)[:, :, :512]):
        cpu, gpu = (
            epiloq.quantize_int8(view),
            epiloq.quantize_int8(wide.cuda().as_strided(view.shape, view.stride(), view.storage_offset())),
        )
        assert same_bits(cpu[0], gpu[0]) and same_bits(cpu[1], gpu[1])


def test_zero_and_constant_rows(device: str) -> None:
    x = torch.stack([torch.zeros(32), torch.full((32,), 3.25), torch.full((32,), -0.7)]).to(device)
    q, scale, azp = epiloq.quantize_int8(x)
    assert (q[0] == 0).all() and scale[0] == SMALLEST
    assert (q[1] == 127).all() and (q[2] == -127).all()
    for with_zero in (True, False):
        q, scale, azp = epiloq.quantize_int8(x, symmetric=False, range_includes_zero=with_zero)
        assert azp is not None and not scale.isnan().any()
        restored = (q.double() - azp.double()) * scale.double()
        torch.testing.assert_close(restored, x.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_rows(seed: int, device: str, bad: float, symmetric: bool) -> None:
    """Their outputs are NaN, as a float product's would be; the other rows are untouched."""
    x = torch.randn(3, 64, device=device)
    clean = epiloq.quantize_int8(x, symmetric=symmetric)
    x[1, 7] = bad
    q, scale, azp = epiloq.quantize_int8(x, symmetric=symmetric)
    assert not scale[1].isfinite().any()
    assert scale[[0, 2]].equal(clean[1][[0, 2]]) and q[[0, 2]].equal(clean[0][[0, 2]])
    weight = torch.randint(-128, 128, (16, 64), dtype=torch.int8, device=device)
    if azp is None:
        out = epiloq.scaled_mm(q, weight.t(), scale, torch.ones(1, device=device))
    else:
        adj = weight.sum(1, dtype=torch.int32)
        out = epiloq.scaled_mm_azp(q, weight.t(), scale, torch.ones(1, device=device), adj, azp)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


def test_static_values_that_are_not_finite(device: str) -> None:
    x = torch.tensor([[math.nan, math.inf, -math.inf, 1.0]], device=device)
    q, _, _ = epiloq.quantize_int8(x, scale=torch.tensor([0.5], device=device))
    assert q.tolist() == [[0, 127, -128, 2]]


def test_static_returns_what_it_was_given(seed: int, device: str) -> None:
    x = torch.randn(2, 3, 40, device=device)
    scale = torch.tensor([0.02], device=device)
    azp = torch.tensor([-5], dtype=torch.int32, device=device)
    q, same_scale, same_azp = epiloq.quantize_int8(x, scale=scale, azp=azp, pad_to=16)
    assert same_scale is scale and same_azp is azp
    assert q.shape == (2, 3, 48) and (q[..., 40:] == 0).all()
    expected = ((x / scale).round() + azp).clamp(-128, 127)
    assert torch.equal(q[..., :40].float(), expected)


def test_per_tensor(seed: int, device: str) -> None:
    x = torch.randn(6, 50, device=device)
    q, scale, azp = epiloq.quantize_int8(x, granularity="tensor")
    assert scale.shape == (1,) and azp is None and scale.item() == np.float32(x.abs().max().item()) / np.float32(127)
    q, scale, azp = epiloq.quantize_int8(x, granularity="tensor", symmetric=False)
    assert azp is not None and azp.shape == (1,)
    assert ((q.double() - azp) * scale.double() - x.double()).abs().max() <= 0.51 * scale.item()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 8), (0,)])
def test_empty(device: str, shape: tuple[int, ...]) -> None:
    for symmetric in (True, False):
        q, scale, _ = epiloq.quantize_int8(torch.empty(shape, device=device), symmetric=symmetric, pad_to=16)
        assert q.shape[:-1] == shape[:-1] and scale.shape == (*shape[:-1], 1)
        assert (q == 0).all() and scale.isfinite().all()


def test_out(seed: int, device: str) -> None:
    x = torch.randn(5, 64, device=device, dtype=torch.float16)
    expected = epiloq.quantize_int8(x, symmetric=False)
    out = (
        torch.full((5, 64), 99, dtype=torch.int8, device=device),
        torch.full((5, 1), math.nan, device=device),
        torch.full((5, 1), 10**6, dtype=torch.int32, device=device),
    )
    assert epiloq.quantize_int8(x, symmetric=False, out=out) is out
    assert all(same_bits(a, b) for a, b in zip(expected, out, strict=True))


BAD_CALLS = [
    ({"granularity": "row"}, "granularity"),
    ({"pad_to": 0}, "pad_to"),
    ({"azp": torch.zeros(1, dtype=torch.int32)}, "azp"),
    ({"scale": torch.ones(1), "symmetric": False}, "azp"),
    ({"scale": torch.ones(3)}, "scale"),
    ({"scale": torch.ones(1, dtype=torch.float64)}, "float"),
    ({"scale": torch.ones(1), "azp": torch.zeros(1)}, "azp"),
    ({"scale": torch.ones(1), "azp": torch.zeros(2, dtype=torch.int32)}, "azp"),
]


@pytest.mark.parametrize(("kwargs", "names"), BAD_CALLS)
def test_bad_arguments_are_named(kwargs: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        epiloq.quantize_int8(torch.randn(4, 16), **kwargs)  # type: ignore[arg-type]


def test_bad_x() -> None:
    for x, text in (
        (torch.zeros(4, 4, dtype=torch.int8), "x: expected float32 or float16 or bfloat16, got int8"),
        (torch.randn(4, 8).t(), "row-major"),
        (torch.tensor(1.0), "x"),
        (torch.randn(4, 1).expand(4, 8), "row-major"),
    ):
        with pytest.raises(ValueError, match=text):
            epiloq.quantize_int8(x)
