"""Which layers of experts epiloq takes from vLLM, and which it leaves to it, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from epiloq.integrations.engines.choice import VARIABLE
from epiloq.integrations.engines.experts import Sizes, reason_against_graphs
from epiloq.integrations.vllm import device, expert_offers
from epiloq.integrations.vllm import experts as plugin
from vllm_checkpoints import arguments, compressed_tensors
from vllm_expert_formats import (
    FORMATS,
    HIDDEN,
    INTERMEDIATE,
    take_all_kinds,
    words,
)


@pytest.fixture(autouse=True)
def _all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_kinds(monkeypatch)


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the plug-in logs about experts."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    listener = Listener()
    for once in ("_print_info_once", "_print_warning_once"):
        getattr(__import__("vllm.logger", fromlist=[once]), once).cache_clear()
    plugin.logger.addHandler(listener)
    yield found
    plugin.logger.removeHandler(listener)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("words of 4 bits", {"activation": "relu2"}, "expected the activation silu or gelu or gelu_tanh, got relu2"),
        ("words of 4 bits", {"swiglu_limit": 7.0}, "expected no limits of the activation"),
        ("FP8 in blocks", {"has_bias": True}, "expected no biases"),
        ("FP8 per channel", {"apply_router_weight_on_input": True}, "expected router weights on outputs"),
        ("FP8 per channel", {"intermediate_size": 72}, "expected multiples of 16, got hidden size 256 and 72 per rank"),
        ("int8", {"intermediate_size": 8}, "expected multiples of 16, got hidden size 256 and 8 per rank"),
    ],
)
def test_unsupported_layers_are_left_to_the_engine(
    messages: list[str], name: str, options: dict[str, Any], reason: str
) -> None:
    form = FORMATS[name]
    with vllm_on_cpu.engine():
        options = {"intermediate_size": INTERMEDIATE} | options
        layer = vllm_on_cpu.experts(form.config(), 4, 2, HIDDEN, options.pop("intermediate_size"), **options)
    method = layer.routed_experts.quant_method
    assert not isinstance(method, plugin.EpiloqExperts)
    left = f"epiloq leaves {form.kind} to vLLM's {type(method).__name__}: {reason}"
    assert [message for message in messages if message.startswith(left)], messages


@pytest.mark.parametrize(
    ("name", "fewest"),
    [("words of 4 bits", 16), ("words of 8 bits", 16), ("NVFP4", 16), ("MXFP4", 0), ("int8", 0), ("FP8 in blocks", 0)],
)
def test_few_experts_are_left_to_the_engine_by_default(name: str, fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "runs_on", lambda *_: (True, None))
    for chosen in (True, False):
        if not chosen:
            monkeypatch.delenv(VARIABLE)
        for count in (15, 16):
            with vllm_on_cpu.engine():
                layer = vllm_on_cpu.experts(FORMATS[name].config(), count, 2, HIDDEN, INTERMEDIATE)
            own = isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts)
            assert own == (chosen or count >= fewest)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: AutoGPTQConfig(4, 32, True, True, False, {}, {}), "expected no activation order"),
        (lambda: Fp8Config(True, "static"), "expected a dynamic scale of activations, got a static one"),
        (
            lambda: compressed_tensors(
                arguments(4, "int", "group", group_size=32, actorder="group"), None, "pack-quantized"
            ),
            "expected no activation order",
        ),
    ],
)
def test_unsupported_weights_are_left_to_the_engine(messages: list[str], config: Any, reason: str) -> None:
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.experts(config(), 4, 2, HIDDEN, INTERMEDIATE)
    assert not isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts)
    assert any(reason in message for message in messages), messages


def test_gpt_oss_with_8_bit_activations_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    asked = Mxfp4MoeBackend.FLASHINFER_CUTLASS_MXFP4_MXFP8, None
    monkeypatch.setattr("vllm.model_executor.layers.quantization.mxfp4.select_mxfp4_moe_backend", lambda *_: asked)
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.experts(
            GptOssMxfp4Config(), 2, 1, HIDDEN, 128, has_bias=True, activation="swigluoai"
        ).routed_experts
    assert not isinstance(layer.quant_method, plugin.EpiloqExperts)
    assert messages[-1].endswith("expected bfloat16 activations, got the backend FLASHINFER_CUTLASS_MXFP4_MXFP8")


@pytest.mark.parametrize(
    ("name", "kind", "by_default"),
    [("FP8 in blocks", "fp8-block-experts", True), ("int8", "int8-experts", False)],
)
def test_experts_taken_by_default_and_by_name(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], name: str, kind: str, by_default: bool
) -> None:
    for chosen, ours in ((None, by_default), ("int8,fp8-block", False), (kind, True), ("none", False)):
        monkeypatch.delenv("EPILOQ_ENGINE_LAYERS")
        if chosen is not None:
            monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", chosen)
        with vllm_on_cpu.engine():
            layer = vllm_on_cpu.experts(FORMATS[name].config(), 4, 2, HIDDEN, INTERMEDIATE)
        assert isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts) is ours
        monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", "all")
    engines = type(layer.routed_experts.quant_method).__name__
    assert messages == [f"Selected epiloq's {kind} for the experts of vLLM's {engines}"]


def test_floating_point_experts_stay_as_they_are() -> None:
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.experts(None, 4, 2, HIDDEN, INTERMEDIATE).routed_experts
    assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod" and hasattr(layer, "w13_weight")


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype", "capability", "recorded"),
    [
        (4, 32, torch.bfloat16, 90, True),
        (4, 128, torch.float16, 80, True),
        (4, -1, torch.bfloat16, 89, True),
        (4, 96, torch.bfloat16, 90, False),
        (8, 128, torch.bfloat16, 90, True),
        (8, 32, torch.bfloat16, 90, False),
        (4, 128, torch.bfloat16, 75, False),
        (4, 128, torch.float16, 75, True),
    ],
)
def test_what_cuda_graphs_record(
    monkeypatch: pytest.MonkeyPatch,
    messages: list[str],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    capability: int,
    recorded: bool,
) -> None:
    reason = reason_against_graphs(Sizes(128, 2048, 768), bits, group_size, dtype, capability)
    assert (reason is None) is recorded
    if reason is not None:
        assert reason.startswith("no kernel multiplies all experts of 1536 x 2048 with")


def test_experts_that_cuda_graphs_cannot_record_are_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setattr(expert_offers, "capability_here", lambda: 90)
    for bits, ours in ((4, True), (8, False)):
        with vllm_on_cpu.engine():
            layer = vllm_on_cpu.experts(words(bits, 32, "none").config(), 4, 2, HIDDEN, INTERMEDIATE)
        assert isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts) is ours
    assert "no kernel multiplies all experts of 512 x 256 with 8 bits in groups of 32" in messages[-1]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.experts(words(4, 32, "none").config(), 4, 2, HIDDEN, INTERMEDIATE)
    assert not isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts)
    assert "batch-invariant packed experts are multiplied one after the other" in messages[-1]
