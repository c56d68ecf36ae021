"""What happens to FP8 layers in their lives: saving, loading, moving, copying, compiling."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from epiloq.nn import Fp8BlockLinear, Fp8Linear
from fp8_layer_reference import KINDS
from int8_reference import make_linear

NAMES = ["token-channel", "static-channel", "tensor-tensor", "static-tensor", "block"]


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, for torch compares no float8."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("in_features", "out_features"), [(17, 9), (32, 16), (200, 300)])
def test_state_dict_through_safetensors(
    in_features: int, out_features: int, name: str, seed: int, tmp_path: Path
) -> None:
    kind, x = KINDS[name], torch.randn(4, in_features)
    layer = kind.from_linear(make_linear(in_features, out_features), x)
    shapes = {"weight_q": (out_features, in_features), "bias": (out_features,)}
    if name == "block":
        shapes["weight_scale_inv"] = (-(-out_features // 128), -(-in_features // 128))
    else:
        shapes["weight_scale"] = (out_features,) if "channel" in name else (1,)
    if kind.is_static:
        shapes["input_scale"] = (1,)
    state = layer.state_dict()
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == shapes
    assert state["weight_q"].dtype == torch.uint8 and layer.file_state()["weight"].dtype == torch.float8_e4m3fn
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in state.values())

    save_file(state, tmp_path / "layer.safetensors")
    fresh = kind.fresh(in_features, out_features)
    fresh.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True)
    assert torch.equal(fresh(x), layer(x))

    with torch.device("meta"):
        empty = kind.fresh(in_features, out_features)
    empty.load_state_dict(load_file(tmp_path / "layer.safetensors"), strict=True, assign=True)
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("offset", [1, 4, 8, 15])
def test_assigned_tensors_may_lie_anywhere_in_memory(offset: int, seed: int) -> None:
    layer, x = Fp8BlockLinear.from_linear(make_linear(32, 16)), torch.randn(4, 32)
    state = layer.state_dict()
    buffer = torch.zeros(16 * 32 + 16, dtype=torch.uint8)
    state["weight_q"] = buffer[offset : offset + 16 * 32].view(16, 32).copy_(state["weight_q"])
    other = Fp8BlockLinear(32, 16, device="meta")
    other.load_state_dict(state, assign=True)
    assert other.weight_q.data_ptr() % 16 == 0
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", NAMES)
def test_loading_keeps_addresses_and_the_given_dict(name: str, seed: int) -> None:
    x = torch.randn(4, 17)
    first = nn.Sequential(KINDS[name].from_linear(make_linear(17, 9), x))
    second = nn.Sequential(KINDS[name].from_linear(make_linear(17, 9), x - 1))
    addresses = [buffer.data_ptr() for buffer in second.parameters()]
    state = dict(first.state_dict())
    kept = {key: (tensor.data_ptr(), tensor.shape) for key, tensor in state.items()}
    second.load_state_dict(state)
    assert torch.equal(second(x), first(x))
    assert [buffer.data_ptr() for buffer in second.parameters()] == addresses
    assert {key: (tensor.data_ptr(), tensor.shape) for key, tensor in state.items()} == kept


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_q": torch.zeros(9, 17)},
        {"weight_q": torch.zeros(9, 17, dtype=torch.float8_e5m2)},
        {"weight_q": torch.zeros(9, 17, dtype=torch.int8)},
        {"weight_q": torch.zeros(16, 32, dtype=torch.float8_e4m3fn)},
        {"weight_scale_inv": torch.zeros(9)},
        {"weight_scale_inv": torch.zeros(1, 1, dtype=torch.int32)},
        {"bias": torch.zeros(9, dtype=torch.int32)},
    ],
)
@pytest.mark.parametrize("assign", [True, False])
def test_loading_another_kind_of_tensor_is_refused(wrong: dict[str, Tensor], assign: bool, seed: int) -> None:
    """A float checkpoint, above all, must not be rounded to FP8 without scales."""
    layer, x = Fp8BlockLinear.from_linear(make_linear(17, 9)), torch.randn(2, 17)
    before = layer(x)
    with pytest.raises(RuntimeError, match=f"{next(iter(wrong))}: expected"):
        layer.load_state_dict(layer.state_dict() | wrong, strict=False, assign=assign)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_in_other_floating_point_types_become_float32(dtype: torch.dtype, seed: int) -> None:
    layer = Fp8BlockLinear.from_linear(make_linear(17, 9))
    scale = torch.full((1, 1), 2.0**-7)
    layer.load_state_dict(layer.state_dict() | {"weight_scale_inv": scale.to(dtype)}, assign=True)
    assert equal(layer.weight_scale_inv, scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "convert",
    [lambda layer: layer.half(), lambda layer: layer.to(torch.float16), lambda layer: layer.double().half()],
    ids=["half", "to", "double-half"],
)
def test_dtype_moves_change_the_bias_alone(convert: Callable[[nn.Module], nn.Module], name: str, seed: int) -> None:
    x = torch.randn(4, 17)
    layer = KINDS[name].from_linear(make_linear(17, 9), x)
    before = {key: buffer.clone() for key, buffer in layer.named_parameters()}
    assert convert(layer) is layer
    after = dict(layer.named_parameters())
    assert after.pop("bias").dtype == torch.float16
    before.pop("bias")
    assert all(equal(after[key], old) for key, old in before.items())
    assert layer(x.half()).dtype == torch.float16


@pytest.mark.parametrize("name", NAMES)
def test_meta_and_back(name: str, seed: int) -> None:
    x = torch.randn(4, 17)
    layer = KINDS[name].from_linear(make_linear(17, 9), x)
    state, expected = layer.state_dict(), layer(x)
    layer.to("meta")
    assert all(buffer.is_meta for buffer in layer.parameters())
    layer.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_from_a_linear_on_meta(name: str) -> None:
    linear = nn.Linear(17, 9, device="meta", dtype=torch.bfloat16)
    layer = KINDS[name].from_linear(linear, torch.ones(1))
    assert all(buffer.is_meta for buffer in layer.parameters())
    assert layer.weight_q.shape == (9, 17) and layer.weight.shape == (9, 17)
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(duplicate: Callable[[nn.Module], nn.Module], name: str, seed: int) -> None:
    x = torch.randn(4, 17)
    layer = KINDS[name].from_linear(make_linear(17, 9), x)
    expected, other = layer(x), duplicate(layer)
    assert torch.equal(other(x), expected)
    for buffer in layer.parameters():
        buffer.zero_()
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("out_features", [16, 9])
def test_compiles_into_one_graph(name: str, out_features: int, seed: int) -> None:
    x = torch.randn(2, 3, 17)
    layer = KINDS[name].from_linear(make_linear(17, out_features), x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_repr_and_weight_bytes() -> None:
    assert repr(Fp8Linear(100, 17, bias=False, activation="static")) == (
        "Fp8Linear(in_features=100, out_features=17, bias=False, activation=static, weight=channel)"
    )
    assert repr(Fp8BlockLinear(100, 17)) == "Fp8BlockLinear(in_features=100, out_features=17, bias=True)"
    assert Fp8Linear(100, 17, activation="static").weight_bytes == 17 * 100 + 17 * 4 + 24 * 112 + 24 * 4
    assert Fp8Linear(576, 1536, weight="tensor").weight_bytes == 1536 * 576 + 4
    assert Fp8BlockLinear(576, 1536).weight_bytes == 1536 * 576 + 12 * 5 * 4
