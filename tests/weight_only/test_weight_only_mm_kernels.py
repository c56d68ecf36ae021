"""weight_only_mm on a GPU: every kernel of the tables, large sizes, every integer, guards, graphs and streams."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import epiloq
from reference import ulp
from weight_reference import (
    DECODE_TOKENS,
    KINDS,
    WGMMA_TOKENS,
    assert_close,
    make_weight,
    rounds_weights,
    run_and_assert_close,
    run_kernel,
)

HALVES = [torch.float16, torch.bfloat16]
# Bits and groups that kernels support; groups of 16 only with 2 and 3 bits.
GRIDS = [(bits, group) for bits in (2, 3, 4, 8) for group in (16, 32, 64, 128, 512, -1) if group != 16 or bits < 4]


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["sm75", "sm80", "sm90"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("bits", "group_size"), GRIDS)
def test_large_on_a_gpu(seed: int, bits: int, group_size: int, dtype: torch.dtype, arch: str) -> None:
    with epiloq.config(arch=arch):
        for n, k in ((4096, 4096), (2112, 7168), (1000, 14336)):
            for m in (1, 2, 8, 17, 64, 190, 700):
                run_and_assert_close("cuda", m, n, k, bits, group_size, KINDS[m % 3], dtype, bias=m % 2 == 0)


# Rows of the tables in src/dispatch/weight_only_mm/tables.h; the first GEMVs multiply tokens as integers.
ROWS = {"gemv": 14, "tiled": 5, "decode": len(DECODE_TOKENS), "wgmma": len(WGMMA_TOKENS)}
DIGIT_ROWS = 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("bits", "group_size"), GRIDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel(seed: int, kind: str, group_size: int, bits: int, dtype: torch.dtype) -> None:
    """Independently of the tables, with one slice of K, with some, and with the most.

    A kernel that this device cannot run is refused; two of them run on every device.
    """
    kernels = [(family, row, split) for family, rows in ROWS.items() for row in range(rows) for split in (1, 3, 7, 8)]
    ran = 0
    for (n, k), scale_dtype in itertools.product(((1040, 2064), (33, 1100)), (torch.float16, dtype)):
        weight = make_weight(n, k, bits, group_size, kind, scale_dtype=scale_dtype, device="cuda")
        for m, kernel in itertools.product((1, 2, 5, 8, 40, 130), kernels):
            x = torch.nn.functional.pad(torch.randn(m, k, device="cuda").to(dtype), (0, -k % 8))[:, :k]
            try:
                out = run_kernel(kernel, x, weight.packed)
            except ValueError as refusal:
                assert "kernel: expected one that fits" in str(refusal)
                continue
            assert_close(out, x, weight, rounded_weights=rounds_weights(kernel))
            ran += 1
    assert ran >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_integer_is_exact(bits: int, dtype: torch.dtype) -> None:
    """Rows of the unit matrix read the weight back, q - zero for every q at every place and every zero."""
    values = 1 << bits
    x = torch.eye(256, device="cuda", dtype=dtype)
    for shift in range(0, values, 5):
        q = (torch.arange(256 * 256).view(256, 256) * 3 + torch.arange(256)[:, None] + shift) % values
        zero = (torch.arange(256)[:, None] * 7 + shift) % values
        packed = epiloq.pack_weight(q, torch.ones(256, 1), zero, bits=bits, group_size=-1).to("cuda")
        expected = (q - zero).to(dtype).t().cuda()
        for m in (1, 8, 64, 256):
            for first in range(0, 256, m if m > 8 else 61):
                rows = x[first : first + m]
                assert torch.equal(epiloq.weight_only_mm(rows, packed), expected[first : first + m])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["symmetric", "zero"])
def test_tokens_as_digits_of_any_magnitude(seed: int, kind: str, bits: int, dtype: torch.dtype) -> None:
    """Activations far apart in a block of 128, whose largest meets weights of 0, and blocks far from each other.

    The bound is that of docs/numerics.md with its term for digits. The others are 2^12 below the largest, so that a
    wrong lowest digit exceeds it.
    """
    n, k, block = 100, 1152, 128
    weight = make_weight(n, k, bits, block, kind, device="cuda")
    lowest, highest = (-24, 8) if dtype == torch.float16 else (-120, 60)
    for m, row, split in itertools.product((1, 2), range(DIGIT_ROWS), (1, 3)):
        exponent = torch.randint(lowest, highest, (m, k // block, 1)) - torch.randint(0, 40, (m, k // block, block))
        x = torch.randn(m, k, device="cuda").double() * torch.exp2(exponent.view(m, k).cuda().double())
        x = x.to(dtype)
        largest = x[0].abs().view(-1, block).argmax(-1) + torch.arange(0, k, block, device="cuda")
        smaller = torch.full((k,), 2.0**-12, dtype=torch.float64, device="cuda")
        smaller[largest] = 1
        x = (x.double() * smaller).to(dtype)
        q, dense, size = weight.q.clone(), weight.dense.clone(), weight.size.clone()
        q[:, largest] = 0 if weight.zero is None else weight.zero.to(q.dtype)
        dense[:, largest] = size[:, largest] = 0
        packed = epiloq.pack_weight(q, weight.scale, weight.zero, bits=bits, group_size=block)
        y = run_kernel(("gemv", row, split), x, packed)
        rows = x.double()
        exact, magnitude = rows @ dense.t(), rows.abs() @ size.t()
        digits = rows.abs().view(m, -1, block).amax(-1).clamp(min=2.0**-98) @ size.view(n, -1, block).sum(-1).t()
        bound = ulp(exact, dtype) + 2.0**-23 * k**0.5 * magnitude + 2.0**-30 * digits
        error = (y.double() - exact).abs()
        assert (error <= bound).all(), (m, row, split, float((error / bound).max()))


def all_kernels() -> list[tuple[str, int, int]]:
    """Every row of the table, without split-K and with three slices; unsuitable ones are refused when called."""
    return [(family, row, split) for family, rows in ROWS.items() for row in range(rows) for split in (1, 3)]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("m", [1, 2, 7, 40])
def test_kernels_wait_for_the_producer_of_tokens(seed: int, m: int) -> None:
    """A chain of products with the unit matrix, nothing in between: each starts while the one before still runs."""
    n, links = 512, 40
    x = torch.randn(m, n, device="cuda").half()
    for bits in (4, 8):
        q = torch.eye(n, dtype=torch.int32, device="cuda")
        packed = epiloq.pack_weight(
            q, torch.ones(n, n // 128, dtype=torch.float16, device="cuda"), bits=bits, group_size=128
        )
        for kernel in all_kernels():
            outs = torch.full((links, m, n), math.nan, dtype=torch.float16, device="cuda")
            tokens = x
            try:
                for out in outs:
                    tokens = run_kernel(kernel, tokens, packed, out=out)
            except ValueError as refusal:
                assert "kernel: expected one that fits" in str(refusal)
                continue
            assert torch.equal(outs, x.expand_as(outs)), kernel


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("m", [1, 2, 7, 40])
def test_weights_that_a_kernel_of_torch_has_just_written(seed: int, m: int) -> None:
    """Integers change in place, by a kernel; another product follows, during which the next one starts."""
    n, k = 256, 1024
    first, second = (make_weight(n, k, device="cuda").packed for _ in range(2))
    x = torch.randn(m, k, device="cuda").half()
    change = first.q ^ second.q
    packed = dataclasses.replace(first, q=first.q.clone())
    for kernel in all_kernels():
        try:
            expected = [run_kernel(kernel, x, dataclasses.replace(first, q=w.q)) for w in (second, first)]
        except ValueError as refusal:
            assert "kernel: expected one that fits" in str(refusal)
            continue
        outs = torch.full((20, m, n), math.nan, dtype=torch.float16, device="cuda")
        other = torch.empty_like(outs[0])
        for out in outs:
            packed.q.bitwise_xor_(change)
            run_kernel(kernel, x, first, out=other)
            run_kernel(kernel, x, packed, out=out)
        for i, out in enumerate(outs):
            assert torch.equal(out, expected[i % 2]), (kernel, i)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 8, 64])
def test_no_reads_out_of_bounds(seed: int, m: int) -> None:
    """Guards of NaN around x, in the row's own padding above all, leave no trace."""
    for n, k, dtype in itertools.product((17, 100), (33, 100, 576), HALVES):
        weight = make_weight(n, k, 4, 32, "zero", device="cuda")
        x = torch.randn(m, k, device="cuda").to(dtype)
        padded = -(-k // 8) * 8
        memory = torch.full((m + 2, padded + 8), math.nan, dtype=dtype, device="cuda")
        view = memory[1:-1, :k].copy_(x)
        assert_close(epiloq.weight_only_mm(view, weight.packed), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 33, 63, 64, 65, 72, 73, 129, 191, 192, 193, 200, 201, 700])
def test_streams_read_the_tokens_that_are_there(seed: int, k: int) -> None:
    """Every number of them, lines of memory that end anywhere, and NaN wherever a row is not."""
    weight = make_weight(100, k, 4, 128, "zero", device="cuda")
    for m, row, dtype in itertools.product(range(1, 9), range(ROWS["gemv"]), HALVES):
        if row < DIGIT_ROWS and m > 2:
            continue
        memory = torch.full((m + 2, -(-k // 8) * 8 + 64), math.nan, dtype=dtype, device="cuda")
        x = memory[1:-1, :k].copy_(torch.randn(m, k))
        assert_close(run_kernel(("gemv", row, 1), x, weight.packed), x, weight)


@pytest.mark.gpu
def test_in_a_cuda_graph_and_on_a_stream(seed: int) -> None:
    weight = make_weight(512, 1024, device="cuda").packed
    for m in (1, 40, 700):
        x = torch.randn(m, 1024, device="cuda").half()
        expected = epiloq.weight_only_mm(x, weight)
        out = torch.zeros_like(expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            epiloq.weight_only_mm(x, weight, out=out)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = epiloq.weight_only_mm(x, weight)
        stream.synchronize()
        assert torch.equal(again, expected)
