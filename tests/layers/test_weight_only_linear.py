"""epiloq.nn.WeightOnlyLinear: its numbers, its life, and the schemes that make it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import epiloq
from epiloq.nn import WeightOnlyLinear
from epiloq.quantize.targets import TARGETS
from epiloq.weights.computed import NotFiniteError
from toy_language_model import LanguageModel
from weight_reference import KINDS, assert_close, make_weight

# Bits, group size, zeros.
SCHEMES = {
    "w8a16": (8, -1, "none"),
    "w4a16-g128": (4, 128, "zero"),
    "w4a16-g64": (4, 64, "zero"),
    "w4a16-g32": (4, 32, "zero"),
}


def nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    """Each group rounded to its grid, group by group, as documented."""
    parts, steps = [], 2**bits - 1
    for part in weight.detach().float().split(weight.shape[1] if group_size == -1 else group_size, dim=1):
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        span = 2 * torch.maximum(-low, high) if symmetric else high - low
        scale = (span / torch.full_like(span, steps)).to(weight.dtype).float()
        zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else torch.round(-low / scale).clamp(0, steps)
        q = (torch.round(part / scale) + zero).clamp(0, steps)
        parts.append(((q - zero) * scale).double())
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("zeros", ["none", "zero"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, -1), (4, 128), (4, 64), (4, 32), (2, 32), (3, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_from_linear_rounds_to_nearest(
    seed: int, device: str, dtype: torch.dtype, bits: int, group_size: int, zeros: str
) -> None:
    for k, n, bias in ((100, 17, True), (576, 96, False), (4095, 9, True)):
        linear = nn.Linear(k, n, bias=bias, dtype=dtype, device=device)
        with torch.no_grad():
            linear.weight[: n // 3] = linear.weight[: n // 3].abs() + 0.01  # 0 at an end of the range
        layer = WeightOnlyLinear.from_linear(linear, bits=bits, group_size=group_size, zeros=zeros)
        assert layer.zeros == zeros
        expected = nearest(linear.weight, bits, group_size, zeros == "none")
        assert ((layer.weight.dequantize().double() - expected).abs() <= 2.0**-23 * expected.abs()).all()
        x = torch.randn(3, 2, k, dtype=dtype, device=device)
        y = layer(x)
        assert y.shape == (3, 2, n) and y.dtype == dtype and y.is_contiguous()
        exact = x.double() @ expected.t() + (linear.bias.double() if bias else 0)
        size = x.double().abs() @ expected.abs().t() + 1
        of_sums = 2.0**-23 * k**0.5  # as docs/numerics.md bounds sums of k products in fp32
        assert ((y.double() - exact).abs() <= (2 * torch.finfo(dtype).eps + of_sums) * size).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leading", [(), (0,), (7,), (2, 0, 3), (2, 1, 2)])
def test_from_packed(seed: int, device: str, kind: str, leading: tuple[int, ...]) -> None:
    weight = make_weight(33, 100, 4, 32, kind, act_order=True, device=device)
    bias = torch.randn(33, device=device).half()
    layer = WeightOnlyLinear.from_packed(weight.packed, bias)
    x = torch.randn(*leading, 100, device=device).half()
    y = layer(x)
    assert y.shape == (*leading, 33)
    assert_close(y, x, weight, bias)
    assert torch.equal(y, epiloq.weight_only_mm(x, weight.packed, bias))
    assert f"zeros={'none' if kind == 'symmetric' else kind}, act_order=True" in repr(layer)


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x[1:, 1:41], lambda x: x.expand(3, 41, 41)[1:, :, :40]])
def test_views(seed: int, device: str, view: Callable[[Tensor], Tensor]) -> None:
    x = view(torch.randn(41, 41, device=device).half())
    layer = WeightOnlyLinear.from_packed(make_weight(24, x.shape[-1], device=device).packed)
    assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


def layer_of(kind: str = "zero", *, act_order: bool = True) -> WeightOnlyLinear:
    weight = make_weight(33, 100, 4, 32, kind, act_order=act_order)
    return WeightOnlyLinear.from_packed(weight.packed, torch.randn(33).half())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_through_safetensors(seed: int, tmp_path: Path, kind: str, assign: bool) -> None:
    layer, x = layer_of(kind), torch.randn(4, 100).half()
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    state = load_file(tmp_path / "layer.safetensors")
    zeros = "none" if kind == "symmetric" else kind
    with torch.device("meta" if assign else "cpu"):
        fresh = WeightOnlyLinear(100, 33, bits=4, group_size=32, zeros=zeros, act_order=True)
    fresh.load_state_dict(state, strict=True, assign=assign)
    if not assign:
        fresh.half()
    assert torch.equal(fresh(x), layer(x))
    assert fresh.weight_scale.dtype == torch.float16


@pytest.mark.parametrize("offset", [1, 8, 15])
def test_assigned_tensors_may_lie_anywhere_in_memory(seed: int, offset: int) -> None:
    layer, x = layer_of(), torch.randn(4, 100).half()
    state = layer.state_dict()
    q = state["weight_q"]
    buffer = torch.zeros(q.numel() + 16, dtype=torch.uint8)
    state["weight_q"] = buffer[offset : offset + q.numel()].view(q.shape).copy_(q)
    other = WeightOnlyLinear(100, 33, group_size=32, zeros="zero", act_order=True, device="meta")
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_q": torch.zeros(33, 100)},
        {"weight_scale": torch.ones(33, 4)},
        {"weight_perm": torch.zeros(100, dtype=torch.int64)},
        {"bias": torch.zeros(33).int()},
    ],
)
def test_loading_another_kind_of_tensor_is_refused(seed: int, wrong: dict[str, Tensor]) -> None:
    layer, x = layer_of(), torch.randn(2, 100).half()
    before = layer(x)
    with pytest.raises(RuntimeError, match=f"{next(iter(wrong)).removeprefix('weight_')}: expected"):
        layer.load_state_dict(layer.state_dict() | wrong, strict=False)
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(
    "convert", [lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16), lambda m: m.double().bfloat16()]
)
def test_dtype_moves_change_the_bias_alone(seed: int, convert: Callable[[nn.Module], nn.Module]) -> None:
    layer = layer_of("offset")
    before = {name: buffer.clone() for name, buffer in layer.named_parameters()}
    assert convert(layer) is layer
    after = dict(layer.named_parameters())
    assert after.pop("bias").dtype == torch.bfloat16 and before.pop("bias") is not None
    assert all(after[name].dtype == old.dtype and torch.equal(after[name], old) for name, old in before.items())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_equal_and_independent(seed: int, duplicate: Callable[[Any], Any]) -> None:
    layer, x = layer_of(), torch.randn(4, 100).half()
    expected, other = layer(x), duplicate(layer)
    for buffer in layer.parameters():
        buffer.zero_()
    assert torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_meta_and_back(seed: int) -> None:
    layer, x = layer_of(), torch.randn(4, 100).half()
    state, expected = layer.state_dict(), layer(x)
    layer.to("meta")
    assert all(buffer.is_meta for buffer in layer.parameters())
    layer.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(layer(x), expected)
    linear = nn.Linear(100, 17, device="meta", dtype=torch.bfloat16)
    for zeros in ("none", "zero"):
        layer = WeightOnlyLinear.from_linear(linear, zeros=zeros)
        assert all(buffer.is_meta for buffer in layer.parameters())
        assert layer.zeros == zeros


@pytest.mark.gpu
def test_moves_between_devices(seed: int) -> None:
    layer, x = layer_of(), torch.randn(4, 100).half()
    expected = layer(x)
    there = layer.to("cuda")(x.cuda()).cpu()
    torch.testing.assert_close(there, expected, rtol=2**-9, atol=2**-9)
    assert torch.equal(layer.cpu()(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph(seed: int, device: str, kind: str) -> None:
    layer, x = layer_of(kind).to(device), torch.randn(2, 3, 100, device=device).half()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantising_a_file_to_nearest_gives_the_same_weights(
    seed: int, device: str, scheme: str, dtype: torch.dtype
) -> None:
    bits, group_size, zeros = SCHEMES[scheme]
    linear = nn.Linear(100, 17, dtype=dtype, device=device)
    with torch.no_grad():
        linear.weight[3] = 0
        linear.weight[4] = linear.weight[4].abs()
    grid = TARGETS[scheme].grid(scale_dtype=dtype)
    parts = []
    for group in linear.weight.detach().float().split(100 if group_size == -1 else group_size, dim=1):
        found = grid.parameters(group.amin(1, keepdim=True), group.amax(1, keepdim=True))
        parts.append(grid.restore(grid.round(group, found), found))
    layer = WeightOnlyLinear.from_linear(linear, bits=bits, group_size=group_size, zeros=zeros)
    assert torch.equal(layer.weight.dequantize(), torch.cat(parts, dim=1))


@pytest.mark.parametrize("zeros", ["none", "zero"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_weight_that_is_not_finite_is_refused(seed: int, zeros: str, value: str) -> None:
    linear = nn.Linear(100, 8)
    with torch.no_grad():
        linear.weight[3, 40] = float(value)
    with pytest.raises(NotFiniteError, match=r"WeightOnlyLinear: linear\.weight: expected finite numbers"):
        WeightOnlyLinear.from_linear(linear, group_size=32, zeros=zeros)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_features": 0}, "in_features"),
        ({"out_features": 0}, "out_features"),
        ({"bits": 5}, "bits.*5"),
        ({"group_size": 0}, "group_size"),
        ({"zeros": "points"}, "zeros: expected one of none, zero, offset, got 'points'"),
    ],
)
def test_constructor_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightOnlyLinear(**{"in_features": 8, "out_features": 8} | arguments)


def test_more_mismatching_arguments_are_refused() -> None:
    for wrong, message in (
        (nn.Conv1d(2, 2, 1), "torch.nn.Linear.*Conv1d"),
        (nn.Linear(4, 4, dtype=torch.float64), "weight.*float64"),
        (nn.LazyLinear(4), "lazy"),
        (nn.MultiheadAttention(4, 2).out_proj, "MultiheadAttention"),
    ):
        with pytest.raises(ValueError, match=f"WeightOnlyLinear: .*{message}"):
            WeightOnlyLinear.from_linear(wrong)
    with pytest.raises(ValueError, match="zeros: expected none or zero, got 'offset'"):
        WeightOnlyLinear.from_linear(nn.Linear(4, 4), zeros="offset")
    with pytest.raises(ValueError, match=r"bias: expected a floating-point tensor \[33\]"):
        WeightOnlyLinear.from_packed(make_weight(33, 10).packed, torch.zeros(32))
    for shape in ((), (9,), (4, 20)):
        with pytest.raises(ValueError, match=r"x: expected shape \[…, 10\]"):
            WeightOnlyLinear(10, 4)(torch.zeros(shape))


def test_weight_bytes() -> None:
    assert WeightOnlyLinear(4096, 64, dtype=torch.float16).weight_bytes == 64 * 4096 // 2 + 64 * 32 * 2
    assert WeightOnlyLinear(4096, 64, bits=8, group_size=-1).weight_bytes == 64 * 4096 + 64 * 4


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(seed: int, scheme: str) -> None:
    model = LanguageModel().eval()
    linear = copy.deepcopy(model.blocks[1].up)
    epiloq.quantize_(model, scheme, calibrate=lambda m: pytest.fail("calibrated"))
    bits, group_size, zeros = SCHEMES[scheme]
    alone = WeightOnlyLinear.from_linear(linear, bits=bits, group_size=group_size, zeros=zeros)
    x = torch.randn(5, 20)
    assert torch.equal(model.blocks[1].up(x), alone(x))


@pytest.mark.parametrize("std", [8e-4, 1e-4, 1e-6])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_small_float16_weights_lose_no_more_than_large_ones(seed: int, device: str, scheme: str, std: float) -> None:
    """Their scales are below the normal numbers of float16, some below all of its numbers."""
    bits, group_size, zeros = SCHEMES[scheme]
    weight = torch.randn(256, 256, device=device)  # the same at each size, or the errors differ by chance

    def error(size: float) -> float:
        linear = nn.Linear(256, 256, bias=False, device=device)
        linear.weight.data = weight * size
        exact = linear.half().weight.detach().float()
        layer = WeightOnlyLinear.from_linear(linear, bits=bits, group_size=group_size, zeros=zeros)
        x = torch.eye(256, dtype=torch.float16, device=device)
        found = layer.weight.dequantize()
        assert torch.allclose(layer(x).t().float(), found, atol=2**-24, rtol=2e-3)
        return float((found - exact).norm() / exact.norm())

    assert error(std) < 1.06 * error(1.0)
