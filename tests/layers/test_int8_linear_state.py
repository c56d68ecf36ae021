"""What happens to an Int8Linear in its life: saving, loading, moving, copying, compiling."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from epiloq.nn import Int8Linear
from int8_reference import KINDS, make_layer, make_linear


@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
@pytest.mark.parametrize(("in_features", "out_features"), [(17, 9), (32, 16)])
def test_state_dict_through_safetensors(
    in_features: int, out_features: int, activation: str, symmetric: bool, seed: int, tmp_path: Path
) -> None:
    linear, x = make_linear(in_features, out_features), torch.randn(4, in_features)
    layer = make_layer(linear, x, activation, symmetric)
    shapes = {"weight_q": (out_features, in_features), "weight_scale": (out_features,), "bias": (out_features,)}
    if activation == "static":
        shapes |= {"input_scale": (1,)} if symmetric else {"input_scale": (1,), "input_zero_point": (1,)}
    state = layer.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())

    save_file(state, tmp_path / "layer.safetensors")
    fresh = Int8Linear(in_features, out_features, activation=activation, symmetric=symmetric)
    fresh.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True)
    assert torch.equal(fresh(x), layer(x))

    with torch.device("meta"):
        empty = Int8Linear(in_features, out_features, activation=activation, symmetric=symmetric)
    empty.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True, assign=True)
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("offset", range(1, 16))
def test_assigned_tensors_may_lie_anywhere_in_memory(offset: int, seed: int) -> None:
    """As in a file that is mapped into memory: kernels want addresses that are multiples of 16."""
    layer, x = Int8Linear.from_linear(make_linear(32, 16)), torch.randn(4, 32)
    state = layer.state_dict()
    buffer = torch.zeros(16 * 32 + 16, dtype=torch.int8)
    state["weight_q"] = buffer[offset : offset + 16 * 32].view(16, 32).copy_(state["weight_q"])
    other = Int8Linear(32, 16, device="meta")
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(x), layer(x))


def test_loading_one_by_one_from_meta(seed: int) -> None:
    x = torch.randn(4, 17)
    layer = make_layer(make_linear(17, 9), x, "static", False)
    for names in (("weight_q", "input_zero_point"), ("input_zero_point", "weight_q")):
        empty = Int8Linear(17, 9, activation="static", symmetric=False, device="meta")
        state = layer.state_dict()
        for name in (*names, "weight_scale", "bias", "input_scale"):
            empty.load_state_dict({name: state[name]}, strict=False, assign=True)
        assert torch.equal(empty(x), layer(x))


def test_loading_inside_a_model_keeps_addresses_and_the_given_dict(seed: int) -> None:
    x = torch.randn(4, 17)
    first = nn.Sequential(make_layer(make_linear(17, 9), x, "static", False))
    second = nn.Sequential(make_layer(make_linear(17, 9), x - 1, "static", False))
    addresses = [buffer.data_ptr() for buffer in second.parameters()]
    state = dict(first.state_dict())
    kept = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in state.items()}
    second.load_state_dict(state)
    assert torch.equal(second(x), first(x))
    assert [buffer.data_ptr() for buffer in second.parameters()] == addresses
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in state.items()} == kept


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_q": torch.zeros(9, 17)},
        {"weight_q": torch.zeros(9, 17, dtype=torch.int32)},
        {"weight_q": torch.zeros(16, 32, dtype=torch.int8)},
        {"weight_scale": torch.zeros(16)},
        {"bias": torch.zeros(9, dtype=torch.int32)},
    ],
)
@pytest.mark.parametrize("assign", [True, False])
def test_loading_another_kind_of_tensor_is_refused(wrong: dict[str, Tensor], assign: bool, seed: int) -> None:
    """A float checkpoint, above all, must not be cut off to integers."""
    layer, x = Int8Linear.from_linear(make_linear(17, 9)), torch.randn(2, 17)
    before = layer(x)
    with pytest.raises(RuntimeError, match=f"{next(iter(wrong))}: expected"):
        layer.load_state_dict(layer.state_dict() | wrong, strict=False, assign=assign)
    assert torch.equal(layer(x), before)


def test_strict_loading_names_what_is_missing() -> None:
    state = Int8Linear(17, 9).state_dict()
    del state["weight_scale"]
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale"):
        Int8Linear(17, 9).load_state_dict(state)


def test_scales_of_a_half_precision_checkpoint_become_float32(seed: int) -> None:
    layer = Int8Linear.from_linear(make_linear(17, 9))
    state = {name: t.half() if t.is_floating_point() else t for name, t in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.weight_scale.dtype == torch.float32
    assert layer.bias.dtype == torch.float16


@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
@pytest.mark.parametrize(
    "convert",
    [
        lambda layer: layer.half(),
        lambda layer: layer.to(torch.float16),
        lambda layer: layer.type(torch.float16),
        lambda layer: layer.double().half(),
    ],
    ids=["half", "to", "type", "double-half"],
)
def test_dtype_moves_change_the_bias_alone(
    convert: Callable[[nn.Module], nn.Module], activation: str, symmetric: bool, seed: int
) -> None:
    linear, x = make_linear(17, 9), torch.randn(4, 17)
    layer = make_layer(linear, x, activation, symmetric)
    before = {name: buffer.clone() for name, buffer in layer.named_parameters()}
    assert convert(layer) is layer
    after = dict(layer.named_parameters())
    assert after.pop("bias").dtype == torch.float16
    before.pop("bias")
    assert all(after[name].dtype == old.dtype and torch.equal(after[name], old) for name, old in before.items())
    assert layer(x.half()).dtype == torch.float16


@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
def test_meta_and_back(activation: str, symmetric: bool, seed: int) -> None:
    linear, x = make_linear(17, 9), torch.randn(4, 17)
    layer = make_layer(linear, x, activation, symmetric)
    state, expected = layer.state_dict(), layer(x)
    layer.to("meta")
    assert all(buffer.is_meta for buffer in layer.parameters())
    layer.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(layer(x), expected)


def test_from_a_linear_on_meta() -> None:
    layer = Int8Linear.from_linear(
        nn.Linear(17, 9, device="meta", dtype=torch.bfloat16),
        activation="static",
        symmetric=False,
        input_scale=torch.ones(1),
        input_zero_point=3,
    )
    assert all(buffer.is_meta for buffer in layer.parameters())
    assert layer.weight_q.shape == (9, 17) and layer.weight.shape == (9, 17)
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(
    duplicate: Callable[[Int8Linear], Int8Linear], activation: str, symmetric: bool, seed: int
) -> None:
    x = torch.randn(4, 17)
    layer = make_layer(make_linear(17, 9), x, activation, symmetric)
    expected, other = layer(x), duplicate(layer)
    assert torch.equal(other(x), expected)
    for buffer in layer.parameters():
        buffer.zero_()
    assert torch.equal(other(x), expected)


def test_torch_save_of_the_module(seed: int) -> None:
    layer, x, file = Int8Linear.from_linear(make_linear(17, 9)), torch.randn(2, 17), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))


@pytest.mark.parametrize(("activation", "symmetric"), KINDS)
@pytest.mark.parametrize("out_features", [16, 9])
def test_compiles_into_one_graph(activation: str, symmetric: bool, out_features: int, seed: int) -> None:
    x = torch.randn(2, 3, 17)
    layer = make_layer(make_linear(17, out_features), x.reshape(-1, 17), activation, symmetric)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_repr_and_weight_bytes() -> None:
    layer = Int8Linear(100, 17, bias=False, activation="static", symmetric=False)
    assert repr(layer) == (
        "Int8Linear(in_features=100, out_features=17, bias=False, activation=static, symmetric=False)"
    )
    assert layer.weight_bytes == 17 * 100 + 17 * 4 + 24 * 112 + 24 * 4 + 24 * 4
    assert Int8Linear(576, 1536).weight_bytes == 1536 * 576 + 1536 * 4
