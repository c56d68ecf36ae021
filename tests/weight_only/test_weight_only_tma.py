"""Kernels of weight_only_mm that TMA feeds, on a Hopper GPU, one mechanism a test: what fails names what is wrong."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import epiloq
from weight_reference import DECODE_TOKENS, WGMMA_TOKENS, assert_close, make_weight, rounds_weights, run_kernel

HALVES = [torch.float16, torch.bfloat16]
# Tokens of a tile, by family and row.
TILES = {
    (family, row): tile
    for family, tiles in (("decode", DECODE_TOKENS), ("wgmma", WGMMA_TOKENS))
    for row, tile in enumerate(tiles)
}
each_kernel = pytest.mark.parametrize("kernel", TILES, ids=lambda kernel: f"{kernel[0]} {kernel[1]}")
Kernel = tuple[str, int]


def fitting(kernel: Kernel, sizes: tuple[int, ...]) -> list[int]:
    """The values of M that a kernel supports; the decode kernel has one tile of tokens."""
    return [m for m in sizes if kernel[0] != "decode" or m <= TILES[kernel]]


pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is SM90's")


def assert_equal(y: Tensor, expected: Tensor) -> None:
    """Bit for bit. The rows and columns that differ show whether a swizzle, a permutation or a tile is wrong."""
    wrong = (y != expected).nonzero().tolist()
    if wrong:
        token, row = wrong[0]
        tokens, rows = (sorted({place[i] % 64 for place in wrong}) for i in range(2))
        raise AssertionError(
            f"{len(wrong)} of {y.numel()} differ; tokens mod 64 {tokens}; weight rows mod 64 {rows}; first "
            f"[{token}, {row}]: {float(y[token, row])} instead of {float(expected[token, row])}"
        )


def ones(n: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(n, 1, device="cuda", dtype=dtype)


def unit_weight(n: int, k: int, columns: Tensor, dtype: torch.dtype) -> epiloq.PackedWeight:
    """1 in one column of each row, else 0."""
    q = torch.zeros(n, k, dtype=torch.int64, device="cuda").scatter_(1, columns[:, None], 1)
    zero = torch.zeros(n, 1, dtype=torch.int64, device="cuda")
    return epiloq.pack_weight(q, ones(n, dtype), zero, bits=4, group_size=-1)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [4, 8])
@each_kernel
def test_integers_are_at_their_positions(kernel: Kernel, bits: int, dtype: torch.dtype) -> None:
    """Fragments: rows of the unit matrix read q - zero back, without scales, splits or ragged edges."""
    values, n, k = 1 << bits, 512, 256
    q = (torch.arange(n * k).view(n, k) * 3 + torch.arange(n)[:, None]) % values
    for zero in (None, (torch.arange(n)[:, None] * 7) % values):
        codes = q - values // 2 if zero is None else q
        packed = epiloq.pack_weight(codes, torch.ones(n, 1, dtype=dtype), zero, bits=bits, group_size=-1).to("cuda")
        expected = (q - (values // 2 if zero is None else zero)).to(dtype).t().cuda()
        x = torch.eye(k, device="cuda", dtype=dtype)
        for first in range(0, k, TILES[kernel]):
            some = slice(first, first + TILES[kernel])
            assert_equal(run_kernel((*kernel, 1), x[some], packed), expected[some])


@each_kernel
def test_tokens_are_at_their_positions(seed: int, kernel: Kernel) -> None:
    """Swizzle and TMA boxes of tokens: each weight row returns one of their columns. Full, partial and several tiles,
    and several bands of 1024 tokens (tile_bands.cuh)."""
    n, k, tile = 700, 384, TILES[kernel]
    columns = torch.randint(k, (n,), device="cuda")
    packed = unit_weight(n, k, columns, torch.bfloat16)
    for m in fitting(kernel, (tile, 1, 7, tile - 3, tile + 1, 3 * tile + 9, 1024 + 1, 2 * 1024 + 3 * tile + 9)):
        x = torch.randn(m, k, device="cuda").bfloat16()
        assert_equal(run_kernel((*kernel, 1), x, packed), x[:, columns])


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_have_their_parameters(seed: int, bits: int, group_size: int, scale_dtype: torch.dtype) -> None:
    """Scales and zero points: tokens with a single 1 read scale (q - zero) back, rounded once."""
    n, k = 272, 1024
    group = torch.arange(k, device="cuda") // (k if group_size == -1 else group_size)
    q = torch.randint(1 << bits, (n, k), device="cuda")
    scale = torch.rand(n, int(group[-1]) + 1, device="cuda").add_(0.5).to(scale_dtype)
    zero = torch.randint(1 << bits, scale.shape, device="cuda")
    packed = epiloq.pack_weight(q, scale, zero, bits=bits, group_size=group_size)
    expected = (scale.float()[:, group] * (q - zero[:, group])).t()
    for kernel, tile in TILES.items():
        if rounds_weights((*kernel, 1)) and scale_dtype != torch.float16:
            continue
        column = torch.randperm(k, device="cuda")[:tile]
        x = torch.zeros(tile, k, device="cuda", dtype=torch.float16)
        x[torch.arange(tile, device="cuda"), column] = 1
        assert_equal(run_kernel((*kernel, 1), x, packed), expected[column].half())


@pytest.mark.parametrize("bits", [4, 8])
@each_kernel
def test_stages_wrap_around(seed: int, kernel: Kernel, bits: int) -> None:
    """Barriers and phases: more K steps than stages (of which 8-bit weights have fewer), a partial last step, and fewer
    steps than K groups; sums of integers, exact in any order."""
    for k in (128, 256, 1152, 2056, 8192):
        weight = make_weight(300, k, bits, -1, "zero", device="cuda")
        packed = epiloq.pack_weight(weight.q, ones(300, torch.bfloat16), weight.zero, bits=bits, group_size=-1)
        x = torch.randint(-2, 3, (fitting(kernel, (TILES[kernel], TILES[kernel] + 1))[-1], k), device="cuda")
        assert weight.zero is not None
        expected = (x.double() @ (weight.q - weight.zero).double().t()).bfloat16()
        for _ in range(3):
            assert_equal(run_kernel((*kernel, 1), x.bfloat16(), packed), expected)


@each_kernel
def test_persistent_cta_runs_several_tiles(seed: int, kernel: Kernel) -> None:
    """The pipeline continues from tile to tile, while the last one is stored: more tiles than SMs, again exact."""
    n, k = 20_001, 640
    q = torch.randint(-8, 8, (n, k), device="cuda")
    packed = epiloq.pack_weight(q, ones(n, torch.bfloat16), bits=4, group_size=-1)
    for m in fitting(kernel, (TILES[kernel], TILES[kernel] + 1, 2 * TILES[kernel] + 5)):
        x = torch.randint(-2, 3, (m, k), device="cuda")
        expected = (x.double() @ q.double().t()).bfloat16()
        for _ in range(3):
            assert_equal(run_kernel((*kernel, 1), x.bfloat16(), packed), expected)


@each_kernel
def test_split_k_over_a_cluster(seed: int, kernel: Kernel) -> None:
    """Split-K with the reduction through DSMEM: numbers of slices that divide the K steps and that do not."""
    n, k = 700, 1280
    q = torch.randint(-8, 8, (n, k), device="cuda")
    packed = epiloq.pack_weight(q, ones(n, torch.bfloat16), bits=4, group_size=-1)
    for m in fitting(kernel, (5, TILES[kernel], TILES[kernel] + 9)):
        x = torch.randint(-2, 3, (m, k), device="cuda")
        expected = (x.double() @ q.double().t()).bfloat16()
        for split in range(1, 9):
            assert_equal(run_kernel((*kernel, split), x.bfloat16(), packed), expected)


@pytest.mark.parametrize("split", [1, 3])
@each_kernel
def test_ragged_edges(seed: int, kernel: Kernel, split: int) -> None:
    """N, M and K that no tile divides; NaN around the operands; output rows off 8 bytes; bias and clamp."""
    sizes = fitting(kernel, (5, 9, 30, 131))
    for (n, k), m, shift in itertools.product(((17, 385), (100, 400), (259, 1096)), sizes, (0, 1, 4)):
        dtype = HALVES[(n + m) % 2]
        weight = make_weight(n, k, 4, 32, "zero", scale_dtype=dtype, device="cuda")
        memory = torch.full((m + 2, -(-k // 8) * 8 + 8), math.nan, dtype=dtype, device="cuda")
        x = memory[1:-1, :k].copy_(torch.randn(m, k, device="cuda"))
        wide = torch.full((m + 2, n + 9), math.nan, dtype=dtype, device="cuda")
        out = wide[1:-1, shift : shift + n]
        bias = torch.randn(n, device="cuda").to(dtype)
        run_kernel((*kernel, split), x, weight.packed, bias, (-1.5, 2.0), out)
        rounded = rounds_weights((*kernel, split))
        assert_close(out, x, weight, bias, (-1.5, 2.0), rounded_weights=rounded)
        out.fill_(math.nan)
        assert wide.isnan().all(), "something was written outside of the output"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, -1)])
@each_kernel
def test_layers(seed: int, kernel: Kernel, bits: int, group_size: int, dtype: torch.dtype) -> None:
    """Sizes of real layers, in the documented bound, the same bits each time."""
    for n, k in ((4096, 4096), (2112, 7168)):
        kind = "zero" if bits == 4 else "symmetric"
        weight = make_weight(n, k, bits, group_size, kind, scale_dtype=dtype, device="cuda")
        for m in fitting(kernel, (TILES[kernel], 300)):
            split = 4 if m == TILES[kernel] else 1
            x = torch.randn(m, k, device="cuda").to(dtype)
            y = run_kernel((*kernel, split), x, weight.packed)
            assert_close(y, x, weight, rounded_weights=rounds_weights((*kernel, split)))
            assert all(torch.equal(run_kernel((*kernel, split), x, weight.packed), y) for _ in range(3))


@each_kernel
def test_weights_written_by_the_previous_kernel(seed: int, kernel: Kernel) -> None:
    """Overlapping launches: the preceding kernel writes tokens and weights, and reads the output's old values."""
    n, k, m = 1024, 2048, TILES[kernel]
    columns = [torch.randint(k, (n,), device="cuda") for _ in range(4)]
    weights = [unit_weight(n, k, c, torch.float16) for c in columns]
    tokens = [torch.randn(m, k, device="cuda").half() for _ in range(4)]
    x, out = torch.empty_like(tokens[0]), torch.empty(m, n, device="cuda", dtype=torch.float16)
    packed = unit_weight(n, k, columns[0], torch.float16)
    copies = []
    for turn in range(40):
        packed.q.copy_(weights[turn % 4].q)
        x.copy_(tokens[turn // 4 % 4])
        run_kernel((*kernel, 2), x, packed, out=out)
        copies.append(out.clone())
    for turn, copy in enumerate(copies):
        assert_equal(copy, tokens[turn // 4 % 4][:, columns[turn % 4]])
