"""online_quant_mm by SM90's wgmma kernels: what their tiles, clusters and stores add to the other kernels' tests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import epiloq
from blockwise_kernels import run_kernel, some, wgmma_cases
from blockwise_reference import exact, make_weight
from online_quant_sweep import Kernel
from reference import ulp

CASES = wgmma_cases()


@pytest.fixture(autouse=True)
def _sm90() -> None:
    """Cases are for 132 SMs."""
    card = torch.cuda.get_device_properties()
    on_hopper = (card.major, card.minor, card.multi_processor_count) == (9, 0, 132)
    if "sm90" not in epiloq._core.built_archs() or not on_hopper:
        pytest.skip("needs SM90 and its kernels")


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_float32_sums_of_wgmma_kernels(seed: int, bits: int, offset: bool) -> None:
    """Scales and offsets' parts pass tensor cores in two tf32 parts, and are added there with their last bit cut off:
    terms of one sign, where that adds up with every block, stay within what docs/numerics.md says."""
    for kernel, m, n, k in (
        (Kernel("sm90", 0, 2), 65, 200, 1000),
        (Kernel("sm90", 2), 200, 4100, 4096),
        (Kernel("sm90", 1, 5), 130, 300, 16400),
        (Kernel("sm90", 4, 2, last_wave=True), 500, 5000, 2048),
    ):
        x = torch.rand(m, k, device="cuda") + 3
        weight = make_weight(n, k, 128, bits=bits, offset=offset, device="cuda")
        weight = replace(weight, q=weight.q.clamp(min=0), offset=weight.offset.abs() if offset else None)
        rows, columns = some(m, 40).cuda(), some(n, 60).cuda()
        out = run_kernel(kernel, x, weight.prepared())[rows][:, columns]
        chosen = replace(
            weight,
            q=weight.q[columns],
            scale=weight.scale[columns],
            offset=weight.offset[columns] if offset else None,
        )
        result, magnitude = exact(x[rows], chosen, None)
        limit = ulp(result, torch.float32) + (2.0**-20 + -(-k // 128) * 2.0**-23) * magnitude
        assert ((out.double() - result).abs() <= limit).all(), (kernel, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("kernel", "m", "n", "k"), [(Kernel("sm90", 0), 40, 300, 700), *CASES])
def test_non_finite_values_affect_only_their_row(
    seed: int, kernel: Kernel, m: int, n: int, k: int, offset: bool, bits: int, dtype: torch.dtype
) -> None:
    """Also where shared memory that held such a token's parameters comes again, in another block of K or tile."""
    x = torch.randn(m, k, device="cuda").to(dtype)
    weight = make_weight(n, k, 128, bits=bits, offset=offset, device="cuda").prepared()
    expected = run_kernel(kernel, x, weight)
    x[min(3, m - 1), k - 1], x[m - 1, 0] = float("nan"), float("inf")
    out = run_kernel(kernel, x, weight)
    spoiled = torch.tensor([min(3, m - 1), m - 1], device="cuda")
    assert out[spoiled].isnan().all()
    rest = torch.ones(m, dtype=torch.bool, device="cuda").index_fill(0, spoiled, False)
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float16_outputs_equal_float32_ones(seed: int, dtype: torch.dtype, bits: int) -> None:
    """16-bit outputs are stored on another path than float32, by TMA while the next tile is multiplied; where K is
    short that is soon done. Their values are those of float32, rounded."""
    for kernel, m, n, k in (*CASES, *((Kernel("sm90", row), 514, 8192, 128) for row in range(5))):
        weight = make_weight(n, k, 128, bits=bits, offset=False, device="cuda").prepared()
        for _ in range(5):
            x = torch.randn(m, k, device="cuda").to(dtype)
            expected = run_kernel(kernel, x.float(), weight).to(dtype)
            assert torch.equal(run_kernel(kernel, x, weight), expected), (kernel, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_is_written_outside_an_output(seed: int, dtype: torch.dtype, bits: int) -> None:
    """Views whose rows TMA can write and others, whose columns may be no multiple of 16 bytes, with the same bits."""
    for kernel, m, n, k in (*CASES, (Kernel("sm90", 1), 129, 2050, 640)):
        x = torch.randn(m, k, device="cuda").to(dtype)
        weight = make_weight(n, k, 128, bits=bits, offset=False, device="cuda").prepared()
        more = {"bias": torch.randn(n, device="cuda").to(dtype), "clamp": (-20, 20)}
        expected = run_kernel(kernel, x, weight, **more)
        for first in (16, 5):
            memory = torch.full((m + 9, (n + 47) // 8 * 8), 99.0, device="cuda", dtype=dtype)
            inside = torch.zeros_like(memory, dtype=torch.bool)
            inside[4 : 4 + m, first : first + n] = True
            run_kernel(kernel, x, weight, memory[4 : 4 + m, first : first + n], **more)
            assert torch.equal(memory[inside].view(m, n), expected), (kernel, m, n, k, first)
            assert (memory[~inside] == 99).all(), (kernel, m, n, k, first)
