"""Decode steps of optimised layers that change: modules, hooks, modes and weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from decode_steps import Doubled, decoded
from epiloq.optimize import optimize_
from epiloq.optimize.norms import Offset
from small_models import quantised, relative, tokens


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, result: 2 * result)


def _pre_hook(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))


def _replaced(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj = Doubled(model.model.layers[0].self_attn.o_proj)


def _wrapped(model: Any) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    before = norm.forward
    norm.forward = lambda x: 2 * before(x)


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _norm(model: Any) -> None:
    model.model.layers[0].input_layernorm = nn.LayerNorm(128)


def _norm_after(model: Any) -> None:
    """Gemma 3's norm of what the MLP adds."""
    model.model.layers[0].post_feedforward_layernorm = nn.LayerNorm(128)


def _dropout(model: Any) -> None:
    """Phi-3's before an addition."""
    model.model.layers[0].resid_mlp_dropout.register_forward_hook(lambda _, __, result: 2 * result)


def _other_dropout(model: Any) -> None:
    model.model.layers[0].resid_attn_dropout = Doubled(nn.Identity())


def _mlp(model: Any) -> None:
    model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        *(("llama", change) for change in (_hook, _pre_hook, _replaced, _wrapped, _activation, _norm, _mlp)),
        *(("gemma3", change) for change in (_hook, _wrapped, _activation, _norm_after, _mlp)),
        *(("phi3", change) for change in (_hook, _dropout, _other_dropout)),
    ],
)
def test_changed_layers_run_as_before(
    seed: int, steps: list[bool], family: str, change: Callable[[Any], None], after_a_step: bool
) -> None:
    model, x = quantised(family, "w4a16-g32"), tokens()
    plain = copy.deepcopy(model)
    optimize_(model)
    if after_a_step:
        decoded(model, x)
        steps.clear()
    for which in (model, plain):
        torch.manual_seed(1)
        change(which)
    result = decoded(model, x)
    # A layer that is replaced before the first step is called as it is, for its input and output are ordinary tensors.
    assert steps[2:] == [change is _replaced and not after_a_step, True] * 3
    assert relative(result, decoded(plain, x)) <= 1e-5


@pytest.mark.parametrize("around", ["gradients", "autocast", "a mode", "a hook of all modules", "attention"])
def test_other_surroundings(seed: int, steps: list[bool], around: str) -> None:
    model, x = quantised("llama", "w4a16-g32"), tokens()
    optimize_(model)
    # Some versions of transformers give a static cache one type; under autocast keys and values differ in theirs.
    kind = "dynamic" if around == "autocast" else "static"
    expected, seen = decoded(model, x, kind), []
    assert any(steps)
    steps.clear()
    if around == "attention":
        model.set_attn_implementation("sdpa")
    if around == "a hook of all modules":
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "gradients": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "a mode": Watching,
    }
    inside = decoded.__wrapped__ if around == "gradients" else decoded  # type: ignore[attr-defined]
    try:
        with contexts.get(around, nullcontext)():
            result = inside(model, x, kind)
    finally:
        if around == "a hook of all modules":
            handle.remove()
    assert steps and not any(steps)
    assert relative(result.float(), expected) <= (3e-2 if around == "autocast" else 1e-5)
    assert around != "a hook of all modules" or seen.count("WeightOnlyLinear") > 0


@pytest.mark.parametrize("scheme", ["w4a16-g32", "fp8-token"])
def test_weights_that_change_are_followed(seed: int, steps: list[bool], scheme: str) -> None:
    """Loaded, written in place, and given as other tensors."""
    model, other, x = quantised("llama", scheme), quantised("llama", scheme), tokens()
    optimize_(model)
    decoded(model, x)

    def fresh() -> Tensor:
        """Of a model that is optimised now."""
        copied = copy.deepcopy(other)
        optimize_(copied)
        return decoded(copied, x)

    model.load_state_dict(other.state_dict())
    assert torch.equal(decoded(model, x), fresh())
    with torch.no_grad():
        for which in (model, other):
            layer = which.model.layers[0]
            for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight_scale.mul_(3)
    assert torch.equal(decoded(model, x), fresh())
    for which in (model, other):
        layer = which.model.layers[1].self_attn.o_proj
        layer.weight_scale = nn.Parameter(layer.weight_scale * 2, requires_grad=False)
    assert torch.equal(decoded(model, x), fresh())
    assert steps.count(True) == (1 + 3 * 2) * 6


@torch.no_grad()
def test_weights_of_offset_norms_are_followed(seed: int) -> None:
    """Gemma's norms multiply by one more than their weight, which is computed once: loaded weights, weights written in
    place, other memory, another type, and weights made in inference mode."""
    model, other, x = quantised("gemma3", "w4a16-g32"), quantised("gemma3", "w4a16-g32"), tokens()
    optimize_(model)

    def agree(bound: float = 1e-5) -> bool:
        return relative(decoded(model, x).float(), decoded(other, x).float()) <= bound

    assert not agree()
    model.load_state_dict(other.state_dict())
    assert agree()
    for change in (lambda w: w.mul_(2), lambda w: setattr(w, "data", w.data * 3), lambda w: w.zero_()):
        for which in (model, other):
            change(which.model.layers[1].pre_feedforward_layernorm.weight)
            change(which.model.layers[0].self_attn.q_norm.weight)
        assert agree(), change
    with torch.inference_mode():
        made = torch.rand(128)
    for which in (model, other):
        which.model.layers[0].input_layernorm.weight = nn.Parameter(made, requires_grad=False)
    assert agree()
    with torch.inference_mode():
        made.add_(1)
    assert agree()
    model.to(torch.bfloat16), other.to(torch.bfloat16)
    assert agree(3e-2)


def test_copies_have_their_own(seed: int, steps: list[bool]) -> None:
    model, x = quantised("llama", "w4a16-g32"), tokens()
    optimize_(model)
    expected = decoded(model, x)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    steps.clear()
    assert torch.equal(decoded(copied, x), expected)
    assert steps[2:] == [True] * 6


@torch.no_grad()
def test_the_factor_of_an_offset_norm_keeps_its_memory(seed: int) -> None:
    """A captured CUDA graph has its address, and would read freed memory after a write and a call in eager mode."""
    weight, offset = nn.Parameter(torch.randn(128, dtype=torch.bfloat16)), Offset()
    before = offset.of(weight)
    for change in (lambda: weight.mul_(2), lambda: setattr(weight, "data", torch.randn(128))):
        change()
        factor = offset.of(weight)
        assert factor.data_ptr() == before.data_ptr() and torch.equal(factor, 1 + weight.float())
    weight.data = torch.randn(64)
    assert torch.equal(offset.of(weight), 1 + weight)
