"""What epiloq.quantize_ makes of sample inputs, and the errors that leave a model untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq import schemes
from epiloq.nn import Int8Linear
from toy_language_model import LanguageModel, tokens


def snapshot(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, Tensor], int]:
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    return dict(model.named_modules()), copy.deepcopy(model.state_dict()), hooks


def assert_untouched(model: nn.Module, before: tuple[dict[str, nn.Module], dict[str, Tensor], int]) -> None:
    modules, state, hooks = before
    now_modules, now_state, now_hooks = snapshot(model)
    assert now_modules == modules
    assert now_hooks == hooks
    assert now_state.keys() == state.keys()
    assert all(torch.equal(now_state[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(("symmetric", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.half)])
def test_calibration_takes_the_range_of_everything_seen(
    symmetric: bool, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"activation": "static", "symmetric": symmetric}
    row = schemes.Scheme("test-static", "static activations", Int8Linear, options)
    monkeypatch.setitem(schemes.SCHEMES, row.name, row)
    model = nn.Sequential(nn.Linear(10, 8)).to(dtype)
    batches = [torch.randn(n, 10).add(0.5).to(dtype) for n in (5, 0, 1, 9)]

    def calibrate(float_model: nn.Module) -> None:
        assert not torch.is_grad_enabled()
        for index, batch in enumerate(batches):
            float_model[0](batch) if index % 2 else float_model[0](input=batch)

    epiloq.quantize_(model, row.name, calibrate=calibrate)
    seen = torch.cat(batches).double()
    low, high = min(seen.min().item(), 0.0), max(seen.max().item(), 0.0)
    if symmetric:
        assert model[0].input_scale.item() == pytest.approx(max(-low, high) / 127, rel=1e-6)
        assert model[0].input_zero_point is None
    else:
        scale = (high - low) / 255
        assert model[0].input_scale.item() == pytest.approx(scale, rel=1e-6)
        assert abs(model[0].input_zero_point.item() - (-128 - low / scale)) <= 0.5 + 1e-4
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_static_state_loads_into_a_model_calibrated_otherwise(seed: int) -> None:
    first, inputs = LanguageModel().eval(), tokens()
    second = copy.deepcopy(first)
    epiloq.quantize_(first, "w8a8-int8-static", calibrate=lambda m: m(inputs))
    epiloq.quantize_(second, "w8a8-int8-static", calibrate=lambda m: m(inputs[:1, :2]))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(inputs), first(inputs))


def skips_the_head(model: nn.Module) -> None:
    x = model.embed(tokens())
    for block in model.blocks:
        x = block(x)


def breaks(model: nn.Module) -> None:
    model(tokens())
    raise KeyError("no such sample")


def sees_nan(model: nn.Module) -> None:
    model.blocks[1].down(torch.full((1, 60), float("nan")))
    model(tokens())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": "w4a4"}, ValueError, "scheme: expected one of w8a8-int8, w8a8-int8-azp, w8a8-int8-static.*'w4a4'"),
        ({"scheme": "w8a8-int8-static"}, ValueError, "calibrate: .*w8a8-int8-static.*got None"),
        ({"scheme": "w8a8-int8", "filter_fn": lambda module, name: False}, ValueError, "filter_fn: .*none"),
        ({"scheme": "w8a8-int8-static", "calibrate": skips_the_head}, ValueError, "'head' saw no input"),
        ({"scheme": "w8a8-int8-static", "calibrate": sees_nan}, ValueError, "finite inputs of 'blocks.1.down'"),
        ({"scheme": "w8a8-int8-static", "calibrate": breaks}, KeyError, "no such sample"),
    ],
)
def test_errors_do_not_change_the_model(
    arguments: dict[str, object], error: type[Exception], message: str, seed: int
) -> None:
    model = LanguageModel()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        epiloq.quantize_(model, **arguments)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (nn.Linear(4, 4, dtype=torch.float64), "layer '1.0': .*float64"),
        (nn.Linear(65793, 1, bias=False), "layer '1.0': .*in_features.*65792"),
        (nn.LazyLinear(4), "layer '1.0': .*lazy"),
        (nn.MultiheadAttention(4, 2).out_proj, "layer '1.0': .*MultiheadAttention"),
    ],
)
def test_a_layer_that_cannot_be_converted_is_named_before_any_change(last: nn.Module, message: str) -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Sequential(last))
    with pytest.raises(ValueError, match=message):
        epiloq.quantize_(model, "w8a8-int8-azp", lambda module, name: True)
    assert model[0] is first
    assert model[1][0] is last


@pytest.mark.parametrize("observer", ["min-max", "percentile", "mse"])
def test_a_model_without_values_has_no_static_scales(observer: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4)).to("meta")
    with pytest.raises(
        ValueError, match=r"calibrate: expected inputs of '0' with values, got tensors on the device meta"
    ):
        epiloq.quantize_(
            model, "w8a8-int8-static", calibrate=lambda m: m(torch.zeros(1, 4, device="meta")), observer=observer
        )
    assert type(model[0]) is nn.Linear


def test_quantising_twice_is_refused(seed: int) -> None:
    model = epiloq.quantize_(LanguageModel(), "w8a8-int8")
    with pytest.raises(ValueError, match="already"):
        epiloq.quantize_(model, "w8a8-int8-azp")


def test_a_bare_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="from_linear"):
        epiloq.quantize_(nn.Linear(4, 4), "w8a8-int8")
