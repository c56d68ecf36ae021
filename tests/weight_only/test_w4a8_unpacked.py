"""w4a8_mm at large M: products of the unpacked weight. The arithmetic on a CPU, the choice of this path on a GPU."""

from __future__ import annotations

import pytest
import torch

import epiloq
from epiloq._torch import devices
from epiloq.ops.w4a8 import unpacked
from epiloq.ops.w4a8_mm import FLOAT8_TOKENS, float8_tokens
from reference import poisoned
from w4a8_reference import KINDS, assert_close, make_problem, run_and_assert_close

WAYS = [(-1, torch.float8_e4m3fn), (-1, torch.int8), (128, torch.float8_e4m3fn), (384, torch.float8_e4m3fn)]
OTHERS = [(64, torch.float8_e4m3fn), (160, torch.float8_e4m3fn), (128, torch.int8)]
MANY = unpacked.MANY_TOKENS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group_size", "activations"), WAYS)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (70, 640), (129, 144), (64, 128), (33, 2000)])
def test_arithmetic(seed: int, n: int, k: int, group_size: int, activations: torch.dtype, kind: str) -> None:
    for bias in (None, torch.float16):
        problem = make_problem(9, n, k, group_size, kind, activations, bias=bias)
        x_q, weight, scale_a, added = problem.arguments
        out = poisoned((9, n), torch.float16, "cpu")
        unpacked.multiply(out, x_q, weight, scale_a, added)
        assert_close(out, problem)


@pytest.mark.parametrize(("group_size", "k"), [(32, 16), (64, 48), (100, 80), (256, 144), (512, 400)])
def test_a_group_longer_than_a_row(seed: int, group_size: int, k: int) -> None:
    """A scale per row, though the packed weight has more for padded columns."""
    problem = make_problem(9, 33, k, group_size, "zero")
    out = poisoned((9, 33), torch.bfloat16, "cpu")
    unpacked.multiply(out, problem.x_q, problem.weight.packed, problem.scale_a, None)
    assert_close(out, problem)


@pytest.mark.parametrize(
    ("run", "float8", "measured"), [(["sm89", "sm90"], True, True), (["sm89"], True, False), (["sm80"], False, False)]
)
def test_gpus_whose_kernels_multiply_float8(
    monkeypatch: pytest.MonkeyPatch, run: list[str], float8: bool, measured: bool
) -> None:
    """Only SM90 runs SM90's kernels. Newer GPUs run SM89's, for which the threshold on M was not measured."""
    monkeypatch.setattr(devices._core, "runs_kernels_of", lambda arch, _: arch in run)
    device = torch.device("cuda", 0)
    assert devices.runs_kernels_of(device, *unpacked._FLOAT8_ARCHS) == float8
    assert devices.runs_kernels_of(device, *unpacked._MEASURED_ARCHS) == measured

    def on_this_gpu(of: tuple[str, ...]) -> bool:
        return devices.runs_kernels_of(device, *of)

    for group_size, m, fits in (
        (128, MANY, measured),
        (128, unpacked.MANY_TOKENS_ELSEWHERE, measured),
        (-1, MANY, measured),
        (-1, unpacked.MANY_TOKENS_ELSEWHERE, float8),
    ):
        assert unpacked.fits_sizes(m, 512, group_size, torch.float8_e4m3fn, on_this_gpu) == fits


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group_size", "activations"), [*WAYS, *OTHERS])
def test_large_m(seed: int, group_size: int, activations: torch.dtype, kind: str) -> None:
    on_sm90 = torch.cuda.get_device_capability() == (9, 0)
    many = MANY if on_sm90 else unpacked.MANY_TOKENS_ELSEWHERE
    for m, n, k in ((many, 70, 640), (many + 33, 520, 1040), (many, 129, 16)):
        more = {"bias": torch.bfloat16, "act_order": group_size == 128, "device": "cuda"}
        problem = make_problem(m, n, k, group_size, kind, activations, **more)
        run_and_assert_close(problem, torch.bfloat16)
        by_8_bits = "unpacked" in epiloq.explain("w4a8_mm", *problem.arguments)
        grouped = 0 < group_size < k
        fits = (group_size, activations) in WAYS and (not grouped or on_sm90)
        assert by_8_bits == (fits or k <= group_size)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128, 512])
def test_the_kernel_of_groups(seed: int, group_size: int, kind: str) -> None:
    """For symmetric weights on SM90; any sizes."""
    for m, n, k in ((FLOAT8_TOKENS, 70, 640), (300, 520, 1040), (257, 129, 1000), (130, 1030, 136)):
        more = {"bias": torch.float16, "act_order": group_size == 64, "device": "cuda"}
        problem = make_problem(m, n, k, group_size, kind, **more)
        run_and_assert_close(problem, torch.float16)
        message = epiloq.explain("w4a8_mm", *problem.arguments, out_dtype=torch.float16)
        taken = "float8 in registers" in message
        on_sm90 = torch.cuda.get_device_capability() == (9, 0)
        assert taken == (kind == "symmetric" and on_sm90 and m in float8_tokens(group_size))


@pytest.mark.gpu
def test_older_gpus_and_odd_sizes_dequantise(seed: int) -> None:
    problem = make_problem(MANY, 64, 256, -1, device="cuda")
    assert unpacked.fits(problem.x_q, problem.weight.packed)
    assert not unpacked.fits(problem.x_q[1:], problem.weight.packed)
    with epiloq.config(arch="sm80"):
        assert not unpacked.fits(problem.x_q, problem.weight.packed)
        run_and_assert_close(problem, torch.float16)
    run_and_assert_close(make_problem(MANY, 64, 250, -1, device="cuda"), torch.float16)
