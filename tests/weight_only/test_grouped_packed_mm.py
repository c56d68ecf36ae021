"""grouped_packed_mm: each expert's rows as weight_only_mm and w4a8_mm multiply them.

On the CPU, and where a GPU's kernels multiply one expert after the other, the same bits; otherwise within the bound.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
from epiloq.ops.w4a8_mm import widened
from w4a8_reference import make_activations
from weight_reference import make_weight

COUNTS = (3, 0, 20, 1)
N, K = 48, 200


def case(kind: str, activations: torch.dtype, device: str = "cpu", bits: int = 4) -> dict[str, Any]:
    """Rows sorted by expert, and two that belong to none."""
    m = sum(COUNTS) + 2
    weight = make_weight(len(COUNTS) * N, K, bits, 64, kind, device=device).packed
    if activations.is_floating_point and activations.itemsize > 1:
        x, scale = torch.randn(m, K, device=device).to(activations), None
    else:
        x, scale = make_activations(m, K, activations, device), torch.rand(m, 1, device=device) * 0.02
    offs = torch.tensor(COUNTS, device=device).cumsum(0).to(torch.int32)
    return {"x": x, "weight": weight, "scale_a": scale, "offs": offs}


def assert_same(y: Tensor, expected: Tensor) -> None:
    """The same bits; on CUDA, where another kernel multiplies all experts, within sums' and bfloat16's rounding."""
    if y.is_cuda and y.numel() > 0:
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    else:
        assert torch.equal(y, expected)


def one(x: Tensor, weight: epiloq.PackedWeight, scale_a: Tensor | None) -> Tensor:
    return epiloq.weight_only_mm(x, weight) if scale_a is None else epiloq.w4a8_mm(x, weight, scale_a)


KINDS = [
    *(
        (kind, dtype, bits)
        for kind in ("symmetric", "zero", "offset")
        for dtype, bits in ((torch.bfloat16, 4), (torch.float32, 8))
    ),
    *((kind, dtype, 4) for kind in ("symmetric", "zero") for dtype in (torch.float8_e4m3fn, torch.int8)),
]


@pytest.mark.parametrize(("kind", "activations", "bits"), KINDS)
def test_is_each_experts_product(seed: int, device: str, kind: str, activations: torch.dtype, bits: int) -> None:
    given = case(kind, activations, device, bits)
    y = epiloq.grouped_packed_mm(**given)
    x, weight, scale = given["x"], given["weight"], given["scale_a"]
    boxes = x.new_zeros(len(COUNTS), max(COUNTS), K) if scale is None else x[:1].expand(max(COUNTS), K).repeat(4, 1, 1)
    scales = None if scale is None else scale.new_ones(len(COUNTS), max(COUNTS), 1)
    begin = 0
    for expert, count in enumerate(COUNTS):
        rows, part = slice(begin, begin + count), weight.row_slice(expert * N, (expert + 1) * N)
        expected = one(x[rows], part, None if scale is None else scale[rows])
        assert_same(y[rows], expected)
        boxes.view(torch.uint8)[expert, :count] = x.view(torch.uint8)[rows]
        if scales is not None and scale is not None:
            scales[expert, :count] = scale[rows]
        begin += count
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=device)
    masked = epiloq.grouped_packed_mm(boxes, weight, scales, masked_m=counts)
    assert masked.shape == (len(COUNTS), max(COUNTS), N)
    assert_same(torch.cat([box[:count] for box, count in zip(masked, COUNTS, strict=True)]), y[:begin])
    out = torch.full((len(x), N), 7.0, device=device, dtype=y.dtype)
    assert epiloq.grouped_packed_mm(**given, out=out) is out
    assert torch.equal(out[:begin], y[:begin])
    assert (out[begin:] == 7).all()
    text = epiloq.explain("grouped_packed_mm", **given)
    has_kernel = device == "cuda" and kind != "offset" and bits == 4
    widens = "" if scale is None else "activations as bfloat16: "
    assert text.startswith(f"{widens}grouped " if has_kernel else "one expert after the other: ")


@pytest.mark.parametrize("out_dtype", [None, torch.float16])
@pytest.mark.parametrize("activations", [torch.float8_e4m3fn, torch.bfloat16])
def test_explain_names_every_pass(
    monkeypatch: pytest.MonkeyPatch, activations: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    """Of a GPU's kernel that takes bfloat16, and without the passes being run."""
    given = case("symmetric", activations)
    operation, seen = sys.modules["epiloq.ops.grouped_packed_mm"], list[torch.dtype]()

    def explained(out: Tensor, x: Tensor, *_: Any) -> str:
        assert x.shape == given["x"].shape and x.stride(0) % 8 == 0
        seen.extend((x.dtype, out.dtype))
        return "a kernel"

    monkeypatch.setattr(operation, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(operation, "widened", None)
    monkeypatch.setattr(epiloq._core, "explain_grouped_packed_mm", explained, raising=False)
    options = {} if activations == torch.bfloat16 else {"out_dtype": out_dtype}
    text = epiloq.explain("grouped_packed_mm", **given, **options)
    then = ", then rounded to float16" if options.get("out_dtype") else ""
    assert text == ("a kernel" if given["scale_a"] is None else f"activations as bfloat16: a kernel{then}")
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offs": None}, "offs: expected either offs or masked_m, got neither"),
        ({"masked_m": torch.ones(4, dtype=torch.int32)}, "offs: expected either offs or masked_m, got both"),
        ({"offs": torch.ones(4)}, r"offs: expected int32 \[E\]"),
        ({"offs": torch.tensor([3, 2, 23, 24], dtype=torch.int32)}, "offs: expected ascending ends"),
        ({"offs": torch.tensor([3, 3, 23, 27], dtype=torch.int32)}, "offs: expected ascending ends up to 26"),
        ({"offs": torch.ones(5, dtype=torch.int32)}, "weight: expected 5 matrices of a multiple of 16 rows"),
        ({"x": torch.zeros(26, K + 1, dtype=torch.int8)}, rf"x: expected \[M, K\] with {K} columns"),
        ({"scale_a": torch.ones(25, 1)}, r"scale_a: expected float32 \[26, 1\]"),
        (
            {"scale_a": None, "x": torch.zeros(26, K), "out_dtype": torch.float16},
            "out_dtype: expected x's torch.float32",
        ),
        ({"out": torch.zeros(26, N + 1)}, rf"out: expected \[26, {N}\]"),
        ({"weight": make_weight(4 * N, K, 4, 64, act_order=True).packed}, "weight.perm: expected None"),
        ({"weight": make_weight(4 * N, K, 4, 64, "offset").packed}, "weight.offset: expected None"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^epiloq\.grouped_packed_mm: {message}"):
        epiloq.grouped_packed_mm(**case("symmetric", torch.int8) | changes)


@pytest.mark.parametrize("activations", [torch.float8_e4m3fn, torch.int8])
def test_rows_are_widened_in_one_pass(seed: int, device: str, activations: torch.dtype) -> None:
    """8-bit rows times their scales, rounded once, whatever their strides; what one kernel for all experts reads."""
    for shape, columns in (((26, K), K), ((26, K), 13), ((4, 20, K), K), ((4, 20, K), 7), ((0, K), K), ((3, 0, K), 5)):
        rows = make_activations(math.prod(shape[:-1]), K, activations, device).view(shape)
        x = rows[:, ::2][..., :columns] if len(shape) == 3 else rows[..., :columns]
        scale = (torch.rand((*x.shape[:-1], 2), device=device) * 0.02)[..., :1]
        found = widened(x, scale, torch.bfloat16)
        assert (found.shape, found.dtype) == (x.shape, torch.bfloat16)
        assert torch.equal(found, (x.double() * scale.double()).float().bfloat16())
        assert found.numel() == 0 or (found.data_ptr() % 16 == 0 and found.stride(-2) % 8 == 0)
