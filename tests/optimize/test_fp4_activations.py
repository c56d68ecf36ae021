"""optimize_ of models whose FP4 layers quantise activations in groups, or by a scale of the files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor, nn

import epiloq
from epiloq.nn import ExpertLinears, W4A8Fp4Linear
from epiloq.nn.experts.kind import Kind
from epiloq.optimize.tokens import measure_of
from tiny_teacher import tiny_model

TOKENS = torch.arange(24).view(2, 12) * 5 + 1


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()  # type: ignore[no-any-return]


def quantised(form: str, activation: str) -> Any:
    """A model in float32, whose static scales reach what its layers are given."""
    model = tiny_model(hidden_size=160, intermediate_size=320, num_attention_heads=5, head_dim=32)
    options: dict[str, Any] = {"input_scale": 0.02} if activation == "fp8-static" else {}
    for module in list(model.model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                made = W4A8Fp4Linear.from_linear(layer, format=form, activation=activation, **options)
                setattr(module, name, made)
    return model


@pytest.mark.parametrize("activation", ["fp8", "fp8-group", "fp8-static"])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_same_logits(seed: int, form: str, activation: str) -> None:
    """But for tokens whose last bits move across a rounding of FP8, which a norm in one pass may do."""
    model = quantised(form, activation)
    before = logits(model)
    epiloq.optimize_(model)
    after = logits(model)
    assert float((after - before).norm() / before.norm()) < 0.05
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    measure = measure_of(layer)
    expected = {"fp8": ("token", 128), "fp8-group": ("group", 128)}.get(activation)
    assert (None if measure is None else measure[:2]) == expected


def test_experts_with_a_scale_each_run_one_by_one(seed: int) -> None:
    """Each has its own, which the operations for all experts do not take; one of the two here saturates its inputs."""
    layer = W4A8Fp4Linear.from_linear(nn.Linear(64, 32), activation="fp8-static", input_scale=0.01)
    assert Kind.of(layer) is None
    assert Kind.of(W4A8Fp4Linear.from_linear(nn.Linear(64, 32), activation="fp8-group")) is not None
    names = ("gate_proj", "up_proj", "down_proj")

    def expert(scale: float) -> dict[str, nn.Module]:
        layers = (nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 64))
        made = (W4A8Fp4Linear.from_linear(one, activation="fp8-static", input_scale=scale) for one in layers)
        return dict(zip(names, made, strict=True))

    experts = ExpertLinears([expert(0.001), expert(0.03)], nn.SiLU())
    x, index, shares = torch.randn(5, 64), torch.randint(0, 2, (5, 1)), torch.ones(5, 1)
    with torch.no_grad():
        y = experts(x, index, shares)
        for token, chosen in enumerate(index.flatten().tolist()):
            gate, up, down = experts.layers(chosen)
            alone = down(nn.functional.silu(gate(x[token : token + 1])) * up(x[token : token + 1]))
            assert float((y[token] - alone[0]).norm() / alone.norm()) < 0.05
