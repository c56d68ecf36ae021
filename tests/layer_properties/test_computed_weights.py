"""A weight that is computed before each call is quantised as it would then be, not as it was before loading."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import epiloq
import tiny_teacher
from epiloq.nn import Int8Conv2d, Int8Linear, WeightOnlyConv2d, WeightOnlyLinear
from epiloq.quantize.algorithms.smoothquant import fold_, smoothquant_
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.int8_graph.batch_norm import fold_batch_norm_
from epiloq.weights.computed import bake_
from epiloq.weights.grid import Grid

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", amount=0.3),
    "pruned twice": lambda module: prune.random_unstructured(
        prune.l1_unstructured(module, "weight", amount=0.3), "weight", amount=0.2
    ),
    "parametrised weight_norm": parametrizations.weight_norm,
    "parametrised": lambda module: parametrize.register_parametrization(module, "weight", nn.Tanh()),
}
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], tuple[int, ...]]] = {
    "int8": (lambda: nn.Linear(32, 16), Int8Linear.from_linear, (4, 32)),
    "w8a16": (lambda: nn.Linear(32, 16), lambda x: WeightOnlyLinear.from_linear(x, bits=8), (4, 32)),
    "conv-int8": (
        lambda: nn.Conv2d(8, 8, 3),
        lambda x: Int8Conv2d.from_conv2d(x, input_scale=0.03, input_zero_point=0),
        (1, 8, 5, 5),
    ),
    "conv-w8a16": (lambda: nn.Conv2d(8, 8, 3), lambda x: WeightOnlyConv2d.from_conv2d(x, bits=8), (1, 8, 5, 5)),
}

WAYS_OF_MATRICES = WAYS | {"parametrised spectral_norm": parametrizations.spectral_norm}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_after_loading(kind: str, way: str, seed: int) -> None:
    make, convert, shape = KINDS[kind]
    source, target = (WAYS[way](make()).eval() for _ in range(2))
    target.load_state_dict(source.state_dict())
    x = torch.randn(shape)
    with torch.no_grad():
        found = convert(target)(x)
        assert torch.equal(found, convert(source)(x))
        expected = source(x)
    # The other model's weight was nowhere near.
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_quantize_a_model_after_loading(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        models = [nn.Sequential(nn.utils.weight_norm(nn.Linear(32, 16)), nn.ReLU()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(4, 32)
    expected = models[0](x)
    torch.testing.assert_close(epiloq.quantize_(models[1], "w8a16")(x), expected, rtol=0.05, atol=0.05)


def test_hooks_of_other_kinds_are_refused() -> None:
    linear = nn.Linear(8, 8)
    weight = linear.weight
    del linear._parameters["weight"]
    linear.stored = weight

    def computing(module: nn.Module, _: Any) -> None:
        module.weight = module.stored * 2

    linear.register_forward_pre_hook(computing)
    linear(torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"Int8Linear: weight: expected a parameter, .* pre-hook .*computing"):
        Int8Linear.from_linear(linear)
    plain = nn.Linear(8, 8)
    plain.register_forward_pre_hook(lambda module, _: None)  # which computes no weight
    Int8Linear.from_linear(plain)


def reparametrised_teacher(way: str) -> nn.Module:
    """A language model of which some layers' weights are computed."""
    model = tiny_teacher.tiny_model().eval()
    for block in model.model.layers:
        for layer in (block.mlp.down_proj, block.self_attn.v_proj):
            WAYS_OF_MATRICES[way](layer)
    return model.eval()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS_OF_MATRICES)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq", "awq"])
def test_calibration_writes_into_it(algorithm: str, way: str, seed: int) -> None:
    """The model computes with the weights that calibration gives, and these stand for what it computed before."""
    pytest.importorskip("transformers")
    model = reparametrised_teacher(way)
    windows = [torch.randint(0, 256, (1, 24)) for _ in range(3)]
    with torch.no_grad():
        expected = model(windows[0]).logits  # after which hooks have computed what they set
        before = {n: m.weight.clone() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        found = {}
        for block in calibrate(model, windows, Grid(8, group_size=16), ALGORITHMS[algorithm]):
            found |= block.weights
        assert len(found) == 14  # every linear layer of both blocks
        for name, weight in found.items():
            layer = model.get_submodule(name)
            assert torch.equal(layer.weight, weight.dequantize(layer.weight.dtype)), name
            if algorithm != "awq":
                assert (layer.weight - before[name]).norm() < 0.02 * before[name].norm(), name
        torch.testing.assert_close(model(windows[0]).logits, expected, rtol=0.05, atol=0.05 * expected.abs().max())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("way", WAYS_OF_MATRICES)
def test_smoothing_changes_no_result(way: str, seed: int) -> None:
    pytest.importorskip("transformers")
    model, tokens = reparametrised_teacher(way), torch.randint(0, 256, (1, 24))
    with torch.no_grad():
        expected = model(tokens).logits
        folded = smoothquant_(model, lambda m: m(tokens))
        assert any(name.endswith("down_proj") for fold in folded for name in fold.consumers)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_producer_whose_weight_is_computed_is_not_folded(seed: int) -> None:
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 4)
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    model, x = nn.Sequential(norm, linear), torch.randn(5, 8)
    expected = model(x)
    assert smoothquant_(model, lambda m: m(x)) == ()
    assert torch.equal(model(x), expected)
    with pytest.raises(ValueError, match=r"fold_: Parametrized\w+\.weight: expected a parameter"):
        fold_(norm, [linear], torch.ones(8))


def test_a_convolution_whose_bias_is_computed_keeps_its_norm(seed: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    parametrize.register_parametrization(model[0], "bias", nn.Tanh())
    model[1].running_mean.normal_()
    x = torch.randn(1, 3, 6, 6)
    expected = model(x)
    assert fold_batch_norm_(model) == []
    assert torch.equal(model(x), expected)


def test_linear_layers_with_parametrised_weights_are_chosen(seed: int) -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
    parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    x = torch.randn(4, 32)
    expected = model(x)
    torch.testing.assert_close(epiloq.quantize_(model, "w8a16")(x), expected, rtol=0.05, atol=0.05)


def test_a_pruned_conv1d_is_quantised_as_it_would_be_after_loading(seed: int) -> None:
    conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
    models = [nn.Sequential(conv1d(16, 32)) for _ in range(2)]
    for model in models:
        nn.init.normal_(model[0].weight)
        prune.l1_unstructured(model[0], "weight", amount=0.3)
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(4, 32)
    expected = models[0](x)
    found = epiloq.quantize_(models[1], "w8a16")(x)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_unsupported_parametrisations_are_refused_by_name() -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double()

    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Sizes(), unsafe=True)
    with pytest.raises(ValueError, match=r"up_proj: weight: expected a parametrisation that can be removed"):
        bake_("up_proj", linear)
