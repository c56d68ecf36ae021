"""The weight-only benchmark: its cases on the CPU, and what it hands to other projects, which stand-ins multiply."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import layout_definitions as definitions
from epiloq.bench.cases import SUITES, Case
from epiloq.bench.contract import Inputs, Unavailable
from epiloq.bench.floor import Ceiling, ReadFloor, ReadSample
from epiloq.bench.operations import OPERATIONS, weight_only_mm
from epiloq.bench.peers import weight_only as weight_only_peers
from epiloq.bench.runner import Bench
from epiloq.bench.timing import CpuTimer

CPU = torch.device("cpu")
OPERATION = OPERATIONS["weight_only_mm"]
VARIANTS = list(OPERATION.variants)


def drawn(variant: str, m: int = 3, n: int = 64, k: int = 256) -> tuple[Inputs, Any, Tensor]:
    case = Case("weight_only_mm", variant, "tiny", m, n, k)
    inputs = OPERATION.inputs(case, torch.Generator(CPU))
    weight = weight_only_mm._packed(case, inputs)
    return inputs, weight, inputs["x"].double() @ weight.dequantize().double().t()


def assert_near(y: Tensor, exact: Tensor) -> None:
    assert (y.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_suite_runs_on_a_cpu(seed: int, variant: str) -> None:
    assert variant in SUITES["weight-only"].variants["weight_only_mm"]
    floor = ReadFloor(2.0, 5e4, (ReadSample(1 << 20, 23.0, "made up"),))
    ceilings = {"half": Ceiling(0.5, "made up")}
    bench = Bench(CPU, CpuTimer(0.002), floor, ceilings, OPERATIONS, torch.Generator(CPU), cache=1 << 16)
    case = Case("weight_only_mm", variant, "odd", 5, 100, 576)
    (row,) = bench.run(case)
    assert row.status == "ok" and row.time_us and row.error is not None
    assert set(row.peers) == {"dense", "_weight_int4pack_mm", "gemlite", "humming", "marlin", "torchao"}
    assert row.peers["dense"].time_us
    assert all(row.peers[name].note == "CUDA only" for name in ("gemlite", "humming", "marlin", "torchao"))


@pytest.mark.parametrize("variant", ["w4_g128", "w4_g128_fp16", "w4_g32_zero"])
def test_torch_multiplies_the_same_weight(seed: int, variant: str) -> None:
    inputs, weight, exact = drawn(variant)
    assert_near(weight_only_peers.int4pack(inputs, weight)(), exact)  # type: ignore[arg-type]


def test_torch_has_no_eight_bits(seed: int) -> None:
    inputs, weight, _ = drawn("w8")
    with pytest.raises(Unavailable, match="4 bits"):
        weight_only_peers.int4pack(inputs, weight)


# --- stand-ins for packages that need a GPU


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(weight_only_peers, "_on_cuda", lambda x: None)
    return monkeypatch


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    parts = name.split(".")
    for i in range(1, len(parts)):
        parent = ".".join(parts[:i])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.mark.parametrize("variant", VARIANTS)
def test_marlin_is_given_its_own_words(seed: int, variant: str, anywhere: pytest.MonkeyPatch) -> None:
    kinds = types.SimpleNamespace(uint4b8="uint4b8", uint8b128="uint8b128", uint4="uint4", uint8="uint8")

    # vLLM's signature.
    def marlin_gemm(
        a: Any,
        c: Any,
        b_q_weight: Any,
        b_bias: Any,
        b_scales: Any,
        a_scales: Any,
        global_scale: Any,
        b_zeros: Any,
        g_idx: Any,
        perm: Any,
        workspace: Any,
        b_q_type: Any,
        size_m: int,
        size_n: int,
        size_k: int,
        is_k_full: bool = True,
        use_atomic_add: bool = False,
        use_fp32_reduce: bool = False,
        is_zp_float: bool = False,
    ) -> Tensor:
        assert (c, b_bias, a_scales, global_scale, g_idx, perm) == (None,) * 6
        assert workspace == "workspace" and (size_m, size_n, size_k) == (3, 64, 256)
        bits = 8 if "8b" in b_q_type or b_q_type == "uint8" else 4
        assert b_q_type.startswith(f"uint{bits}") and ("b" in b_q_type) == (b_zeros is None)
        tensors = {"B": b_q_weight, "s": b_scales} | ({} if b_zeros is None else {"qzeros": b_zeros})
        group_size = -1 if b_scales.shape[0] == 1 else size_k // b_scales.shape[0]
        return a.double() @ definitions.marlin(tensors, bits, group_size).t()

    module(anywhere, "vllm._custom_ops", marlin_gemm=marlin_gemm)
    module(anywhere, "vllm.scalar_type", scalar_types=kinds)
    module(
        anywhere,
        "vllm.model_executor.layers.quantization.utils.marlin_utils",
        marlin_make_workspace_new=lambda device: "workspace",
    )
    inputs, weight, exact = drawn(variant)
    assert_near(weight_only_peers.marlin(inputs, weight)(), exact)  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gemlite_is_given_the_same_weight(seed: int, variant: str, anywhere: pytest.MonkeyPatch) -> None:
    class GemLiteLinearTriton:
        def __init__(self, **sizes: Any) -> None:
            assert sizes["input_dtype"] == sizes["output_dtype"]
            self.sizes = sizes

        def pack(self, q: Tensor, scales: Tensor, zeros: Tensor, bias: None) -> None:
            assert q.dtype == torch.uint8 and int(q.max()) < 2 ** self.sizes["W_nbits"]
            shape = (self.sizes["out_features"], -1, self.sizes["group_size"])
            by_group = q.view(shape).double() - zeros.view(shape[0], -1, 1).double()
            self.weight = (by_group * scales.view(shape[0], -1, 1).double()).view(shape[0], -1)

        def forward(self, x: Tensor) -> Tensor:
            return x.double() @ self.weight.t()

    kinds = types.SimpleNamespace(FP16="fp16", BF16="bf16")
    module(anywhere, "gemlite.core", DType=kinds, GemLiteLinearTriton=GemLiteLinearTriton)
    inputs, weight, exact = drawn(variant)
    assert_near(weight_only_peers.gemlite(inputs, weight)(), exact)  # type: ignore[arg-type]


def test_torchao_quantises_the_same_weight(seed: int, anywhere: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def config(**options: Any) -> str:
        asked.append(options)
        return "config"

    module(anywhere, "torchao.quantization", Int4WeightOnlyConfig=config, quantize_=lambda model, config: None)
    inputs, weight, exact = drawn("w4_g128")
    assert_near(weight_only_peers.torchao(inputs, weight)(), exact)  # type: ignore[arg-type]
    assert asked == [{"group_size": 128, "int4_packing_format": "plain"}]
    for variant in ("w8", "w4_g128_fp16"):
        with pytest.raises(Unavailable, match="bfloat16"):
            weight_only_peers.torchao(*drawn(variant)[:2])


def test_absent_packages_are_named(seed: int, anywhere: pytest.MonkeyPatch) -> None:
    inputs, weight, _ = drawn("w4_g128")
    for name in ("vllm", "gemlite", "torchao"):
        anywhere.setitem(sys.modules, name, None)  # Makes its import fail.
    for bind, name in (("marlin", "vllm"), ("gemlite", "gemlite"), ("torchao", "torchao")):
        with pytest.raises(Unavailable, match=f"import {name}"):
            getattr(weight_only_peers, bind)(inputs, weight)
