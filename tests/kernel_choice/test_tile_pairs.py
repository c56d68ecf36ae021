"""Products on an SM90 GPU by tiles of 256 tokens, which blocks take in pairs and whose tokens they read once: tiles
without a pair, tiles whose tokens end within, bands of rows, nothing but the output written.
"""

from __future__ import annotations

import pytest
import torch

import epiloq
from groupwise_reference import assert_close, make
from reference import poisoned
from tile_products import EPILOGUES, only_its_own

TILE = "256 tokens x 128 weights"
# M, N, K. Tiles in rows and columns: 1 x 127 of all tokens, 1 x 125 of some, 2 x 65, 4 x 31, 4 x 126, 9 x
# 125 in two bands, the last tile alone, 10 x 65 in one band, 17 x 31 in one of 16 rows and a last.
SIZES = [
    *[(256, 16136, 528), (200, 16000, 1040), (511, 8200, 2064), (1000, 3960, 4112), (1000, 16008, 2064)],
    *[(2300, 16000, 2064), (2504, 8200, 1040), (4134, 3960, 528)],
]


ODD_COLUMNS = [(1000, 16003, 2064)]  # of groups: scaled_mm wants multiples of 8
IN_A_ROW = [(1000, 3960, 528), (256, 16136, 1040), (2300, 16000, 528)]
GROUPS, FLOAT8 = ("groupwise_mm", {}), ("scaled_mm", {"dtype": "float8_e4m3fn"})
OF_EXPERTS = {"experts": 3, "m": 1500, "n": 8200, "k": 1040}


def has_132_sms() -> bool:
    """As all choices here take for granted."""
    return torch.cuda.get_device_properties(0).multi_processor_count == 132


def test_cluster_pairs_support_sizes() -> None:
    products = [(GROUPS, size) for size in SIZES + ODD_COLUMNS + IN_A_ROW] + [(FLOAT8, size) for size in SIZES]
    for (operation, options), (m, n, k) in products:
        assert TILE in epiloq.explain(operation, m=m, n=n, k=k, arch="sm90", sm_count=132, **options), (m, n, k)
    for rows in (OF_EXPERTS["m"], OF_EXPERTS["m"] * OF_EXPERTS["experts"]):
        assert TILE in epiloq.explain("grouped_mm", **{**OF_EXPERTS, "m": rows}, arch="sm90", sm_count=132)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["groups", "groups, scales in rows, bias", "float8", "float8, bias"])
def test_pairs(seed: int, name: str, dtype: torch.dtype) -> None:
    if name.startswith("float8") and dtype == torch.float32:
        pytest.skip("scaled_mm has outputs of 16 bits on a GPU")
    for size in SIZES + ([] if name.startswith("float8") else ODD_COLUMNS):
        kernel = only_its_own(EPILOGUES[name], size, before=8, after=3, dtype=dtype)
        assert not has_132_sms() or TILE in kernel, (size, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("is_masked", [False, True])
def test_experts_use_no_cluster_pairs(seed: int, is_masked: bool) -> None:
    """Their numbers of rows are known only on the device; the kernel is the same. TMA copies scales of masked rows."""
    experts, m, n, k = OF_EXPERTS.values()
    p = make(experts * m if is_masked else m, n, k, device="cuda", experts=experts).in_columns(4)
    left, right = p.operands()
    for counts in ([500, 0, 1000], [1, 769, 513]):
        ends = torch.tensor(counts).cumsum(0).tolist()
        firsts = [expert * m for expert in range(experts)] if is_masked else [0, *ends[:-1]]
        rows = torch.tensor(counts if is_masked else ends, dtype=torch.int32, device="cuda")
        wide = poisoned((p.a.shape[0], n + 16), torch.bfloat16, "cuda")
        out = wide[:, 8 : 8 + n]
        if is_masked:
            operands = (p.a.view(experts, m, k), p.b, p.scale_a.view(experts, m, -1), p.scale_b)
            how = {"masked_m": rows}
            epiloq.grouped_mm(*operands, **how, out=out.view(experts, m, n))
        else:
            operands, how = (p.a, p.b, p.scale_a, p.scale_b), {"offs": rows}
            epiloq.grouped_mm(*operands, **how, out=out)
        assert not has_132_sms() or TILE in epiloq.explain("grouped_mm", *operands, **how)
        known = torch.zeros(len(wide), dtype=torch.bool, device="cuda")
        for first, count, weight in zip(firsts, counts, right, strict=True):
            own = slice(first, first + count)
            assert_close(out[own], left[own], weight)
            known[own] = True
        assert wide[~known].isnan().all() and wide[:, :8].isnan().all() and wide[:, 8 + n :].isnan().all()


@pytest.mark.gpu
@pytest.mark.alone
def test_consecutive_calls_are_bit_equal(seed: int) -> None:
    """A block that is done early neither leaves what its partner still writes to, nor takes the next call's for it."""
    calls = []
    for m, n, k in IN_A_ROW:
        p = make(m, n, k, device="cuda").in_columns(4)
        operands = (p.a, p.b, p.scale_a, p.scale_b)
        assert not has_132_sms() or TILE in epiloq.explain("groupwise_mm", *operands)
        first = epiloq.groupwise_mm(*operands)
        assert_close(first, *p.operands())
        calls.append((operands, first, [poisoned(first.shape, first.dtype, "cuda") for _ in range(20)]))
    for i in range(20):
        for operands, _, outs in calls:
            epiloq.groupwise_mm(*operands, out=outs[i])
    for _, first, outs in calls:
        assert all(torch.equal(out, first) for out in outs)
