"""What quantize_fp8 refuses, and in which words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import epiloq
from fp8_reference import FORMATS

ONE = torch.ones(1)
BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"granularity": "row"}, "granularity: expected tensor or token or group or block, got row"),
    ({"scale_layout": "tma"}, "scale_layout: expected row or column"),
    ({"scale_layout": "column"}, "scale_layout: expected"),
    ({"dtype": torch.int8}, "dtype: expected .*float8_e4m3fn or .*float8_e5m2, got torch.int8"),
    ({"pad_to": 0}, "pad_to: expected a positive"),
    ({"group_size": 0}, "group_size: expected a positive"),
    ({"group_size": 2**31}, "group_size: expected at most 2147483647, got 2147483648"),
    ({"group_size": 2**70, "granularity": "group"}, "group_size: expected at most 2147483647"),
    ({"eps": -1.0}, "eps: expected"),
    ({"eps": math.inf}, "eps: expected"),
    ({"scale": ONE, "ue8m0": True}, "ue8m0: expected none"),
    ({"scale": ONE, "scale_ub": ONE}, "scale_ub: expected none"),
    ({"scale_ub": torch.ones(2)}, "scale_ub: expected one element"),
    ({"scale_ub": torch.ones(1, dtype=torch.float64)}, "scale_ub: expected float32"),
    ({"scale": torch.ones(4, 1)}, "scale: expected 1 elements for granularity tensor.*as many as granularity token"),
    ({"scale": ONE, "granularity": "token"}, "scale: expected 4 elements .*granularity tensor has or block has"),
    ({"scale": torch.ones(4, 2), "granularity": "block"}, "scale: expected 1 elements"),
    ({"scale": torch.ones(1, 4), "granularity": "group"}, r"scale: expected shape \[4, 1\]"),
    ({"scale": torch.ones(1, dtype=torch.float64)}, "scale: expected float32"),
    ({"out": (torch.zeros(4, 16),)}, "out: expected"),
    ({"out": (torch.zeros(4, 16), ONE)}, "out: expected float8_e4m3fn or float8_e5m2"),
    ({"out": (torch.zeros(4, 15).to(FORMATS[0]), ONE)}, "out: expected x's leading"),
    ({"out": (torch.zeros(4, 16).to(FORMATS[0]), ONE), "scale": torch.ones(1)}, "out: expected the given scale"),
]


@pytest.mark.parametrize(("kwargs", "message"), BAD_CALLS)
def test_bad_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"epiloq.quantize_fp8: {message}"):
        epiloq.quantize_fp8(torch.randn(4, 16), **kwargs)
    ok, reason = epiloq.supports("quantize_fp8", torch.randn(4, 16), **kwargs)
    assert not ok and reason.startswith("epiloq.quantize_fp8: ")


def test_bad_x() -> None:
    for x, kwargs, text in (
        (torch.zeros(4, 4, dtype=torch.int8), {}, "x: expected float32 or float16 or bfloat16, got int8"),
        (torch.randn(4, 8).t(), {}, "row-major"),
        (torch.tensor(1.0), {}, "x: expected at least one dimension"),
        (torch.randn(2, 4, 8), {"granularity": "block"}, "x: expected two dimensions"),
        (torch.randn(8), {"granularity": "block"}, "x: expected two dimensions"),
    ):
        with pytest.raises(ValueError, match=text):
            epiloq.quantize_fp8(x, **kwargs)
    with pytest.raises(TypeError, match=r"epiloq.quantize_fp8: x: expected a tensor, got list"):
        epiloq.quantize_fp8([1.0])


def test_out_must_not_overlap_inputs() -> None:
    x = torch.randn(4, 16)
    over = x.view(torch.float8_e4m3fn)[:, :16]
    with pytest.raises(ValueError, match="out: expected memory apart from x's"):
        epiloq.quantize_fp8(x, out=(over, torch.ones(1)))
    with pytest.raises(ValueError, match="scale: expected memory apart from x's"):
        epiloq.quantize_fp8(x, out=(torch.empty(4, 16, dtype=torch.float8_e4m3fn), x[0, :1]))


@pytest.mark.parametrize("kwargs", [{}, {"scale": ONE}])
def test_no_gradient(kwargs: dict[str, Any]) -> None:
    for part in epiloq.quantize_fp8(torch.randn(4, 16, requires_grad=True), **kwargs):
        if part is not kwargs.get("scale"):
            with pytest.raises(NotImplementedError, match=r"epiloq.quantize_fp8 has no gradient"):
                part.float().sum().backward()
