"""Subclasses that compute something else, and weights that are not finite: named, and nothing else is changed."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import epiloq
from epiloq.models.subclasses import is_plain
from epiloq.schemes import SCHEMES


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class SameByAnotherName(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y = torch.einsum("...k,nk->...n", input, self.weight)
        return y if self.bias is None else y + self.bias


class Centred(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class Halved(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight / 2, bias)


class Gained(nn.Conv2d):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(1))


class Renamed(nn.Conv2d):
    pass


def said_of(model: nn.Module, scheme: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epiloq.quantize_(model, scheme)
    return "".join(str(each.message) for each in caught if "left in" in str(each.message))


def kept(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_children() if isinstance(module, (nn.Linear, nn.Conv2d))]


def test_subclassed_linear_layers_are_kept_and_named(seed: int) -> None:
    model = nn.Sequential(
        nn.Linear(24, 24), Doubled(24, 24), SameByAnotherName(24, 24), SameByAnotherName(24, 9, bias=False)
    )
    x = torch.randn(5, 24)
    expected = model(x)
    assert said_of(model, "w8a16") == "quantize_: left in floating point: 1 (Doubled is not a plain linear layer)"
    assert kept(model) == ["1"]
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)


def test_subclassed_convolutions_are_kept_and_named(seed: int) -> None:
    pruned = nn.Conv2d(32, 32, 1)
    prune.l1_unstructured(pruned, "weight", 0.5)
    model = nn.Sequential(
        Centred(3, 32, 3),
        Renamed(32, 32, 3),
        Halved(32, 32, 1),
        parametrizations.weight_norm(nn.Conv2d(32, 32, 3)),
        pruned,
        Gained(32, 32, 1),
    )
    x = torch.randn(2, 3, 11, 9)
    expected = model(x)
    text = said_of(model, "conv-w8a16")
    assert text == (
        "quantize_: left in floating point: 0 (Centred is not a plain convolution); "
        "2 (Halved is not a plain convolution); 5 (Gained is not a plain convolution)"
    )
    assert kept(model) == ["0", "2", "5"]
    torch.testing.assert_close(model(x), expected, rtol=0.03, atol=0.03)


def test_explicitly_selected_subclass_is_converted_without_warning(seed: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Gained(8, 8, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epiloq.quantize_(model, "conv-w8a16", lambda module, name: name == "1")
    assert kept(model) == ["0"]


def rounding(observed: nn.Module) -> nn.Module:
    """A layer of quantisation-aware training, which rounds its float weight in each call."""
    observed.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
    made: Any = torch.ao.nn.qat.Conv2d if isinstance(observed, nn.Conv2d) else torch.ao.nn.qat.Linear
    return made.from_float(observed)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*(reduce_range|torch.ao.quantization)")
@pytest.mark.parametrize("scheme", ["w8a16", "conv-w8a16"])
def test_layers_of_other_quantisers_are_refused_by_name(scheme: str, seed: int) -> None:
    """Also where they are chosen: their weights are not what they compute with."""
    make: Any = (lambda: nn.Linear(32, 32)) if scheme == "w8a16" else (lambda: nn.Conv2d(32, 32, 1))
    model = nn.Sequential(rounding(make()), rounding(make()), make())
    why = f"{type(model[0]).__name__} of torch.ao quantises by itself: quantise the float model"
    with pytest.raises(ValueError, match=f"^quantize_: layer '1': {why}"):
        epiloq.quantize_(model, scheme, lambda module, name: name == "1")
    with pytest.raises(ValueError, match=f"got none; 0, 1: {why}"):
        epiloq.quantize_(model[:2], scheme)
    assert said_of(model, scheme) == f"quantize_: left in floating point: 0, 1 ({why})"
    assert kept(model) == ["0", "1"]


@pytest.mark.filterwarnings("ignore:.*(reduce_range|torch.ao.quantization)")
def test_heads_and_embeddings_of_other_quantisers(seed: int) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 32), "lm_head": rounding(nn.Linear(32, 50))})
    with pytest.raises(ValueError, match=r"layer 'lm_head': Linear of torch\.ao quantises by itself"):
        epiloq.quantize_(model, None, head="w8a16")
    model["embed"].qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig
    model["embed"] = torch.ao.nn.qat.Embedding.from_float(model["embed"])  # type: ignore[no-untyped-call]
    with pytest.raises(
        ValueError, match="expected no parameters and modules but weight, got weight, weight_fake_quant"
    ):
        epiloq.quantize_(model, None, embedding="w8a16")


def test_reasons_are_not_repeated_for_each_layer() -> None:
    model = nn.Sequential(*(Doubled(8, 8) for _ in range(40)))
    with pytest.raises(ValueError, match=r"got none; 0, 1, 2 and 37 more: Doubled is not a plain linear layer$"):
        epiloq.quantize_(model, "w8a16")
    said = said_of(nn.Sequential(nn.Linear(8, 8), *model), "w8a16")
    assert said.count("Doubled") == 1 and all(f" {i}," in said for i in range(1, 40)) and " 40 (" in said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_weight_that_is_not_finite_is_named_before_anything_changes(scheme: str, value: float, seed: int) -> None:
    made: Any = nn.Conv2d if SCHEMES[scheme].layer is nn.Conv2d else nn.Linear
    sizes = (32, 32, 1) if made is nn.Conv2d else (128, 128)
    model = nn.Sequential(made(*sizes), nn.Sequential(made(*sizes)))
    bad = model.get_submodule("1.0")
    with torch.no_grad():
        bad.weight.view(-1)[-1] = value  # type: ignore[operator,union-attr]
    with pytest.raises(ValueError, match=r"quantize_: layer '1\.0': .*weight: expected finite numbers"):
        epiloq.quantize_(model, scheme, calibrate=lambda _: None)
    assert {type(module) for module in model.modules()} == {nn.Sequential, made}
    kind = SCHEMES[scheme].module
    make = kind.from_conv2d if hasattr(kind, "from_conv2d") else kind.from_linear
    seen = {"input_scale": 1.0, "input_zero_point": 0} if SCHEMES[scheme].static else {}
    with pytest.raises(ValueError, match=f"{kind.__name__}: .*weight: expected finite numbers"):
        make(bad, **SCHEMES[scheme].options, **seen)


@pytest.mark.parametrize("end", ["head", "embedding"])
def test_embeddings_and_heads_of_all_kinds(end: str, seed: int) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 32), "body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 50)})
    name = "lm_head" if end == "head" else "embed"
    with torch.no_grad():
        model[name].weight[7, 3] = math.inf  # type: ignore[index,operator]
    with pytest.raises(ValueError, match=f"quantize_: layer '{name}': .*weight: expected finite numbers"):
        epiloq.quantize_(model, "w8a16", **{end: "w8a16"})
    assert type(model["body"]) is nn.Linear


@pytest.mark.parametrize(
    "scheme",
    ["w8a8-int8", "fp8-token", "fp8-block", "w8a16-fp8", "w4a8-int8", "w4a16-g32", "w4a16-nvfp4", "w4a8-block"],
)
def test_empty_batches_of_any_strides(scheme: str, seed: int) -> None:
    """torch calls every empty tensor contiguous, whatever its strides."""
    model = epiloq.quantize_(nn.Sequential(nn.Linear(64, 48)), scheme)
    for x in (torch.zeros(0, 128)[:, ::2], torch.zeros(64, 0).t(), torch.zeros(3, 0, 128)[..., ::2]):
        assert model(x).shape == (*x.shape[:-1], 48)
    rows = torch.randn(5, 128)[:, ::2]
    assert torch.equal(model(rows), model(rows.contiguous()))


class Limited(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-50, 50)


class OfSmallInputs(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-3, 3))


class DroppedOut(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Tripled(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 3  # type: ignore[no-any-return]


class TripledConv2d(nn.Conv2d):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 3  # type: ignore[no-any-return]


def test_foldings_that_fail_for_some_inputs_are_rejected(seed: int) -> None:
    """Large values, training, and a call that does more than ``forward``."""
    kinds = (Limited, OfSmallInputs, DroppedOut, Tripled)
    model = nn.Sequential(*(kind(32, 32) for kind in kinds), nn.Linear(32, 32)).eval()
    text = said_of(model, "w8a16")
    assert kept(model) == ["0", "1", "2", "3"] and all(f"{kind.__name__} is not a plain" in text for kind in kinds)
    images = nn.Sequential(TripledConv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    assert "0 (TripledConv2d is not a plain" in said_of(images, "conv-w8a16") and kept(images) == ["0"]


class ByMatmul(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_subclasses_are_judged_alike_under_any_defaults(seed: int) -> None:
    """As models are opened: on the meta device, by another type."""
    layers = ByMatmul(64, 32), Limited(64, 32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert [is_plain(layer) for layer in layers] == [True, False]
    finally:
        torch.set_default_dtype(before)


def test_scripted_layers_are_named() -> None:
    model = nn.Sequential(nn.Linear(32, 32), torch.jit.script(nn.Sequential(nn.Linear(32, 32))))  # type: ignore[no-untyped-call]
    assert said_of(model, "w8a16") == (
        "quantize_: left in floating point: 1.0 (TorchScript has compiled it: quantise the model before "
        "torch.jit.script)"
    )
    with pytest.raises(ValueError, match=r"got none; 0: TorchScript has compiled it"):
        epiloq.quantize_(model[1], "w8a16")
    with pytest.raises(ValueError, match=r"Conv2d to be chosen, got none; 0: TorchScript has compiled it"):
        epiloq.quantize_(torch.jit.script(nn.Sequential(nn.Conv2d(8, 8, 1))), "conv-w8a16")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["w8a16", "w8a8-int8", "w4a16-mxfp4"])
def test_hooks_are_called_as_before(name: str, seed: int) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.utils.weight_norm(nn.Linear(32, 32)))
    x, calls = torch.randn(4, 32), list[str]()
    plain = epiloq.quantize_(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), name)
    handles = [
        model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
        model[1].register_forward_hook(lambda module, given, made: calls.append(type(module).__name__) or made * 3),
        model[0].register_forward_pre_hook(
            lambda module, given, named: calls.append("before") or None, with_kwargs=True
        ),
    ]
    epiloq.quantize_(model, name)
    for part, layer in zip(plain, model, strict=True):
        part.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), 3 * plain[1](plain[0](2 * x)))
        assert calls == ["before", type(plain[1]).__name__]
        for handle in handles:
            handle.remove()
        assert torch.equal(model(x), plain(x))
