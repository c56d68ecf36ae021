"""Memory as it comes: strided and batched views, degenerate strides, NumPy arrays."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
from epiloq import _core
from product_arguments import product
from reference import Problem, assert_within_one_ulp


def rows_apart(data: st.DataObject, values: Tensor) -> Tensor:
    """The matrix in wider rows and, where there is one row or one column, under any stride that means the same."""
    rows, columns = values.shape
    pitch = (
        16 * data.draw(st.integers(-(-columns // 16), -(-columns // 16) + 2)) if data.draw(st.booleans()) else columns
    )
    memory = torch.zeros(max(rows * max(pitch, 1), 16), dtype=values.dtype)
    view = memory.as_strided((rows, columns), (max(pitch, 1), 1)).copy_(values)
    if rows == 1:
        view = view.as_strided(view.shape, (data.draw(st.sampled_from([1, columns, 100_000])), 1))
    elif columns == 1:
        view = view.as_strided(view.shape, (view.stride(0), data.draw(st.sampled_from([1, view.stride(0), 100_000]))))
    return view


@settings(max_examples=150)
@given(st.data(), st.integers(0, 2**31))
def test_any_valid_views(data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    leading = data.draw(st.lists(st.integers(0, 3), max_size=4))
    n, k = data.draw(st.integers(0, 20)), data.draw(st.sampled_from([0, 1, 2, 3, 16, 17, 33, 1040]))
    m = int(np.prod(leading, dtype=int))
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    zero_point = data.draw(st.booleans())
    arguments = product(zero_point, m, n, k)
    a, weight = rows_apart(data, arguments["a"]), rows_apart(data, arguments["b"].t())
    p = Problem(a, weight, *(arguments.get(x) for x in ("scale_a", "scale_b", "bias", "azp", "azp_adj")))
    for name in ("scale_a", "scale_b") + (("azp",) if zero_point else ()):
        vector = arguments[name]
        if vector.numel():
            shape = data.draw(st.sampled_from([(1,), (), (1, 1), tuple(vector.shape), (vector.numel(),)]))
            setattr(
                p, name, vector.flatten()[0].reshape(shape) if shape in ((1,), (), (1, 1)) else vector.reshape(shape)
            )
    p.bias = data.draw(st.sampled_from([None, arguments["bias"].to(dtype)]))
    out = rows_apart(data, torch.full((m, n), torch.nan, dtype=dtype))
    shape = (*leading, k)
    batched = a.unflatten(0, leading) if len(leading) > 1 else a[0] if not leading else a
    out_view = out.unflatten(0, leading) if len(leading) > 1 else out[0] if not leading else out
    assert batched.shape == shape
    tensors = (batched, p.b, p.scale_a, p.scale_b)
    if zero_point:
        result = epiloq.scaled_mm_azp(*tensors, p.azp_adj, p.azp, p.bias, out=out_view)
    else:
        result = epiloq.scaled_mm(*tensors, p.bias, out=out_view)
    assert result is out_view
    assert_within_one_ulp(out, p)


@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**31))
def test_any_valid_views_of_the_quantiser(data: st.DataObject, seed: int) -> None:
    """A strided, batched x gives what its contiguous copy gives; q in wider rows keeps zeros past K."""
    torch.manual_seed(seed)
    leading = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    m, k = int(np.prod(leading, dtype=int)), data.draw(st.sampled_from([0, 1, 2, 17, 40]))
    x = rows_apart(data, torch.randn(m, k).to(data.draw(st.sampled_from([torch.float16, torch.float32]))))
    expected_q, expected_scale, expected_azp = epiloq.quantize_int8(x.clone(), symmetric=False)
    q, scale = torch.full((m, k + 3), 99, dtype=torch.int8), torch.full((m,), torch.nan)
    azp = torch.full((m, 1), 1234, dtype=torch.int32)
    epiloq.quantize_int8(
        x.unflatten(0, leading), symmetric=False, out=(q.unflatten(0, leading), scale.unflatten(0, leading), azp)
    )
    assert torch.equal(q[:, :k], expected_q) and (q[:, k:] == 0).all()
    assert torch.equal(scale[:, None], expected_scale) and torch.equal(azp, expected_azp)


def test_numpy_through_dlpack() -> None:
    """The C++ half takes anything that has __dlpack__; layouts are judged as they are."""
    tensors = product(zero_point=False)
    good = {name: tensors[name].numpy() for name in ("a", "b", "scale_a", "scale_b")}
    good["out"] = np.full((6, 10), 7, np.float32)
    rest = {"bias": None, "azp_adj": None, "azp": None, "threads": 1}
    _core.scaled_mm_on_host(**good, **rest)
    sums = good["a"].astype(int) @ good["b"].astype(int)
    expected = sums * good["scale_a"].reshape(-1, 1) * good["scale_b"].ravel()
    np.testing.assert_allclose(good["out"], expected, rtol=4 * np.finfo(np.float32).eps)
    good["out"][:] = 7
    k_first = np.asfortranarray(good["a"])
    for name, wrong, text in (
        ("a", good["a"][::-1], "do not overlap"),
        ("a", good["a"][:, ::-1], "row-major"),
        ("a", k_first, "row-major"),
        ("b", np.ascontiguousarray(good["b"]), "column-major"),
        ("a", good["a"].astype(np.uint8), "got uint8"),
        ("scale_a", good["scale_a"].astype(np.float64), "got float64"),
        ("scale_b", good["scale_b"][::-1], "contiguous"),
        ("out", good["out"][:, :0], "10 columns"),
        ("out", np.broadcast_to(np.float32(7), (6, 10)).copy().reshape(1, 1, 1, 1, 1, 6, 10), "6 dimensions, got 7"),
    ):
        with pytest.raises(ValueError, match=f"epiloq.scaled_mm: {name}: .*{re.escape(text)}"):
            _core.scaled_mm_on_host(**{**good, name: wrong}, **rest)
    assert (good["out"] == 7).all()
    frozen = good["a"].copy()
    frozen.flags.writeable = False
    with pytest.raises(BufferError, match="readonly"):
        _core.scaled_mm_on_host(**{**good, "a": frozen}, **rest)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _core.scaled_mm_on_host(**{**good, "a": [1, 2]}, **rest)


def test_numpy_values() -> None:
    """The host epilogue reads and writes NumPy's memory in place."""
    acc = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    out = np.zeros((3, 4), np.float32)
    scale_a, scale_b = np.array([0.5, 1, 2], np.float32), np.array([1, 2, 3, 4], np.float32)
    _core.evaluate_epilogue(out, acc, scale_a, scale_b)
    np.testing.assert_array_equal(out, acc * scale_a[:, None] * scale_b)
