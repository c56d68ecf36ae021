"""w4a8_mm and grouped_packed_mm with a scale for each token and group of 128 columns, against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import epiloq
import fp4_reference
from reference import poisoned, ulp
from w4a8_reference import ACTIVATIONS, make_activations
from weight_reference import make_weight

WEIGHTS = ("mxfp4", "nvfp4", "int4", "int4 in activation order")


class Weight(NamedTuple):
    """A packed weight of stacked matrices, in float64, and the magnitude of its terms."""

    packed: Any
    dense: Tensor
    size: Tensor


def weight_of(kind: str, n: int, k: int, device: str) -> Weight:
    if kind.startswith("int4"):
        made = make_weight(n, k, 4, 32, "zero", act_order=kind.endswith("order"), device=device)
        return Weight(made.packed, made.dense, made.size)
    dtype = torch.uint8 if kind == "mxfp4" else torch.float8_e4m3fn
    codes, scale, _ = fp4_reference.weight(n, k, dtype, device)
    factor = torch.rand(1, device=device) + 0.1 if kind == "nvfp4" else None
    dense = fp4_reference.dequantized(codes, scale, factor, k)
    return Weight(epiloq.pack_fp4_weight(codes, scale, in_features=k, global_scale=factor), dense, dense.abs())


def scales(*shape: int, device: str) -> Tensor:
    """Of token groups, in columns, as kernels load them."""
    *rows, groups = shape
    return (torch.rand(*rows[:-1], groups, rows[-1], device=device) * 0.02 + 1e-3).transpose(-1, -2)


def check(
    y: Tensor, x_q: Tensor, scale_a: Tensor, weight: Weight, bias: Tensor | None = None, rows: slice = slice(None)
) -> None:
    """Within sqrt(k) roundings of fp32, one of each token and one of the type; on CUDA also bfloat16's."""
    x = x_q.double() * scale_a.double().repeat_interleave(128, -1)[..., : x_q.shape[-1]]
    exact, size = x @ weight.dense[rows].t(), x.abs() @ weight.size[rows].t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = ulp(exact, y.dtype) + 2.0**-23 * (x_q.shape[-1] ** 0.5 + 1) * size + (2.0**-7 * size if y.is_cuda else 0)
    error = (y.double() - exact).abs()
    assert not error.isnan().any() and (error <= bound).all(), float((error / bound).max())


@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("n", "k"), [(17, 129), (33, 256), (100, 1000), (16, 4096), (1, 160), (20, 64)])
def test_sizes(seed: int, device: str, n: int, k: int, kind: str, activations: torch.dtype) -> None:
    weight = weight_of(kind, n, k, device)
    for m, dtype in ((1, torch.float16), (9, torch.bfloat16), (300, torch.bfloat16), (0, torch.float16)):
        x_q, scale_a = make_activations(m, k, activations, device), scales(m, -(-k // 128), device=device)
        bias = torch.randn(n, device=device).to(dtype) if m % 2 else None
        out = poisoned((m, n), dtype, device)
        assert epiloq.w4a8_mm(x_q, weight.packed, scale_a, bias, out=out) is out
        check(out, x_q, scale_a, weight, bias)
        assert torch.equal(epiloq.w4a8_mm(x_q, weight.packed, scale_a, bias, out_dtype=dtype), out)


def test_leading_dimensions_and_float32(seed: int) -> None:
    weight, x_q = weight_of("mxfp4", 24, 300, "cpu"), make_activations(6, 300, torch.float8_e4m3fn, "cpu")
    scale_a = scales(6, 3, device="cpu")
    y = epiloq.w4a8_mm(x_q.view(2, 3, 300), weight.packed, scale_a.reshape(2, 3, 3), out_dtype=torch.float32)
    check(y.view(6, 24), x_q, scale_a, weight)
    assert y.shape == (2, 3, 24)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_no_bit_is_lost_where_sums_fit(seed: int, kind: str) -> None:
    """Integers, by scales of powers of two: fp32 holds every product and sum, in whatever order."""
    k = 320
    q = torch.randint(-8, 8, (24, k))
    perm = torch.randperm(k) if kind.endswith("order") else None
    if kind.startswith("int4"):
        weight: Any = epiloq.pack_weight(q, torch.full((24, k // 32), 0.5), bits=4, group_size=32, perm=perm)
    else:
        dtype, size = (torch.uint8, 32) if kind == "mxfp4" else (torch.float8_e4m3fn, 16)
        codes = torch.randint(0, 256, (24, k // 2), dtype=torch.uint8)
        scale = torch.full((24, k // size), 127 if kind == "mxfp4" else 0x38, dtype=torch.uint8).view(dtype)
        weight = epiloq.pack_fp4_weight(codes, scale, in_features=k)
    x_q = torch.randint(-16, 17, (21, k)).float().to(torch.float8_e4m3fn)
    scale_a = torch.tensor([0.25, 1.0, 4.0]).repeat(21, 1).roll(1, 0)
    y = epiloq.w4a8_mm(x_q, weight, scale_a, out_dtype=torch.float32)
    x = x_q.double() * scale_a.double().repeat_interleave(128, 1)[:, :k]
    assert torch.equal(y.double(), x @ weight.dequantize().double().t())


def test_batch_invariance(seed: int, device: str) -> None:
    weight, x_q = weight_of("nvfp4", 48, 320, device), make_activations(20, 320, torch.float8_e4m3fn, device)
    scale_a = scales(20, 3, device=device)
    with epiloq.config(batch_invariant=True):
        whole = epiloq.w4a8_mm(x_q, weight.packed, scale_a)
        for row in (0, 7, 19):
            part = slice(row, row + 1)
            assert torch.equal(epiloq.w4a8_mm(x_q[part], weight.packed, scale_a[part])[0], whole[row])


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "int4"])
@pytest.mark.parametrize("masked", [False, True])
def test_experts(seed: int, device: str, kind: str, masked: bool) -> None:
    experts, n, k = 3, 32, 300
    weight = weight_of(kind, experts * n, k, device)
    ends = torch.tensor([4, 4, 11], dtype=torch.int32, device=device)
    counts = torch.tensor([4, 0, 7], dtype=torch.int32, device=device)
    shape = (experts, 8) if masked else (11,)
    rows = int(torch.tensor(shape).prod())
    x_q = make_activations(rows, k, torch.float8_e4m3fn, device).view(*shape, k)
    scale_a = scales(*shape, 3, device=device).contiguous()
    places: Any = {"masked_m": counts} if masked else {"offs": ends}
    y = epiloq.grouped_packed_mm(x_q, weight.packed, scale_a, **places)
    for expert, (begin, end) in enumerate(((0, 4), (4, 4), (4, 11))):
        place: Any = (expert, slice(end - begin)) if masked else slice(begin, end)
        if end > begin:
            check(y[place], x_q[place], scale_a[place], weight, rows=slice(expert * n, (expert + 1) * n))


@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_explain(kind: str, device: str) -> None:
    weight, x_q = weight_of(kind, 32, 256, device), make_activations(4, 256, torch.float8_e4m3fn, device)
    how = "bfloat16" if device == "cuda" else "float32"
    text = epiloq.explain("w4a8_mm", x_q, weight.packed, torch.ones(4, 2, device=device))
    assert text.startswith(f"activations as {how}, times their scales per group: ")


def test_compiles_whole(seed: int, device: str) -> None:
    weight = weight_of("mxfp4", 40, 200, device)

    def f(x: Tensor) -> Tensor:
        q, scale = epiloq.quantize_fp8(x, granularity="group")
        return epiloq.w4a8_mm(q, weight.packed, scale, out_dtype=torch.float16) * 2

    torch._dynamo.reset()
    x = torch.randn(4, 200, device=device).half()
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)(x), f(x))


@pytest.mark.parametrize("shape", [(4, 3), (3, 2), (8,), (2, 4)])
def test_refuses_other_numbers_of_groups(shape: tuple[int, ...]) -> None:
    weight, x_q = weight_of("mxfp4", 32, 256, "cpu"), make_activations(4, 256, torch.int8, "cpu")
    expected = r"one for each of 4 rows \(\[4\] or \[4, 1\]\), or for each group of 128 columns \(\[4, 2\]\)"
    with pytest.raises(ValueError, match=f"^epiloq.w4a8_mm: scale_a: expected float32, one element or {expected}, got"):
        epiloq.w4a8_mm(x_q, weight.packed, torch.ones(shape))


def test_experts_refuse_other_numbers_of_groups() -> None:
    weight, x_q = weight_of("mxfp4", 32, 256, "cpu"), make_activations(4, 256, torch.int8, "cpu")
    offs = torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"scale_a: expected float32 \[4, 1\] or \[4, 2\], got torch.float32 \[4, 3\]"):
        epiloq.grouped_packed_mm(x_q, weight.packed, torch.ones(4, 3), offs=offs)
