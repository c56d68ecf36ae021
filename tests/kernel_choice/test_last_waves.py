"""Products on an SM90 GPU whose last wave of tiles is shared by blocks in pairs: every epilogue, nothing but the output
written, the same bits every time.
"""

from __future__ import annotations

import pytest
import torch

import epiloq
from groupwise_reference import assert_close, make
from reference import assert_within_one_ulp, make_problem, poisoned
from tile_products import EPILOGUES, only_its_own

LAST_WAVE = "in a last wave"

# M, N, K: tiles of one wave and of several, ragged along all three, of every width whose last wave may be shared.
SIZES = [
    *[(66, 5000, 8208), (129, 4104, 8208), (66, 9000, 8208), (129, 6144, 4112), (513, 2504, 4112), (193, 17003, 4112)],
    *[(257, 17000, 8208), (513, 12000, 8208), (641, 17000, 8208), (1025, 2056, 8208), (1000, 5000, 4112)],
    *[(577, 17000, 2064), (1025, 17000, 2064), (1529, 31768, 2064)],
]
# By what an epilogue's name begins with: what is to be explained, and how many of its tiles share a last wave on 132
# SMs.
SCHEMES = {
    "int8": ("scaled_mm", {"dtype": "int8"}, 7),
    "float8": ("scaled_mm", {"dtype": "float8_e4m3fn"}, 4),
    "groups": ("groupwise_mm", {}, 5),
    "a scale a column": ("groupwise_mm", {"column_scales": True}, 1),
}


# Sizes of two products that begin while the one before ends, by how their scales are.
IN_A_ROW = {"int8": (257, 17000, 8208), "groups": (129, 6144, 4112)}


def shared(scheme: str, sms: int) -> dict[tuple[int, int, int], str]:
    """The sizes whose last wave uses split-K, and their kernels."""
    operation, options, _ = SCHEMES[scheme]
    kernels = {
        (m, n, k): epiloq.explain(operation, m=m, n=n, k=k, arch="sm90", sm_count=sms, **options) for m, n, k in SIZES
    }
    return {size: kernel for size, kernel in kernels.items() if LAST_WAVE in kernel}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sizes_reach_every_tile(scheme: str) -> None:
    kernels = shared(scheme, 132)
    assert len(set(kernels.values())) == SCHEMES[scheme][2], kernels
    assert scheme not in IN_A_ROW or IN_A_ROW[scheme] in kernels


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_tile(seed: int, name: str, dtype: torch.dtype) -> None:
    scheme = next(scheme for scheme in SCHEMES if name.startswith(scheme))
    if SCHEMES[scheme][0] == "scaled_mm" and dtype == torch.float32:
        pytest.skip("scaled_mm has outputs of 16 bits on a GPU")
    kernels = shared(scheme, torch.cuda.get_device_properties(0).multi_processor_count)
    assert kernels
    for size, kernel in kernels.items():
        assert only_its_own(EPILOGUES[name], size, before=8, after=3, dtype=dtype) == kernel


@pytest.mark.gpu
@pytest.mark.alone
def test_consecutive_calls_are_bit_equal(seed: int) -> None:
    """Each product begins while the one before ends: pipelines, barriers and slots stay consistent."""
    p = make_problem(*IN_A_ROW["int8"], device="cuda", bias=True)
    q = make(*IN_A_ROW["groups"], device="cuda").in_columns(4)
    groups, rows = (q.a, q.b, q.scale_a, q.scale_b), (p.a, p.b, p.scale_a, p.scale_b, p.bias)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert LAST_WAVE in epiloq.explain("scaled_mm", *rows[:4])
        assert LAST_WAVE in epiloq.explain("groupwise_mm", *groups)
    first, of_groups = epiloq.scaled_mm(*rows), epiloq.groupwise_mm(*groups)
    assert_within_one_ulp(first, p)
    assert_close(of_groups, *q.operands())
    outs = [
        (poisoned(first.shape, first.dtype, "cuda"), poisoned(of_groups.shape, of_groups.dtype, "cuda"))
        for _ in range(30)
    ]
    for out, out_of_groups in outs:
        epiloq.scaled_mm(*rows, out=out)
        epiloq.groupwise_mm(*groups, out=out_of_groups)
    for out, out_of_groups in outs:
        assert torch.equal(out, first)
        assert torch.equal(out_of_groups, of_groups)
