"""The weight-only benchmark: its cases on the CPU, and what it hands to other projects, which stand-ins multiply."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import epiloq
import layout_definitions as definitions
from epiloq.bench.cases import SUITES, Case
from epiloq.bench.contract import Inputs, Unavailable
from epiloq.bench.floor import Ceiling, ReadFloor, ReadSample
from epiloq.bench.operations import OPERATIONS
from epiloq.bench.operations.packed import weight_only_mm
from epiloq.bench.peers import weight_only as weight_only_peers
from epiloq.bench.runner import Bench
from epiloq.bench.timing import CpuTimer

CPU = torch.device("cpu")
OPERATION = OPERATIONS["weight_only_mm"]
VARIANTS = list(OPERATION.variants)
OF_4_BITS = ("w4a8_mm", "packed_fp4_mm")


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
    assert set(row.peers) == {"dense", "_weight_int4pack_mm", "gemlite", "humming", "machete", "marlin", "torchao"}
    assert row.peers["dense"].time_us
    assert all(row.peers[name].note == "CUDA only" for name in ("gemlite", "humming", "machete", "marlin", "torchao"))


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
    monkeypatch.setattr(weight_only_peers, "on_cuda", lambda x: None)
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


def integers_of(words: Tensor) -> Tensor:
    """int32 ``[K / 8, N]``, column-major, to 0 to 15 ``[N, K]``."""
    assert words.dtype == torch.int32 and words.t().is_contiguous()
    return torch.stack([words.t() >> 4 * i & 15 for i in range(8)], -1).flatten(1)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [128, -1])
def test_machete_is_given_its_own_words(seed: int, group: int, zeros: bool, anywhere: pytest.MonkeyPatch) -> None:
    # vLLM's signatures.
    def machete_prepack_B(b_q_weight: Tensor, a_type: Any, b_type: Any, group_scales_type: Any) -> Tensor:
        assert a_type == group_scales_type == torch.bfloat16 and b_type == ("uint4" if zeros else "uint4b8")
        return integers_of(b_q_weight)

    def machete_mm(
        a: Tensor,
        b_q: Tensor,
        b_type: Any,
        out_type: Any = None,
        b_group_scales: Tensor | None = None,
        b_group_zeros: Tensor | None = None,
        b_group_size: int | None = None,
        b_channel_scales: Tensor | None = None,
        a_token_scales: Tensor | None = None,
        schedule: str | None = None,
    ) -> Tensor:
        assert b_group_size == group and b_group_scales is not None and b_group_scales.is_contiguous()
        assert (b_group_zeros is not None) == zeros and b_type == ("uint4" if zeros else "uint4b8")
        size = b_q.shape[1] if group == -1 else group
        scale = b_group_scales.double().repeat_interleave(size, 0).t()
        offset = -8 * scale if b_group_zeros is None else b_group_zeros.double().repeat_interleave(size, 0).t()
        return a.double() @ (b_q.double() * scale + offset).t()

    kinds = types.SimpleNamespace(uint4b8="uint4b8", uint4="uint4")
    module(anywhere, "vllm._custom_ops", machete_mm=machete_mm, machete_prepack_B=machete_prepack_B)
    module(anywhere, "vllm.scalar_type", scalar_types=kinds)
    n, k = 128, 256
    q = torch.randint(0, 16, (n, k), dtype=torch.uint8) if zeros else torch.randint(-8, 8, (n, k), dtype=torch.int8)
    groups = 1 if group == -1 else k // group
    scale, zero = torch.rand(n, groups).bfloat16(), torch.randint(0, 16, (n, groups), dtype=torch.uint8)
    weight = epiloq.pack_weight(q, scale, zero if zeros else None, bits=4, group_size=group)
    x = torch.randn(3, k).bfloat16()
    exact = x.double() @ weight.dequantize().double().t()
    assert_near(weight_only_peers.machete({"x": x}, weight)(), exact)  # type: ignore[arg-type]


@pytest.mark.parametrize(("variant", "n", "k"), [("w8", 128, 256), ("w4_g32_zero", 128, 256), ("w4_g128", 64, 256)])
def test_what_machete_lacks(seed: int, variant: str, n: int, k: int, anywhere: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="groups of 128"):
        weight_only_peers.machete(*drawn(variant, n=n, k=k)[:2])


def test_vllm_w4a8_is_given_the_same_weight(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's signature.
    def cutlass_w4a8_mm(
        a: Tensor,
        b_q: Tensor,
        b_group_scales: Tensor,
        b_group_size: int,
        b_channel_scales: Tensor,
        a_token_scales: Tensor,
        out_type: Any = None,
        maybe_schedule: str | None = None,
    ) -> Tensor:
        assert a.dtype == torch.float8_e4m3fn and b_group_size == 128 and out_type is None
        assert b_group_scales.dtype == torch.float8_e4m3fn and b_group_scales.is_contiguous()
        assert b_channel_scales.dtype == torch.float32 and b_channel_scales.shape == (64,)
        signed = (b_q + 8) % 16 - 8
        scale = b_group_scales.double().repeat_interleave(128, 0).t() * b_channel_scales.double()[:, None]
        return ((a.double() * a_token_scales.double()) @ (signed.double() * scale).t()).bfloat16()

    module(
        monkeypatch,
        "vllm._custom_ops",
        cutlass_w4a8_mm=cutlass_w4a8_mm,
        cutlass_encode_and_reorder_int4b=integers_of,
        cutlass_pack_scale_fp8=lambda scales: scales,
    )
    monkeypatch.setattr(weight_only_peers, "on_cuda", lambda x: None)
    row, case = OPERATIONS["w4a8_mm"], Case("w4a8_mm", "g128", "", 3, 64, 256)
    inputs = row.inputs(case, torch.Generator(CPU))
    bound = row.peers["vllm"](case, [inputs])
    assert bound.note == ""  # the same numbers
    wrong = {**inputs, "scale": inputs["scale"].flip(0)}
    result = row.peers["vllm"](case, [wrong]).calls[0]()
    assert row.error(case, inputs, result, torch.Generator(CPU)) > 1
    for variant in set(row.variants) - {"g128"}:
        other = Case("w4a8_mm", variant, "", 3, 64, 256)
        with pytest.raises(Unavailable, match="groups of 128"):
            row.peers["vllm"](other, [row.inputs(other, torch.Generator(CPU))])


@pytest.mark.parametrize(("operation", "variant"), [(o, v) for o in OF_4_BITS for v in OPERATIONS[o].variants])
def test_what_4_bit_products_are_compared_with_is_the_same_product(seed: int, operation: str, variant: str) -> None:
    """FP8 weights but for their rounding, of 2^-4 of a number."""
    row, case = OPERATIONS[operation], Case(operation, variant, "", 5, 64, 256)
    inputs = row.inputs(case, torch.Generator(CPU))
    expected = row.bind(case, [inputs]).calls[0]()
    assert isinstance(expected, Tensor)
    for name in row.peers.keys() - {"vllm"}:
        found = row.peers[name](case, [inputs]).calls[0]()
        assert isinstance(found, Tensor) and found.dtype == expected.dtype
        limit = 0.05 if name == "fp8 weights" else 0.01
        assert (found - expected).norm() < limit * expected.norm(), name


def test_the_suite_of_4_bits_has_the_peers_of_its_products() -> None:
    suite = SUITES["four-bits"]
    assert suite.variants.keys() == {"weight_only_mm", *OF_4_BITS}
    for peer in suite.peers:
        assert any(peer in OPERATIONS[name].peers for name in suite.variants), peer
    tuned = {(shape.n, shape.k) for shape in SUITES["h200"].shapes}
    assert not tuned & {(shape.n, shape.k) for shape in suite.shapes}


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
    inputs, weight, _ = drawn("w4_g128", n=128)
    for name in ("vllm", "gemlite", "torchao"):
        anywhere.setitem(sys.modules, name, None)  # Makes its import fail.
    for bind, name in (("marlin", "vllm"), ("machete", "vllm"), ("gemlite", "gemlite"), ("torchao", "torchao")):
        with pytest.raises(Unavailable, match=f"import {name}"):
            getattr(weight_only_peers, bind)(inputs, weight)
