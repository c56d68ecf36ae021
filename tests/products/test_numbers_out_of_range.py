"""Numbers that no C++ function takes are refused by the argument's name, not by a C++ signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import epiloq

M, K, N = 6, 64, 32
INT8, UINT8 = torch.int8, torch.uint8
X, ONES = torch.randn(M, K), torch.ones(K)
W, SCALE = torch.zeros(N, K, dtype=INT8), torch.ones(N)
FP8 = torch.zeros(N, K, dtype=UINT8).view(torch.float8_e4m3fn)
TABLE = (X, torch.zeros(N * K // 2, dtype=UINT8), torch.zeros(16), torch.ones(N * K // 64))
IMAGE, KERNEL = torch.zeros(1, 8, 6, 6, dtype=INT8), torch.zeros(16, 3, 3, 8, dtype=INT8)
SCALES = {"input_scale": 0.1, "weight_scale": torch.ones(1), "output_scale": 1.0}


def conv2d(**given: Any) -> Any:
    return epiloq.conv2d_int8(IMAGE, KERNEL, **{**SCALES, **given})


def conv2d_weight_only(**given: Any) -> Any:
    weight = epiloq.pack_conv2d_weight(KERNEL, torch.ones(16, 3, 3, 1), bits=8, group_size=8)
    return epiloq.conv2d_weight_only(IMAGE.float(), weight, **given)


Call = Callable[[Any], Any]
INTEGERS: dict[str, Call] = {
    "out_features": lambda n: epiloq.table_mm(*TABLE, out_features=n, block_size=64),
    "block_size": lambda n: epiloq.table_mm(*TABLE, out_features=N, block_size=n),
    "block": lambda n: epiloq.fp8_weight_mm(X, FP8, torch.ones(1, 1), block=(n, 128)),
    "stride": lambda n: conv2d(stride=n),
    "padding": lambda n: conv2d(padding=(1, n)),
    "dilation": lambda n: conv2d_weight_only(dilation=(n, 1)),
    "groups": lambda n: conv2d_weight_only(groups=n),
    "group_size": lambda n: epiloq.online_quant_weight(W, SCALE[:, None], group_size=n),
    "in_features": lambda n: epiloq.online_quant_weight(W, SCALE[:, None], group_size=64, in_features=n),
    "pad_to": lambda n: epiloq.quantize_int8(X, pad_to=n),
    "input_zero": lambda n: conv2d(input_zero=n),
}
NUMBERS: dict[str, Call] = {
    "eps": lambda n: epiloq.rms_norm_quant(X, ONES, n),
    "eps ": lambda n: epiloq.quantize_fp8(X, eps=n),
    "eps  ": lambda n: epiloq.rms_norm(X, ONES, n),
    "input_scale": lambda n: conv2d(input_scale=n),
    "output_scale": lambda n: conv2d(output_scale=n),
}


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**70, 2**31, 1.5, "a", True])
@pytest.mark.parametrize("argument", INTEGERS)
def test_integers(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^epiloq\.\w+: {argument}: expected .*got "):
        INTEGERS[argument](value)


@pytest.mark.parametrize("value", [10**400, "a", ()])
@pytest.mark.parametrize("argument", NUMBERS)
def test_numbers(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^epiloq\.\w+: {argument.strip()}: expected .*got "):
        NUMBERS[argument](value)


@pytest.mark.parametrize("explain", ["table_mm", "fp8_weight_mm"])
def test_explained(explain: str) -> None:
    tensors = TABLE if explain == "table_mm" else (X, FP8, torch.ones(1, 1))
    sizes = {"out_features": N, "block_size": 2**63} if explain == "table_mm" else {"block": (1, 2**63)}
    with pytest.raises(ValueError, match=rf"^epiloq\.{explain}: block.*: expected .*got "):
        epiloq.explain(explain, *tensors, **sizes)


def test_numbers_of_other_types_are_taken() -> None:
    """A large integer as `eps`, and NumPy's numbers, mean their values."""
    q, scale = epiloq.rms_norm_quant(X, ONES, 2**70)
    expected = epiloq.rms_norm_quant(X, ONES, float(2**70))
    assert torch.equal(q, expected[0]) and torch.equal(scale, expected[1])
    by_numpy = conv2d(stride=np.int64(2), padding=(np.int32(1), np.int64(1)), input_scale=np.float32(0.125))
    assert torch.equal(by_numpy, conv2d(stride=2, padding=1, input_scale=0.125))
    sizes = {"out_features": N, "block_size": 64}
    by_numpy = epiloq.table_mm(*TABLE, **{name: np.int64(value) for name, value in sizes.items()})
    assert torch.equal(by_numpy, epiloq.table_mm(*TABLE, **sizes))
