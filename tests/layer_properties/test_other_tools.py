"""torch's other tools: fake tensors, TorchScript, pruning, vectors of parameters, files without pickled code."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim import swa_utils

from every_layer import LAYERS, SIZES, WEIGHTED, arguments, run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_fake_inputs_of_a_layer_with_values(name: str, size: tuple[int, int], seed: int) -> None:
    """Sizes without a computation, as of a memory estimate; the layer itself is unchanged."""
    layer, given = LAYERS[name](*size), arguments(name, size[0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made = run(name, layer, tuple(mode.from_tensor(tensor) for tensor in given))
    y = run(name, layer, given)
    assert (made.shape, made.dtype, made.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("experts")])
def test_torchscript_is_refused_by_name(name: str) -> None:
    layer = LAYERS[name](*SIZES[0])
    with pytest.raises(NotImplementedError, match=rf"^{type(layer).__name__}: torch.jit.script does not support it"):
        torch.jit.script(nn.Sequential(layer, nn.ReLU()))


@pytest.mark.parametrize("name", WEIGHTED)
def test_pruning_the_weight_is_refused_by_name(name: str) -> None:
    layer = LAYERS[name](*SIZES[0])
    names = [key for key, _ in layer.named_parameters()]
    with pytest.raises(NotImplementedError, match=rf"^{type(layer).__name__}\.weight: cannot be replaced"):
        prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]
    assert [key for key, _ in layer.named_parameters()] == names


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", WEIGHTED)
def test_reparametrising_the_weight_is_refused_and_changes_nothing(name: str, seed: int) -> None:
    ways = {
        parametrizations.weight_norm: ValueError,
        parametrizations.orthogonal: ValueError,
        nn.utils.weight_norm: KeyError,
        nn.utils.spectral_norm: KeyError,
    }
    layer, given = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    keys, y = list(layer.state_dict()), run(name, layer, given)
    for way, error in ways.items():
        with pytest.raises(error, match="'weight'"):
            way(layer)
    assert list(layer.state_dict()) == keys and torch.equal(run(name, layer, given), y)


@pytest.mark.parametrize("name", ["int8", "fp8-block", "w4a16", "nvfp4", "w8a8-block"])
def test_integers_are_not_set_from_a_float_vector(name: str, seed: int) -> None:
    layer, given = LAYERS[name](*SIZES[1]), arguments(name, SIZES[1][0])
    y = run(name, layer, given)
    with pytest.raises(TypeError, match=r"^FrozenParameter\.data: expected torch\.u?int8, .* got torch\.float32"):
        vector_to_parameters(parameters_to_vector(layer.parameters()), layer.parameters())
    assert torch.equal(run(name, layer, given), y)


def test_kept_parameters_are_loaded_without_pickled_code(seed: int) -> None:
    layer, file = LAYERS["int8-azp"](*SIZES[1]), io.BytesIO()
    torch.save(layer.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    assert loaded.keys() == layer.state_dict().keys()
    for key, tensor in layer.state_dict().items():
        assert torch.equal(loaded[key], tensor), key


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean of lists": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "moving": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "moving, of lists": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_averages_keep_frozen_tensors_and_follow_trained_ones(name: str, kind: str, seed: int) -> None:
    """torch averages integers in floating point, and truncates."""
    model, given = nn.ModuleList([LAYERS[name](*SIZES[1]), nn.Linear(3, 2)]), arguments(name, SIZES[1][0])
    y = run(name, model[0], given)
    averages = swa_utils.AveragedModel(model, **AVERAGES[kind])
    order = list(model.state_dict())
    for step in range(3):
        with torch.no_grad():
            model[1].weight.fill_(step)
        averages.update_parameters(model)
    found = averages.module.state_dict()
    assert list(found) == list(model.state_dict()) == order
    for key, tensor in model[0].state_dict().items():
        assert torch.equal(found[f"0.{key}"], tensor), key
    assert torch.equal(run(name, averages.module[0], given), y)
    expected = 1 if kind.startswith("mean") else 0.1 * 0.9 + 0.2
    torch.testing.assert_close(found["1.weight"], torch.full((2, 3), float(expected)))


def test_averages_follow_a_bias_that_is_trained_and_other_frozen_values(seed: int) -> None:
    layer, other = LAYERS["int8"](37, 21), LAYERS["int8"](37, 21)
    layer.bias.requires_grad = other.bias.requires_grad = True
    averages = swa_utils.AveragedModel(layer)
    averages.update_parameters(layer)
    averages.update_parameters(other)
    state, last = averages.module.state_dict(), other.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in last.items() if key != "bias")
    torch.testing.assert_close(averages.module.bias, (layer.bias + other.bias) / 2)
    (x,) = arguments("int8", 37)
    torch.testing.assert_close(averages(x) - averages.module.bias, other(x) - other.bias)


def test_an_average_of_a_model_that_was_quantised_later_is_refused(seed: int) -> None:
    averages = swa_utils.AveragedModel(nn.Sequential(nn.Linear(37, 21)))
    with pytest.raises(ValueError, match=r"^AveragedModel\.update_parameters: model: expected frozen parameters"):
        averages.update_parameters(nn.Sequential(LAYERS["int8"](37, 21)))


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_empty_layers_of_accelerate_are_filled(name: str, seed: int, tmp_path: Path) -> None:
    """It makes parameters of parameters on the meta device, of their class."""
    accelerate = pytest.importorskip("accelerate")
    layer, given = nn.ModuleList([LAYERS[name](*SIZES[1])]), arguments(name, SIZES[1][0])
    y = run(name, layer[0], given)
    torch.save(layer.state_dict(), tmp_path / "pytorch_model.bin")
    with accelerate.init_empty_weights():
        empty = nn.ModuleList([LAYERS[name](*SIZES[1])])
    assert all(tensor.is_meta for tensor in empty.parameters())
    filled = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / "pytorch_model.bin"), {"": "cpu"})
    assert torch.equal(run(name, filled[0], given), y)
