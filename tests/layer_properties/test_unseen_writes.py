"""Writes that torch does not count, or that a graph does not see: layers whose sizes need padded copies see them all
the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from every_layer import LAYERS, LINEAR, SIZES, WEIGHTED, arguments, run


def _copy(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.data.copy_(values)


def _replace(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.data = values.clone()


def _write(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.copy_(values)


def _assign(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter[...] = values


def _set(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.set_(values.clone())  # type: ignore[call-overload]


def _write_bytes(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """As NumPy and the collectives of torch.distributed do, which do not change the version."""
    parameter.detach().reshape(-1).view(torch.uint8).numpy()[...] = values.reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("write", [_copy, _replace, _write_bytes])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_writes_through_data(name: str, size: tuple[int, int], write: Callable[..., None], seed: int) -> None:
    layer, other, given = LAYERS[name](*size), LAYERS[name](*size), arguments(name, size[0])
    run(name, layer, given)
    state = other.state_dict()
    for key, parameter in layer.named_parameters():
        write(parameter, state[key])
    assert torch.equal(run(name, layer, given), run(name, other, given))


@pytest.mark.parametrize("name", LAYERS)
def test_writes_to_the_state_dict(name: str, seed: int) -> None:
    """As ``torch.distributed.broadcast`` of each of its tensors does."""
    size = SIZES[1]
    layer, other, given = LAYERS[name](*size), LAYERS[name](*size), arguments(name, size[0])
    run(name, layer, given)
    ours, theirs = layer.state_dict(), other.state_dict()
    for key, tensor in ours.items():
        tensor.reshape(-1).view(torch.uint8).numpy()[...] = theirs[key].reshape(-1).view(torch.uint8).numpy()
    assert torch.equal(run(name, layer, given), run(name, other, given))


@pytest.mark.parametrize("write", [_write, _assign, _set, _copy, _replace])
@pytest.mark.parametrize(
    "name", ["int8", "int8-azp", "int8-static", "fp8-block", "w4a16", "nvfp4", "conv-int8", "rows-int8"]
)
def test_a_compiled_graph_sees_writes(name: str, write: Callable[..., Any], seed: int) -> None:
    """Before the first call and between calls, without one in eager mode, in two graphs at most."""
    size, graphs = SIZES[1], 0

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    layer, given = LAYERS[name](*size), arguments(name, size[0])
    torch.compiler.reset()
    compiled = torch.compile(lambda *inputs: run(name, layer, inputs), backend=backend)
    with torch.no_grad():
        for _ in range(3):
            other = LAYERS[name](*size)
            state = other.state_dict()
            for key, parameter in layer.named_parameters():
                write(parameter, state[key])
            torch.testing.assert_close(compiled(*given), run(name, other, given))
        run(name, layer, given)
        layer.state_dict(), copy.deepcopy(layer)
        torch.testing.assert_close(compiled(*given), run(name, other, given))
    assert graphs <= 2


def _write_list(parameter: nn.Parameter, values: torch.Tensor) -> None:
    torch._foreach_copy_([parameter], [values])


def _write_view(parameter: nn.Parameter, values: torch.Tensor) -> None:
    parameter.view(-1).copy_(values.reshape(-1))


def _write_out(parameter: nn.Parameter, values: torch.Tensor) -> None:
    write: Callable[..., Any] = torch.mul if values.is_floating_point() else torch.bitwise_or
    write(values, torch.tensor(1 if values.is_floating_point() else 0, dtype=values.dtype), out=parameter)


@pytest.mark.parametrize("write", [_write_list, _write_view, _write_out])
@pytest.mark.parametrize("name", ["int8", "int8-azp", "fp8-block", "w4a16", "conv-int8", "rows-int8"])
def test_a_compiled_graph_sees_any_write_after_a_call_in_eager_mode(
    name: str, write: Callable[..., Any], seed: int
) -> None:
    """These ways report nothing: eager mode compares versions, which a graph does not."""
    size = SIZES[1]
    layer, other, given = LAYERS[name](*size), LAYERS[name](*size), arguments(name, size[0])
    torch.compiler.reset()
    compiled = torch.compile(lambda *inputs: run(name, layer, inputs), backend="aot_eager")
    with torch.no_grad():
        run(name, layer, given), compiled(*given)
        state = other.state_dict()
        for key, parameter in layer.named_parameters():
            write(parameter, state[key])
        expected = run(name, other, given)
        assert torch.equal(run(name, layer, given), expected)
        torch.testing.assert_close(compiled(*given), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["int8", "int8-azp", "fp8-block", "w4a16", "conv-int8"])
def test_layers_made_in_inference_mode(name: str, size: tuple[int, int], seed: int) -> None:
    """They can be written to there, and cast outside."""
    with torch.inference_mode():
        layer, other, given = LAYERS[name](*size), LAYERS[name](*size), arguments(name, size[0])
        run(name, layer, given)
        for write in (_write, _copy):
            changed = LAYERS[name](*size)
            for parameter, values in zip(layer.parameters(), changed.parameters(), strict=True):
                write(parameter, values)
            assert torch.equal(run(name, layer, given), run(name, changed, given))
        layer = copy.deepcopy(other)
    expected = LAYERS[name](*size)
    expected.load_state_dict(other.state_dict())
    assert torch.equal(run(name, layer.half(), given), run(name, expected.half(), given))
    layer.load_state_dict(changed.state_dict(), assign=True)
    assert torch.equal(run(name, layer, given), run(name, changed, given))


def test_nothing_is_derived_anew_without_a_write(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = LAYERS["int8"](*SIZES[1])
    x = torch.randn(3, SIZES[1][0])
    layer(x)
    made: list[object] = []
    make = layer._make
    monkeypatch.setattr(layer, "_make", lambda: (made.append(None), make())[1])
    layer(x), layer(x)
    assert not made
    assert layer.weight_q.data.shape == (SIZES[1][1], SIZES[1][0])
    layer(x), layer(x)
    assert len(made) == 1


@pytest.mark.parametrize("name", LINEAR)
def test_a_trained_parameter_of_ones_own_as_bias(name: str, seed: int) -> None:
    layer: Any = LAYERS[name](*SIZES[1])
    layer.bias = nn.Parameter(torch.zeros(SIZES[1][1]))
    x = torch.randn(3, SIZES[1][0])
    before = layer(x).detach()
    layer.bias.data.add_(1)
    torch.testing.assert_close(layer(x).detach(), before + 1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deep", "pickle"])
def test_copies_of_a_trained_bias_are_trained(duplicate: Callable[[nn.Module], Any], seed: int) -> None:
    layer: Any = LAYERS["int8"](*SIZES[0])
    layer.bias.requires_grad = True
    other = duplicate(layer)
    other(torch.randn(3, SIZES[0][0])).sum().backward()
    assert torch.equal(other.bias.grad, torch.full((SIZES[0][1],), 3.0))
    assert not other.weight_scale.requires_grad


@pytest.mark.parametrize("name", ["int8", "fp8-block", "w4a16"])
def test_a_compiled_graph_sees_a_bias_that_is_trained(name: str, seed: int) -> None:
    layer: Any = LAYERS[name](*SIZES[1])
    layer.bias.requires_grad = True
    x = torch.randn(3, SIZES[1][0])
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    before = compiled(x).detach()
    with torch.no_grad():
        layer.bias.add_(1)
    torch.testing.assert_close(compiled(x).detach(), before + 1)


@pytest.mark.parametrize("name", ["int8", "w4a16", "nvfp4", "w8a8-block", "conv-w4a16"])
def test_the_float_weight_is_read_only_and_readable(name: str, seed: int) -> None:
    layer: Any = LAYERS[name](*SIZES[0])
    weight, values = layer.weight, layer.dequantized_weight()
    for write in (
        lambda: weight.__setitem__(0, 0.0),
        lambda: setattr(weight, "data", values),
        lambda: weight.data.zero_(),
        lambda: setattr(layer, "weight", values),
        lambda: setattr(layer, "weight", nn.Parameter(values)),
    ):
        with pytest.raises(NotImplementedError, match=r"weight: (expected to be read|cannot be replaced)"):
            write()  # type: ignore[no-untyped-call]
    copied = copy.deepcopy(weight)
    assert type(copied) is torch.Tensor and torch.equal(copied, values)
    assert weight.tolist() == weight.numpy().tolist() == values.tolist()


class _Twice(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


@pytest.mark.parametrize("how", ["attribute", "parametrisation"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WEIGHTED)
def test_attributes_may_take_the_place_of_parameters(name: str, size: tuple[int, int], how: str, seed: int) -> None:
    """As FSDP's flat parameters, hooks that compute a tensor and torch's parametrisations make them: what is computed
    follows the attribute's changes, which no layer sees."""
    original, given = LAYERS[name](*size), arguments(name, size[0])
    for key, values in original.named_parameters():
        if not values.is_floating_point():
            continue
        layer = copy.deepcopy(original)
        run(name, layer, given)
        if how == "parametrisation":
            register_parametrization(layer, key, _Twice())
        else:
            delattr(layer, key)
            vars(layer)[key] = values.detach().clone()
        for _ in range(2):  # the second call finds what the first one derived
            run(name, layer, given)
        with torch.no_grad():
            if how == "parametrisation":
                layer.get_parameter(f"parametrizations.{key}.original").mul_(1.5)
            else:
                vars(layer)[key] = 3 * values
        expected = copy.deepcopy(original)
        expected.get_parameter(key).data.copy_(3 * values)
        assert torch.equal(run(name, layer, given), run(name, expected, given)), key


def replica_of(model: nn.Module) -> nn.Module:
    """A replica as torch.nn.DataParallel makes it: its parameters are attributes."""
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in made.items():
        for key, child in module._modules.items():
            replica._modules[key] = None if child is None else made[child]
        for key, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[key] = None
            else:
                setattr(replica, key, parameter.clone())
    return made[model]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_replicas_compute_the_same(name: str, size: tuple[int, int], seed: int) -> None:
    layer, (x, *rest) = LAYERS[name](*size), arguments(name, size[0])
    assert torch.equal(run(name, replica_of(layer), (x, *rest)), run(name, layer, (x, *rest)))
    if name in LINEAR:
        x.requires_grad_()
        found, expected = (torch.autograd.grad(each(x).sum(), x)[0] for each in (replica_of(layer), layer))
        assert torch.equal(found, expected)
