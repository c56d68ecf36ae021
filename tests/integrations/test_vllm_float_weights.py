"""FP8 and FP4 weights with 16-bit activations in vLLM's own layers, on epiloq's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
import vllm.envs as envs
from vllm.model_executor.kernels import linear as engine
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import PlatformEnum

import epiloq
import epiloq.integrations.vllm as integration
from epiloq.integrations.engines.choice import VARIABLE
from epiloq.integrations.vllm import float_weights, kernels
from epiloq.nn import Fp4Linear, Fp8WeightOnlyLinear
from vllm_checkpoints import compressed_tensors

K, SIZES = 256, [128, 128]
_LISTS = (
    (engine._POSSIBLE_WFP8A16_KERNELS, float_weights.EpiloqFp8WeightOnlyLinearKernel),
    (engine._POSSIBLE_FP8_KERNELS, float_weights.EpiloqFp8OnOlderLinearKernel),
    (engine._POSSIBLE_NVFP4_KERNELS, float_weights.EpiloqNvFp4LinearKernel),
    (engine._POSSIBLE_MXFP4_KERNELS, float_weights.EpiloqMxFp4LinearKernel),
)


@pytest.fixture(autouse=True)
def _only_epiloq(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "all")
    integration.register()
    for by_platform, kernel in _LISTS:
        monkeypatch.setitem(by_platform, PlatformEnum.CPU, [kernel])
    yield


def layer_of(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, shards: list[dict[str, Tensor]]) -> Any:
    """A merged layer with a checkpoint's shards, loaded by the engine's loaders."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    message = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}
    with vllm_on_cpu.engine():
        config = CompressedTensorsConfig.from_config(message)
        layer = vllm_on_cpu.merged(config, SIZES, K, "model.layers.0.mlp.gate_up_proj")
        for index, tensors in enumerate(shards):
            vllm_on_cpu.load(layer, tensors, index)
        vllm_on_cpu.settle(layer)
    return layer


def check(layer: Any, weight: Tensor, weights_rounded: bool = False) -> None:
    """The output is the product by the weights that the files stand for, rounded once."""
    for shape in ((5, K), (1, K), (2, 3, K), (0, K), (100, K)):
        x = torch.randn(shape, dtype=vllm_on_cpu.DTYPE)
        y, _ = layer(x)
        assert y.dtype == x.dtype and y.shape == (*shape[:-1], sum(SIZES))
        exact, reach = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
        # For more than 64 rows, and of NVFP4 on a CPU, the weights are rounded to the type of x, too.
        rounded = reach if shape[0] > 64 or weights_rounded else 0.01 * reach
        assert ((y.double() - exact).abs() <= 2.0**-8 * (exact.abs() + rounded)).all()


def numbers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True, **more}


def floats(n: int) -> nn.Linear:
    layer = nn.Linear(K, n, bias=False, dtype=vllm_on_cpu.DTYPE)
    nn.init.normal_(layer.weight, std=K**-0.5)
    return layer


@pytest.mark.parametrize(
    ("strategy", "route"),
    [
        ("channel", "weights alone"),
        ("tensor", "weights alone"),
        ("channel", "no FP8 in the engine"),
        ("tensor", "no FP8 in the engine"),
        ("block", "no FP8 in the engine"),
        ("channel", "no FP8 in tensor cores"),
    ],
)
def test_fp8_weights(seed: int, monkeypatch: pytest.MonkeyPatch, strategy: str, route: str) -> None:
    """Checkpoints that say so, and those with FP8 activations where the engine or the GPU cannot have these."""
    if route == "no FP8 in the engine":
        monkeypatch.setattr(CompressedTensorsConfig, "_check_scheme_supported", lambda *_, **options: False)
    block = {"channel": (1, -1), "tensor": (-1, -1), "block": (128, 128)}[strategy]
    references = [Fp8WeightOnlyLinear.from_linear(floats(n), block=block) for n in SIZES]
    states = [reference.file_state() for reference in references]
    shape = {"tensor": (-1,), "channel": (-1, 1), "block": (-1, K // 128)}[strategy]
    shards = [{"weight": s["weight"], "weight_scale": s["weight_scale"].reshape(shape)} for s in states]
    more: dict[str, Any] = {"block_structure": [128, 128]} if strategy == "block" else {}
    tokens = {"group_size": 128} if strategy == "block" else {}
    inputs = numbers(8, "group" if tokens else "token", **tokens) | {"dynamic": True}
    layer = layer_of(numbers(8, strategy, **more), None if "alone" in route else inputs, "float-quantized", shards)
    older = route == "no FP8 in tensor cores"
    chosen = layer.scheme.fp8_linear if older else layer.scheme.linear_kernel
    assert type(chosen) is _LISTS[1 if older else 0][1]
    check(layer, torch.cat([reference.dequantized_weight() for reference in references]))


@pytest.mark.parametrize("granularity", ["token", "group"])
def test_mxfp4_whose_activations_the_engine_ignores(seed: int, granularity: str) -> None:
    """The engine has one scheme for MXFP4, whatever the configuration says of activations."""
    references = [Fp4Linear.from_linear(floats(n), format="mxfp4") for n in SIZES]
    states = [reference.file_state() for reference in references]
    shards = [{"weight_packed": s["weight"], "weight_scale": s["weight_scale"].view(torch.uint8)} for s in states]
    more = {"group_size": 128} if granularity == "group" else {}
    inputs = numbers(8, granularity, **more) | {"dynamic": True}
    layer = layer_of(numbers(4, "group", group_size=32), inputs, "mxfp4-pack-quantized", shards)
    assert type(layer.scheme.kernel) is float_weights.EpiloqMxFp4LinearKernel
    check(layer, torch.cat([reference.dequantized_weight() for reference in references]))


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_fp4_weights(seed: int, form: str) -> None:
    references = [Fp4Linear.from_linear(floats(n), format=form) for n in SIZES]
    if form == "nvfp4":  # One factor for the merged layer, as tools that write such checkpoints take care of.
        wide = nn.Linear(K, sum(SIZES), bias=False, dtype=vllm_on_cpu.DTYPE)
        wide.weight.data = torch.cat([floats(n).weight.data for n in SIZES])
        state = Fp4Linear.from_linear(wide, format=form).file_state()
        whole = state["weight_global_scale"].float().reshape(1)
        rows = [slice(0, SIZES[0]), slice(SIZES[0], None)]
        shards = [
            {
                "weight_packed": state["weight"][part],
                "weight_scale": state["weight_scale"][part],
                "weight_global_scale": whole,
                "input_global_scale": torch.ones(1),
            }
            for part in rows
        ]
        references = [Fp4Linear.from_linear(wide, format=form)]
        inputs: dict[str, Any] | None = numbers(4, "tensor_group", group_size=16) | {"dynamic": "local"}
        weights = numbers(4, "tensor_group", group_size=16)
    else:
        states = [reference.file_state() for reference in references]
        shards = [{"weight_packed": s["weight"], "weight_scale": s["weight_scale"].view(torch.uint8)} for s in states]
        inputs, weights = None, numbers(4, "group", group_size=32)
    layer = layer_of(weights, inputs, f"{form}-pack-quantized", shards)
    assert type(layer.scheme.kernel) is _LISTS[2 if form == "nvfp4" else 3][1]
    check(layer, torch.cat([reference.dequantized_weight() for reference in references]), form == "nvfp4")


@pytest.mark.parametrize(("form", "block"), [("mxfp4", 32), ("nvfp4", 16)])
def test_ranks_with_a_part_of_a_block_are_refused(form: str, block: int) -> None:
    """The engine loads a scale for each whole block of a rank."""
    grouped = numbers(4, "group" if form == "mxfp4" else "tensor_group", group_size=block)
    inputs = None if form == "mxfp4" else grouped | {"dynamic": "local"}
    name = "model.layers.0.mlp.down_proj"
    for ranks, refused in ((3, False), (2, True)):
        with vllm_on_cpu.engine(ranks - 1, ranks):
            config = compressed_tensors(grouped, inputs, f"{form}-pack-quantized")
            layer = linear.RowParallelLinear(
                3 * block, 32, bias=False, quant_config=config, prefix=name, reduce_results=False
            )
            for parameter in layer.parameters():
                parameter.data.zero_()
            if not refused:
                vllm_on_cpu.settle(layer)
                continue
            with pytest.raises(
                ValueError, match=rf"{name}: expected a multiple of {block} .*, got {3 * block} on 2 ranks"
            ):
                vllm_on_cpu.settle(layer)


def test_order_among_the_engines_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.register()
    fp8, nvfp4, mxfp4 = (
        table[PlatformEnum.CUDA]
        for table in (engine._POSSIBLE_FP8_KERNELS, engine._POSSIBLE_NVFP4_KERNELS, engine._POSSIBLE_MXFP4_KERNELS)
    )
    assert fp8[:2] == [kernels.EpiloqFp8LinearKernel, float_weights.EpiloqFp8OnOlderLinearKernel]
    for table, ours in ((nvfp4, float_weights.EpiloqNvFp4LinearKernel), (mxfp4, float_weights.EpiloqMxFp4LinearKernel)):
        place = table.index(ours)
        assert place > 0 and "Marlin" in table[place + 1].__name__ and table.count(ours) == 1
    older = float_weights.EpiloqFp8OnOlderLinearKernel.is_supported
    assert older(90) == (False, "FP8 activations run from compute capability 8.9 on") and older(80)[0]
    monkeypatch.delenv(VARIABLE)
    for _, kernel in _LISTS:
        possible, reason = kernel.is_supported(80)
        assert not possible and f"{VARIABLE} leaves out" in reason


def test_batch_invariance_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    try:
        integration.register()
        assert kernels.EpiloqInt8LinearKernel.is_supported()[0]
        possible, reason = float_weights.EpiloqFp8WeightOnlyLinearKernel.is_supported()
        assert not possible and reason == "the sums of epiloq's w8a16-fp8 depend on the number of tokens"
        with pytest.raises(NotImplementedError, match="batch"):
            epiloq.fp8_weight_mm(torch.randn(2, 16), torch.zeros(8, 16).to(torch.float8_e4m3fn), torch.ones(8, 1))
    finally:
        epiloq.set_batch_invariant(False)
