"""Experts with biases, with gates and ups in turns, with norms, that return their tokens, or called by tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from torch import Tensor, nn

import epiloq
from biased_mixtures import FAMILIES, gpt_oss, llama4, longcat
from epiloq.models import mixtures
from epiloq.nn import (
    ExpertLinears,
    Fp4Linear,
    Fp8BlockLinear,
    Fp8Linear,
    GatedExperts,
    Int8Linear,
    W4A8Fp4Linear,
    W4A8Linear,
    WeightOnlyLinear,
)
from epiloq.nn.experts.gating import OwnGate
from epiloq.parallel.experts import expert_part
from epiloq.schemes import QuantisedLinear
from other_mixtures import TOKENS, logits
from tiny_mixtures import error

pytestmark = [
    pytest.mark.usefixtures("epiloq_in_transformers"),
    pytest.mark.filterwarnings("ignore:quantize_. left in floating point"),
]
SCHEMES = ("w4a16-g32", "w4a8-fp8", "w8a8-int8", "fp8-token", "w4a16-mxfp4", "w4a16-nvfp4", "w8a16-fp8")
WEIGHT_ONLY = ("w4a16-g32", "w4a16-mxfp4", "w4a16-nvfp4", "w8a16-fp8")


@torch.no_grad()
def outputs(model: Any) -> Tensor:
    if hasattr(model, "lm_head"):
        return logits(model)
    return model(TOKENS).last_hidden_state  # type: ignore[no-any-return]


@torch.no_grad()
def dequantised(float_model: Any, quantised: Any) -> Any:
    """The float model with the quantised one's weights: experts' matrices go back where they came from."""
    found = copy.deepcopy(float_model)
    values = {
        name: module.dequantized_weight()
        for name, module in mixtures.named_layers(quantised, None)
        if isinstance(module, QuantisedLinear)
    }
    used = set()
    for name, module in found.named_modules():
        if isinstance(module, nn.Linear) and name in values:
            module.weight.data = values[name].to(module.weight.dtype)
            used.add(name)
        for part in ("gate_up_proj", "down_proj"):
            if f"{name}.0.{part.replace('gate_up', 'gate')}" not in values or not hasattr(module, part):
                continue
            stack = getattr(module, part)
            for expert in range(4):
                keys = [f"{name}.{expert}.{leaf}" for leaf in (("gate_proj", "up_proj") if "up" in part else (part,))]
                parts = [values[key] for key in keys]
                matrix = torch.cat(parts) if "GptOss" not in type(module).__name__ or len(parts) == 1 else None
                matrix = torch.stack(parts, 1).flatten(0, 1) if matrix is None else matrix
                stack.data[expert] = matrix if stack.shape[1:] == matrix.shape and not _turned(module) else matrix.t()
                used |= set(keys)
    assert used == values.keys()
    return found


def _turned(module: nn.Module) -> bool:
    return getattr(module, "is_transposed", "Llama4" in type(module).__name__)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_saved_and_opened(family: str, scheme: str, seed: int, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    found = epiloq.quantize_(copy.deepcopy(model), scheme)
    assert not mixtures.stacked(found) and not mixtures.experts_left_stacked(found)
    experts = [name for name, _ in mixtures.named_layers(found) if ".experts.0." in name and name.endswith("down_proj")]
    assert len(experts) == len(mixtures.stacked(model)) > 0
    y = outputs(found)
    if scheme in WEIGHT_ONLY:
        assert error(y, outputs(dequantised(model, found))) < 2e-5
    else:
        assert 1e-4 < error(y, outputs(model)) < 1
    found.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(again), y)


@pytest.mark.parametrize("family", FAMILIES)
def test_apart_and_together(family: str, seed: int) -> None:
    """The same numbers; and a changed matrix, or bias, is where it was taken from."""
    model = FAMILIES[family]()
    before, parameters = outputs(model), dict(model.named_parameters())
    epiloq.quantize_(copy.deepcopy(model), "w8a8-int8", ignore="*.experts")
    with mixtures.unstacked_experts(model):
        torch.testing.assert_close(outputs(model), before, rtol=1e-4, atol=1e-4)
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    if family == "llama4":
        return
    with mixtures.unstacked_experts(model):
        (name, experts), *_ = [(n, m) for n, m in model.named_modules() if isinstance(m, ExpertLinears)]
        for layer in experts.layers(2):
            layer.weight = nn.Parameter(layer.weight * 2)
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias + 1)
    for part, tensor in dict(model.get_submodule(name).named_parameters(recurse=False)).items():
        old = parameters[f"{name}.{part}"]
        assert tensor.shape == old.shape and tensor.is_contiguous()
        assert torch.equal(tensor[2], old[2] + 1 if "bias" in part else old[2] * 2)
        assert torch.equal(tensor[[0, 1, 3]], old[[0, 1, 3]]) and torch.equal(tensor[4:], old[4:])


@pytest.mark.parametrize("make", [gpt_oss, llama4])
def test_experts_that_are_left_keep_their_stacks(make: Any, seed: int) -> None:
    model = make()
    before = {name: type(module) for name, module in mixtures.stacked(model).items()}
    epiloq.quantize_(model, "w4a16-g32", ignore="*.experts")
    assert {name: type(module) for name, module in mixtures.stacked(model).items()} == before


# int8: rounding a token to its largest of n numbers costs at most sqrt(n) / 254 of it, here twice, of 64 and 48.
@pytest.mark.parametrize(("scheme", "bound"), [("w4a16-g32", 1e-5), ("w8a8-int8", 0.1)])
def test_experts_that_return_their_tokens(scheme: str, bound: float, seed: int) -> None:
    """Beside quantised ones, against their weights in float64."""
    model = longcat()
    name = next(iter(mixtures.stacked(model)))
    x, index, weights = torch.randn(40, 64), torch.randint(0, 6, (40, 2)), torch.rand(40, 2)
    index[0] = torch.tensor([5, 4])
    quantised = epiloq.quantize_(copy.deepcopy(model), scheme)
    experts: Any = quantised.get_submodule(name)
    assert isinstance(experts, GatedExperts) and experts.identities == 2
    exact = dequantised(model, quantised).get_submodule(name).double()
    found, wanted = experts(x, index, weights), exact(x.double(), index, weights.double())
    assert error(found, wanted) < bound
    alone = (index >= 4).all(1)
    torch.testing.assert_close(found[alone].double(), wanted[alone], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="expected indices from 0 to 5, got 6"):
        experts(x, index * 0 + 6, weights)


def test_step3p7_gates_after_the_activation(seed: int) -> None:
    """They are called as others are, though their class does not say how they are stacked."""
    module = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    said = {"num_local_experts": 4, "hidden_size": 64, "moe_intermediate_size": 48, "hidden_act": "silu"}
    experts = module.Step3p7Experts(SimpleNamespace(**said), swiglu_limit=0.5)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape) / 8
    model = nn.ModuleDict({"experts": experts, "head": nn.Linear(64, 64)})
    x, index, weights = torch.randn(30, 64), torch.randint(0, 4, (30, 2)), torch.rand(30, 2)
    exact = copy.deepcopy(experts).double()(x.double(), index, weights.double())
    epiloq.quantize_(model, "w8a8-int8")
    assert isinstance(model["experts"], GatedExperts) and model["experts"]._gate is None
    assert error(model["experts"](x, index, weights), exact) < 0.04


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpt_oss_in_16_bits(dtype: torch.dtype, seed: int) -> None:
    model = gpt_oss().to(dtype)
    name = next(iter(mixtures.stacked(model)))
    exact = copy.deepcopy(model.get_submodule(name)).float()
    x, index, weights = torch.randn(30, 64, dtype=dtype), torch.randint(0, 4, (30, 2)), torch.rand(30, 2, dtype=dtype)
    epiloq.quantize_(model, "w8a16")
    y = model.get_submodule(name)(x, index, weights)
    assert y.dtype == dtype and error(y, exact(x.float(), index, weights.float())) < 0.02


KINDS = {
    "int8": Int8Linear.from_linear,
    "fp8": Fp8Linear.from_linear,
    "w4a16": lambda linear: WeightOnlyLinear.from_linear(linear, group_size=32),
    "w4a8-fp8": lambda linear: W4A8Linear.from_linear(linear, group_size=32),
    "mxfp4": lambda linear: Fp4Linear.from_linear(linear, format="mxfp4"),
    "nvfp4": Fp4Linear.from_linear,
    "w4a8-nvfp4": lambda linear: W4A8Fp4Linear.from_linear(linear, format="nvfp4"),
    "fp8-block": Fp8BlockLinear.from_linear,
}


def biased(make: Any, dtype: torch.dtype = torch.float32, sizes: tuple[int, int] = (72, 40)) -> ExpertLinears:
    """Experts of layers with biases, whose gates alternate with ups in GPT-OSS's way."""
    hidden, inner = sizes
    shapes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    layers = [{name: make(nn.Linear(*shape, dtype=dtype)) for name, shape in shapes.items()} for _ in range(5)]
    gate = mixtures.stacked(gpt_oss())["model.layers.0.mlp.experts"]
    return ExpertLinears(layers, OwnGate(gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_biases_beside_grouped_products(kind: str, dtype: torch.dtype, seed: int) -> None:
    """The numbers of one layer after the other; biases in state dicts, files, parts and gradients."""
    apart = biased(KINDS[kind], dtype)
    whole = GatedExperts.from_linears(apart)
    assert whole is not None and whole.down_bias is not None and whole.down_bias.dtype == dtype
    x = torch.randn(17, 72, dtype=dtype)
    index, weights = torch.stack([torch.randperm(5)[:2] for _ in range(17)]), torch.rand(17, 2)
    with torch.no_grad():
        wanted, y = apart(x, index, weights), whole(x, index, weights)
    # Of activations that are quantised, a bias rounded otherwise may move some to their neighbours.
    exact = dtype == torch.float32 and kind in ("w4a16", "mxfp4", "nvfp4")
    assert error(y, wanted) < (2e-6 if exact else 0.003 if dtype == torch.float32 else 0.03)
    files = whole.file_state()
    for expert in range(5):
        for name, layer in zip(apart.projections.names, apart.layers(expert), strict=True):
            assert torch.equal(files[f"{expert}.{name}.bias"], layer.bias)  # type: ignore[arg-type]
    for state in (files, whole.state_dict()):
        again = copy.deepcopy(whole)
        for parameter in again.parameters():
            parameter.data.zero_()
        again.load_state_dict(dict(state))
        assert torch.equal(again(x, index, weights), y)
    empty = copy.deepcopy(whole).to("meta")
    empty.load_state_dict(dict(files), assign=True)
    assert torch.equal(empty(x, index, weights), y)
    for linear in dict(whole.linears()).values():
        assert linear.bias is not None
    parts = torch.zeros(17, 72, dtype=torch.float32)
    for part in (range(2), range(2, 5)):
        some = copy.deepcopy(whole)
        expert_part(some, part)
        parts += some(x, index, weights).float()
    assert error(parts, y.float()) < 1e-2
    given = x.clone().requires_grad_()
    whole(given, index, weights).float().sum().backward()
    assert given.grad is not None and bool(given.grad.isfinite().all())
    if kind not in ("int8", "w4a16"):
        return
    torch.compiler.reset()
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert error(compiled(x, index, weights), y) < 1e-6


def test_a_bias_of_another_shape_is_named(seed: int) -> None:
    whole = GatedExperts.from_linears(biased(Int8Linear.from_linear))
    assert whole is not None
    state = whole.file_state() | {"3.up_proj.bias": torch.ones(7)}
    with pytest.raises(RuntimeError, match=r"3.up_proj.bias: expected torch.float32 \[40\], got torch.float32 \[7\]"):
        whole.load_state_dict(state)
