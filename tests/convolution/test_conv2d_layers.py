"""Quantised convolutional networks: layers, folding of norms, observers, schemes, int8 from layer to layer."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import epiloq
from epiloq import schemes
from epiloq.nn import Int8Conv2d, WeightOnlyConv2d
from epiloq.observers import HistogramMse, MinMax, Percentile, quantizer
from epiloq.quantize.int8_graph.batch_norm import fold_batch_norm_
from epiloq.quantize.int8_graph.exchange import exchange_int8

CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": (3, 5), "padding": "same", "groups": 8},
    {"kernel_size": 5, "padding": (3, 1), "dilation": 2, "groups": 2, "bias": False},
]
SCHEMES = ("conv-w8a8-int8", "conv-w8a16", "conv-w4a16")


class Network(nn.Module):
    """Norms that fold and one that does not, activations of every kind, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.depthwise, self.norm = nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2d(16)
        self.drop, self.point = nn.Dropout(), nn.Conv2d(16, 8, 1)
        self.left, self.right = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 8, 1)
        self.after, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.depthwise(self.stem(x))))
        x = self.point(self.drop(x)).clamp(min=-0.5, max=2)
        return self.head(self.after(functional.hardswish(self.left(x) + self.right(x))))


def network() -> tuple[Network, Tensor]:
    model, x = Network(), torch.randn(4, 3, 24, 20)
    for _ in range(3):
        model(x)
    return model.eval(), x


def error(y: Tensor, expected: Tensor) -> float:
    return float(((y - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("clamp", [None, (0.0, 6.0)])
def test_int8_conv2d(seed: int, device: str, options: dict[str, Any], clamp: tuple[float, float] | None) -> None:
    """The layer is its definition: quantise, convolve, and the same through its state dict and pickle."""
    conv = nn.Conv2d(8, 16, **options).to(device)
    x = torch.randn(2, 8, 14, 13, device=device)
    layer = Int8Conv2d.from_conv2d(conv, input_scale=0.03, input_zero_point=4, clamp=clamp)
    # By a tensor on the device: by a number CUDA would multiply by what 1 / 0.03 rounds to, and round some ties away.
    q = (torch.round(x / torch.full((), 0.03, device=device)) + 4).clamp(-128, 127)
    scale = conv.weight.detach().abs().amax((1, 2, 3), keepdim=True) / 127
    exact = copy.deepcopy(conv).double()
    exact.weight.data.copy_(torch.round(conv.weight / scale) * scale.double())
    expected = exact((q - 4).double() * layer.input[0]).clamp(*(clamp or (-math.inf, math.inf)))
    y = layer(x)
    assert (y - expected).abs().max() <= 2.0**-20 * expected.abs().max()
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(layer(q.to(torch.int8)), y)
    layer.set_quantizers(output=(0.05, -7))
    handed_on = layer(x)
    assert handed_on.dtype == torch.int8 and ((handed_on + 7.0) * 0.05 - y.clamp(-6.05, 6.7)).abs().max() <= 0.0251
    empty = Int8Conv2d(8, 16, clamp=clamp, device=device, **options)
    empty.load_state_dict(layer.state_dict())
    for same in (empty, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(same(x), handed_on) and same.output == layer.output


def test_dtypes(seed: int, device: str) -> None:
    conv, x = nn.Conv2d(4, 6, 3).to(device), torch.randn(1, 4, 9, 8, device=device)
    layer = Int8Conv2d.from_conv2d(conv, input_scale=0.03, input_zero_point=0)
    y = layer(x)
    layer.half()
    assert layer.weight_scale.dtype == torch.float32 and layer.weight_q.dtype == torch.int8
    assert layer(x.half()).dtype == torch.float16 and error(layer(x.half()).float(), y) < 0.02
    few = WeightOnlyConv2d.from_conv2d(conv, bits=8)
    expected = few(x)
    few.bfloat16()
    assert few.weight_scale.dtype == torch.float32 and error(few(x.bfloat16()).float(), expected) < 0.02


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("zeros", ["none", "zero"])
@pytest.mark.parametrize(("bits", "group_size"), [(8, -1), (4, 8), (4, -1)])
def test_weight_only_conv2d(
    seed: int, device: str, options: dict[str, Any], bits: int, group_size: int, zeros: str
) -> None:
    conv, x = nn.Conv2d(8, 16, **options).to(device), torch.randn(2, 8, 14, 13, device=device)
    how = {"bits": bits, "group_size": group_size, "zeros": zeros, "clamp": (0.0, math.inf)}
    layer = WeightOnlyConv2d.from_conv2d(conv, **how)
    assert layer.zeros == zeros and f"zeros={zeros}" in repr(layer)
    restored = layer.weight.dequantize()
    # A zero point is rounded too, by which an end of the range may lose half a step more.
    steps = 0.5 if zeros == "none" else 1
    assert (restored - conv.weight).abs().max() <= steps * layer.weight_scale.max() * 1.001
    exact = copy.deepcopy(conv).double()
    exact.weight.data.copy_(restored)
    expected = exact(x.double()).relu()
    assert (layer(x) - expected).abs().max() <= 2.0**-19 * expected.abs().max().clamp(min=1)
    assert layer.weight_bytes == layer.packed.nbytes
    again = WeightOnlyConv2d.from_conv2d(nn.Conv2d(8, 16, **options).to(device), **how)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("make", [Int8Conv2d.from_conv2d, WeightOnlyConv2d.from_conv2d])
def test_unsupported_conversions(make: Any) -> None:
    options = {"input_scale": 1.0, "input_zero_point": 0} if make == Int8Conv2d.from_conv2d else {}
    for conv, text in (
        (nn.Linear(3, 3), "expected a torch.nn.Conv2d"),
        (nn.Conv2d(3, 3, 1, padding=1, padding_mode="reflect"), "padding_mode: expected zeros"),
        (nn.Conv2d(3, 3, 1).double(), "expected one of torch.float32"),
        (nn.LazyConv2d(3, 1), "lazy"),
    ):
        with pytest.raises(ValueError, match=text):
            make(conv, **options)


def test_layers_refuse_other_images() -> None:
    layer = Int8Conv2d(4, 6, 3)
    for x in (torch.zeros(1, 5, 6, 6), torch.zeros(5, 6, 6), torch.zeros(4, 6)):
        with pytest.raises(ValueError, match=r"Int8Conv2d: x: expected \[B, 4, H, W\]"):
            layer(x)
    for arguments, text in (
        ((4, 6, 3, 1, 0, 1, 3), "groups: expected a divisor"),
        ((0, 6, 3), "in_channels"),
        ((4096, 1, 5), "expected at most 65793"),
    ):
        with pytest.raises(ValueError, match=text):
            Int8Conv2d(*arguments)
    with pytest.raises(ValueError, match="input_zero: expected an integer from -128"):
        layer.set_quantizers((1.0, 128))


def test_folds_norms(seed: int) -> None:
    model, x = network()
    expected = model(x)
    assert fold_batch_norm_(model) == ["stem.1", "norm"]
    assert isinstance(model.norm, nn.Identity) and isinstance(model.after, nn.BatchNorm2d)
    assert error(model(x), expected) < 1e-6
    assert fold_batch_norm_(model) == []
    with pytest.raises(ValueError, match="evaluation mode"):
        fold_batch_norm_(model.train())


def test_leaves_norms_whose_convolution_has_other_readers(seed: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    assert fold_batch_norm_(Twice().eval()) == []

    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match=r"that torch\.fx can trace"):
        fold_batch_norm_(Branches().eval())


def test_zero_points_lose_less(seed: int) -> None:
    conv = nn.Conv2d(64, 48, 3)

    def lost(zeros: str) -> float:
        layer = WeightOnlyConv2d.from_conv2d(conv, group_size=32, zeros=zeros)
        return float((layer.weight.dequantize() - conv.weight.detach()).norm())

    assert 0 < lost("zero") < lost("none")
    with pytest.raises(ValueError, match="WeightOnlyConv2d: zeros: expected none or zero, got 'offset'"):
        WeightOnlyConv2d.from_conv2d(conv, zeros="offset")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(seed: int, scheme: str) -> None:
    assert schemes.available(nn.Conv2d) == SCHEMES
    model, x = network()
    expected, same = model(x), copy.deepcopy(model)
    assert epiloq.quantize_(model, scheme, calibrate=lambda m: m(x)) is model
    assert not any(type(module) is nn.Conv2d for module in model.modules())
    assert error(model(x), expected) > 0
    for name, module in same.named_modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = model.get_submodule(name).dequantized_weight()
    assert error(model(x), same(x)) < (0.03 if scheme == "conv-w8a8-int8" else 1e-5)
    with pytest.raises(ValueError, match=r"expected at least one torch\.nn\.Conv2d"):
        epiloq.quantize_(model, scheme, calibrate=lambda m: m(x))


@pytest.mark.parametrize("observer", ["min-max", "percentile", "mse"])
def test_int8_is_passed_between_layers(seed: int, observer: str) -> None:
    """Where layers exchange int8, the result is that of quantising each layer's input again, up to a rare rounding."""
    model, x = network()
    expected = model(x)
    fold_batch_norm_(model)
    epiloq.quantize_(model, "conv-w8a8-int8", calibrate=lambda m: m(x), observer=observer)
    apart = model(x)
    linked = exchange_int8(model)
    assert error(linked(x), apart) < 2e-3 and error(apart, expected) < 0.05
    kinds = {name: layer.output is not None for name, layer in linked.named_modules() if isinstance(layer, Int8Conv2d)}
    hands_on = {"stem.0", "depthwise", "point"}
    assert kinds == {name: name in hands_on for name in kinds} and len(kinds) == 6
    assert model.depthwise.clamp == (0.0, math.inf) and model.point.clamp == (-0.5, 2.0)
    called = [str(node.target) for node in linked.graph.nodes]
    assert not any("relu" in target or "drop" in target or "clamp" in target for target in called)
    seen: list[torch.dtype] = []
    handle = linked.get_submodule("point").register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    linked(x)
    handle.remove()
    assert seen == [torch.int8]


def test_unlinked_layers(seed: int) -> None:
    """Layers that are called twice, whose result is returned too, or whose readers expect different scales."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            one = {"input_scale": 0.05, "input_zero_point": 0}
            self.twice, self.seen = (Int8Conv2d.from_conv2d(nn.Conv2d(4, 4, 1), **one) for _ in range(2))
            self.last = Int8Conv2d.from_conv2d(nn.Conv2d(4, 4, 1), input_scale=0.04, input_zero_point=0)
            self.other = Int8Conv2d.from_conv2d(nn.Conv2d(4, 4, 1), **one)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.twice(self.twice(x))
            z = self.seen(y)
            return z, self.last(z), self.other(y)

    model, x = Model().eval(), torch.randn(1, 4, 5, 5)
    expected = model(x)
    linked = exchange_int8(model)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(linked(x), expected, strict=True))
    assert not any(layer.output for layer in model.modules() if isinstance(layer, Int8Conv2d))


def test_other_quantised_layers_do_not_keep_int8_from_being_exchanged(seed: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(36, 5)).eval()
    x = torch.randn(2, 4, 3, 3)
    epiloq.quantize_(model, "w8a16")
    epiloq.quantize_(model, "conv-w8a8-int8", calibrate=lambda m: m(x))
    expected = model(x)
    linked = exchange_int8(model)
    assert linked.get_submodule("0").output is not None
    assert float((linked(x) - expected).norm() / expected.norm()) < 0.02


def test_observers(seed: int) -> None:
    """On normal values with one outlier, in batches: the whole range, almost all values, and the best range."""
    values = torch.randn(40_000)
    values[17] = 60.0
    observers = MinMax(), Percentile(0.999), HistogramMse()
    for part in (*values.split(7_000), torch.empty(0)):
        for observer in observers:
            observer.add(part)
    ends = [observer.ends() for observer in observers]
    assert all(end is not None for end in ends)
    whole, most, best = (end for end in ends if end is not None)
    assert whole.tolist() == [float(values.min()), 60.0]
    width = 60.0 / 2048
    for end, part in zip(most.tolist(), (0.0005, 0.9995), strict=True):
        assert abs(end - float(values.quantile(part))) < 4 * width

    def loss(end: Tensor) -> float:
        scale, zero = quantizer(end)
        assert zero is not None
        q = (torch.round(values / scale) + zero).clamp(-128, 127)
        return float(((q - zero) * scale - values).flatten().square().mean())

    candidates = [torch.tensor([whole[0] * a, whole[1] * b]) for a in (1.0, 0.7, 0.4) for b in (1.0, 0.5, 0.2, 0.1)]
    assert loss(best) <= 1.2 * min(map(loss, candidates)) and loss(best) <= loss(whole)


@pytest.mark.parametrize("observer", [MinMax, Percentile, HistogramMse])
def test_observers_at_the_edges(observer: Any) -> None:
    assert observer().ends() is None
    one = observer()
    one.add(torch.full((5,), 3.0))
    assert one.ends().tolist() == [3.0, 3.0] or one.ends()[1] >= 3.0 >= one.ends()[0]
    one.add(torch.tensor([math.nan]))
    assert not one.ends().isfinite().all()
    zeros = observer()
    zeros.add(torch.zeros(4))
    assert quantizer(zeros.ends())[0] > 0
    with pytest.raises(ValueError, match="part: expected more than 0"):
        Percentile(0.0)
