"""What layers cost a budget: measured by the divergence of the model, whose definition is checked too."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

for needed in ("typer", "rich", "safetensors", "transformers"):
    pytest.importorskip(needed, reason="the command needs the extra hf")

from command_line import ROUND
from epiloq.evaluation.divergence import divergence
from epiloq.formats.io import model as models
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.layer_filter import default_filter
from epiloq.quantize import Grid, InputStatistics, QuantizedWeight, gptq, refine, rtn
from epiloq.quantize.algorithms.table import ALGORITHMS
from epiloq.quantize.budget import candidates, sensitivity
from epiloq.quantize.budget.probe import Probe, in_float32
from epiloq.quantize.calibration.blocks import find_blocks
from epiloq.quantize.calibration.inputs import InputGroup
from tiny_teacher import save, sharpen, tiny_model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of its layers matter more than others."""
    model = tiny_model(**ROUND)
    sharpen(model)
    return save(tmp_path_factory.mktemp("teacher") / "model", model)


def hessian_of(inputs: Tensor) -> Tensor:
    statistics = InputStatistics(inputs.shape[1])
    statistics.add(inputs)
    return statistics.shrunk[0]


ROUNDINGS: dict[str, Callable[[Tensor, Grid, Tensor], QuantizedWeight]] = {
    "rtn": lambda weight, grid, hessian: rtn(weight, grid),
    "rtn-mse": lambda weight, grid, hessian: rtn(weight, grid, torch.ones(weight.shape[1])),
    "awq": lambda weight, grid, hessian: rtn(weight, grid, hessian),
    "gptq": lambda weight, grid, hessian: gptq(weight, hessian, grid, moments=hessian.diagonal()),
    "gptq+refine": lambda weight, grid, hessian: refine(
        gptq(weight, hessian, grid, moments=hessian.diagonal()), weight, hessian
    ),
}
"""By algorithms, without what they fold."""


NOISE = float(np.spacing(np.float32(math.log(256))) / math.sqrt(8 * 64))
"""A mean over all tokens of the rounding errors of float32 logarithms of 256 probabilities, as if independent."""


def layers_to_round(model: nn.Module) -> dict[str, nn.Linear]:
    takes = default_filter(model)
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and takes(m, n)}


def some_windows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (1, 64), generator=generator) for _ in range(8)]


def test_a_probe_runs_from_the_changed_block_on(teacher: Path, seed: int) -> None:
    model, exact, windows = (
        models.load_float(Checkpoint(teacher)),
        models.load_float(Checkpoint(teacher)),
        some_windows(),
    )
    blocks = find_blocks(model, default_filter(model))
    probe = Probe(model, list(blocks.values()), windows)
    for index, block in enumerate(blocks.values()):
        assert probe.divergence(index) == pytest.approx(0, abs=1e-9)
        state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(1 + torch.randn_like(parameter))
        expected = divergence(exact, model, windows)
        assert expected > 1e-4
        assert probe.divergence(index) == pytest.approx(expected, rel=1e-3)
        block.load_state_dict(state)
        probe.step(index)


@pytest.mark.parametrize("algorithm", ["rtn", "rtn-mse", "awq", "gptq", "gptq+refine"])
def test_losses_are_measured(teacher: Path, algorithm: str) -> None:
    """Each group of layers rounded alone, as the algorithm rounds it: by the reference what is measured, and about that
    by another candidate."""
    model, reference = models.load_float(Checkpoint(teacher)), models.load_float(Checkpoint(teacher))
    layers, windows = layers_to_round(model), some_windows()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    grids = candidates.grids(["w4a16-g32", "w3a16-g32"], False)
    options: Any = {"algorithm": ALGORITHMS[algorithm], "blocks": None, "filter_fn": default_filter(model)}
    found = sensitivity.losses(model, windows, windows, grids, "w4a16-g32", **options)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert {name for names in found for name in names} == set(layers)
    by_three = sensitivity.losses(model, windows, windows, grids, "w3a16-g32", **options)
    pairs = []
    for names, values in found.items():
        pairs.append((values["w3a16-g32"], by_three[names]["w3a16-g32"]))
        with torch.no_grad():
            for name in names:
                inputs = inputs_of(reference, name, windows)
                rounded = ROUNDINGS[algorithm](before[f"{name}.weight"], grids["w4a16-g32"], hessian_of(inputs))
                layers[name].weight.copy_(rounded.dequantize())
        expected = divergence(reference, model, windows)
        assert values["w4a16-g32"] == pytest.approx(expected, rel=0.02, abs=NOISE)
        with torch.no_grad():
            for name in names:
                layers[name].weight.copy_(before[f"{name}.weight"])
    guessed, measured = np.array(pairs).T
    assert np.corrcoef(np.log(guessed), np.log(measured))[0, 1] > 0.9, pairs
    assert 0.5 < np.median(guessed / measured) < 2, pairs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_16_bits_is_measured_in_float32(teacher: Path, dtype: torch.dtype) -> None:
    model = models.load_float(Checkpoint(teacher)).to(dtype)
    exact = copy.deepcopy(model).float()
    grids, windows = candidates.grids(["w4a16-g32"], False), some_windows()
    names = set(layers_to_round(model))
    options: Any = {"algorithm": ALGORITHMS["rtn"], "blocks": None, "filter_fn": lambda module, name: name in names}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with in_float32(model):
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        found = sensitivity.losses(model, windows, windows, grids, "w4a16-g32", **options)
    assert found == sensitivity.losses(exact, windows, windows, grids, "w4a16-g32", **options)
    after = model.state_dict()
    assert all(tensor.dtype == dtype and torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_all_experts_of_a_mixture_have_one_scheme() -> None:
    names = [["b.q", "b.k"], ["b.experts.0.up"], ["b.experts.0.down"], ["b.experts.1.up"], ["b.o"]]
    found = sensitivity._groups([InputGroup(group, 0, None) for group in names])
    assert [[group.names for group in together] for together in found] == [names[:1], names[1:4], names[4:]]


def inputs_of(model: nn.Module, name: str, windows: list[Tensor]) -> Tensor:
    """What a layer reads, ``[tokens, K]``."""
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for window in windows:
            model(window)
    handle.remove()
    return torch.cat(seen)


def test_divergence_against_float64(seed: int) -> None:
    torch.manual_seed(seed)
    teacher, model = tiny_model(), tiny_model()
    windows = [torch.randint(0, 256, (1, n)) for n in (7, 30)]
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for window in windows:
            p, q = (m(window).logits[0].double().log_softmax(-1) for m in (teacher, model))
            total += (p.exp() * (p - q)).sum()
    assert divergence(teacher, model, windows) == pytest.approx(float(total) / 37, rel=1e-4)
    assert divergence(teacher, teacher, windows) == 0
    with pytest.raises(ValueError, match="windows: expected at least one"):
        divergence(teacher, model, [])
