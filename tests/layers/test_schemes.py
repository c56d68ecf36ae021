"""epiloq.quantize_ and the table of schemes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import epiloq
from epiloq import schemes
from epiloq.nn import (
    Fp8BlockLinear,
    Fp8Linear,
    Fp8WeightOnlyLinear,
    Int8Linear,
    WeightOnlyLinear,
)
from epiloq.quantize import smoothquant_
from toy_language_model import IN_BLOCKS, LanguageModel, quantised, tokens

INT8 = ("w8a8-int8", "w8a8-int8-azp", "w8a8-int8-static")
BLOCKS = ("w8a8-block", "w4a8-block", "w4a8-block-g32")
FP8 = ("fp8", "fp8-token", "fp8-block")
FP8_WEIGHTS = ("w8a16-fp8", "w8a16-fp8-block")
WEIGHT_ONLY = ("w8a16", "w4a16-g128", "w4a16-g64", "w4a16-g32", "w4a16")
W4A8 = ("w4a8-fp8", "w4a8-int8")
W4A8_FP4 = ("w4a8-mxfp4-fp8", "w4a8-nvfp4-fp8")
FP4 = ("w4a16-mxfp4", "w4a16-nvfp4")
NAMES = (*INT8, *BLOCKS, *FP8, *FP8_WEIGHTS, *W4A8, *W4A8_FP4, *WEIGHT_ONLY, *FP4)
INTEGERS = (*INT8, *BLOCKS, *W4A8, *WEIGHT_ONLY)
FP8_LAYERS = (Fp8BlockLinear, Fp8Linear, Fp8WeightOnlyLinear)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [name for name in NAMES if name != "w8a8-int8-static"])  # which has to be calibrated
def test_a_gpu_quantises_as_the_cpu(scheme: str, seed: int) -> None:
    """Bit for bit: short significands put many quotients on a tie, which a rounding before it would move."""
    model = nn.Sequential(nn.Linear(512, 384, dtype=torch.bfloat16))
    found = epiloq.quantize_(copy.deepcopy(model).cuda(), scheme).state_dict()
    expected = epiloq.quantize_(model, scheme).state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu().contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


def test_the_table() -> None:
    assert schemes.available() == NAMES
    assert all("\n" not in scheme.description and scheme.description for scheme in schemes.SCHEMES.values())


@pytest.mark.parametrize("scheme", INTEGERS)
def test_quantises_in_place_and_stays_close(scheme: str, seed: int) -> None:
    model, inputs = LanguageModel().eval(), tokens()
    expected = model(inputs)
    result = epiloq.quantize_(model, scheme, calibrate=lambda m: m(inputs))
    assert result is model
    assert quantised(model) == [*IN_BLOCKS, "head"]
    row = schemes.SCHEMES[scheme]
    layer = model.blocks[0].up
    assert all(getattr(layer, name) == value for name, value in row.options.items())
    error = (model(inputs) - expected).norm() / expected.norm()
    assert 0 < error < (0.2 if scheme.startswith("w4") else 0.03)


@pytest.mark.parametrize(
    ("scheme", "same"),
    [
        ("fp8", lambda linear: Fp8Linear.from_linear(linear, activation="tensor", weight="tensor")),
        ("fp8-token", Fp8Linear.from_linear),
        ("fp8-block", Fp8BlockLinear.from_linear),
        ("w8a16-fp8", Fp8WeightOnlyLinear.from_linear),
        ("w8a16-fp8-block", lambda linear: Fp8WeightOnlyLinear.from_linear(linear, block=(128, 128))),
    ],
)
def test_fp8_schemes(scheme: str, same: Callable[[nn.Linear], nn.Module], seed: int) -> None:
    model, inputs = LanguageModel().eval(), tokens()
    expected, linear = model(inputs), copy.deepcopy(model.blocks[1].up)
    epiloq.quantize_(model, scheme, calibrate=lambda m: pytest.fail("calibrated"))
    made = [name for name, module in model.named_modules() if isinstance(module, FP8_LAYERS)]
    assert made == [*IN_BLOCKS, "head"]
    x = torch.randn(5, 20)
    assert repr(model.blocks[1].up) == repr(same(linear))
    assert torch.equal(model.blocks[1].up(x), same(linear)(x))
    error = (model(inputs) - expected).norm() / expected.norm()
    assert 0 < error < 0.06


@pytest.mark.parametrize("scheme", NAMES)
def test_a_quantised_model_compiles(scheme: str, seed: int) -> None:
    model, inputs = LanguageModel().eval(), tokens()
    epiloq.quantize_(model, scheme, calibrate=lambda m: m(inputs))
    torch._dynamo.reset()  # it compiles one function for few models only
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(inputs), model(inputs))


def test_dynamic_schemes_equal_from_linear_and_do_not_calibrate(seed: int) -> None:
    model = LanguageModel()
    linear = copy.deepcopy(model.blocks[1].up)
    epiloq.quantize_(model, "w8a8-int8-azp", calibrate=lambda m: pytest.fail("calibrated"))
    x = torch.randn(5, 20)
    assert torch.equal(model.blocks[1].up(x), Int8Linear.from_linear(linear, symmetric=False)(x))


@pytest.mark.parametrize("scheme", [["w8a16"], 4, {"w8a16": 1}], ids=str)
def test_invalid_scheme_names(scheme: Any) -> None:
    with pytest.raises(ValueError, match=r"quantize_: scheme: expected one of w8a8-int8, .*, got "):
        epiloq.quantize_(nn.Sequential(nn.Linear(8, 8)), scheme)


def test_invalid_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"quantize_: model: expected a torch.nn.Module, got str; .*from_pretrained"):
        epiloq.quantize_("facebook/opt-125m", "w8a16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"calibrate": torch.zeros(4, 8)},
            r"calibrate: expected a function to be called as calibrate\(model\), got Tensor",
        ),
        ({"filter_fn": "0"}, r"filter_fn: expected a function to be called as filter_fn\(module, name\), got str"),
        ({"ignore": 0}, "ignore: expected patterns of layers' names, got int"),
        ({"ignore": ["0", 1]}, "ignore: expected patterns of layers' names, got int"),
        ({"ignore": [nn.Linear]}, "ignore: expected patterns of layers' names, got type"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_refused_by_name(arguments: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(TypeError, match=f"^quantize_: {message}"):
        epiloq.quantize_(model, "w8a8-int8-static", **{"calibrate": lambda m: m(torch.randn(4, 8))} | arguments)
    assert all(type(layer) is nn.Linear for layer in model)
    for argument in {"calibrate", "filter_fn"} & arguments.keys():
        with pytest.raises(TypeError, match=f"^smoothquant_: {message}"):
            smoothquant_(model, **{"calibrate": lambda m: m(torch.randn(4, 8))} | {argument: arguments[argument]})


@pytest.mark.parametrize("observer", [["mse"], None, "mean"], ids=str)
def test_unknown_observers_are_refused(observer: Any) -> None:
    with pytest.raises(ValueError, match=r"quantize_: observer: expected one of min-max, .*, got "):
        epiloq.quantize_(nn.Sequential(nn.Linear(8, 8)), "w8a16", observer=observer)


@pytest.mark.parametrize("options", [{"bits": 5}, {"group_size": 0}, {"group_size": 2**40}], ids=str)
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("WeightOnlyLinear", lambda **o: WeightOnlyLinear.from_linear(nn.Linear(64, 32), **o)),
        ("WeightOnlyConv2d", lambda **o: epiloq.nn.WeightOnlyConv2d.from_conv2d(nn.Conv2d(64, 32, 3), **o)),
        ("QuantizedEmbedding", lambda **o: epiloq.nn.QuantizedEmbedding.from_embedding(nn.Embedding(64, 32), **o)),
    ],
)
def test_sizes_no_layer_has_are_refused_by_its_name(kind: str, make: Callable[..., Any], options: Any) -> None:
    with pytest.raises(ValueError, match=rf"{kind}: {next(iter(options))}: expected "):
        make(**options)
