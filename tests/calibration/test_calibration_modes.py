"""Calibration runs a model in evaluation mode, and leaves each module's mode and running statistics as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq.quantize import Grid
from epiloq.quantize.algorithms.smoothquant import smoothquant_
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.calibration.calibrate import calibrate
from epiloq.quantize.calibration.inputs import observe, outputs
from epiloq.quantize.int8_graph.exchange import exchange_int8
from model_families import VOCABULARY, llama


def network() -> nn.Sequential:
    """Some modules in training mode, some not."""
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.ReLU(), nn.Linear(12, 4)).train()
    model[1].running_mean.normal_()
    model[3].eval()
    return model


def left(model: nn.Module) -> tuple[list[bool], dict[str, Tensor]]:
    modes = [module.training for module in model.modules()]
    return modes, {name: buffer.clone() for name, buffer in model.named_buffers()}


def unchanged(model: nn.Module, before: tuple[list[bool], dict[str, Tensor]]) -> bool:
    modes, buffers = left(model)
    return modes == before[0] and all(torch.equal(buffers[name], buffer) for name, buffer in before[1].items())


def test_static_scales_are_those_of_evaluation_mode(seed: int) -> None:
    model, x = network(), torch.randn(64, 8)
    still, before = copy.deepcopy(model).eval(), left(model)

    def run(m: nn.Module) -> None:
        assert not torch.is_grad_enabled() and not any(module.training for module in m.modules())
        m(x)

    for each in (model, still):
        epiloq.quantize_(each, "w8a8-int8-static", calibrate=run)
    assert unchanged(model, before)
    assert torch.equal(model[4].input_scale, still[4].input_scale)


@pytest.mark.parametrize("fails", [False, True])
def test_module_modes_are_restored(fails: bool, seed: int) -> None:
    """Also if the run raises, or changes modes itself."""
    x = torch.randn(6, 8)

    def run(m: nn.Module) -> None:
        assert not m.training
        m(x)
        m[2].train()
        if fails:
            raise ZeroDivisionError

    def conv(m: nn.Module) -> None:
        m(torch.randn(2, 3, 5, 5))
        m.train()
        if fails:
            raise ZeroDivisionError

    model = network()
    before, images = left(model), nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    epiloq.quantize_(images, "conv-w8a8-int8", calibrate=lambda m: m(torch.randn(2, 3, 5, 5)))
    calls: list[Any] = [
        lambda: epiloq.quantize_(model, "w8a8-int8-static", calibrate=run) if fails else None,
        lambda: observe(model, run),
        lambda: smoothquant_(nn.Sequential(nn.LayerNorm(8), model), lambda m: run(m[1])) if fails else None,
        lambda: exchange_int8(images, calibrate=conv),
    ]
    for call in calls:
        if fails:
            with pytest.raises(ZeroDivisionError):
                call()
        else:
            call()
        assert unchanged(model, before) and not any(module.training for module in images.modules())


def test_outputs_of_a_probe(seed: int) -> None:
    model, x = network(), torch.randn(6, 8)
    seen, before = observe(model, lambda m: m(x)), left(model)
    assert torch.equal(outputs(model, seen)[0], copy.deepcopy(model).eval()(x)) and unchanged(model, before)


def test_blocks_of_a_model_in_training_mode(seed: int) -> None:
    model, windows = llama().train(), [torch.randint(VOCABULARY, (1, 12)) for _ in range(2)]
    model.model.layers[1].mlp.eval()
    model.config.attention_dropout = 0.5
    still, before = copy.deepcopy(model).eval(), left(model)
    found = [list(calibrate(each, windows, Grid(4, 16), ALGORITHMS["gptq"])) for each in (model, still)]
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(value.q, other.weights[name].q) for name, value in one.weights.items())
    assert unchanged(model, before)
