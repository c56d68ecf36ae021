"""Ordinary checkpoints of mixtures of experts in vLLM's own layers, on epiloq's grouped products."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.models.gpt_oss import GptOssModel

import epiloq.integrations.vllm as integration
from epiloq import nn as modules
from epiloq.formats.layouts import awq, gptq
from epiloq.integrations.engines.experts import Sizes, reason_against_graphs
from epiloq.integrations.vllm import expert_offers
from epiloq.integrations.vllm import experts as plugin
from epiloq.nn.experts.expert_linears import ExpertLinears
from epiloq.nn.experts.gated_experts import GatedExperts
from mixture_references import error, mixture_in_float64
from vllm_checkpoints import arguments, compressed_tensors, words_of_compressed_tensors
from vllm_kernel_lists import backends_of_gpus

Layers = list[dict[str, Any]]
HIDDEN, INTERMEDIATE, COUNT = 256, 256, 8
TOKEN = arguments(8, "int", "token", dynamic=True)
FLOAT_TOKEN = arguments(8, "float", "token", dynamic=True)


@dataclass(frozen=True)
class Format:
    """How a checkpoint quantises a matrix, and the engine's configuration of it.

    kind
        The kind of layers, as in ``EPILOQ_ENGINE_LAYERS``.
    error
        Bound of the relative error that rounded activations cause.
    """

    kind: str
    config: Callable[[], Any]
    convert: Callable[[nn.Linear], Any]
    tensors: Callable[[Any], dict[str, Tensor]]
    error: float


def words(bits: int, group_size: int, zeros: str) -> Format:
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = arguments(bits, "int", **strategy) | {"symmetric": zeros == "none"}
    return Format(
        f"w{bits}a16-experts",
        lambda: compressed_tensors(weights, None, "pack-quantized"),
        lambda layer: modules.WeightOnlyLinear.from_linear(layer, bits=bits, group_size=group_size, zeros=zeros),
        words_of_compressed_tensors,
        2**-7,
    )


def by_group(zeros: str, bits: int = 4) -> Callable[[nn.Linear], Any]:
    return lambda layer: modules.WeightOnlyLinear.from_linear(layer, bits=bits, group_size=32, zeros=zeros)


def with_columns(module: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = module.file_state()
    return state | {"weight_scale": state["weight_scale"].view(-1, 1)}


def int8() -> Any:
    return compressed_tensors(arguments(8, "int", "channel"), TOKEN, "int-quantized")


def float8(strategy: str, inputs: str) -> Callable[[], Any]:
    rounded = arguments(8, "float", inputs, dynamic=True)
    return lambda: compressed_tensors(arguments(8, "float", strategy), rounded, "float-quantized")


def float8_blocks() -> Any:
    weights = arguments(8, "float", "block", block_structure=[128, 128])
    return compressed_tensors(weights, arguments(8, "float", "group", dynamic=True, group_size=128), "float-quantized")


def per_tensor(layer: nn.Linear) -> Any:
    return modules.Fp8Linear.from_linear(layer, weight="tensor")


def fp4(form: str, inputs: dict[str, Any] | None = None) -> Format:
    group = {"mxfp4": {"strategy": "group", "group_size": 32}, "nvfp4": {"strategy": "tensor_group", "group_size": 16}}
    scale = {"mxfp4": "torch.uint8", "nvfp4": "torch.float8_e4m3fn"}[form]
    weights = arguments(4, "float", **group[form]) | {"scale_dtype": scale}

    def tensors(module: Any) -> dict[str, Tensor]:
        state = module.file_state()
        found = {"weight_packed": state["weight"], "weight_scale": state["weight_scale"]}
        return found | ({"weight_global_scale": state["weight_global_scale"]} if form == "nvfp4" else {})

    return Format(
        f"{form}-experts",
        lambda: compressed_tensors(weights, inputs, f"{form}-pack-quantized"),
        lambda layer: modules.Fp4Linear.from_linear(layer, format=form),
        tensors,
        2**-6,
    )


FORMATS = {
    "words of 4 bits": words(4, 32, "none"),
    "words of 4 bits with zero points": words(4, 128, "zero"),
    "words of 4 bits per channel": words(4, -1, "none"),
    "words of 8 bits": words(8, 128, "none"),
    "GPTQ": Format(
        "w4a16-experts",
        lambda: AutoGPTQConfig(4, 32, False, True, False, {}, {}),
        by_group("none"),
        lambda module: gptq.from_packed(module.packed),
        2**-7,
    ),
    "GPTQ of 8 bits": Format(
        "w8a16-experts",
        lambda: AutoGPTQConfig(8, 32, False, True, False, {}, {}),
        by_group("none", 8),
        lambda module: gptq.from_packed(module.packed),
        2**-7,
    ),
    "AWQ": Format(
        "w4a16-experts",
        lambda: AutoAWQConfig(4, 32, True, False, [], {}),
        by_group("zero"),
        lambda module: awq.from_packed(module.packed),
        2**-7,
    ),
    "FP8 in blocks": Format(
        "fp8-block-experts",
        lambda: Fp8Config(True, "dynamic", weight_block_size=[128, 128]),
        modules.Fp8BlockLinear.from_linear,
        lambda module: module.file_state(),
        0.08,
    ),
    "FP8 in blocks of compressed-tensors": Format(
        "fp8-block-experts",
        float8_blocks,
        modules.Fp8BlockLinear.from_linear,
        lambda module: {"weight": module.file_state()["weight"], "weight_scale": module.weight_scale_inv},
        0.08,
    ),
    "FP8 per channel": Format(
        "fp8-experts", float8("channel", "token"), modules.Fp8Linear.from_linear, with_columns, 0.08
    ),
    "FP8 per tensor": Format(
        "fp8-experts", lambda: Fp8Config(True, "dynamic"), per_tensor, lambda module: module.file_state(), 0.08
    ),
    "FP8 per tensor of compressed-tensors": Format(
        "fp8-experts", float8("tensor", "tensor"), per_tensor, lambda module: module.file_state(), 0.08
    ),
    "MXFP4": fp4("mxfp4"),
    "NVFP4": fp4("nvfp4"),
    "NVFP4 with activations": fp4(
        "nvfp4", arguments(4, "float", "tensor_group", dynamic=True, group_size=16) | {"dynamic": "local"}
    ),
    "int8": Format("int8-experts", int8, modules.Int8Linear.from_linear, with_columns, 0.03),
}


@pytest.fixture(autouse=True)
def _all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.register()
    integration.register()
    monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", "all")
    backends_of_gpus(monkeypatch)


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


def quantised(form: Format, count: int = COUNT, intermediate: int = INTERMEDIATE) -> Layers:
    found = []
    for _ in range(count):
        sizes = {"gate_proj": (HIDDEN, intermediate), "up_proj": (HIDDEN, intermediate)}
        sizes["down_proj"] = (intermediate, HIDDEN)
        layers = {}
        for name, (k, n) in sizes.items():
            layer = nn.Linear(k, n, bias=False, dtype=vllm_on_cpu.DTYPE)
            nn.init.normal_(layer.weight, std=k**-0.5)
            layers[name] = form.convert(layer)
        found.append(layers)
    return found


def made(form: Format, layers: Layers, top_k: int = 2, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    """The engine's layer with a checkpoint's tensors, and its configuration."""
    intermediate = layers[0]["gate_proj"].out_features
    expert_parallel = options.pop("expert_parallel", False)
    with vllm_on_cpu.engine(rank, ranks, expert_parallel=expert_parallel) as config:
        layer = vllm_on_cpu.experts(form.config(), len(layers), top_k, HIDDEN, intermediate, **options)
        assert isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts)
        for expert, each in enumerate(layers):
            for name, module in each.items():
                tensors = form.tensors(module).items()
                found = set(layer.load_weights((f"{expert}.{name}.{part}", tensor) for part, tensor in tensors))
                assert len(found) == len(tensors) or layer.expert_map is not None
        vllm_on_cpu.settle(layer.routed_experts)
    return layer, config


def inputs(tokens: int, count: int = COUNT, uneven: bool = False) -> tuple[Tensor, Tensor]:
    logits = torch.randn(tokens, count)
    if uneven:  # nearly all tokens go to the first two experts, and none to the last
        logits += torch.tensor([9.0, 8.0, *[0.0] * (count - 3), -30.0])
    return torch.randn(tokens, HIDDEN, dtype=vllm_on_cpu.DTYPE), logits


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(seed: int, name: str) -> None:
    """Bit for bit as epiloq's own experts, and near the product of the dequantised weights."""
    form = FORMATS[name]
    layers = quantised(form)
    layer, config = made(form, layers)
    own = GatedExperts.from_linears(ExpertLinears(layers, nn.SiLU()))
    assert own is not None
    for tokens, uneven in ((0, False), (1, False), (7, True), (100, False), (100, True)):
        x, logits = inputs(tokens, uneven=uneven)
        y = vllm_on_cpu.run_experts(layer, config, x, logits)
        weights, ids = vllm_on_cpu.top_k_of_softmax(x, logits, 2, True)
        assert y.dtype == x.dtype and torch.equal(y, own(x, ids.long(), weights))
        assert error(y, mixture_in_float64(layers, x, weights, ids)) < form.error


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("name", ["words of 4 bits", "FP8 in blocks"])
def test_numbers_of_experts_per_token(seed: int, name: str, top_k: int, renormalize: bool) -> None:
    form = FORMATS[name]
    layers = quantised(form)
    layer, config = made(form, layers, top_k, renormalize=renormalize)
    for tokens in (1, 7, 100):
        x, logits = inputs(tokens, uneven=tokens == 7)
        reference = mixture_in_float64(layers, x, *vllm_on_cpu.top_k_of_softmax(x, logits, top_k, renormalize))
        assert error(vllm_on_cpu.run_experts(layer, config, x, logits), reference) < form.error


@pytest.mark.parametrize("name", FORMATS)
def test_tensor_parallel_ranks_add_up(seed: int, name: str) -> None:
    form = FORMATS[name]
    layers = quantised(form)
    x, logits = inputs(7)
    total = torch.zeros(7, HIDDEN, dtype=torch.float64)
    for rank in range(2):
        layer, config = made(form, layers, rank=rank, ranks=2)
        assert layer.routed_experts.epiloq.intermediate == INTERMEDIATE // 2
        total += vllm_on_cpu.run_experts(layer, config, x, logits).double()
    assert error(total, mixture_in_float64(layers, x, *vllm_on_cpu.top_k_of_softmax(x, logits, 2, True))) < form.error


@pytest.mark.parametrize("name", ["words of 4 bits", "FP8 in blocks", "int8"])
def test_expert_parallel_ranks_add_up(seed: int, name: str) -> None:
    """Of five experts one rank has three and the other two."""
    form = FORMATS[name]
    layers = quantised(form, 5)
    for tokens in (0, 7):
        x, logits = inputs(tokens, 5)
        total = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
        for rank in range(2):
            layer, config = made(form, layers, rank=rank, ranks=2, expert_parallel=True)
            assert layer.routed_experts.epiloq.experts == 3 - rank
            total += vllm_on_cpu.run_experts(layer, config, x, logits).double()
        assert (
            error(total, mixture_in_float64(layers, x, *vllm_on_cpu.top_k_of_softmax(x, logits, 2, True))) < form.error
        )


@pytest.mark.parametrize(("activation", "approximate"), [("gelu", "none"), ("gelu_pytorch_tanh", "tanh")])
@pytest.mark.parametrize("name", ["words of 4 bits", "FP8 in blocks"])
def test_other_gates(seed: int, name: str, activation: str, approximate: str) -> None:
    form = FORMATS[name]
    layers = quantised(form, 4)
    layer, config = made(form, layers, activation=activation)
    own = GatedExperts.from_linears(ExpertLinears(layers, nn.GELU(approximate)))
    assert own is not None
    x, logits = inputs(7, 4)
    weights, ids = vllm_on_cpu.top_k_of_softmax(x, logits, 2, True)
    assert torch.equal(vllm_on_cpu.run_experts(layer, config, x, logits), own(x, ids.long(), weights))


def test_loaded_tensors_are_released(seed: int) -> None:
    for name, form in FORMATS.items():
        layer, _ = made(form, quantised(form, 2))
        names = [name for name, _ in layer.routed_experts.named_parameters()]
        assert names and all(found.startswith("epiloq.") for found in names), name


def test_values_of_8_bits_are_not_copied(seed: int) -> None:
    form = FORMATS["FP8 in blocks"]
    layers = quantised(form, 2)
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.experts(form.config(), 2, 1, HIDDEN, INTERMEDIATE).routed_experts
        places = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
        vllm_on_cpu.settle(layer)
    own = layer.epiloq
    assert (own.gate_up.weight_q.data_ptr(), own.down.weight_q.data_ptr()) == places
    assert len(layers) == own.experts


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


def gpt_oss(intermediate: int, rank: int, ranks: int, expert_parallel: bool, tensors: dict[str, Tensor]) -> Any:
    """GPT-OSS's layer, loaded by the model's own function."""
    count = tensors["w13_bias"].shape[0]
    with vllm_on_cpu.engine(rank, ranks, expert_parallel=expert_parallel) as config:
        layer = vllm_on_cpu.experts(
            GptOssMxfp4Config(), count, 2, HIDDEN, intermediate, has_bias=True, activation="swigluoai"
        )
        assert isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts)
        model: Any = nn.Module()
        model.experts, model.parallel_config = layer, config.parallel_config
        model.config = SimpleNamespace(num_local_experts=count, intermediate_size=intermediate)
        part = count // ranks if expert_parallel else count
        first = rank * part if expert_parallel else 0
        weights = [(f"experts.routed_experts.{name}", tensor.clone()) for name, tensor in tensors.items()]
        loaded = GptOssModel._load_weights_mxfp4(model, first + part, first, 0, 0, weights, [])
        assert len(loaded) == len(tensors)
        vllm_on_cpu.settle(layer.routed_experts)
    return layer, config


def of_gpt_oss(whole: modules.Fp4Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """In float64, from the dequantised weights."""
    products = {}
    for name in ("gate_up_proj", "down_proj"):
        packed, bias = whole.packed(name), getattr(whole, f"{name}_bias")
        products[name] = packed.dequantize().double().view(len(bias), -1, packed.k), bias.double()
    result = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(whole.experts):
        weight, bias = (tensor[expert] for tensor in products["gate_up_proj"])
        both = x.double() @ weight.t() + bias
        gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
        weight, bias = (tensor[expert] for tensor in products["down_proj"])
        y = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ weight.t() + bias
        result += (weights.double() * (ids == expert)).sum(-1, keepdim=True) * y
    return result


@pytest.mark.parametrize(
    ("intermediate", "ranks", "expert_parallel"), [(96, 1, False), (96, 2, False), (224, 4, False), (96, 2, True)]
)
def test_gpt_oss(
    seed: int, monkeypatch: pytest.MonkeyPatch, intermediate: int, ranks: int, expert_parallel: bool
) -> None:
    """The model divides 96 into ranks of 64 and 32, and 224 into three of 64 and one of 32."""
    outline, tensors = modules.Fp4Experts(4, HIDDEN, intermediate, dtype=vllm_on_cpu.DTYPE), {}
    ranges = {"blocks": (0, 256), "scales": (119, 124)}
    for name, shape in outline.shapes().items():
        kind = name.rpartition("_")[2]
        values = torch.randn(shape) if kind == "bias" else torch.randint(*ranges[kind], shape)
        tensors[name] = values.to(vllm_on_cpu.DTYPE if kind == "bias" else torch.uint8)
    whole = outline.from_blocks(tensors)
    given = {
        f"{short}_{part}": tensors[f"{name}_{stored}"]
        for short, name in (("w13", "gate_up_proj"), ("w2", "down_proj"))
        for part, stored in (("weight", "blocks"), ("weight_scale", "scales"), ("bias", "bias"))
    }
    layers = [gpt_oss(intermediate, rank, ranks, expert_parallel, given) for rank in range(ranks)]
    for tokens in (0, 1, 7, 100):
        x, logits = inputs(tokens, 4)
        weights, ids = vllm_on_cpu.top_k_of_softmax(x, logits, 2, True)
        parts = torch.stack([vllm_on_cpu.run_experts(*layer, x, logits) for layer in layers])
        assert ranks > 1 or torch.equal(parts[0], whole(x, ids.long(), weights))
        assert error(parts.double().sum(0), of_gpt_oss(whole, x, weights, ids)) < 2**-6


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


def test_experts_are_not_taken_by_default(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    for chosen, ours in ((None, False), ("int8,fp8-block", False), ("fp8-block-experts", True), ("none", False)):
        monkeypatch.delenv("EPILOQ_ENGINE_LAYERS")
        if chosen is not None:
            monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", chosen)
        with vllm_on_cpu.engine():
            layer = vllm_on_cpu.experts(FORMATS["FP8 in blocks"].config(), 4, 2, HIDDEN, INTERMEDIATE)
        assert isinstance(layer.routed_experts.quant_method, plugin.EpiloqExperts) is ours
        monkeypatch.setenv("EPILOQ_ENGINE_LAYERS", "all")
    assert messages == ["Selected epiloq's fp8-block-experts for the experts of vLLM's Fp8MoEMethod"]


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


@pytest.mark.parametrize("name", ["words of 4 bits", "FP8 in blocks", "int8"])
def test_traced_whole_for_any_number_of_tokens(seed: int, name: str) -> None:
    """On a CPU the engine's compiled graphs contain the experts; on GPUs they call them as one operator."""
    layer = made(FORMATS[name], quantised(FORMATS[name], 4))[0].routed_experts

    def apply(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = layer.quant_method.apply(layer, x, weights, ids)
        return result

    torch._dynamo.reset()
    compiled = torch.compile(apply, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for tokens in (3, 17):
            x, logits = inputs(tokens, 4)
            weights, ids = vllm_on_cpu.top_k_of_softmax(x, logits, 2, True)
            assert torch.equal(compiled(x, weights, ids), apply(x, weights, ids))


def test_shared_experts_and_a_router_inside(seed: int) -> None:
    """As Qwen2-MoE and DeepSeek have them: the engine's runner calls both, and adds what they return."""

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x[:, :4].float(), None

    form = FORMATS["words of 4 bits"]
    layers = quantised(form, 4)
    layer, config = made(form, layers, gate=Gate(), shared_experts=nn.Identity())
    x = torch.randn(7, HIDDEN, dtype=vllm_on_cpu.DTYPE)
    weights, ids = vllm_on_cpu.top_k_of_softmax(x, x[:, :4].float(), 2, True)
    reference = x.double() + mixture_in_float64(layers, x, weights, ids)
    assert error(vllm_on_cpu.run_experts(layer, config, x, x), reference) < form.error
