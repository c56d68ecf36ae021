"""scaled_mm of float8 operands against float64, on the CPU and on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

import epiloq
from float8_reference import (
    ACCURATE,
    FLOAT8,
    Float8Problem,
    assert_float8_close,
    exact_float8,
    fast_bound,
    make_float8_problem,
)
from reference import poisoned, ulp

HALVES = (torch.bfloat16, torch.float16)
PAIRS = list(itertools.product(FLOAT8, FLOAT8))


def call(p: Float8Problem, **kwargs: object) -> torch.Tensor:
    return epiloq.scaled_mm(p.a, p.b, p.scale_a, p.scale_b, p.bias, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("operands", PAIRS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 16, 16), (17, 100, 100), (100, 17, 576), (576, 24, 4095), (33, 4095, 64)]
)
def test_odd_sizes(seed: int, device: str, operands: tuple[torch.dtype, torch.dtype], m: int, n: int, k: int) -> None:
    for dtype, bias in itertools.product(HALVES, (False, True)):
        p = make_float8_problem(m, n, k, device=device, operands=operands, dtype=dtype, bias=bias)
        out = poisoned((m, n), dtype, device)
        assert call(p, out=out) is out
        assert_float8_close(out, p)


@pytest.mark.parametrize(("per_token", "per_channel"), list(itertools.product((False, True), repeat=2)))
def test_scale_granularities(seed: int, device: str, per_token: bool, per_channel: bool) -> None:
    p = make_float8_problem(48, 80, 256, device=device, per_token=per_token, per_channel=per_channel, bias=True)
    assert_float8_close(call(p), p)
    assert_float8_close(call(p, fast_accum=True), p, fast_bound(256))


@pytest.mark.parametrize("shape", [(0, 16, 32), (16, 0, 32), (16, 16, 0)])
def test_empty(device: str, shape: tuple[int, int, int]) -> None:
    p = make_float8_problem(*shape, device=device, bias=True)
    assert_float8_close(call(p), p)


def test_long_sums(seed: int, device: str) -> None:
    """The bound grows with the square root of K, as the span of the terms does."""
    for k in (1024, 16384, 65536):
        p = make_float8_problem(64, 128, k, device=device)
        assert_float8_close(call(p), p)


def test_strided_rows_and_leading_dimensions(seed: int, device: str) -> None:
    p = make_float8_problem(24, 64, 96, device=device)
    wide = torch.zeros(24, 128, device=device).to(torch.float8_e4m3fn)
    wide[:, :96] = p.a
    expected = call(p)
    assert torch.equal(epiloq.scaled_mm(wide[:, :96], p.b, p.scale_a, p.scale_b), expected)
    nested = epiloq.scaled_mm(p.a.view(2, 3, 4, 96), p.b, p.scale_a, p.scale_b)
    assert nested.shape == (2, 3, 4, 64) and torch.equal(nested.view(24, 64), expected)


def test_nan_reaches_the_output(device: str) -> None:
    p = make_float8_problem(16, 32, 64, device=device)
    p.a.view(torch.uint8)[3, 5] = 0x7F
    out = call(p)
    assert out[3].isnan().all() and not out[:3].isnan().any() and not out[4:].isnan().any()


def test_float32_output() -> None:
    p = make_float8_problem(17, 40, 100, dtype=torch.float32, bias=True)
    assert_float8_close(call(p, out_dtype=torch.float32), p, 2.0**-20)


def test_compiles_and_checks(seed: int, device: str) -> None:
    p = make_float8_problem(32, 64, 128, device=device, bias=True)
    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(compiled(p), call(p))
    operands = (p.a, p.b, p.scale_a, p.scale_b, p.bias)
    # The schema's own check compares copies of the operands, which torch cannot do in float8.
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.epiloq.scaled_mm, operands, {"out_dtype": torch.bfloat16}, test_utils=checks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.int8}, r"b: expected float8_e4m3fn or float8_e5m2, got int8"),
        ({"a": torch.int8}, r"b: expected int8, got float8_e4m3fn"),
        ({"a": torch.bfloat16}, r"a: expected int8 or float8_e4m3fn or float8_e5m2, got bfloat16"),
    ],
)
def test_mixed_kinds_are_refused(change: dict[str, torch.dtype], message: str) -> None:
    p = make_float8_problem(16, 32, 64)
    a, weight = (t.float().to(change.get(name, t.dtype)) for name, t in (("a", p.a), ("b", p.weight)))
    with pytest.raises(ValueError, match=message):
        epiloq.scaled_mm(a, weight.t(), p.scale_a, p.scale_b)


def test_zero_points_are_for_integers() -> None:
    p = make_float8_problem(16, 32, 64)
    with pytest.raises(ValueError, match="a: expected int8 with a zero point"):
        epiloq.scaled_mm_azp(p.a, p.b, p.scale_a, p.scale_b, torch.zeros(32, dtype=torch.int32))


# M, N, K that pick every row of the tile tables; odd ones leave ragged tiles.
SIZES = [
    *itertools.product(
        (1, 9, 16, 31, 33, 64, 65, 127, 128, 200, 255, 600, 2050), (16, 2112, 4096, 6400, 8192, 12296), (1040,)
    ),
    *[(79, 15400, 1040), (999, 8200, 1040), (600, 4096, 8208), (1000, 6400, 8208)],
]
KERNELS = {"sm89": (3, 5), "sm90": (11, 12)}  # without fast accumulation and with it


@pytest.mark.parametrize("arch", KERNELS)
@pytest.mark.parametrize("fast_accum", [False, True])
def test_sizes_reach_every_kernel(arch: str, fast_accum: bool) -> None:
    how = {"arch": arch, "sm_count": 132, "fast_accum": fast_accum}
    answers = (epiloq.explain("scaled_mm", m=m, n=n, k=k, dtype=kind, **how) for m, n, k in SIZES for kind in FLOAT8)
    kernels = {answer.partition(", K over")[0] for answer in answers}
    assert len(kernels) == KERNELS[arch][fast_accum], kernels


@pytest.mark.gpu
@pytest.mark.parametrize("arch", KERNELS)
@pytest.mark.parametrize("fast_accum", [False, True])
def test_every_kernel_of_an_architecture(seed: int, arch: str, fast_accum: bool) -> None:
    if arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    kernels = set()
    with epiloq.config(arch=arch):
        for m, n, k in SIZES:
            bound = {"span_bound": fast_bound(k)} if fast_accum else {}
            for operands, dtype in ((PAIRS[0], torch.bfloat16), (PAIRS[1], torch.float16), (PAIRS[3], torch.bfloat16)):
                p = make_float8_problem(m, n, k, device="cuda", operands=operands, dtype=dtype, bias=True)
                out = poisoned((m, n), dtype, "cuda")
                call(p, out=out, fast_accum=fast_accum)
                assert_float8_close(out, p, **bound)
                kernel = epiloq.explain("scaled_mm", p.a, p.b, p.scale_a, p.scale_b, fast_accum=fast_accum)
                kernels.add(kernel.partition(", K over")[0])
    assert len(kernels) == KERNELS[arch][fast_accum], kernels


@pytest.mark.gpu
def test_fast_sums_of_long_rows(seed: int) -> None:
    m, n = 512, 4096  # served by tiles for fast sums, whatever K
    for k in (16384, 65536):
        p = make_float8_problem(m, n, k, device="cuda")
        assert "fast" in epiloq.explain("scaled_mm", m=m, n=n, k=k, dtype=FLOAT8[0], fast_accum=True, sm_count=132)
        assert_float8_close(call(p, fast_accum=True), p, fast_bound(k))


@pytest.mark.gpu
def test_gpu_and_cpu_agree(seed: int) -> None:
    p = make_float8_problem(100, 576, 2048, bias=True)
    on_gpu = Float8Problem(*(None if t is None else t.cuda() for t in vars(p).values()))  # type: ignore[arg-type]
    # Both are within the bound of float64, so within two bounds of one another.
    out = call(on_gpu).cpu()
    assert_float8_close(out, p)
    _, span = exact_float8(p)
    limit = 2 * ulp(call(p).double(), torch.bfloat16) + ACCURATE * span
    assert ((out.double() - call(p).double()).abs() <= limit).all()
