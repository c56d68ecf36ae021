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

pytestmark = pytest.mark.gpu

LAST_WAVE = "in a last wave"

# M, N, K: tiles of one wave and of several, ragged along all three, of every width whose last wave may be shared.
SIZES = [
    *[(66, 5000, 8208), (129, 4107, 8208), (66, 9000, 8208), (129, 6144, 4112), (513, 2504, 4112), (193, 17003, 4112)],
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_tile(seed: int, name: str, dtype: torch.dtype) -> None:
    operation, options, tiles = next(scheme for start, scheme in SCHEMES.items() if name.startswith(start))
    if operation == "scaled_mm" and dtype == torch.float32:
        pytest.skip("scaled_mm has outputs of 16 bits on a GPU")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    served = set()
    for m, n, k in SIZES:
        kernel = epiloq.explain(operation, m=m, n=n, k=k, arch="sm90", sm_count=sms, **options)
        if LAST_WAVE in kernel:
            assert only_its_own(EPILOGUES[name], (m, n, k), before=8, after=3, dtype=dtype) == kernel
            served.add(kernel)
    assert len(served) == tiles if sms == 132 else served, served


@pytest.mark.alone
def test_the_same_bits_behind_one_another(seed: int) -> None:
    """Each product begins while the one before ends: rings, barriers and slots are in order."""
    p, q = make_problem(257, 17000, 8208, device="cuda", bias=True), make(513, 2504, 4112, device="cuda").in_columns(4)
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
