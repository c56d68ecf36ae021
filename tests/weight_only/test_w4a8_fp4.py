"""w4a8_mm with FP4 weights against float64: 8-bit activations by E2M1 numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
import fp4_reference
from epiloq.ops.w4a8 import unpacked
from epiloq.weights.packed_fp4_weight import PackedFp4Weight
from reference import poisoned, ulp
from w4a8_reference import ACTIVATIONS, make_activations

KINDS = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}
HALVES = (torch.float16, torch.bfloat16)


class Product:
    """Arguments of a call, and what it returns, in float64."""

    def __init__(
        self, m: int, n: int, k: int, form: str, activations: torch.dtype, bias: torch.dtype | None, device: str
    ) -> None:
        codes, scale, _ = fp4_reference.weight(n, k, KINDS[form], device)
        factor = torch.rand(1, device=device) + 0.1 if form == "nvfp4" else None
        self.dense = fp4_reference.dequantized(codes, scale, factor, k)
        self.weight = epiloq.pack_fp4_weight(codes, scale, in_features=k, global_scale=factor)
        self.x_q = make_activations(m, k, activations, device)
        self.scale_a = torch.rand(m, 1, device=device) * 0.02 + 1e-3
        self.bias = None if bias is None else torch.randn(n, device=device).to(bias)

    @property
    def arguments(self) -> tuple[Tensor, PackedFp4Weight, Tensor, Tensor | None]:
        return self.x_q, self.weight, self.scale_a, self.bias

    def check(self, y: Tensor) -> None:
        x, scale = self.x_q.double(), self.scale_a.double()
        exact, size = scale * (x @ self.dense.t()), scale * (x.abs() @ self.dense.abs().t())
        if self.bias is not None:
            exact, size = exact + self.bias.double(), size + self.bias.double().abs()
        # The factor's product with a scale is rounded where the reference rounds it.
        bound = ulp(exact, y.dtype) + 2.0**-23 * max(x.shape[-1], 1) ** 0.5 * size
        if y.is_cuda:
            bound += 2.0**-7 * size  # where activations become bfloat16; the float8 kernel is within 2^-12
        error = (y.double() - exact).abs()
        assert not error.isnan().any(), "NaN: an element that was never written?"
        assert (error <= bound).all(), f"worst element {float((error / bound).max()):.2f} times the bound"


def run_and_check(product: Product, dtype: torch.dtype) -> None:
    """With and without an output that is given."""
    out = poisoned((len(product.x_q), product.weight.n), dtype, str(product.x_q.device))
    assert epiloq.w4a8_mm(*product.arguments, out=out) is out
    product.check(out)
    assert torch.equal(epiloq.w4a8_mm(*product.arguments, out_dtype=dtype), out)


@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (17, 100), (100, 17), (16, 128), (33, 4095), (1029, 33), (264, 640), (0, 64), (20, 0)]
)
def test_sizes(seed: int, device: str, n: int, k: int, form: str, activations: torch.dtype) -> None:
    for m, dtype in ((0, HALVES[0]), (1, HALVES[0]), (9, HALVES[1]), (70, HALVES[0]), (130, HALVES[1])):
        run_and_check(Product(m, n, k, form, activations, dtype if m % 2 else None, device), dtype)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 80),
    n=st.integers(1, 200),
    k=st.integers(1, 500),
    form=st.sampled_from(sorted(KINDS)),
    activations=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    has_bias=st.booleans(),
    draw=st.integers(0, 2**32 - 1),
)
def test_any_product(
    m: int, n: int, k: int, form: str, activations: torch.dtype, dtype: torch.dtype, has_bias: bool, draw: int
) -> None:
    torch.manual_seed(draw)
    run_and_check(Product(m, n, k, form, activations, dtype if has_bias else None, "cpu"), dtype)


@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
def test_no_bit_is_lost_where_sums_fit(seed: int, activations: torch.dtype) -> None:
    """Every code and activations that are integers: fp32 holds every sum, of scales from 2^-20 to 2^20 too."""
    k = 320
    codes = torch.randint(0, 256, (64, k // 2), dtype=torch.uint8)
    scale = (127 + torch.randint(-20, 21, (64, 1))).repeat(1, k // 32).to(torch.uint8)
    x_q = torch.randint(-16, 17, (21, k)).float().to(activations)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=k)
    y = epiloq.w4a8_mm(x_q, weight, torch.full((21, 1), 0.25), out_dtype=torch.float32)
    dense = fp4_reference.dequantized(codes, scale, None, k)
    assert torch.equal(y.double(), 0.25 * (x_q.double() @ dense.t()))


@pytest.mark.parametrize("form", KINDS)
def test_the_same_as_the_dequantised_activations(seed: int, form: str) -> None:
    """`packed_fp4_mm` of activations without scales; and one scale for all tokens is each token's."""
    product = Product(9, 48, 160, form, torch.float8_e4m3fn, None, "cpu")
    one = torch.ones(1)
    expected = epiloq.packed_fp4_mm(product.x_q.float(), product.weight)
    assert torch.equal(epiloq.w4a8_mm(product.x_q, product.weight, one, out_dtype=torch.float32), expected)
    each = epiloq.w4a8_mm(product.x_q[None], product.weight, one.expand(1, 9, 1), out_dtype=torch.float32)
    assert torch.equal(each[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (70, 640), (129, 144), (520, 4096), (33, 1000)])
def test_many_tokens(seed: int, n: int, k: int, dtype: torch.dtype, form: str) -> None:
    """MXFP4 becomes float8 rows, where K is a multiple of 16."""
    for m in (unpacked.MANY_FP4_TOKENS, 600):
        for bias in (None, dtype):
            product = Product(m, n, k, form, torch.float8_e4m3fn, bias, "cuda")
            run_and_check(product, dtype)
            by_8_bits = "unpacked to 8 bits" in epiloq.explain("w4a8_mm", *product.arguments, out_dtype=dtype)
            assert by_8_bits == (form == "mxfp4" and k % 16 == 0 and torch.cuda.get_device_capability() >= (8, 9))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1, 16), (33, 4096), (100, 100), (1029, 64), (17, 8 * 512)])
@pytest.mark.parametrize("spread", [0, 14, 40])
def test_rows_of_float8(seed: int, n: int, k: int, spread: int) -> None:
    """Exact where a row's scales differ by at most 2^14, and within 2^-16 of the largest elsewhere."""
    codes = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8)
    low = torch.randint(1, 254 - spread, (n, 1))
    scale = (low + torch.randint(0, spread + 1, (n, -(-k // 32)))).to(torch.uint8)
    codes[0] = 0  # zeros, of any scales
    codes[-1, :16] = 0x88  # a block of zeros, and of the largest scale
    scale[-1, 0] = 254
    dense = fp4_reference.dequantized(codes, scale, None, k)
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=k).to("cuda")
    rows, row_scale = weight.float8_rows()
    found = (rows.cpu().double() * row_scale.cpu().double())[:, :k]
    blocks = torch.nn.functional.pad(dense, (0, -k % 32)).view(n, -1, 32)
    counts = torch.where(blocks.any(2), scale.double(), -1).amax(1, keepdim=True)
    bound = torch.where(counts < 0, 0.0, (counts - 127 - 16).exp2()) * (spread > 14)
    assert ((found - dense).abs() <= bound).all()
    assert (row_scale > 0).all()


@pytest.mark.gpu
def test_a_nan_scale_makes_its_row_nan(seed: int) -> None:
    """Of a block of zeros, too."""
    codes = torch.randint(0, 256, (40, 64), dtype=torch.uint8)
    codes[5, 16:32] = 0
    scale = torch.full((40, 4), 127, dtype=torch.uint8)
    scale[5, 1] = scale[20, 3] = 255
    rows, row_scale = epiloq.pack_fp4_weight(codes, scale, in_features=128).to("cuda").float8_rows()
    assert row_scale.isnan().nonzero()[:, 0].tolist() == [5, 20]
    assert rows.float().isfinite().all()


@pytest.mark.parametrize("form", KINDS)
def test_nan_stays_where_it_is(seed: int, device: str, form: str) -> None:
    product = Product(9, 50, 256, form, torch.float8_e4m3fn, None, device)
    clean = epiloq.w4a8_mm(*product.arguments)
    others = [row for row in range(9) if row != 4]
    x = product.x_q.clone()
    x[4, 200] = math.nan
    y = epiloq.w4a8_mm(x, product.weight, product.scale_a)
    assert torch.equal(y[others], clean[others]) and y[4].isnan().all()
    scale_a = product.scale_a.clone()
    scale_a[4] = math.nan
    y = epiloq.w4a8_mm(product.x_q, product.weight, scale_a)
    assert torch.equal(y[others], clean[others]) and y[4].isnan().all()
    codes, scale, factor = product.weight.unpack()
    scale.view(torch.uint8)[7, 3] = 255 if form == "mxfp4" else 127
    weight = epiloq.pack_fp4_weight(codes, scale, in_features=256, global_scale=factor)
    y = epiloq.w4a8_mm(product.x_q, weight, product.scale_a)
    assert y[:, 7].isnan().all() and torch.equal(y[:, :7], clean[:, :7]) and torch.equal(y[:, 8:], clean[:, 8:])


@pytest.mark.parametrize("form", KINDS)
def test_batch_invariance(seed: int, device: str, form: str) -> None:
    product = Product(20, 48, 192, form, torch.float8_e4m3fn, torch.bfloat16, device)
    with epiloq.config(batch_invariant=True):
        whole = epiloq.w4a8_mm(*product.arguments)
        for row in (0, 7, 19):
            part = slice(row, row + 1)
            alone = epiloq.w4a8_mm(product.x_q[part], product.weight, product.scale_a[part], product.bias)
            assert torch.equal(alone[0], whole[row])
    product.check(whole)


def test_compiles_whole(seed: int, device: str) -> None:
    product = Product(1, 40, 100, "nvfp4", torch.float8_e4m3fn, torch.float16, device)

    def f(x: Tensor) -> Tensor:
        q, scale = epiloq.quantize_fp8(x, granularity="token")
        return epiloq.w4a8_mm(q, product.weight, scale, product.bias, out_dtype=torch.float16) * 2

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (2, 40):
        x = torch.randn(m, 100, device=device).half()
        assert torch.equal(compiled(x), f(x))


def call(**changes: Any) -> dict[str, Any]:
    product = Product(3, 32, 64, "nvfp4", torch.float8_e4m3fn, torch.float16, "cpu")
    valid = dict(zip(("x_q", "weight", "scale_a", "bias"), product.arguments, strict=True))
    return {**valid, "out": torch.zeros(3, 32).half(), **changes}


def changed(**parts: Any) -> PackedFp4Weight:
    w = call()["weight"]
    names = ("q", "scale", "global_scale", "format", "n", "k")
    return PackedFp4Weight(**{**{name: getattr(w, name) for name in names}, **parts})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_q": torch.zeros(3, 63, dtype=torch.int8)}, "x_q: expected 64 columns"),
        ({"x_q": torch.randn(3, 64)}, "x_q: expected int8 or float8_e4m3fn, got float32"),
        ({"weight": changed(format="fp4")}, "weight.format: expected one of mxfp4, nvfp4, got 'fp4'"),
        ({"weight": changed(q=torch.zeros(2, 2, 32, 15, dtype=torch.uint8))}, "weight.q: expected torch.uint8"),
        ({"weight": changed(scale=torch.zeros(2, 4, 16, dtype=torch.uint8))}, "weight.scale: expected torch.uint8"),
        ({"weight": changed(global_scale=torch.ones(2))}, r"weight.global_scale: expected torch.float32 \[1\]"),
        ({"weight": changed(global_scale=torch.ones(1).half())}, "weight.global_scale: expected torch.float32"),
        ({"bias": torch.randn(31).half()}, r"bias: expected the output's torch.float16 \[32\]"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    given = call(**changes)
    before = given["out"].clone()
    with pytest.raises(ValueError, match=f"^epiloq.w4a8_mm: {message}"):
        epiloq.w4a8_mm(**given)
    assert torch.equal(before, given["out"])
    assert not epiloq.supports("w4a8_mm", **given)[0]


def test_refuses_an_output_in_the_weight(seed: int) -> None:
    weight = changed()
    with pytest.raises(ValueError, match=r"^epiloq\.w4a8_mm: out: expected memory apart from weight\.q's"):
        epiloq.w4a8_mm(**call(weight=weight, out=weight.q.view(torch.float16).view(-1)[:96].view(3, 32)))


def test_explain_describes_the_path() -> None:
    explanation = epiloq.explain("w4a8_mm", **call())
    assert explanation.startswith("activations as float32: cpu, packed E2M1 numbers in registers")
