"""scaled_mm and scaled_mm_azp against float64: every epilogue, dtype and kernel family, odd sizes, views, streams."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import Tensor

import epiloq
from reference import Problem, assert_within_one_ulp, make_problem, poisoned

HALVES = [torch.float16, torch.bfloat16]
EPILOGUES = [
    {"bias": False, "zero_point": "none"},
    {"bias": True, "zero_point": "none"},
    {"bias": False, "zero_point": "static"},
    {"bias": True, "zero_point": "static"},
    {"bias": False, "zero_point": "token"},
    {"bias": True, "zero_point": "token"},
]
EPILOGUE_IDS = [f"{e['zero_point']}-{'bias' if e['bias'] else 'plain'}" for e in EPILOGUES]


def call(p: Problem, **kwargs: object) -> Tensor:
    if p.azp_adj is None:
        return epiloq.scaled_mm(p.a, p.b, p.scale_a, p.scale_b, p.bias, **kwargs)  # type: ignore[arg-type]
    return epiloq.scaled_mm_azp(p.a, p.b, p.scale_a, p.scale_b, p.azp_adj, p.azp, p.bias, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=EPILOGUE_IDS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (17, 104, 576), (100, 576, 576), (3, 17, 100), (65, 1, 33)])
def test_every_epilogue(
    seed: int, device: str, m: int, n: int, k: int, dtype: torch.dtype, epilogue: dict[str, object]
) -> None:
    p = make_problem(m, n, k, device=device, dtype=dtype, **epilogue)  # type: ignore[arg-type]
    out = poisoned((m, n), dtype, device)
    assert call(p, out=out, out_dtype=dtype) is out
    assert_within_one_ulp(out, p)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("m", [1, 40, 300])
def test_every_scale_granularity(seed: int, device: str, m: int, per_token: bool, per_channel: bool) -> None:
    for zero_point in ("none", "token"):
        p = make_problem(
            m, 136, 208, device=device, per_token=per_token, per_channel=per_channel, zero_point=zero_point, bias=True
        )
        if p.azp is not None and not per_token:
            p.azp = p.azp[:1].clone()
        assert_within_one_ulp(call(p), p)


@pytest.mark.parametrize("n", [1, 17, 100, 576, 4095])
@pytest.mark.parametrize("m", [1, 17, 100, 576])
def test_odd_sizes(seed: int, device: str, m: int, n: int) -> None:
    for k in (1, 17, 576, 4095):
        p = make_problem(m, n, k, device=device, bias=True, zero_point="token")
        out = poisoned((m, n), torch.bfloat16, device)
        call(p, out=out)
        assert_within_one_ulp(out, p)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (5, 0, 32), (5, 16, 0), (0, 0, 0)])
def test_empty(device: str, m: int, n: int, k: int) -> None:
    p = make_problem(m, n, k, device=device, bias=True)
    out = call(p)
    assert out.shape == (m, n)
    assert_within_one_ulp(out, p)


def test_leading_dimensions(seed: int, device: str) -> None:
    p = make_problem(2 * 3 * 7, 48, 64, device=device, bias=True)
    flat = call(p)
    a = p.a.view(2, 3, 7, 64)
    for scale in (p.scale_a, p.scale_a.view(2, 3, 7, 1), p.scale_a.view(2, 3, 7), p.scale_a.view(-1)):
        out = epiloq.scaled_mm(a, p.b, scale, p.scale_b, p.bias)
        assert out.shape == (2, 3, 7, 48)
        assert torch.equal(out.view(-1, 48), flat)
    vector = epiloq.scaled_mm(p.a[5], p.b, p.scale_a[5], p.scale_b, p.bias)
    assert torch.equal(vector, flat[5])


@pytest.mark.parametrize("m", [5, 200])
def test_strided_views(seed: int, device: str, m: int) -> None:
    """Rows that lie apart in a, the weight and out; what lies between out's rows stays as it was."""
    p = make_problem(m, 64, 96, device=device, bias=True, zero_point="token")
    wide_a = torch.zeros(m, 160, dtype=torch.int8, device=device)
    wide_a[:, 32:128] = p.a
    wide_weight = torch.zeros(64, 112, dtype=torch.int8, device=device)
    wide_weight[:, :96] = p.weight
    wide_out = torch.full((m, 80), 7.0, dtype=torch.bfloat16, device=device)
    expected = call(p)
    p.a, p.weight = wide_a[:, 32:128], wide_weight[:, :96]
    call(p, out=wide_out[:, 8:72])
    assert torch.equal(wide_out[:, 8:72], expected)
    assert (wide_out[:, :8] == 7).all() and (wide_out[:, 72:] == 7).all()


def test_extreme_values_are_exact(device: str) -> None:
    """The largest sums there are, at K where int32 just holds them."""
    for value_a, value_b, k in ((-128, -128, 4096), (127, 127, 4095), (-128, 127, 65793)):
        a = torch.full((33, k), value_a, dtype=torch.int8, device=device)
        weight = torch.full((24, k), value_b, dtype=torch.int8, device=device)
        azp_adj = weight.sum(1, dtype=torch.int32)
        azp = torch.full((33, 1), -127 if value_a > 0 else 127, dtype=torch.int32, device=device)
        one = torch.ones(1, device=device)
        p = Problem(a, weight, one, one, None, azp, azp_adj)
        assert_within_one_ulp(call(p), p)


def test_float32_output(seed: int) -> None:
    p = make_problem(17, 40, 100, dtype=torch.float32, bias=True, zero_point="token")
    out = call(p, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_within_one_ulp(out, p)


# M, N that pick rows of the tile table (other ones of SM90: test_large_m.py); odd ones leave ragged tiles.
SIZES = list(
    itertools.product(
        (1, 9, 16, 31, 33, 64, 65, 127, 128, 200, 255, 600, 2050), (16, 40, 2112, 4096, 5000, 6400, 8192, 12296)
    )
)
KERNELS = {"sm75": 3, "sm80": 13, "sm90": 9}


@pytest.mark.parametrize("arch", KERNELS)
def test_sizes_reach_kernels(arch: str) -> None:
    kernels = {epiloq.explain("scaled_mm", m=m, n=n, k=272, arch=arch, sm_count=132) for m, n in SIZES}
    assert len(kernels) == KERNELS[arch], kernels


@pytest.mark.gpu
@pytest.mark.parametrize("arch", KERNELS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_kernel_of_an_architecture(seed: int, arch: str, dtype: torch.dtype) -> None:
    """With both epilogue kernels."""
    if arch not in epiloq._core.built_archs():
        pytest.skip(f"built without {arch}")
    with epiloq.config(arch=arch):
        for (m, n), zero_point in itertools.product(SIZES, ("none", "token")):
            p = make_problem(m, n, 272, device="cuda", dtype=dtype, bias=True, zero_point=zero_point)
            out = poisoned((m, n), dtype, "cuda")
            call(p, out=out, out_dtype=dtype)
            assert_within_one_ulp(out, p)


@pytest.mark.gpu
def test_graph_capture_and_streams(seed: int) -> None:
    p = make_problem(64, 256, 512, device="cuda", bias=True)
    expected = call(p)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = call(p)
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    captured = torch.zeros_like(expected)
    with torch.cuda.graph(graph):
        call(p, out=captured)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_chain_of_dependent_launches(seed: int) -> None:
    """Quantise, multiply, quantise ...: kernels that overlap must still see what the one before them wrote."""
    weights = [make_problem(1, 512, 512, device="cuda") for _ in range(4)]
    x0 = torch.randn(48, 512, device="cuda", dtype=torch.bfloat16)

    def chain(synchronise: bool) -> Tensor:
        x = x0
        for step in range(40):
            p = weights[step % 4]
            q, scale, azp = epiloq.quantize_int8(x, symmetric=False)
            if synchronise:
                torch.cuda.synchronize()
            x = epiloq.scaled_mm_azp(q, p.b, scale, p.scale_b, p.weight.sum(1, dtype=torch.int32), azp)
            x = x / x.abs().amax()
            if synchronise:
                torch.cuda.synchronize()
        return x

    expected = chain(True)
    for _ in range(20):
        assert torch.equal(chain(False), expected)


@pytest.mark.gpu
@pytest.mark.alone
def test_scalar_scales_written_by_the_kernel_before(seed: int) -> None:
    """A per-tensor scale that changes from zero just before the launch must not be read early."""
    p = make_problem(16, 4096, 4096, device="cuda", per_token=False, per_channel=False)
    scale = p.scale_a.clone()
    expected = call(p)
    for _ in range(50):
        p.scale_a.zero_()
        call(p)
        p.scale_a.copy_(scale)
        assert torch.equal(call(p), expected)


def test_threads(seed: int, device: str) -> None:
    problems = [make_problem(m, 64, 128, device=device, bias=True) for m in (1, 16, 33, 100)]
    expected = [call(p) for p in problems]
    results: list[list[Tensor]] = [[] for _ in problems]

    def work(i: int) -> None:
        with epiloq.config(arch="auto"):
            for _ in range(20):
                results[i].append(call(problems[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if device == "cuda":
        torch.cuda.synchronize()
    for outs, reference in zip(results, expected, strict=True):
        assert len(outs) == 20 and all(torch.equal(out, reference) for out in outs)


@pytest.mark.gpu
def test_tensors_on_a_device_that_is_not_current(seed: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    p = make_problem(33, 256, 512, device="cuda:1", bias=True)
    with torch.cuda.device(0):
        out = call(p)
    assert out.device.index == 1
    assert_within_one_ulp(out, p)
