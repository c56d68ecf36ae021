"""grouped_packed_mm of FP4 weights: each expert's 8-bit rows as w4a8_mm multiplies them, and against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
import fp4_reference
from epiloq.ops.experts import few_rows
from epiloq.weights.packed_fp4_weight import PackedFp4Weight
from reference import ulp
from w4a8_reference import ACTIVATIONS, make_activations

SCALES = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}
COUNTS = (3, 0, 20, 1)
N, K = 48, 200


def case(form: str, activations: torch.dtype, device: str = "cpu", factors: int = 1) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a call, rows sorted by expert and two that belong to none; and the weight in float64."""
    m, rows = sum(COUNTS) + 2, len(COUNTS) * N
    codes, scale, _ = fp4_reference.weight(rows, K, SCALES[form], device)
    factor = torch.rand(factors, device=device) + 0.1 if form == "nvfp4" else None
    each = None if factor is None else factor.repeat_interleave(rows // factors)[:, None]
    dense = fp4_reference.dequantized(codes, scale, None, K) * (1 if each is None else each.double())
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=K, global_scale=factor)
    x, scale_a = make_activations(m, K, activations, device), torch.rand(m, 1, device=device) * 0.02 + 1e-3
    offs = torch.tensor(COUNTS, device=device).cumsum(0).to(torch.int32)
    return {"x": x, "weight": weight, "scale_a": scale_a, "offs": offs}, dense


def check(y: Tensor, x: Tensor, scale_a: Tensor, dense: Tensor) -> None:
    """Of one expert's rows, as docs/numerics.md bounds `w4a8_mm`."""
    rows, scale = x.double(), scale_a.double()
    exact, size = scale * (rows @ dense.t()), scale * (rows.abs() @ dense.abs().t())
    bound = ulp(exact, y.dtype) + 2.0**-23 * K**0.5 * size
    if y.is_cuda:  # activations become bfloat16, and so may NVFP4's weight and, for float16, the result
        bound += (2.0**-9 + 2.0**-8 + 2.0**-8) * size
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("factors", [1, len(COUNTS)])
@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_is_each_experts_product(
    seed: int, device: str, form: str, activations: torch.dtype, factors: int, out_dtype: torch.dtype
) -> None:
    """Contiguous and masked, with and without an output that is given."""
    given, dense = case(form, activations, device, factors)
    x, weight, scale = given["x"], given["weight"], given["scale_a"]
    y = epiloq.grouped_packed_mm(**given, out_dtype=out_dtype)
    assert y.dtype == out_dtype and y.shape == (len(x), N)
    boxes, scales = x[:1].expand(max(COUNTS), K).repeat(4, 1, 1), scale.new_ones(len(COUNTS), max(COUNTS), 1)
    begin = 0
    for expert, count in enumerate(COUNTS):
        rows, part = slice(begin, begin + count), slice(expert * N, (expert + 1) * N)
        check(y[rows], x[rows], scale[rows], dense[part])
        if device == "cpu":
            alone = epiloq.w4a8_mm(x[rows], weight.row_slice(part.start, part.stop), scale[rows], out_dtype=out_dtype)
            assert torch.equal(y[rows], alone)
        boxes.view(torch.uint8)[expert, :count] = x.view(torch.uint8)[rows]
        scales[expert, :count] = scale[rows]
        begin += count
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=device)
    masked = epiloq.grouped_packed_mm(boxes, weight, scales, masked_m=counts, out_dtype=out_dtype)
    assert masked.shape == (len(COUNTS), max(COUNTS), N)
    apart = torch.cat([box[:count] for box, count in zip(masked, COUNTS, strict=True)])
    torch.testing.assert_close(apart, y[:begin], rtol=0 if device == "cpu" else 2**-7, atol=0 if device == "cpu" else 1)
    out = torch.full((len(x), N), 7.0, device=device, dtype=out_dtype)
    assert epiloq.grouped_packed_mm(**given, out=out) is out
    assert torch.equal(out[:begin], y[:begin]) and (out[begin:] == 7).all()
    text = epiloq.explain("grouped_packed_mm", **given, out_dtype=out_dtype)
    widened = "activations as bfloat16: " if device == "cuda" else "one expert after the other: activations as float32"
    assert text.startswith(widened), text


@pytest.mark.parametrize("one_kernel", [True, False])
@pytest.mark.parametrize("form", SCALES)
def test_many_rows_of_an_expert(
    seed: int, device: str, form: str, one_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel of all experts, and, as CUDA multiplies rows that take longer, one expert after the other, MXFP4
    by its FP8 product."""
    if not one_kernel:
        monkeypatch.setattr(few_rows, "multiplications", lambda *_, **__: 0)
    rows, n, k = 700, 32, 256
    codes, scale, _ = fp4_reference.weight(2 * n, k, SCALES[form], device)
    dense = fp4_reference.dequantized(codes, scale, None, k)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=k)
    x, scale_a = make_activations(rows, k, torch.float8_e4m3fn, device), torch.rand(rows, 1, device=device) + 0.5
    offs = torch.tensor([300, rows], dtype=torch.int32, device=device)
    y = epiloq.grouped_packed_mm(x, weight, scale_a, offs=offs)
    for part, of in ((slice(300), slice(n)), (slice(300, rows), slice(n, 2 * n))):
        check(y[part], x[part], scale_a[part], dense[of])


@pytest.mark.parametrize("form", SCALES)
def test_batch_invariance(seed: int, device: str, form: str) -> None:
    """A row's result does not depend on the other rows of any expert."""
    given, _ = case(form, torch.float8_e4m3fn, device)
    with epiloq.config(batch_invariant=True):
        whole = epiloq.grouped_packed_mm(**given)
        for row, expert in ((1, 0), (3, 2), (17, 2), (23, 3)):
            part = slice(row, row + 1)
            offs = torch.tensor([int(e >= expert) for e in range(len(COUNTS))], dtype=torch.int32, device=device)
            alone = epiloq.grouped_packed_mm(given["x"][part], given["weight"], given["scale_a"][part], offs=offs)
            assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("form", SCALES)
def test_nan_stays_where_it_is(seed: int, device: str, form: str) -> None:
    given, _ = case(form, torch.float8_e4m3fn, device)
    clean = epiloq.grouped_packed_mm(**given)[: sum(COUNTS)]
    scale_a = given["scale_a"].clone()
    scale_a[4] = math.nan
    y = epiloq.grouped_packed_mm(**given | {"scale_a": scale_a})[: sum(COUNTS)]
    others = [row for row in range(len(y)) if row != 4]
    assert y[4].isnan().all() and torch.equal(y[others], clean[others])


def test_compiles_whole(seed: int, device: str) -> None:
    given, _ = case("nvfp4", torch.float8_e4m3fn, device, len(COUNTS))

    def f(x: Tensor) -> Tensor:
        return epiloq.grouped_packed_mm(**given | {"x": x})[: sum(COUNTS)] * 2

    torch._dynamo.reset()
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(given["x"]), f(given["x"]))


def changed(**parts: Any) -> PackedFp4Weight:
    w = case("nvfp4", torch.int8)[0]["weight"]
    names = ("q", "scale", "global_scale", "format", "n", "k")
    return PackedFp4Weight(**{**{name: getattr(w, name) for name in names}, **parts})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_a": None}, "scale_a: expected the rows' scales with FP4 .*packed_fp4_mm"),
        ({"x": torch.zeros(26, K)}, "x: expected int8 or float8_e4m3fn with scale_a"),
        ({"x": torch.zeros(26, K + 1, dtype=torch.int8)}, rf"x: expected \[M, K\] with {K} columns"),
        ({"offs": torch.ones(5, dtype=torch.int32)}, "weight: expected 5 matrices of a multiple of 16 rows"),
        ({"offs": torch.tensor([3, 2, 23, 24], dtype=torch.int32)}, "offs: expected ascending ends"),
        ({"weight": changed(format="fp4")}, "weight.format: expected one of mxfp4, nvfp4, got 'fp4'"),
        ({"weight": changed(q=torch.zeros(2, 2, 32, 15, dtype=torch.uint8))}, "weight.q: expected torch.uint8"),
        ({"weight": changed(global_scale=torch.ones(3))}, r"weight.global_scale: expected torch.float32 \[4\]"),
        ({"out_dtype": torch.int8}, "out_dtype: expected float16, bfloat16 or float32"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^epiloq\.(grouped_packed_mm|w4a8_mm): {message}"):
        epiloq.grouped_packed_mm(**case("nvfp4", torch.int8)[0] | changes)


def test_other_weights_are_refused() -> None:
    with pytest.raises(TypeError, match="weight: expected a PackedWeight or a PackedFp4Weight, got Tensor"):
        epiloq.grouped_packed_mm(**case("nvfp4", torch.int8)[0] | {"weight": torch.zeros(4, 4)})
