"""Models of transformers with experts: taken apart and put together, and quantised in memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from torch import nn

import epiloq
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.models import mixtures
from epiloq.nn import (
    ExpertLinears,
    Fp8BlockExperts,
    Fp8BlockLinear,
    Fp8Experts,
    GatedExperts,
    Int8Experts,
    Int8Linear,
    PackedExperts,
    W4A8Experts,
    W4A8Fp4Experts,
    WeightOnlyLinear,
)
from epiloq.quantize.job import perform, prepare
from epiloq.quantize.settings import Settings
from reference import typical_error
from tiny_mixtures import deepseek, error, gpt_oss, granite, logits, mixtral, qwen3

NAMES = {
    "qwen3": (qwen3, ["model.layers.1.mlp.experts"], ("gate_proj", "up_proj", "down_proj")),
    "mixtral": (mixtral, ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"], ("w1", "w3", "w2")),
    "deepseek": (deepseek, ["model.layers.1.mlp.experts"], ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("family", NAMES)
def test_apart_and_together(family: str, seed: int) -> None:
    make, names, projections = NAMES[family]
    model = make()
    before, parameters = logits(model), dict(model.named_parameters())
    assert list(mixtures.stacked(model)) == names and mixtures.experts_left_stacked(model) == {}
    with mixtures.unstacked_experts(model):
        found = {name: m for name, m in model.named_modules() if isinstance(m, ExpertLinears)}
        assert list(found) == names
        assert all(m.projections == projections for m in found.values())
        gate = model.get_submodule(f"{names[-1]}.1.{projections[0]}")
        # One memory, so that no model is held twice.
        assert gate.weight.data_ptr() == parameters[f"{names[-1]}.gate_up_proj"][1].data_ptr()
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
        assert list(mixtures.routers(model)) == [name.replace("experts", "gate") for name in names]
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert torch.equal(logits(model), before)
    with mixtures.unstacked_experts(model):
        gate = model.get_submodule(f"{names[-1]}.1.{projections[0]}")
        gate.weight = nn.Parameter(gate.weight * 2)
    stack = model.get_parameter(f"{names[-1]}.gate_up_proj")
    half = stack.shape[1] // 2
    assert torch.equal(stack[1, :half], 2 * parameters[f"{names[-1]}.gate_up_proj"][1, :half])
    assert torch.equal(stack[1, half:], parameters[f"{names[-1]}.gate_up_proj"][1, half:])


def test_shared_by_two_layers(seed: int) -> None:
    model = qwen3(num_hidden_layers=3)
    one, other = (model.get_submodule(f"model.layers.{layer}.mlp") for layer in (1, 2))
    other.experts = one.experts
    before = logits(model)
    with mixtures.unstacked_experts(model):
        assert isinstance(one.experts, ExpertLinears) and other.experts is one.experts
    assert torch.equal(logits(model), before)
    of_their_own = copy.deepcopy(model)
    layer = of_their_own.get_submodule("model.layers.2.mlp")
    layer.experts = copy.deepcopy(layer.experts)
    epiloq.quantize_(model, "w8a8-int8")
    assert isinstance(one.experts, GatedExperts) and other.experts is one.experts
    assert torch.equal(logits(model), logits(epiloq.quantize_(of_their_own, "w8a8-int8")))


@pytest.mark.parametrize(
    ("scheme", "module", "bound"),
    [
        ("fp8-block", Fp8BlockExperts, 0.15),
        ("fp8-token", Fp8Experts, 0.15),
        ("fp8", Fp8Experts, 0.15),
        ("w8a8-int8", Int8Experts, 0.08),
        ("w4a8-fp8", W4A8Experts, 0.4),
        ("w4a8-int8", W4A8Experts, 0.4),
        ("w4a8-mxfp4-fp8", W4A8Fp4Experts, 0.4),
        ("w4a8-nvfp4-fp8", W4A8Fp4Experts, 0.4),
        ("w4a16-g32", PackedExperts, 0.3),
        ("w8a16", PackedExperts, 0.03),
    ],
)
def test_quantize_(scheme: str, module: type, bound: float, seed: int) -> None:
    model = mixtral() if seed % 2 else qwen3()
    quantised = epiloq.quantize_(copy.deepcopy(model), scheme)
    experts = quantised.model.layers[1].mlp.experts
    assert isinstance(experts, GatedExperts) and type(experts.gate_up) is module and type(experts.down) is module
    router = quantised.model.layers[1].mlp.gate
    assert type(router) is type(model.model.layers[1].mlp.gate)
    assert torch.equal(router.weight, model.model.layers[1].mlp.gate.weight)
    assert typical_error(logits(quantised), logits(model)) < 0.6
    x, index, weights = torch.randn(30, 128), torch.randint(0, 4, (30, 2)), torch.rand(30, 2)
    with torch.no_grad():
        exact = model.model.layers[1].mlp.experts(x, index, weights)
        assert 1e-4 < error(experts(x, index, weights), exact) < bound


@pytest.mark.parametrize("scheme", ["w8a8-int8-azp", "w4a8-block"])
def test_schemes_without_grouped_products(scheme: str, seed: int) -> None:
    """Each matrix is a layer of its own."""
    model = qwen3()
    quantised = epiloq.quantize_(copy.deepcopy(model), scheme)
    experts = quantised.model.layers[1].mlp.experts
    assert isinstance(experts, ExpertLinears)
    kinds = {type(layer) for expert in range(4) for layer in experts.layers(expert)}
    assert len(kinds) == 1 and nn.Linear not in kinds
    assert logits(quantised).isfinite().all()


def test_filters(seed: int) -> None:
    """They see a linear layer for each matrix; experts of which none is taken stay as they were."""
    model = qwen3()
    stack = model.model.layers[1].mlp.experts
    epiloq.quantize_(model, "w8a8-int8", lambda module, name: name.endswith("q_proj"))
    assert model.model.layers[1].mlp.experts is stack
    asked = []

    def some(module: nn.Module, name: str) -> bool:
        asked.append(name)
        return "experts.2." in name

    epiloq.quantize_(model, "w8a8-int8", some)
    assert "model.layers.1.mlp.experts.3.down_proj" in asked
    experts = model.model.layers[1].mlp.experts
    assert [type(experts.layers(expert)[1]) for expert in range(4)] == [nn.Linear, nn.Linear, Int8Linear, nn.Linear]
    assert logits(model).isfinite().all()


def test_a_refused_call_changes_nothing(seed: int) -> None:
    model = qwen3()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"expected at least one torch\.nn\.Linear"):
        epiloq.quantize_(model, "fp8-block", lambda module, name: False)
    with pytest.raises(ValueError, match=r"expected every chosen layer to run, but '.*experts.\d.*' saw no input"):
        epiloq.quantize_(model, "w8a8-int8-static", calibrate=lambda m: m(torch.tensor([[3]])))
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}


def test_a_router_that_is_a_linear_layer(seed: int) -> None:
    """Jamba's and, one module further in, Granite's, and the gate of a shared expert; nothing else."""
    model = qwen3()
    block = model.model.layers[1].mlp
    block.router, block.shared_expert_gate = nn.Linear(128, 4), nn.Linear(128, 1)
    block.other, block.inside = nn.Linear(128, 8), nn.Sequential(nn.Linear(128, 4), nn.Linear(4, 1))
    epiloq.quantize_(model, "fp8-block")
    routers = (block.router, block.shared_expert_gate, block.inside[0])
    assert all(type(router) is nn.Linear for router in routers)
    assert isinstance(block.other, Fp8BlockLinear) and isinstance(block.inside[1], Fp8BlockLinear)


def test_unsupported_experts_are_named(seed: int) -> None:
    model = gpt_oss()
    reason = "not called as the experts of transformers are"
    for layer in model.model.layers:
        del layer.mlp.experts.has_bias
    assert mixtures.experts_left_stacked(model) == {f"model.layers.{layer}.mlp.experts": reason for layer in range(2)}
    with pytest.warns(UserWarning, match=rf"the experts of model.layers.1.mlp.experts \({reason}"):
        epiloq.quantize_(model, "fp8-block")
    assert isinstance(model.model.layers[0].self_attn.q_proj, Fp8BlockLinear)
    assert not isinstance(model.model.layers[0].mlp.experts, (GatedExperts, ExpertLinears))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: delattr(m, "has_bias"), "not called as the experts of transformers are"),
        (lambda m: setattr(m, "is_transposed", True), "of shapes [4, 128, 128] and [4, 128, 64]"),
        (lambda m: setattr(m, "is_concatenated", False), "their gate is not elementwise"),
        (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(4))), "made of down_proj, gate_up_proj, more"),
        (lambda m: setattr(m, "down_proj", nn.Parameter(torch.ones(4, 64, 128))), "of shapes"),
    ],
)
def test_other_structures(change: Callable[[Any], None], reason: str, seed: int) -> None:
    model = qwen3()
    change(model.model.layers[1].mlp.experts)
    (found,) = mixtures.experts_left_stacked(model).values()
    assert found.startswith(reason)
    assert mixtures.unstack_experts_(model) == []


def test_custom_gate(seed: int) -> None:
    model = qwen3()
    kind = type(model.model.layers[1].mlp.experts)
    model.model.layers[1].mlp.experts.__class__ = type("Own", (kind,), {"_apply_gate": lambda self, x: x})
    assert list(mixtures.experts_left_stacked(model).values()) == ["their gate is not elementwise"]


@pytest.mark.parametrize("layout", ["epiloq", "deepseek-fp8"])
def test_experts_that_files_stack(layout: str, seed: int, tmp_path: Path) -> None:
    """epiloq's own format has a matrix each all the same; in others they stay, and the report says so."""
    granite().save_pretrained(tmp_path / "model")
    settings = Settings(tmp_path / "model", tmp_path / "out", "fp8-block", "rtn", layout)
    report = perform(prepare(settings))
    model, _ = models.load(Checkpoint(tmp_path / "out"))
    experts = model.get_submodule("model.layers.1.block_sparse_moe.experts")
    assert isinstance(experts, GatedExperts) == (layout == "epiloq")
    why = {f"model.layers.{n}.block_sparse_moe.experts": "stacked in files; format epiloq has them" for n in range(2)}
    assert report["float_experts"] == ({} if layout == "epiloq" else why)
    assert typical_error(logits(model), logits(models.load_float(Checkpoint(tmp_path / "model")))) < 0.6


def test_models_without_experts(seed: int) -> None:
    """Convolutions and embeddings of positions have three dimensions too."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv1d(4, 4, 3), nn.Linear(4, 4)
            self.positions = nn.Parameter(torch.randn(1, 9, 4))

    model = Plain()
    assert mixtures.stacked(model) == {} and mixtures.routers(model) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epiloq.quantize_(model, "w8a8-int8")


class HeadsStacked(nn.Module):
    """Attention whose heads' matrices are one parameter each, as XLNet's."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "r"):
            self.register_parameter(name, nn.Parameter(torch.randn(16, heads, width)))
        self.ff = nn.Linear(16, 16)


class OwnExperts(nn.Module):
    """Experts of nobody's library: two stacks of matrices, or one that says how many it has."""

    def __init__(self, *shapes: tuple[int, ...], **message: int) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(shape)))
        for name, value in message.items():
            setattr(self, name, value)


@pytest.mark.parametrize(("heads", "width"), [(4, 8), (8, 8), (2, 4)])
def test_stacked_heads_are_no_experts(heads: int, width: int) -> None:
    """Nor is a linear layer a router for having as many rows as those have parts."""
    model = nn.Sequential(HeadsStacked(heads, width), nn.Linear(16, 16))
    assert mixtures.stacked(model) == {} and mixtures.routers(model) == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "left in floating point: the experts of 0"
        epiloq.quantize_(model, "w8a16")
    assert all(isinstance(layer, WeightOnlyLinear) for layer in (model[0].ff, model[1]))


@pytest.mark.parametrize(
    "experts",
    [
        OwnExperts((4, 24, 6), (4, 6, 12)),  # gate and up in one, [E, out, in]
        OwnExperts((4, 6, 24), (4, 12, 6)),  # the same, [E, in, out]
        OwnExperts((4, 6, 12), (4, 6, 12), (4, 12, 6)),
        OwnExperts((4, 12, 6), num_experts=4),
        OwnExperts((4, 12, 6), groups=4),
    ],
)
def test_experts_of_remote_code_are_found_by_structure(experts: nn.Module) -> None:
    model = nn.ModuleDict({"gate": nn.Linear(6, 4), "experts": experts, "other": nn.Linear(6, 8)})
    assert list(mixtures.stacked(model)) == ["experts"] and list(mixtures.routers(model)) == ["gate"]
