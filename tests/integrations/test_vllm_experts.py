"""Ordinary checkpoints of mixtures of experts in vLLM's own layers, on epiloq's grouped products."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.models.gpt_oss import GptOssModel

from epiloq import nn as modules
from epiloq.integrations.vllm import experts as plugin
from epiloq.nn.experts.expert_linears import ExpertLinears
from epiloq.nn.experts.gated_experts import GatedExperts
from mixture_references import error, mixture_in_float64
from vllm_expert_formats import FORMATS, HIDDEN, INTERMEDIATE, inputs, made, quantised, take_all_kinds


@pytest.fixture(autouse=True)
def _all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all_kinds(monkeypatch)


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
