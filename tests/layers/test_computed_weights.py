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
from epiloq.nn import Int8Conv2d, Int8Linear, WeightOnlyConv2d, WeightOnlyLinear

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
