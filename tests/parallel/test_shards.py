"""Shards of quantised linear layers, cut anywhere: their weights are parts of the whole one, and join to it."""

from __future__ import annotations

import copy
import itertools
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from epiloq.nn import W4A8Linear, WeightOnlyLinear
from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.experts.row_experts import Experts
from epiloq.parallel import join, shard_columns, shard_rows
from epiloq.parallel.blocked_tensors import CUTS
from epiloq.weights.packed_weight import pack_weight
from every_layer import LAYERS


def in_order(kind: Any, k: int, n: int, group_size: int = 64, **options: Any) -> nn.Module:
    """A layer in activation order."""
    groups = -(-k // group_size) if group_size > 0 else 1
    q, zero = torch.randint(16, (n, k)), torch.randint(16, (n, groups))
    packed = pack_weight(q, torch.rand(n, groups), zero, bits=4, group_size=group_size, perm=torch.randperm(k))
    layer: nn.Module = kind.from_packed(packed, torch.randn(n), **options)
    return layer


def table(k: int, n: int) -> nn.Module:
    """One whose last byte has no second weight where N K is odd: files have zeros there."""
    layer: Any = LAYERS["table-4"](k, n)
    if n * k % 2:
        layer.weight_q[-1] &= 0xF0
    return cast(nn.Module, layer)


def with_offsets(k: int, n: int) -> nn.Module:
    """A layer whose groups have offsets in place of zero points, as those of GGUF files."""
    groups = -(-k // 32)
    q, offset = torch.randint(8, (n, k)), torch.rand(n, groups)
    packed = pack_weight(q, torch.rand(n, groups), offset=offset, bits=3, group_size=32)
    layer: nn.Module = WeightOnlyLinear.from_packed(packed, torch.randn(n))
    return layer


MADE = {name: make for name, make in LAYERS.items() if type(make(16, 16)) in CUTS} | {
    "table-4": table,
    "w3a16-offset": with_offsets,
    "w4a16-ordered": lambda k, n: in_order(WeightOnlyLinear, k, n),
    "w4a16-ordered-rows": lambda k, n: in_order(WeightOnlyLinear, k, n, -1),
    "w4a8-ordered": lambda k, n: in_order(W4A8Linear, k, n, activation="int8"),
}
# Sizes that kernels take as they are, and sizes and cuts that nothing divides.
CASES = [(256, 160, (0, 128, 256), (0, 80, 160)), (301, 213, (0, 37, 170, 301), (0, 13, 140, 213))]


def weight(layer: Any) -> Tensor:
    """The float weight of a layer, or of a shard, without what it shares with its neighbours."""
    found: Tensor = layer.dequantized_weight()
    assert layer.weight.shape == layer.weight_shape == found.shape
    return found


def parts(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(ends))


def same(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return one.state_dict().keys() == state.keys() and all(
        t.dtype == state[key].dtype and torch.equal(t, state[key]) for key, t in one.state_dict().items()
    )


def test_every_class_of_linear_layers_can_be_cut() -> None:
    linear = {type(make(16, 16)) for make in LAYERS.values()}
    assert {kind for kind in linear if issubclass(kind, FrozenLinear) and not issubclass(kind, Experts)} == set(CUTS)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("case", CASES, ids=["even", "odd"])
def test_rows(name: str, case: Any) -> None:
    k, n, _, ends = case
    layer = MADE[name](k, n)
    before = copy.deepcopy(layer)
    x = torch.randn(3, 2, k)
    whole, shards = layer(x), [shard_rows(layer, *part) for part in parts(ends)]
    assert same(layer, before)
    for (begin, end), shard in zip(parts(ends), shards, strict=True):
        if "ordered" not in name:
            assert torch.equal(weight(shard), weight(layer)[begin:end])
        y = shard(x)
        assert y.shape == (3, 2, end - begin)
        if name.startswith("int8") or name == "w4a8-int8":
            assert torch.equal(y, whole[..., begin:end])
        torch.testing.assert_close(y, whole[..., begin:end], rtol=1e-5, atol=2e-5 * float(whole.abs().max()))
    again = join(shards[::-1])
    assert same(again, layer) and torch.equal(again(x), whole)
    assert same(join([copy.deepcopy(shard).half() for shard in shards]), copy.deepcopy(layer).half())


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("case", CASES, ids=["even", "odd"])
def test_columns(name: str, case: Any) -> None:
    k, n, ends, _ = case
    layer = MADE[name](k, n)
    before = copy.deepcopy(layer)
    x = torch.randn(3, 2, k)
    shards: list[Any] = [shard_columns(layer, *part) for part in parts(ends)]
    assert same(layer, before)
    exact = torch.zeros(3, 2, n, dtype=torch.float64)
    for (begin, end), shard in zip(parts(ends), shards, strict=True):
        given = x[..., begin:end]
        if "ordered" not in name:
            assert torch.equal(weight(shard), weight(layer)[:, begin:end])
        assert shard.bias is None and torch.equal(shard.bias_of_sum, layer.bias)
        y = shard(given)
        exact += y
        wide = weight(layer)[:, begin:end].double()
        product = given.double() @ wide.t()
        bound = bound_of(name, given.double(), wide, ends)
        if "ordered" not in name and "static" not in name and "limit" not in name:
            assert ((y - product).abs() <= bound).all()
    again = join(shards)
    assert same(again, layer) and torch.equal(again(x), layer(x))
    # What is summed is what one layer gives, but for the rounding of activations.
    if name in ("table-4", "fp8-weight-only", "w3a16-offset", "w4a16", "w8a16", "w4a16-ordered", "w4a16-ordered-rows"):
        wanted = x.double() @ layer.dequantized_weight().double().t() + layer.bias.double()
        scale = x.double().abs() @ layer.dequantized_weight().double().abs().t()
        assert ((exact + layer.bias.double() - wanted).abs() <= 1e-5 * scale + 1e-5).all()


_INT8_TOKENS = ("w4a8-int8", "w4a8-ordered", "w4a8-nvfp4-int8")
# A group reaches no farther than its token.
_FP8_TOKENS = ("w4a8-fp8", "w4a8-mxfp4-fp8", "w4a8-mxfp4-fp8-group")


def bound_of(name: str, x: Tensor, wide: Tensor, ends: tuple[int, ...]) -> Tensor:
    """The largest error of a product whose activations are rounded as a layer rounds them."""
    reach = x.abs().amax(-1, keepdim=True).expand_as(x)
    float_sums = 1e-5 * x.abs() + 1e-6
    if name.startswith("int8") or name in ("w8a8-block", "w4a8-block", *_INT8_TOKENS):
        # A step of a symmetric grid is a 127th of the reach, and one with a zero point no larger.
        return (reach / 127 / 2 * (1.01 if "azp" not in name else 2.02) + float_sums) @ wide.abs().t()
    if (name.startswith("fp8") and name != "fp8-weight-only") or name in _FP8_TOKENS:
        return (x.abs() / 16 + reach / 448 / 512 + float_sums) @ wide.abs().t()
    return float_sums @ wide.abs().t()


def test_through_transformed_dtypes_and_bad_cuts() -> None:
    layer = LAYERS["int8"](16, 24)
    for cut, ends in ((shard_rows, (0, 25)), (shard_rows, (5, 5)), (shard_columns, (-1, 4)), (shard_columns, (9, 3))):
        with pytest.raises(ValueError, match=r"expected some of 0 to (16|24), got"):
            cut(layer, *ends)
    with pytest.raises(ValueError, match=r"expected one of Int8Linear.*got Linear"):
        shard_rows(nn.Linear(4, 4), 0, 2)
    shard = shard_columns(layer, 3, 9)
    with pytest.raises(ValueError, match=r"expected shape \[…, 6\], the input features 3 to 9"):
        shard(torch.zeros(2, 16))
    with pytest.raises(ValueError, match="got a shard of one"):
        shard_rows(shard, 0, 3)
    with pytest.raises(ValueError, match="but columns from 0 are missing"):
        join([shard])
    with pytest.raises(ValueError, match="but rows from 7 are missing"):
        join([shard_rows(layer, 0, 7), shard_rows(layer, 8, 24)])
