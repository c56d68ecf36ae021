"""Every layer's tensors as torch's own layers have theirs: loaded one by one, copied, cast, moved, written to."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from epiloq.nn import Int8Linear, OnlineQuantLinear, WeightOnlyLinear
from every_layer import FROM_LINEAR, LAYERS, LINEAR, SIZES, WEIGHTED, arguments, run


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, of any type."""
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def shuffled(state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    found = list(state.items())
    random.Random(torch.initial_seed()).shuffle(found)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_tensors_that_come_one_by_one(name: str, size: tuple[int, int], seed: int) -> None:
    """In any order, into a layer that ran before and into one without values; missing keys are reported correctly."""
    one, other, given = LAYERS[name](*size), LAYERS[name](*size), arguments(name, size[0])
    expected = run(name, one, given)
    run(name, other, given)
    blank = copy.deepcopy(other).to("meta")
    for key, tensor in shuffled(one.state_dict()):
        for layer, assign in ((other, False), (blank, True)):
            found = layer.load_state_dict({key: tensor.clone()}, strict=False, assign=assign)
            assert set(found.missing_keys) == one.state_dict().keys() - {key} and not found.unexpected_keys
    for layer in (other, blank):
        assert layer.state_dict().keys() == one.state_dict().keys()
        assert all(same(layer.state_dict()[key], tensor) for key, tensor in one.state_dict().items())
        assert torch.equal(run(name, layer, given), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacked_tensors_can_be_loaded_one_by_one(bits: int, seed: int) -> None:
    """As earlier versions wrote it, in every order."""
    make = {"bits": bits, "group_size": 32, "symmetric": False}
    one = OnlineQuantLinear.from_linear(nn.Linear(70, 10), **make)
    q, scale, offset = one.prepared.unpack()
    if bits == 4:
        even = nn.functional.pad(q, (0, 0)).view(torch.uint8)
        q = ((even[:, ::2] & 15) | (even[:, 1::2] << 4)).view(torch.int8)
    state = {"weight": q, "weight_scale": scale, "weight_offset": offset, "bias": one.bias.detach()}
    for order in itertools.permutations(state):
        blank, other = (
            OnlineQuantLinear(70, 10, **make, device="meta"),
            OnlineQuantLinear.from_linear(nn.Linear(70, 10), **make),
        )
        for key in order:
            for layer, assign in ((blank, True), (other, False)):
                found = layer.load_state_dict({key: state[key].clone()}, strict=False, assign=assign)
                if key != "bias":
                    assert set(found.missing_keys) == state.keys() - {key}
        for layer in (blank, other):
            assert all(same(tensor, layer.state_dict()[key]) for key, tensor in one.state_dict().items())


@pytest.mark.parametrize("name", LAYERS)
def test_every_key_is_an_attribute_and_a_parameter(name: str, seed: int) -> None:
    layer = nn.Sequential(LAYERS[name](37, 21))
    assert list(layer.buffers()) == []
    for key, tensor in layer.state_dict(keep_vars=True).items():
        assert layer.get_parameter(key) is tensor and not tensor.requires_grad
    assert next(layer.parameters()).device.type == "cpu"
    state = get_model_state_dict(layer)
    other = nn.Sequential(LAYERS[name](37, 21))
    set_model_state_dict(other, {key: tensor.clone() for key, tensor in state.items()})
    assert all(same(other.state_dict()[key], tensor) for key, tensor in layer.state_dict().items())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LAYERS)
def test_writes_to_tensors_take_effect(name: str, size: tuple[int, int], seed: int) -> None:
    one, other, given = LAYERS[name](*size), LAYERS[name](*size), arguments(name, size[0])
    expected = run(name, one, given)
    run(name, other, given)
    parameters = dict(other.named_parameters())
    with torch.no_grad():
        for key, tensor in shuffled(one.state_dict()):
            parameters[key].copy_(tensor)
    assert torch.equal(run(name, other, given), expected)
    changed = {key: tensor.clone() for key, tensor in LAYERS[name](*size).state_dict().items()}
    called = torch.func.functional_call(
        one, changed, given, {"offs": torch.tensor([2, 6]).int()} if name.startswith("rows") else {}
    )
    other.load_state_dict(changed)
    assert torch.equal(called, run(name, other, given))
    assert torch.equal(run(name, one, given), expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.bfloat16().half(),
        lambda m: m.to(torch.float64).to(torch.float16),
        lambda m: m.type(torch.float16),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.to("meta").to_empty(device="cpu"),
        lambda m: m.share_memory(),
        lambda m: pickle.loads(pickle.dumps(m)),
        copy.deepcopy,
    ],
    ids=["half", "to", "type", "channels_last", "to_empty", "share_memory", "pickle", "deepcopy"],
)
def test_moves(name: str, change: Callable[[nn.Module], nn.Module], seed: int) -> None:
    """Integers and scales keep types, strides and values; the model may be asked for gradients before and after."""
    layer, given = nn.Sequential(LAYERS[name](37, 21)), arguments(name, 37)
    expected = run(name, layer[0], given)
    state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    changed = change(layer).requires_grad_(True)
    for key, tensor in changed.state_dict().items():
        assert tensor.stride() == state[key].stride()
        assert tensor.dtype == state[key].dtype or key == "0.bias"
    assert not any(parameter.requires_grad for parameter in changed.parameters())
    changed.load_state_dict(state)
    if all(tensor.dtype == state[key].dtype for key, tensor in changed.state_dict().items()):
        assert torch.equal(run(name, changed[0], given), expected)


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_weight_is_the_float_one(name: str, seed: int) -> None:
    """Of the layer's type, which casts change, whatever the integers' is; for reading, by any operation."""
    layer = LAYERS[name](37, 21)
    shape = {"conv": (21, 37, 3, 3), "rows": (2, 21, 37)}.get(name.split("-")[0], (21, 37))
    weight = layer.weight
    assert isinstance(weight, Tensor) and weight.shape == shape and weight.dtype == layer.dtype == torch.float32
    assert torch.equal(weight.dequantize(), weight + 0) and torch.equal(weight * 1, layer.weight.detach().clone())
    assert not weight.requires_grad and "WeightView" in repr(weight)
    assert layer.half().weight.dtype == torch.float16 == (layer.weight * 2).dtype
    assert layer.to("meta").weight.device.type == "meta"
    with pytest.raises(NotImplementedError, match=r"weight: expected to be read"):
        nn.init.zeros_(layer.weight)


@pytest.mark.parametrize("name", LINEAR)
def test_the_weight_multiplies_as_a_linear_layer_does(name: str, seed: int) -> None:
    layer = LAYERS[name](37, 21)
    x = (4 * torch.rand(3, 37) - 2).requires_grad_()  # within the ranges of static scales
    y = nn.functional.linear(x, layer.weight, layer.bias)
    assert float((y - layer(x)).norm() / y.norm()) < 0.2
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, layer.weight.dequantize().sum(0).expand(3, -1))


@pytest.mark.parametrize("name", LINEAR)
def test_module_that_reads_weight_dtype_compiles(name: str, seed: int) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LAYERS[name](37, 21)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.to(self.inner.weight.dtype))  # type: ignore[no-any-return]

    parent, x = Parent().bfloat16(), torch.randn(3, 37)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(parent, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), parent(x))
        assert parent(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in WEIGHTED if not name.startswith("rows")])
def test_autocast_and_other_inputs(name: str, seed: int) -> None:
    layer, (x,) = LAYERS[name](37, 21), arguments(name, 37)
    plain = nn.Conv2d(37, 21, 3) if name.startswith("conv") else nn.Linear(37, 21)
    expected = run(name, layer, (x.bfloat16(),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(name, layer, (x,))
        assert y.dtype == (expected.dtype if name == "conv-int8" else plain(x).dtype)
        assert torch.equal(y, expected)
    for wrong in (x.tolist(), x.numpy(), None):
        with pytest.raises(TypeError):
            plain(wrong)
        with pytest.raises(TypeError, match=r"\(\): argument 'input' must be Tensor, not"):
            layer(wrong)


def test_an_optimiser_leaves_layers_alone(seed: int) -> None:
    model = nn.Sequential(LAYERS["int8-azp"](37, 21), nn.Linear(21, 4)).requires_grad_(True)
    model[0].requires_grad_(False)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimiser = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1, weight_decay=0.5)
    model[1](model[0](torch.randn(3, 37)).detach()).sum().backward()
    optimiser.step()
    changed = {key for key, tensor in model.state_dict().items() if not same(tensor, state[key])}
    assert changed == {"1.weight", "1.bias"}


def test_tensors_on_two_devices_are_named(seed: int) -> None:
    layer = Int8Linear(37, 21, symmetric=False, device="meta")
    layer.load_state_dict({"weight_q": torch.zeros(21, 37, dtype=torch.int8)}, strict=False, assign=True)
    with pytest.raises(ValueError, match=r"Int8Linear: expected all tensors on one device, got .*weight_scale on meta"):
        layer(torch.randn(2, 37))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WEIGHTED)
def test_tensors_of_other_shapes_are_refused_by_name(name: str, size: tuple[int, int], seed: int) -> None:
    """However they come: by themselves, through ``data`` or from a state dict. A shorter one was padded as a whole one
    is to the sizes of the kernels."""
    given = arguments(name, size[0])
    for key, tensor in LAYERS[name](*size).state_dict().items():
        longer = torch.cat([tensor, tensor[-1:]])
        for wrong in (tensor[:-1].clone(), longer, tensor[None].clone(), tensor.flatten()[:1].clone()):
            if wrong.shape == tensor.shape or wrong.numel() == 0:
                continue
            for assign in (False, True):
                layer = LAYERS[name](*size)
                before = {other: value.clone() for other, value in layer.state_dict().items()}
                with pytest.raises(RuntimeError, match=rf"{key}: expected"):
                    layer.load_state_dict(before | {key: wrong}, assign=assign)
                assert all(torch.equal(layer.state_dict()[other], value) for other, value in before.items())
            if name in ("conv-int8",) and key != "bias":
                continue
            for through_data in (False, True):
                layer = LAYERS[name](*size)
                run(name, layer, given)
                if through_data:
                    layer.get_parameter(key).data = wrong
                else:
                    setattr(layer, key, nn.Parameter(wrong, requires_grad=False))
                with pytest.raises(ValueError, match=rf"{key.removeprefix('weight_')}: expected"):
                    run(name, layer, given)


@pytest.mark.parametrize("name", FROM_LINEAR)
def test_a_bias_that_torch_would_broadcast_is_not_converted(name: str, seed: int) -> None:
    for bias in (torch.randn(15), torch.randn(1), torch.randn(1, 16), torch.randn(16, device="meta"), torch.arange(16)):
        linear = nn.Linear(32, 16)
        linear.bias = nn.Parameter(bias, requires_grad=False)
        with pytest.raises(ValueError, match=r"linear\.bias: expected a floating-point tensor \[16\] on cpu, got"):
            FROM_LINEAR[name](linear)


def test_float_weight_cannot_replace_quantised_one() -> None:
    layer = WeightOnlyLinear.from_linear(nn.Linear(64, 32), bits=8)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    with pytest.raises(NotImplementedError, match=r"WeightOnlyLinear\.weight: cannot be replaced"):
        layer.weight = nn.Parameter(torch.zeros(32, 64))  # type: ignore[misc]
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_nested_inputs_are_refused_by_name() -> None:
    layer = Int8Linear.from_linear(nn.Linear(64, 32))
    x = torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"Int8Linear: x: expected a dense tensor, got a nested one"):
        layer(x)
    assert layer(x.values()).shape == (5, 32)


@pytest.mark.parametrize("name", LINEAR)
def test_conversions_by_swapping_tensors(name: str, seed: int) -> None:
    """As without `set_swap_module_params_on_conversion`."""
    layers = [LAYERS[name](*SIZES[0]) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = arguments(name, SIZES[0][0])
    layers[0].to(torch.bfloat16)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layers[1].to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    states = [layer.state_dict() for layer in layers]
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert tensor.dtype == states[1][key].dtype and torch.equal(tensor, states[1][key]), key
    layers[1].requires_grad_(True)
    assert torch.equal(run(name, layers[0], x), run(name, layers[1], x))
