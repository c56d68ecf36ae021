"""`PackedWeight.integers`: the differences q - zero as operands of 8-bit products."""

from __future__ import annotations

import pytest
import torch

import epiloq

FLOAT8 = torch.float8_e4m3fn
SHAPES = [(1, 1, 32), (17, 33, -1), (64, 128, 32), (48, 200, 64), (130, 1000, 128), (33, 264, 96)]


def packed_of(
    bits: int, n: int, k: int, group_size: int, zeros: bool, device: str
) -> tuple[epiloq.PackedWeight, torch.Tensor]:
    """A packed weight of random integers, and q - zero as int16."""
    groups = 1 if group_size == -1 else -(-k // group_size)
    scale = torch.rand(n, groups, device=device) + 0.5
    if not zeros:
        q = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (n, k), device=device, dtype=torch.int8)
        return epiloq.pack_weight(q, scale, bits=bits, group_size=group_size), q.short()
    q = torch.randint(0, 1 << bits, (n, k), device=device, dtype=torch.uint8)
    zero = torch.randint(0, 1 << bits, (n, groups), device=device, dtype=torch.uint8)
    group = torch.arange(k, device=device) // (k if group_size == -1 else group_size)
    packed = epiloq.pack_weight(q, scale, zero, bits=bits, group_size=group_size)
    return packed, q.short() - zero[:, group].short()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integers_are_exact(bits: int, zeros: bool, device: str, seed: int) -> None:
    for n, k, group_size in SHAPES:
        packed, exact = packed_of(bits, n, k, group_size, zeros, device)
        for dtype in (torch.int8, FLOAT8):
            if bits == 8 and (zeros or dtype == FLOAT8):
                with pytest.raises(ValueError, match="cannot hold the integers of this weight of 8 bits"):
                    packed.integers(dtype)
                continue
            found = packed.integers(dtype)
            assert found.dtype == dtype and found.shape == (n, k)
            assert torch.equal(found.float(), exact.float())
            assert torch.equal(torch.compile(packed.integers, backend="eager")(dtype).float(), exact.float())


def test_refused(seed: int) -> None:
    packed, _ = packed_of(4, 32, 64, 32, False, "cpu")
    with pytest.raises(ValueError, match=r"dtype: expected torch.int8 or torch.float8_e4m3fn, got torch.float16"):
        packed.integers(torch.float16)
    q, scale = torch.randint(0, 16, (32, 64), dtype=torch.uint8), torch.rand(32, 2)
    affine = epiloq.pack_weight(q, scale, None, torch.randn(32, 2), bits=4, group_size=32)
    with pytest.raises(ValueError, match="out: expected a floating-point type for a weight with offsets"):
        affine.integers()
