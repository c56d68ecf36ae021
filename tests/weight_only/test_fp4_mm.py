"""`fp4_mm` and its helpers against float64: every code, every scale, odd sizes, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import epiloq
import fp4_reference
from epiloq.weights.fp4 import e4m3_scales
from reference import assert_rounded_product

E8M0, E4M3 = torch.uint8, torch.float8_e4m3fn
FORMATS = [(E8M0, "none"), (torch.float8_e8m0fnu, "none"), (E4M3, "one"), (E4M3, "rows"), (E4M3, "none")]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SIZES = [
    (1, 1, 16),
    (1, 300, 1024),
    (3, 17, 160),
    (7, 33, 576),
    (17, 48, 2048),
    (64, 40, 128),
    (65, 130, 96),
    (4, 7, 33),
    (2, 3, 5),
    (2, 3, 1),
    (0, 8, 64),
    (2, 0, 64),
    (2, 4, 0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scales", "whole"), FORMATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_products(
    m: int, n: int, k: int, scales: torch.dtype, whole: str, dtype: torch.dtype, device: str, seed: int
) -> None:
    codes, scale, global_scale = fp4_reference.weight(n, k, scales, device, whole)
    weight = fp4_reference.dequantized(codes, scale, global_scale, k)
    x, bias = torch.randn(m, k, device=device).to(dtype), torch.randn(n, device=device).to(dtype)
    for of_bias in (None, bias):
        found = epiloq.fp4_mm(x, codes, scale, of_bias, global_scale=global_scale)
        assert_rounded_product(found, x, weight, of_bias)
        wide = torch.full((m, n + 3), 7.0, device=device, dtype=dtype)
        out = wide[:, :n]
        assert epiloq.fp4_mm(x, codes, scale, of_bias, global_scale=global_scale, out=out) is out
        assert_rounded_product(out, x, weight, of_bias)
        # cuBLAS sums into rows that are apart in another order.
        assert device == "cuda" or torch.equal(out, found)
        assert (wide[:, n:] == 7).all()
    assert epiloq.explain("fp4_mm", x, codes, scale, bias, global_scale=global_scale)


def test_weights_that_are_subnormal_in_float16(seed: int, device: str) -> None:
    """docs/numerics.md: they lose up to 2^-25 each."""
    codes, scale, _ = fp4_reference.weight(40, 96, E8M0, device, "none")
    scale = torch.randint(104, 114, scale.shape, dtype=torch.uint8).to(device)
    whole = torch.tensor([0.00123], device=device)
    x = (1000 * torch.randn(9, 96, device=device)).half()
    weight = fp4_reference.dequantized(codes, scale, whole, 96)
    found = epiloq.fp4_mm(x, codes, scale, global_scale=whole).double()
    exact, sums = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    unit = 2.0**-10 * exact.abs() + 2.0**-24
    within = unit + (2.0**-11 + 2.0**-23 * 96**0.5) * sums
    assert ((found - exact).abs() <= within + 2.0**-25 * x.double().abs().sum(1, keepdim=True)).all()
    assert ((found - exact).abs() > within).any()


@given(
    m=st.integers(0, 9),
    n=st.integers(0, 40),
    k=st.integers(0, 150),
    form=st.sampled_from(FORMATS),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    stride=st.integers(0, 5),
    random=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_any_sizes(
    m: int, n: int, k: int, form: tuple[torch.dtype, str], dtype: torch.dtype, with_bias: bool, stride: int, random: int
) -> None:
    torch.manual_seed(random)
    codes, scale, global_scale = fp4_reference.weight(n, k, form[0], "cpu", form[1])
    x = torch.randn(m, k + stride)[:, :k].to(dtype)
    bias = torch.randn(n).to(dtype) if with_bias else None
    found = epiloq.fp4_mm(x, codes, scale, bias, global_scale=global_scale)
    assert_rounded_product(found, x, fp4_reference.dequantized(codes, scale, global_scale, k), bias)
    assert torch.equal(epiloq.fp4_mm(x[None], codes, scale, bias, global_scale=global_scale)[0], found)


@pytest.mark.parametrize("scales", [E8M0, torch.float8_e8m0fnu, E4M3], ids=str)
def test_every_code_by_every_scale_is_exact(scales: torch.dtype, device: str) -> None:
    block = fp4_reference.BLOCK[scales]
    codes = (torch.arange(0, 16, 2) | (torch.arange(1, 16, 2) << 4)).to(torch.uint8).repeat(256, block // 16).to(device)
    scale = torch.arange(256).to(torch.uint8).view(256, 1).to(device).view(scales)
    exact = fp4_reference.dequantized(codes, scale, None, block)
    for dtype in DTYPES:
        found = epiloq.fp4_dequantize(codes, scale, in_features=block, dtype=dtype)
        assert found.dtype == dtype
        assert torch.equal(found.nan_to_num(nan=-7.0), exact.float().to(dtype).nan_to_num(nan=-7.0))
    # Nothing but what is infinite was rounded on the way to float32 and bfloat16.
    finite = exact.abs() < 2.0**128
    for dtype in (torch.float32, torch.bfloat16):
        found = epiloq.fp4_dequantize(codes, scale, in_features=block, dtype=dtype)
        assert torch.equal(found.double()[finite], exact[finite])
    assert exact.isnan().any(1).sum() == (2 if scales == E4M3 else 1)


def test_global_scale_of_one_or_of_rows(seed: int, device: str) -> None:
    codes, scale, rows = fp4_reference.weight(5, 70, E4M3, device, "rows")
    assert rows is not None
    for shape in ((1,), (), (1, 1)):
        one = rows[0].reshape(shape)
        found = epiloq.fp4_dequantize(codes, scale, in_features=70, global_scale=one)
        assert torch.equal(found.double(), fp4_reference.dequantized(codes, scale, one, 70).float().double())
    found = epiloq.fp4_dequantize(codes, scale, in_features=70, global_scale=rows)
    assert torch.equal(found.double(), fp4_reference.dequantized(codes, scale, rows, 70).float().double())


def test_the_half_of_an_odd_width_is_not_read(seed: int, device: str) -> None:
    codes, scale, _ = fp4_reference.weight(3, 33, E8M0, device)
    x = torch.randn(2, 33, device=device)
    other = codes.clone()
    other[:, -1] ^= 0xF0
    assert torch.equal(epiloq.fp4_mm(x, codes, scale), epiloq.fp4_mm(x, other, scale))


def test_nan_affects_only_its_row(device: str, seed: int) -> None:
    codes, scale, _ = fp4_reference.weight(8, 64, E8M0, device)
    scale[3, 1] = 255
    x = torch.randn(3, 64, device=device)
    x[1, 5] = torch.nan
    found = epiloq.fp4_mm(x, codes, scale).isnan()
    expected = torch.zeros_like(found)
    expected[1], expected[:, 3] = True, True
    assert torch.equal(found, expected)


def nearest(value: float) -> float:
    """The E2M1 number next to a value, of two the one with the even code, for which the last bit is 0."""
    size = min(abs(value), 6.0)
    code = min(range(8), key=lambda c: (abs(fp4_reference.E2M1[c] - size), c % 2))
    return fp4_reference.E2M1[code]


@pytest.mark.gpu
def test_scales_of_nvfp4_on_a_gpu_are_quotients(seed: int) -> None:
    """At and beside the numbers halfway between two scales, where a product with 1 / 6 rounds otherwise."""
    numbers = torch.arange(8, 127, dtype=torch.uint8).view(E4M3).float()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    factors = torch.rand(64, 1, 1) + 0.01
    highest = (halfway[:, None] * 6 * factors).view(torch.int32) + torch.arange(-4, 5, dtype=torch.int32)
    for factor, of_factor in zip(factors.flatten(), highest.view(torch.float32), strict=True):
        expected = e4m3_scales(of_factor, factor)
        found = e4m3_scales(of_factor.cuda(), factor.cuda())
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 70), (3, 33), (1, 1), (4, 64), (0, 8), (3, 0)])
def test_quantize(n: int, k: int, dtype: torch.dtype, form: str, seed: int, device: str) -> None:
    """Each block's scale by its rule, each number the nearest to its quotient."""
    weight = (torch.randn(n, k, device=device) * torch.rand(n, 1, device=device) * 0.05).to(dtype)
    codes, scale, global_scale = epiloq.fp4_quantize(weight, form)
    block = fp4_reference.BLOCK[scale.dtype]
    whole = 1.0
    if form == "nvfp4":
        assert global_scale is not None and global_scale.shape == (1,)
        whole = global_scale.item()
        highest = weight.abs().max().item() if weight.numel() else 0.0
        assert whole == ((torch.tensor(2688.0) / highest).reciprocal().item() if highest else 1)
    else:
        assert global_scale is None
    assert scale.shape == (n, -(-k // block)) and codes.shape == (n, -(-k // 2))
    found = fp4_reference.dequantized(codes, scale, None, k)
    for row in range(n):
        for number, part in enumerate(weight[row].float().split(block) if k else ()):
            highest = part.abs().max().item()
            factor = fp4_reference.scale_number(int(scale.view(torch.uint8)[row, number]), scale.dtype)
            if form == "mxfp4":
                exponent = torch.tensor(highest).double().log2().floor().item() - 2
                assert factor == 2.0**exponent
            else:
                wanted = min(max(torch.tensor(highest) / 6 / whole, torch.tensor(2.0**-9)), torch.tensor(448.0))
                assert factor == wanted.to(E4M3).double().item()
            for column, value in enumerate(part.tolist()):
                quotient = (torch.tensor(value) / (torch.tensor(factor) * torch.tensor(whole))).item()
                assert abs(found[row, number * block + column].item()) == nearest(quotient) * factor


def test_ties_go_to_the_even_code(device: str) -> None:
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    above = torch.tensor(values).nextafter(torch.tensor(9.0))
    below = torch.tensor(values).nextafter(torch.tensor(0.0))
    weight = torch.cat((torch.tensor(values), above, below, -torch.tensor(values), torch.tensor([6.0, 0, -0.0, 7])))
    codes, scale, _ = epiloq.fp4_quantize(weight[None].to(device), "mxfp4")
    assert scale.item() == 127
    found = epiloq.fp4_dequantize(codes, scale, in_features=32).cpu()
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    up, down = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert found[0].tolist() == [*even, *up, *down, *(-v for v in even), 6.0, 0.0, 0.0, 6.0]


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_zeros_and_what_is_not_finite(form: str, seed: int, device: str) -> None:
    block = epiloq.weights.fp4.FORMATS[form].block_size
    weight = torch.randn(3, 3 * block, device=device)
    weight[0, :block] = 0
    weight[1, 3], weight[2, -1] = torch.nan, -torch.inf
    codes, scale, global_scale = epiloq.fp4_quantize(weight, form)
    found = epiloq.fp4_dequantize(codes, scale, in_features=3 * block, global_scale=global_scale)
    assert (found[0, :block] == 0).all() and fp4_reference.scale_number(
        int(scale.view(torch.uint8)[0, 0]), scale.dtype
    ) == 1
    bad = torch.zeros_like(weight, dtype=torch.bool)
    bad[1, :block], bad[2, -block:] = True, True
    assert torch.equal(found.isnan(), bad)
    zeros = epiloq.fp4_quantize(torch.zeros(2, block, device=device), form)
    assert (epiloq.fp4_dequantize(zeros[0], zeros[1], in_features=block, global_scale=zeros[2]) == 0).all()


@given(st.integers(-149, 127), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_quantize_of_any_size(exponent: int, random: int) -> None:
    """Of tiny and of huge numbers nothing is lost but what E2M1 loses: at most a quarter of a block's largest."""
    torch.manual_seed(random)
    weight = (torch.rand(2, 48, dtype=torch.float64) * 2.0**exponent).float()
    for form in ("mxfp4", "nvfp4"):
        codes, scale, global_scale = epiloq.fp4_quantize(weight, form)
        found = fp4_reference.dequantized(codes, scale, global_scale, 48)
        block = fp4_reference.BLOCK[scale.dtype]
        highest = torch.stack([part.abs().amax(1) for part in weight.double().split(block, 1)], 1)
        bound = highest.repeat_interleave(block, 1)[:, :48] / 4 + 2.0**-128
        assert ((found - weight.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype, seed: int, device: str) -> None:
    codes, scale, global_scale = fp4_reference.weight(24, 80, E4M3, device, "one")
    weight = epiloq.fp4_dequantize(codes, scale, in_features=80, global_scale=global_scale, dtype=dtype)
    x = torch.randn(2, 3, 80, device=device).to(dtype).requires_grad_()
    bias = torch.randn(24, device=device).to(dtype).requires_grad_()
    dy = torch.randn(2, 3, 24, device=device).to(dtype)
    y = epiloq.fp4_mm(x, codes, scale, bias, global_scale=global_scale)
    y.backward(dy)
    assert x.grad is not None and bias.grad is not None
    assert torch.equal(x.grad, dy @ weight)
    assert torch.equal(bias.grad, dy.reshape(-1, 24).sum(0))
    x.grad = None
    compiled = torch.compile(epiloq.fp4_mm, fullgraph=True, backend="aot_eager")
    compiled(x, codes, scale, bias, global_scale=global_scale).backward(dy)
    assert torch.equal(x.grad, dy @ weight)


def test_transforms(seed: int) -> None:
    codes, scale, _ = fp4_reference.weight(24, 80, E8M0)
    weight = epiloq.fp4_dequantize(codes, scale, in_features=80)
    x, dy = torch.randn(3, 4, 80), torch.randn(3, 4, 24)
    each = torch.vmap(lambda part: epiloq.fp4_mm(part, codes, scale))(x)
    torch.testing.assert_close(each, torch.stack([epiloq.fp4_mm(part, codes, scale) for part in x]))
    gradient = torch.func.grad(lambda part: (epiloq.fp4_mm(part, codes, scale) * dy).sum())(x)
    torch.testing.assert_close(gradient, dy @ weight)


def test_second_derivative(seed: int) -> None:
    codes, scale, _ = fp4_reference.weight(24, 80, E8M0)
    weight = epiloq.fp4_dequantize(codes, scale, in_features=80)
    x, v = torch.randn(2, 80, requires_grad=True), torch.randn(2, 80)
    (first,) = torch.autograd.grad(epiloq.fp4_mm(x, codes, scale).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), x)
    torch.testing.assert_close(second, 2 * v @ weight.t() @ weight, rtol=1e-4, atol=1e-4)


def test_no_gradient_of_scales(seed: int) -> None:
    codes, scale, global_scale = fp4_reference.weight(4, 32, E4M3, "cpu", "one")
    assert global_scale is not None
    y = epiloq.fp4_mm(torch.ones(1, 32), codes, scale, global_scale=global_scale.requires_grad_())
    with pytest.raises(NotImplementedError, match="no gradient of scale or global_scale"):
        y.sum().backward()


BAD = [
    ("x", torch.ones(3, 61), r"codes: expected uint8 \[N, 31\]"),
    ("x", torch.ones(3, 64).double(), "x: expected float32, float16 or bfloat16"),
    ("x", torch.ones(64, 3).t(), "x: expected row-major"),
    ("x", torch.tensor(1.0), "x: expected at least one dimension"),
    ("codes", torch.zeros(4, 32, dtype=torch.int8), "codes: expected uint8"),
    ("codes", torch.zeros(4, 31, dtype=torch.uint8), "codes: expected uint8 .*32"),
    ("codes", torch.zeros(128, dtype=torch.uint8), "codes: expected uint8"),
    ("codes", torch.zeros(4, 64, dtype=torch.uint8)[:, ::2], "codes: .*dense"),
    ("scale", torch.ones(4, 2), "scale: expected uint8 or float8_e8m0fnu"),
    ("scale", torch.zeros(4, 4, dtype=torch.uint8), r"scale: expected \[4, 2\]"),
    ("scale", torch.zeros(3, 2, dtype=torch.uint8), r"scale: expected \[4, 2\]"),
    ("scale", torch.zeros(4, 2).to(torch.float8_e4m3fn), r"scale: expected \[4, 4\]"),
    ("bias", torch.zeros(4).half(), "bias: expected x's"),
    ("bias", torch.zeros(3), "bias: expected x's"),
    ("global_scale", torch.ones(1).double(), "global_scale: expected float32"),
    ("global_scale", torch.ones(2), r"global_scale: expected float32, one element or \[4\]"),
    ("out", torch.zeros(3, 4).half(), "out: expected x's"),
    ("out", torch.zeros(4, 4), r"out: expected \[3, 4\]"),
    ("out", torch.zeros(4).expand(3, 4), "out: expected rows that do not overlap"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_refused(name: str, value: Tensor, message: str) -> None:
    arguments = {
        "x": torch.ones(3, 64),
        "codes": torch.zeros(4, 32, dtype=torch.uint8),
        "scale": torch.full((4, 2), 127, dtype=torch.uint8),
        "bias": torch.zeros(4),
        "global_scale": None,
    }
    assert epiloq.supports("fp4_mm", **arguments)[0]
    with pytest.raises(ValueError, match=rf"epiloq\.fp4_mm: {message}"):
        epiloq.fp4_mm(**{**arguments, name: value})
    assert not epiloq.supports("fp4_mm", **{**arguments, name: value})[0]


def test_refused_by_the_helpers() -> None:
    weight = torch.ones(2, 32)
    for arguments, message in (
        ({"weight": torch.ones(32)}, r"weight: expected float32, float16 or bfloat16 \[N, K\]"),
        ({"weight": weight.int()}, "weight: expected float32"),
        ({"weight": weight, "format": "fp4"}, "format: expected one of mxfp4, nvfp4, got 'fp4'"),
        ({"weight": weight, "format": "mxfp4", "global_scale": torch.ones(1)}, "global_scale: expected None for mxfp4"),
        ({"weight": weight, "global_scale": torch.ones(2)}, "global_scale: expected float32, one element"),
        ({"weight": weight, "global_scale": torch.zeros(1)}, "global_scale: expected a positive number, got 0.0"),
    ):
        with pytest.raises(ValueError, match=rf"epiloq\.fp4_quantize: {message}"):
            epiloq.fp4_quantize(**arguments)
    codes, scale, whole = epiloq.fp4_quantize(weight)
    with pytest.raises(ValueError, match=r"epiloq\.fp4_dequantize: codes: expected uint8 \[N, 17\]"):
        epiloq.fp4_dequantize(codes, scale, in_features=33, global_scale=whole)
    with pytest.raises(ValueError, match=r"epiloq\.fp4_dequantize: in_features: expected an integer from 0, got -1"):
        epiloq.fp4_dequantize(codes, scale, in_features=-1)
    with pytest.raises(ValueError, match=r"epiloq\.fp4_dequantize: dtype: expected float32"):
        epiloq.fp4_dequantize(codes, scale, in_features=32, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"epiloq\.fp4_quantize: weight: expected a tensor, got list"):
        epiloq.fp4_quantize([1.0])
