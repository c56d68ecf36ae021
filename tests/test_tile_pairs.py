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

pytestmark = pytest.mark.gpu

TILE = "256 tokens x 128 weights"
# M, N, K on 132 SMs. Tiles in rows and columns: 1 x 127 of all tokens, 1 x 125 of some, 2 x 65, 4 x 31, 4 x 126, 9 x
# 125 in two bands, the last tile alone, 10 x 65 in one band.
SIZES = [
    *[(256, 16136, 528), (200, 16000, 1040), (511, 8200, 2064), (1000, 3960, 4112), (1000, 16003, 2064)],
    *[(2300, 16000, 2064), (2504, 8200, 1040)],
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["groups", "groups, scales in rows, bias", "float8", "float8, bias"])
def test_pairs(seed: int, name: str, dtype: torch.dtype) -> None:
    if name.startswith("float8") and dtype == torch.float32:
        pytest.skip("scaled_mm has outputs of 16 bits on a GPU")
    is_h200 = torch.cuda.get_device_properties(0).multi_processor_count == 132
    for size in SIZES:
        kernel = only_its_own(EPILOGUES[name], size, before=8, after=3, dtype=dtype)
        assert not is_h200 or TILE in kernel, (size, kernel)


@pytest.mark.parametrize("stride", [1, 2])
def test_experts_go_without_pairs(seed: int, stride: int) -> None:
    """Their rows are known on the device alone; the same kernel serves."""
    experts, m, n, k = 3, 1500, 8200, 1040
    p = make(m, n, k, device="cuda", experts=experts).in_columns(4)
    for ends in ([500, 500, 1500], [1, 770, 1283]):
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        operands = (p.a, p.b, p.scale_a, p.scale_b)
        wide = poisoned((m, n * stride), torch.bfloat16, "cuda")
        out = epiloq.grouped_mm(*operands, offs=offs, out=wide[:, :n])
        left, right = p.operands()
        for first, end, weight in zip([0, *ends], ends, right, strict=False):
            assert_close(out[first:end], left[first:end], weight)
        assert wide[ends[-1] :].isnan().all() and wide[:, n:].isnan().all()


@pytest.mark.alone
def test_the_same_bits_behind_one_another(seed: int) -> None:
    """A block that is done early neither leaves what its partner still writes to, nor takes the next call's for it."""
    calls = []
    for m, n, k in [(1000, 3960, 528), (256, 16136, 1040), (2300, 16000, 528)]:
        p = make(m, n, k, device="cuda").in_columns(4)
        operands = (p.a, p.b, p.scale_a, p.scale_b)
        first = epiloq.groupwise_mm(*operands)
        assert_close(first, *p.operands())
        calls.append((operands, first, [poisoned(first.shape, first.dtype, "cuda") for _ in range(20)]))
    for i in range(20):
        for operands, _, outs in calls:
            epiloq.groupwise_mm(*operands, out=outs[i])
    for _, first, outs in calls:
        assert all(torch.equal(out, first) for out in outs)
