"""quantize_fp8 on the GPU: the CPU's bits, in every layout and on every path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
from fp8_reference import FLOATS, FORMATS, GRANULARITIES, awkward_rows, same_bits

pytestmark = pytest.mark.gpu


def assert_bits_are_the_cpus(x: Tensor, **kwargs: Any) -> None:
    """The CPU's bits and layout, and the GPU's."""
    cpu = epiloq.quantize_fp8(x, **kwargs)
    on_gpu = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    gpu = epiloq.quantize_fp8(x.cuda().as_strided(x.shape, x.stride()), **on_gpu)
    assert all(same_bits(a, b) and a.stride() == b.stride() for a, b in zip(cpu, gpu, strict=True)), kwargs


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [1, 8, 17, 100, 128, 512, 576, 1032, 1536, 2048, 4095, 7168, 16384, 32768, 40960])
def test_gpu_bits_are_the_cpus(seed: int, columns: int, dtype: torch.dtype) -> None:
    x = awkward_rows(140 if columns < 5000 else 33, columns, dtype)
    finite = x.float().nan_to_num(1, 1, 1).to(dtype)
    for granularity in GRANULARITIES:
        for g in (128, 32, 1024) if granularity == "group" else (128, 64) if granularity == "block" else (128,):
            assert_bits_are_the_cpus(finite, granularity=granularity, group_size=g, pad_to=16)
            assert_bits_are_the_cpus(x, granularity=granularity, group_size=g)
            assert_bits_are_the_cpus(
                x, granularity=granularity, group_size=g, ue8m0=True, dtype=torch.float8_e5m2, pad_to=24
            )
            _, scale = epiloq.quantize_fp8(finite, granularity=granularity, group_size=g)
            assert_bits_are_the_cpus(
                x, granularity=granularity, group_size=g, scale=scale * torch.rand_like(scale).mul(6).sub(3).exp2()
            )
    assert_bits_are_the_cpus(x, granularity="group", scale_layout="column", scale_ub=torch.tensor([2.0]), eps=1e-4)


def test_gpu_extreme_static_scales(seed: int) -> None:
    """Scales that are divided by, not multiplied with: tiny, huge, zero, negative, not finite."""
    scales = [0.0, 1e-45, 2.0**-126, 2.0**-81, 2.0**-80, 2.0**100, 2.0**101, 3e38, -0.5, math.inf, math.nan]
    for dtype in FLOATS:
        x = awkward_rows(len(scales) + 13, 4096, dtype)
        scale = torch.tensor(scales + [torch.rand(()).item() for _ in range(13)])[:, None]
        for dtype8 in FORMATS:
            assert_bits_are_the_cpus(x, granularity="token", scale=scale, dtype=dtype8)
            assert_bits_are_the_cpus(
                x[13:].contiguous(), granularity="token", scale=scale[: len(scales)].contiguous(), dtype=dtype8
            )


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gpu_strided_rows(seed: int, granularity: str) -> None:
    wide = torch.randn(40, 640, dtype=torch.bfloat16)
    gpu = wide.cuda()
    for view in (wide[:, 64:576], wide[::2, 8:520], wide[:, 3:515], wide[:, 128:129], wide[1:, :136]):
        expected = epiloq.quantize_fp8(view, granularity=granularity)
        got = epiloq.quantize_fp8(
            gpu.as_strided(view.shape, view.stride(), view.storage_offset()), granularity=granularity
        )
        assert all(same_bits(a, b) for a, b in zip(expected, got, strict=True))


def test_gpu_many_rows_and_one_long_row(seed: int) -> None:
    for shape in ((70_001, 24), (3, 1 << 20), (1, 8_388_608), (100_000, 128)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        for granularity in ("tensor", "token", "group"):
            assert_bits_are_the_cpus(x, granularity=granularity)


def everything(x: torch.Tensor) -> list[Tensor]:
    """Each granularity, the static path and the fused producers."""
    results = [part for granularity in GRANULARITIES for part in epiloq.quantize_fp8(x, granularity=granularity)]
    q, _ = epiloq.quantize_fp8(x, scale=results[1])
    group: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "granularity": "group"}
    return [*results, q, *epiloq.rms_norm_quant(x, x[0], residual=x.flip(0), **group), *epiloq.silu_and_mul_quant(x)]


def test_graphs_streams_and_poison(seed: int) -> None:
    """Captured and replayed on new values, on a stream of its own, over memory that held other values."""
    x = torch.randn(260, 2048, device="cuda").bfloat16()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        everything(x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = everything(x)
    for _ in range(3):
        x.copy_(torch.randn(260, 2048, device="cuda") * torch.rand((), device="cuda") * 10)
        for part in captured:
            part.view(torch.uint8).fill_(0xA5)
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(captured, everything(x), strict=True))


def test_calls_without_a_pause(seed: int) -> None:
    """Kernels that may start before the one before them has ended still read what it wrote."""
    xs = [torch.randn(64, 4096, device="cuda").bfloat16() for _ in range(8)]
    expected = [[part.cpu() for part in everything(x)] for x in xs]
    for _ in range(20):
        results = [everything(x) for x in xs]
        for got, wanted in zip(results, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_fused_extremes(seed: int, dtype: torch.dtype) -> None:
    """Zero rows beside others, and padding behind rows that are not finite."""
    x = awkward_rows(40, 1024, dtype).cuda()
    for choice in ({"dtype": torch.int8}, {"dtype": torch.float8_e4m3fn}):
        weight = torch.rand(1024, device="cuda").to(dtype)
        for q, scale in (
            epiloq.rms_norm_quant(x, weight, pad_to=1040, **choice),
            epiloq.silu_and_mul_quant(x, pad_to=520, **choice),
        ):
            columns = 1024 if q.shape[1] == 1040 else 512
            assert (q.view(torch.uint8)[:, columns:] == 0).all()
            assert scale.isnan()[5] and not scale[13:].isnan().any()
            assert (q.float()[:2] == 0).all() and scale[0] == scale[1]
