"""int8 through what lies between layers: activations as tables, moves of values; and what is left in floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from epiloq.nn import Int8Conv2d, Int8Quantize, Int8Table
from epiloq.quantize.int8_graph import kinds as int8_kinds
from epiloq.quantize.int8_graph.batch_norm import fold_batch_norm_
from epiloq.quantize.int8_graph.exchange import exchange_int8

Step = Callable[[Tensor], Tensor]


def exact_conv(inputs: int, outputs: int, kernel: int, scale: float, zero: int) -> Int8Conv2d:
    """A layer whose weights and scales are powers of two apart, so that its float results are exact."""
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    with torch.no_grad():
        conv.weight.copy_(torch.randint(-9, 10, conv.weight.shape) / 64)
        conv.weight[:, 0, 0, 0] = 127 / 64
        assert conv.bias is not None
        conv.bias.copy_(torch.randint(-50, 50, (outputs,)) / 64)
    return Int8Conv2d.from_conv2d(conv, input_scale=scale, input_zero_point=zero)


class Between(nn.Module):
    """Two layers with a step between."""

    def __init__(self, step: Step, inputs: int = 8) -> None:
        super().__init__()
        self.first, self.second = exact_conv(4, 8, 3, 2.0**-4, 3), exact_conv(inputs, 5, 1, 2.0**-3, -20)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.step(self.first(x)))
        return y


def kinds_of(model: nn.Module) -> dict[type, int]:
    modules = list(model.modules())
    return {kind: sum(type(m) is kind for m in modules) for kind in (Int8Table, Int8Quantize)}


MOVES: list[tuple[Any, int]] = [
    (nn.MaxPool2d(3, 2, 1), 8),
    (lambda x: functional.max_pool2d(x, 2), 8),
    (lambda x: functional.interpolate(x, scale_factor=2.0, mode="nearest"), 8),
    (nn.Upsample(scale_factor=3), 8),
    (nn.PixelShuffle(2), 2),
    (lambda x: functional.pixel_unshuffle(x, 2), 32),
    (lambda x: torch.cat([x, functional.max_pool2d(x, 3, 1, 1)], 1), 16),
    (lambda x: x[:, 2:6], 4),
    (lambda x: x.transpose(2, 3).contiguous(), 8),
    (lambda x: x.reshape(x.size(0), x.size(1), -1).unsqueeze(3).permute(0, 1, 3, 2), 8),
]


@pytest.mark.parametrize("index", range(len(MOVES)))
def test_moves_change_no_bit(seed: int, device: str, index: int) -> None:
    step, inputs = MOVES[index]
    model, x = Between(step, inputs).to(device).eval(), torch.randn(2, 4, 12, 10, device=device)
    expected = model(x)
    linked = exchange_int8(model)
    assert linked.get_submodule("first").output == (2.0**-3, -20)
    assert kinds_of(linked) == {Int8Table: 0, Int8Quantize: 0}
    seen: list[torch.dtype] = []
    linked.get_submodule("second").register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    assert torch.equal(linked(x), expected) and seen == [torch.int8]


def test_floats_are_quantised_before_they_grow(seed: int, device: str) -> None:
    step: Step = lambda x: functional.interpolate(x.mean(1, keepdim=True), scale_factor=4.0)  # noqa: E731
    model, x = Between(step, 1).to(device).eval(), torch.randn(2, 4, 6, 5, device=device)
    expected = model(x)
    linked = exchange_int8(model)
    assert linked.get_submodule("first").output is None
    assert kinds_of(linked) == {Int8Table: 0, Int8Quantize: 1} and torch.equal(linked(x), expected)


FUNCTIONS: list[Any] = [
    functional.hardswish,
    nn.Hardswish(),
    lambda x: functional.hardswish(x) * 0.7 - 0.3,
    nn.Sequential(nn.SiLU(), nn.Hardsigmoid()),
    lambda x: (1.5 - x).sigmoid(),
    lambda x: x * torch.sigmoid(x),
    lambda x: functional.leaky_relu(x, 0.1).clamp(max=1.5),
    lambda x: functional.pixel_shuffle(x, 1).relu() / 3,
]


@pytest.mark.parametrize("index", range(len(FUNCTIONS)))
def test_functions_become_tables(seed: int, device: str, index: int) -> None:
    """Each step by its definition in float64, from the first layer's int8 on."""
    function = FUNCTIONS[index]
    model, x = Between(function).to(device).eval(), torch.randn(2, 4, 9, 11, device=device)
    exact = model(x)
    linked = exchange_int8(model, calibrate=lambda m: m(x))
    first, second = linked.get_submodule("first"), linked.get_submodule("second")
    branches = index == 5  # its first layer has two readers
    assert (first.output is None) is branches and kinds_of(linked)[Int8Table] == (0 if branches else 1)
    if branches:
        assert torch.equal(linked(x), exact)
        return
    scale, zero = first.output
    values = function((first(x).cpu().double() - zero) * scale)
    q = (torch.round(values / second.input[0]) + second.input[1]).clamp(-128, 127)
    seen: list[Tensor] = []
    second.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    y = linked(x)
    assert seen[0].dtype == torch.int8
    assert (seen[0].cpu() - q).abs().max() <= 1 and (seen[0].cpu() != q).float().mean() < 0.01  # near ties, float32
    # One rounding more, by half a step of what the first layer hands on, which no function makes more than 1.5 times as
    # large; and then the second layer's input may round to one place further.
    moved = 1.5 * scale / 2 + second.input[0]
    weights = second.weight.double().abs().sum((1, 2, 3))
    assert ((y - exact).abs().amax((0, 2, 3)) <= moved * weights).all()


def test_a_table_rounds_its_input_over_what_matters(seed: int) -> None:
    """Below -3 hard swish is 0, above what the next layer's grid reaches everything saturates: no steps for either."""
    model, x = Between(functional.hardswish).eval(), torch.randn(2, 4, 30, 30) * 3
    results = model.first(x)
    assert results.min() < -6
    linked = exchange_int8(model, calibrate=lambda m: m(x))
    scale, zero = linked.get_submodule("first").output
    lo, hi = (-128 - zero) * scale, (127 - zero) * scale
    top = min(float(results.max()), 2.0**-3 * (127 + 20))
    assert -3.1 < lo < -2.5 and top - 0.2 < hi < top + 0.2


def test_results_that_stay_in_floating_point(seed: int) -> None:
    """Without calibration, of two tensors, for two grids, or where the network returns it too."""

    class Model(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.a, self.b = exact_conv(4, 4, 1, 0.25, 0), exact_conv(4, 4, 1, 0.25, 0)
            self.c, self.d = exact_conv(4, 4, 1, 0.25, 0), exact_conv(4, 4, 1, 0.125 if kind == "grids" else 0.25, 0)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            if self.kind == "two":
                return (self.c(self.a(x) + self.b(x)),)
            y = functional.silu(self.a(x))
            return (self.c(y), self.d(y)) if self.kind == "grids" else (self.c(y), y)

    x = torch.randn(1, 4, 6, 6)
    for kind in ("two", "grids", "returned"):
        model = Model(kind).eval()
        expected = model(x)
        linked = exchange_int8(model, calibrate=lambda m: m(x))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(linked(x), expected, strict=True))
        assert linked.get_submodule("a").output is None and kinds_of(linked) == {Int8Table: 0, Int8Quantize: 0}
    between = exchange_int8(Between(functional.silu).eval())
    assert between.get_submodule("first").output is None
    with pytest.raises(ValueError, match="exchange_int8: observer: expected one of min-max"):
        exchange_int8(Between(functional.silu).eval(), observer="best")


def test_linked_networks_are_kept_by_their_state(seed: int) -> None:
    x = torch.randn(2, 4, 9, 11)
    linked = exchange_int8(Between(functional.hardswish).eval(), calibrate=lambda m: m(x))
    expected = linked(x)
    state = {name: value.clone() for name, value in linked.state_dict().items()}
    linked.get_submodule("first").set_quantizers(output=(1.0, 0))
    linked.load_state_dict(state)
    assert torch.equal(linked(x), expected)
    table = Int8Table.from_function(lambda v: v * 2, input=(0.5, 0), output=(1.0, 3)).half()
    assert table.table.dtype == torch.int8 and table.table[[0, 128, 228]].tolist() == [-125, 3, 103]
    assert Int8Quantize((0.3, 4)).half().scale.dtype == torch.float32


def test_norms_fold_through_shuffled_pixels(seed: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 20, 1), nn.PixelShuffle(2), nn.BatchNorm2d(5), nn.ReLU())
    x = torch.randn(4, 3, 6, 5)
    model(x)
    expected = model.eval()(x)
    assert fold_batch_norm_(model) == ["2"] and isinstance(model[2], nn.Identity)
    assert (model(x) - expected).abs().max() < 1e-5


def test_tables_of_kinds_are_disjoint() -> None:
    moves = set(int8_kinds.MOVES)
    assert not moves & int8_kinds.POINTWISE and not (moves | int8_kinds.POINTWISE) & int8_kinds.NOTHING
