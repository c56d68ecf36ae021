"""Adapters of other projects' kernels: the operands that they pass have the same values as epiloq's."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import epiloq
from epiloq.bench.cases import Case
from epiloq.bench.operations import OPERATIONS
from epiloq.bench.peers import deep_gemm as peer
from epiloq.bench.timing import rotate
from epiloq.compat import deep_gemm as ours

CPU = torch.device("cpu")


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """epiloq's own functions with DeepGEMM's signatures stand in for it."""
    stand_in = SimpleNamespace(
        fp8_gemm_nt=ours.fp8_gemm_nt,
        m_grouped_fp8_gemm_nt_contiguous=ours.m_grouped_fp8_gemm_nt_contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: 128,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    return stand_in


def test_deep_gemm_gets_the_same_product_and_is_checked(seed: int, deep_gemm: SimpleNamespace) -> None:
    row, case = OPERATIONS["groupwise_mm"], Case("groupwise_mm", "group", "", 17, 256, 384)
    sets, _ = rotate(row.inputs(case, torch.Generator(CPU).manual_seed(seed)), 1)
    bound = row.peers["deep_gemm"](case, sets)
    assert len(bound.calls) == len(sets) and bound.note == ""

    def doubled(*args: Any, **kwargs: Any) -> None:
        ours.fp8_gemm_nt(*args, **kwargs)
        args[2].mul_(2)

    deep_gemm.fp8_gemm_nt = doubled
    assert "times the tolerance" in row.peers["deep_gemm"](case, sets).note


def test_deep_gemm_gets_rows_of_experts_at_multiples_of_128(seed: int, deep_gemm: SimpleNamespace) -> None:
    generator = torch.Generator(CPU).manual_seed(seed)
    counts = torch.tensor([5, 0, 130, 1])
    m, n, k = int(counts.sum()), 128, 256
    # Small integers and powers of two, whose sums are exact in any order, as other numbers of rows may take.
    whole = {"generator": generator, "dtype": torch.float32}
    inputs = {
        "a": torch.randint(-4, 5, (m, k), **whole).to(torch.float8_e4m3fn),
        "b": torch.randint(-4, 5, (4, n, k), **whole).to(torch.float8_e4m3fn).mT,
        "scale_a": torch.randint(-2, 3, (m, 2), **whole).exp2(),
        "scale_b": torch.randint(-2, 3, (4, 1, 2), **whole).exp2().mT,
        "offs": counts.cumsum(0, dtype=torch.int32),
    }
    call, out, rows = peer.grouped(inputs)
    call()
    assert out.shape == (512, n) and rows[[0, 5, 135]].tolist() == [0, 128, 384]
    assert torch.equal(out[rows], epiloq.grouped_mm(**inputs))
    row, case = OPERATIONS["grouped_mm"], Case("grouped_mm", "e8_ragged", "", 9, 256, 256)
    assert row.peers["deep_gemm"](case, [row.inputs(case, generator)]).note == ""


def test_wrong_weight_only_peer_is_noted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row, case = OPERATIONS["weight_only_mm"], Case("weight_only_mm", "w4_g128", "", 3, 64, 256)
    sets = [row.inputs(case, torch.Generator(CPU).manual_seed(seed))]
    right = torch.ops.aten._weight_int4pack_mm_for_cpu
    fake = SimpleNamespace(**{name: getattr(torch.ops.aten, name) for name in ("_convert_weight_to_int4pack_for_cpu",)})
    fake._weight_int4pack_mm_for_cpu = lambda *args: 2 * right(*args)
    assert row.peers["_weight_int4pack_mm"](case, sets).note == ""
    monkeypatch.setattr(torch.ops, "aten", fake)
    assert "times the tolerance" in row.peers["_weight_int4pack_mm"](case, sets).note
