"""What rms_norm_quant and silu_and_mul_quant refuse, and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import epiloq

INT8, FP8 = torch.int8, torch.float8_e4m3fn
W = torch.ones(16)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("rms_norm_quant", (torch.ones(4, 16), torch.ones(15)), {}, r"weight: expected shape \[16\]"),
    ("rms_norm_quant", (torch.ones(4, 16), W.half()), {}, "weight: expected float32"),
    ("rms_norm_quant", (torch.ones(4, 16).int(), W), {}, "x: expected float32 or float16 or bfloat16"),
    ("rms_norm_quant", (torch.ones(16, 4).t(), W), {}, "x: expected row-major"),
    ("rms_norm_quant", (torch.ones(4, 16), W, -1.0), {}, "eps: expected"),
    ("rms_norm_quant", (torch.ones(4, 16), W), {"residual": torch.ones(3, 16)}, "residual: expected x's shape"),
    ("rms_norm_quant", (torch.ones(4, 16), W), {"residual": torch.ones(4, 16).half()}, "residual: expected float32"),
    ("rms_norm_quant", (torch.ones(4, 16), W), {"out": (W,)}, r"out: expected \(q, scale\)"),
    ("rms_norm_quant", (torch.ones(4, 16), W), {"dtype": torch.float8_e5m2}, "dtype: expected"),
    ("rms_norm_quant", (torch.ones(4, 16), W), {"granularity": "group"}, "granularity: expected token for int8"),
    ("rms_norm_quant", (torch.ones(4, 16), W), {"ue8m0": True}, "ue8m0: expected false for int8"),
    ("silu_and_mul_quant", (torch.ones(4, 15),), {}, "x: expected an even number of columns"),
    ("silu_and_mul_quant", (torch.tensor(1.0),), {}, "x: expected at least one dimension"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"granularity": "tensor", "dtype": FP8}, "granularity: expected"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"granularity": "row"}, "granularity: expected"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"pad_to": 0}, "pad_to: expected a positive"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"group_size": 2**31}, "group_size: expected at most 2147483647"),
    ("rms_norm_quant", (torch.ones(4, 16), W), {"group_size": 2**70}, "group_size: expected at most 2147483647"),
    ("quantize_blockwise_int8", (torch.ones(4, 16), 2**70), {}, "group_size: expected at most 2147483647"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"scale_layout": "column"}, "scale_layout: expected"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"alpha": 0.0}, "alpha: expected a positive finite number, got 0"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"limit": 0}, "limit: expected a positive number, got 0"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"offset": math.inf}, "offset: expected a finite number, got inf"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"limit": "a"}, "limit: expected a number, got 'a'"),
    ("silu_and_mul_quant", (torch.ones(4, 16),), {"out": (W, W, W)}, r"out: expected \(q, scale\)"),
    (
        "silu_and_mul_quant",
        (torch.ones(4, 16),),
        {"out": (torch.zeros(4, 7, dtype=INT8), torch.ones(4))},
        "out: expected x's leading dimensions and at least 8",
    ),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "message"), BAD)
def test_bad_arguments_are_named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"epiloq.{name}: {message}"):
        getattr(epiloq, name)(*args, **kwargs)


def test_out_must_not_overlap_inputs() -> None:
    x, residual, q, scale = torch.ones(4, 16), torch.ones(4, 16), torch.zeros(4, 16, dtype=INT8), torch.ones(4)
    with pytest.raises(ValueError, match="residual_out: expected memory apart from x's"):
        epiloq.rms_norm_quant(x, W, residual=residual, out=(q, scale, x))
    memory = torch.ones(5, 16)
    with pytest.raises(ValueError, match="residual_out: expected memory apart from residual's"):
        epiloq.rms_norm_quant(x, W, residual=memory[1:], out=(q, scale, memory[:4]))
    with pytest.raises(ValueError, match="out: expected memory apart from x's"):
        epiloq.silu_and_mul_quant(x, out=(x.view(INT8)[:, :8], scale))


@pytest.mark.parametrize("operation", [lambda x, **kw: epiloq.rms_norm_quant(x, W, **kw), epiloq.silu_and_mul_quant])
def test_no_gradient(operation: Callable[..., Any]) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    for part in operation(x, dtype=FP8):
        with pytest.raises(NotImplementedError, match="has no gradient"):
            part.float().sum().backward()
