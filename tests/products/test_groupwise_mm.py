"""groupwise_mm and grouped_mm against float64, on the CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch

import epiloq
from groupwise_reference import RECIPES, Recipe, assert_close, call, make
from reference import poisoned

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 128), (17, 100, 100), (100, 17, 576), (576, 24, 4095), (3, 4095, 144)]
)
def test_odd_sizes(seed: int, device: str, recipe: Recipe, m: int, n: int, k: int) -> None:
    p = make(m, n, k, device=device, recipe=recipe)
    for dtype in DTYPES:
        bias = torch.randn(n).to(dtype).to(device)
        for row in (None, bias):
            out = poisoned((m, n), dtype, device)
            assert call(p, row, out=out) is out
            assert_close(out, *p.operands(), row)


@pytest.mark.parametrize("shape", [(0, 16, 128), (16, 0, 128), (16, 32, 0)])
def test_empty(device: str, shape: tuple[int, int, int]) -> None:
    p = make(*shape, device=device)
    assert_close(call(p), *p.operands())


def test_no_tokens_with_strides_of_zero(device: str) -> None:
    """torch.compile gives a tensor without elements strides (0, 0)."""
    a = torch.empty_strided((0, 256), (0, 0), dtype=torch.float8_e4m3fn, device=device)
    b = torch.zeros(64, 256, device=device).to(a.dtype).t()
    scale_a, scale_b = torch.ones(0, 2, device=device), torch.ones(2, 1, device=device)
    assert epiloq.groupwise_mm(a, b, scale_a, scale_b).shape == (0, 64)


@pytest.mark.parametrize("shape", [(3, 0), (2, 0, 5), (2, 3, 0), (0, 0), (0, 3)])
def test_empty_batches(device: str, shape: tuple[int, ...]) -> None:
    q, scale = epiloq.quantize_fp8(torch.zeros(*shape, 256, device=device), granularity="group")
    b, scale_b = torch.zeros(64, 256, device=device).to(q.dtype).t(), torch.ones(2, 1, device=device)
    assert epiloq.groupwise_mm(q, b, scale, scale_b).shape == (*shape, 64)


def test_experts_with_zero_capacity(device: str) -> None:
    a = torch.zeros(4, 0, 256, device=device).to(torch.float8_e4m3fn)
    b = torch.zeros(4, 64, 256, device=device).to(a.dtype).transpose(1, 2)
    scales = torch.ones(4, 0, 2, device=device), torch.ones(4, 2, 1, device=device)
    masked_m = torch.zeros(4, dtype=torch.int32, device=device)
    assert epiloq.grouped_mm(a, b, *scales, masked_m=masked_m).shape == (4, 0, 64)


def test_any_layout_of_scales(seed: int, device: str) -> None:
    p = make(33, 200, 640, device=device)
    expected = call(p)
    padded = torch.zeros(5, 36, device=device)
    padded[:, :33] = p.scale_a.t()
    assert torch.equal(epiloq.groupwise_mm(p.a, p.b, padded[:, :33].t(), p.scale_b), expected)
    assert torch.equal(epiloq.groupwise_mm(p.a, p.b, p.scale_a, p.scale_b.t().contiguous().t()), expected)
    nested = epiloq.groupwise_mm(p.a.view(3, 11, 640), p.b, p.scale_a.view(3, 11, 5), p.scale_b)
    assert torch.equal(nested.view(33, 200), expected)


def test_scales_of_quantisers_are_accepted(seed: int, device: str) -> None:
    x, weight = torch.randn(19, 300, device=device), torch.randn(130, 300, device=device)
    q, scale = epiloq.quantize_fp8(x, granularity="group", scale_layout="column")
    w, weight_scale = epiloq.quantize_fp8(weight, granularity="block")
    out = epiloq.groupwise_mm(q, w.t(), scale, weight_scale.t(), out_dtype=torch.float32)
    exact = x.double() @ weight.double().t()
    assert (out.double() - exact).norm() < 0.05 * exact.norm()


def test_long_sums(seed: int, device: str) -> None:
    for k in (16384, 65536):
        p = make(40, 64, k, device=device)
        assert_close(call(p, out_dtype=torch.float32), *p.operands())


def test_strided_operands(seed: int, device: str) -> None:
    p = make(24, 64, 256, device=device)
    wide = torch.zeros(24, 512, device=device).to(torch.float8_e4m3fn)
    wide[:, :256] = p.a
    out = poisoned((24, 96), torch.bfloat16, device)
    epiloq.groupwise_mm(wide[:, :256], p.b, p.scale_a, p.scale_b, out=out[:, :64])
    assert torch.equal(out[:, :64], call(p)) and out[:, 64:].isnan().all()


def test_compiles(seed: int, device: str) -> None:
    p = make(32, 64, 256, device=device)
    compiled = torch.compile(lambda *args: epiloq.groupwise_mm(*args), fullgraph=True)
    assert torch.equal(compiled(p.a, p.b, p.scale_a, p.scale_b), call(p))


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[2]])
@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [0, 0, 64, 0], [17, 33, 128, 256], [8, 9, 16, 17, 32, 33]])
def test_experts_by_offsets(seed: int, device: str, recipe: Recipe, counts: list[int]) -> None:
    p = make(sum(counts) + 7, 136, 400, device=device, recipe=recipe, experts=len(counts))
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(device)
    out = poisoned((p.a.shape[0], 136), torch.bfloat16, device)
    epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, recipe=recipe, out=out)
    left, right = p.operands()
    for expert, rows in enumerate(torch.arange(sum(counts)).split(counts)):
        assert_close(out[rows], left[rows], right[expert])
    assert out[sum(counts) :].isnan().all(), "rows of no expert were written"


@pytest.mark.parametrize("experts,n,k", [(32, 1032, 640), (38, 200, 2064), (30, 392, 4112), (24, 2056, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_many_experts_with_few_rows(seed: int, device: str, dtype: torch.dtype, experts: int, n: int, k: int) -> None:
    """A tile of its own on SM90, for one step of K and for several rounds of its pipeline."""
    counts = torch.randint(9, (experts,)).mul(torch.randint(6, (experts,))).tolist()
    chosen = epiloq.explain("grouped_mm", m=sum(counts), n=n, k=k, experts=experts, arch="sm90", sm_count=132)
    assert "64 tokens x 128 weights, 2 warpgroups along K" in chosen or sum(counts) < experts
    p = make(max(sum(counts), 1), n, k, device=device, recipe=RECIPES[0], experts=experts)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(device)
    out = poisoned((p.a.shape[0], n), dtype, device)
    epiloq.grouped_mm(p.a, p.b, p.scale_a, p.scale_b, offs=ends, recipe=RECIPES[0], out=out)
    left, right = p.operands()
    for expert, rows in enumerate(torch.arange(sum(counts)).split(counts)):
        assert_close(out[rows], left[rows], right[expert])


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[2]])
def test_experts_by_mask(seed: int, device: str, recipe: Recipe) -> None:
    counts, experts, most = [3, 0, 70, 130], 4, 130
    p = make(most * experts, 200, 272, device=device, recipe=recipe, experts=experts)
    a, scale_a = p.a.view(experts, most, 272), p.scale_a.view(experts, most, 3)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=device)
    out = poisoned((experts, most, 200), torch.float16, device)
    epiloq.grouped_mm(a, p.b, scale_a, p.scale_b, masked_m=masked_m, recipe=recipe, out=out)
    left, right = p.operands()
    for expert, count in enumerate(counts):
        rows = slice(expert * most, expert * most + count)
        assert_close(out[expert, :count], left[rows], right[expert])
        assert out[expert, count:].isnan().all()


BAD = {
    "scale_a: expected 16 x 2 scales": {"scale_a": torch.ones(16, 3)},
    "scale_a: expected two dimensions": {"scale_a": torch.ones(1)},
    "scale_b: expected 1 x 2 scales": {"scale_b": torch.ones(2, 32)},
    "a: expected float8_e4m3fn, got int8": {"a": torch.zeros(16, 256, dtype=torch.int8)},
    "b: expected column-major": {"b": torch.zeros(256, 32).to(torch.float8_e4m3fn)},
    "recipe: expected one of": {"recipe": (1, 64, 128)},
    "out_dtype: expected": {"out_dtype": torch.int32},
    "bias: expected bfloat16": {"bias": torch.ones(32)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    p = make(16, 32, 256)
    good = {"a": p.a, "b": p.b, "scale_a": p.scale_a, "scale_b": p.scale_b}
    with pytest.raises(ValueError, match=message):
        epiloq.groupwise_mm(**{**good, **BAD[message]})


def test_bad_experts_are_named() -> None:
    p = make(16, 32, 256, experts=2)
    good = (p.a, p.b, p.scale_a, p.scale_b)
    ends = torch.tensor([4, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match="offs: expected either offs or masked_m, got both"):
        epiloq.grouped_mm(*good, offs=ends, masked_m=ends)
    with pytest.raises(ValueError, match=r"offs: expected shape \[2\]"):
        epiloq.grouped_mm(*good, offs=ends[:1])
    with pytest.raises(ValueError, match="offs: expected ascending ends"):
        epiloq.grouped_mm(*good, offs=ends.flip(0))
    with pytest.raises(ValueError, match="masked_m: expected 0 to 8 rows each"):
        epiloq.grouped_mm(p.a.view(2, 8, 256), p.b, p.scale_a.view(2, 8, 2), p.scale_b, masked_m=ends)
    with pytest.raises(ValueError, match="recipe: expected"):
        epiloq.grouped_mm(*good, offs=ends, recipe=(128, 128, 128))
    with pytest.raises(ValueError, match=r"a: expected \[M, K\] with offs"):
        epiloq.grouped_mm(p.a.view(4, 4, 256), p.b, p.scale_a.view(4, 4, 2), p.scale_b, offs=ends)
    out = torch.zeros(16, 32)
    with pytest.raises(ValueError, match="out: expected memory apart from offs"):
        epiloq.grouped_mm(*good, offs=out.view(torch.int32)[0, :2], out=out)


def test_scales_have_the_leading_dimensions_of_a(seed: int) -> None:
    p = make(12, 32, 640)
    a, (rows, columns) = p.a.view(3, 4, 640), p.operands()
    last = epiloq.groupwise_mm(a[:, -1:], p.b, p.scale_a.view(3, 4, 5)[:, -1:], p.scale_b)
    assert_close(last.view(3, 32), rows[3::4], columns)
    with pytest.raises(ValueError, match="scale_a: expected two dimensions, or a scale a row and a's leading"):
        epiloq.groupwise_mm(a, p.b, p.scale_a.view(4, 3, 5), p.scale_b)
    with pytest.raises(ValueError, match="scale_a: expected two dimensions"):
        epiloq.groupwise_mm(a, p.b, torch.ones(1, 1, 5), p.scale_b, recipe=(128, 128, 128))


def test_explain_checks_its_sizes() -> None:
    with pytest.raises(ValueError, match="experts of at least 1"):
        epiloq.explain("grouped_mm", m=4, n=64, k=128, experts=0)


@pytest.mark.parametrize(
    ("name", "text", "kind", "message"),
    [
        ("scaled_mm", {"m": 1}, TypeError, "expected m, n, k and optionally .*arch.*got no n"),
        ("scaled_mm", {"m": 1, "n": 2, "K": 3}, TypeError, "expected .*got K, which is not one of them"),
        ("scaled_mm", {"m": -5, "n": 1, "k": 1}, ValueError, "m: expected an integer from 0"),
        ("weight_only_mm", {"m": 1, "n": 1, "k": 1, "bits": "4"}, TypeError, "bits: not of the type"),
        ("scaled_mm", {"m": 1, "n": 1, "k": 1, "sm_count": 4, "arch": 90}, TypeError, "arch: not of the type .*90"),
        ("requantized_mm", {"m": 1, "n": 1, "k": 1}, TypeError, "expected its own arguments"),
    ],
)
def test_explain_names_unsupported_sizes(
    name: str, text: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^epiloq.{name}: {message}"):
        epiloq.explain(name, **text)


def test_recipes_may_be_lists_as_json_has_them(seed: int) -> None:
    p = make(16, 32, 256)
    out = epiloq.groupwise_mm(p.a, p.b, p.scale_a, p.scale_b, recipe=[1, 128, 128])
    assert torch.equal(out, epiloq.groupwise_mm(p.a, p.b, p.scale_a, p.scale_b))
    with pytest.raises(ValueError, match=r"recipe: expected one of .*, got \[128, 128\]"):
        epiloq.groupwise_mm(p.a, p.b, p.scale_a, p.scale_b, recipe=[128, 128])
