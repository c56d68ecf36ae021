"""torch's other tools: fake tensors, TorchScript, pruning, vectors of parameters, files without pickled code."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

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
