"""The tables of tiles: every row is reached, and answers read as they should."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

import epiloq
import tile_rows
from epiloq.introspect import _EXPLAIN
from epiloq.ops.checks.problems import _QUESTIONS

SIZES_M = [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 2048, 2049, 10**6]
SIZES_N = [16, 24, 512, 2560, 2568, 4096, 4104, 4608, 4616, 6656, 6664, 7168, 8192, 8448, 8456, 28672]
SIZES_K = [4096, 8192]
# On SM90 without tiles that only batches use, and with groupwise_mm's tiles for per-row scales.
ROWS = {"sm75": 3, "sm80": 5 + 8, "sm90": 2 + tile_rows.INT8}
FLOAT8_ROWS = {"sm89": 6, "sm90": 4 + tile_rows.FLOAT8}


def tiles_of(kernels: set[str]) -> set[str]:
    """With split-K and without."""
    return {kernel.partition(", K over")[0] for kernel in kernels}


@pytest.mark.parametrize("arch", FLOAT8_ROWS)
def test_every_float8_row_is_reached(arch: str) -> None:
    kernels = {
        epiloq.explain("scaled_mm", m=m, n=n, k=k, arch=arch, dtype=dtype, fast_accum=fast)
        for m, n, k in itertools.product(SIZES_M, SIZES_N, SIZES_K)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        for fast in (False, True)
    }
    assert len(tiles_of(kernels)) == FLOAT8_ROWS[arch], sorted(kernels)
    assert all(kernel.startswith(arch) for kernel in kernels)


def test_sums_are_accurate_unless_asked_otherwise() -> None:
    for arch, m, n in itertools.product(FLOAT8_ROWS, SIZES_M, SIZES_N):
        answer = epiloq.explain("scaled_mm", m=m, n=n, k=4096, arch=arch, dtype=torch.float8_e4m3fn)
        assert "fast" not in answer


def test_float8_asks_for_an_architecture_that_has_it() -> None:
    fits, reason = epiloq.supports("scaled_mm", m=16, n=64, k=64, arch="sm80", dtype=torch.float8_e4m3fn)
    assert not fits and "expected sm89 or sm90 for float8" in reason
    fits, reason = epiloq.supports("scaled_mm", m=16, n=64, k=64, dtype=torch.bfloat16)
    assert not fits and "dtype: expected int8, float8_e4m3fn or float8_e5m2" in reason


@pytest.mark.parametrize("arch", ROWS)
def test_every_row_is_reached(arch: str) -> None:
    shapes = itertools.product(SIZES_M, SIZES_N, SIZES_K)
    kernels = {epiloq.explain("scaled_mm", m=m, n=n, k=k, arch=arch) for m, n, k in shapes}
    kernels |= {
        epiloq.explain("scaled_mm", m=m, n=n, k=64, arch=arch, sm_count=sms)
        for m, n, sms in itertools.product((1, 16), range(16, 4096, 16), (16, 132))
    }
    assert len(tiles_of(kernels)) == ROWS[arch], sorted(kernels)
    assert all(kernel.startswith(("sm80 skinny", arch)) for kernel in kernels)


def test_every_row_of_weight_only_mm_is_reached() -> None:
    memory, depths = (0, 4917), (512, 1536, 3584, 4096, 14336)
    shapes = itertools.product([2, 4, *SIZES_M], SIZES_N, depths, (4, 8), (32, 128), ROWS, memory)
    names = ("m", "n", "k", "bits", "group_size", "arch", "memory_gb_s")
    answers = {epiloq.explain("weight_only_mm", **dict(zip(names, shape, strict=True))) for shape in shapes}
    kernels = tiles_of(answers)
    # One of seven decode kernels is never chosen: where it is the fastest, another takes at most 2 % longer.
    for family, rows in {"gemv": 14, "mma.sync": 5, "decode": 6, "wgmma": 12}.items():
        assert sum(kernel.startswith(family) for kernel in kernels) == rows, sorted(kernels)
    assert {answer.partition("clusters of ")[2] for answer in answers} > {"", "2", "8"}


def test_ragged_rows_take_the_generic_kernel_and_say_so() -> None:
    """By numbers alone too, where rows without gaps would begin off 16 bytes."""
    for n, k, is_slow in ((96, 96, False), (100, 96, True), (96, 100, True)):
        for aligned in (True, False):
            answer = epiloq.explain("scaled_mm", m=16, n=n, k=k, arch="sm90", aligned=aligned)
            assert ("generic" in answer and "slow" in answer) == (is_slow or not aligned), answer


@pytest.mark.parametrize("name", _QUESTIONS)
def test_empty_products_launch_nothing(name: str) -> None:
    """By sizes as by tensors; wrong options are refused all the same."""
    for m, n in ((0, 64), (64, 0), (0, 0)):
        assert epiloq.explain(name, m=m, n=n, k=256) == "nothing to launch: the output is empty"
    with pytest.raises(ValueError, match="arch: expected one of"):
        epiloq.explain(name, m=0, n=64, k=256, arch="sm91")
    with pytest.raises(TypeError, match="arch: not of the type"):
        epiloq.explain(name, m=0, n=64, k=256, arch=90)


@pytest.mark.parametrize("name", _QUESTIONS)
def test_architectures_without_kernels_are_refused(name: str) -> None:
    """No operation answers for a card that it has no numbers of, nor with a kernel that such a card would not run."""
    sizes = {"m": 64, "n": 4096, "k": 7168}
    with pytest.raises(NotImplementedError, match="sm100 has no kernels of its own"):
        epiloq.explain(name, **sizes, arch="sm100")
    with pytest.raises(ValueError, match=r"arch: expected one of .*, got auto"):
        epiloq.explain(name, **sizes, arch="auto")


@pytest.mark.parametrize("name", _EXPLAIN)
def test_explain_names_the_operation_whose_arguments_are_wrong(name: str) -> None:
    """By the operation's own signature, as the call does: not that of a function which the user has not called."""
    signature = inspect.signature(getattr(epiloq, name))
    required = [p.name for p in signature.parameters.values() if p.default is p.empty]
    with pytest.raises(TypeError, match=rf"^epiloq\.{name}: missing a required .*'{required[0]}'"):
        epiloq.explain(name)
    with pytest.raises(TypeError, match=rf"^epiloq\.{name}: .*'nothing'"):
        epiloq.explain(name, **dict.fromkeys(required), nothing=1)
    assert not epiloq.supports(name, **dict.fromkeys(required))[0]


def test_explain_and_supports_take_the_calls_own_arguments() -> None:
    a = torch.zeros(4, 32, dtype=torch.int8)
    b = torch.zeros(48, 32, dtype=torch.int8).t()
    one = torch.ones(1)
    assert epiloq.explain("scaled_mm", a, b, one, one).startswith("cpu")
    with epiloq.config(arch="sm80"):
        assert epiloq.explain("scaled_mm", a, b, one, one).startswith("sm80")
    assert epiloq.supports("scaled_mm", a, b, one, one)[0]
    fits, reason = epiloq.supports("scaled_mm", a, b.contiguous(), one, one)
    assert not fits and "b: expected column-major" in reason
    azp_adj = torch.zeros(48, dtype=torch.int32)
    assert epiloq.supports("scaled_mm_azp", a, b, one, one, azp_adj)[0]
    assert not epiloq.supports("scaled_mm_azp", a, b, one, one, azp_adj.float())[0]
    assert not epiloq.supports("scaled_mm_azp", a, b, one, one)[0]
    assert epiloq.supports("scaled_mm", a.numpy(), b, one, one) == (
        False,
        "epiloq.scaled_mm: a: expected a tensor, got ndarray",
    )
    assert not epiloq.supports("quantize_int8", a.numpy())[0]
    assert epiloq.supports("quantize_int8", torch.randn(3, 5)) == (True, "cpu, vectorised rows")
    with pytest.raises(ValueError, match="name: expected one of"):
        epiloq.explain("scaled_nn", a, b)


def test_config_is_scoped_and_checked() -> None:
    with epiloq.config(arch="sm75"), epiloq.config(arch="sm90"):
        assert epiloq._core.forced_arch() == "sm90"
    assert epiloq._core.forced_arch() == "auto"
    with pytest.raises(TypeError, match=r"epiloq\.config: arch: expected a name"), epiloq.config(arch=90):
        pass
    with pytest.raises(ValueError, match="sm91"), epiloq.config(arch="sm91"):
        pass
