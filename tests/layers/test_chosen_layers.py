"""Which layers epiloq.quantize_ replaces: by kind, by name, by what reads their weights."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn import Int8Linear, WeightOnlyLinear
from toy_language_model import IN_BLOCKS, LanguageModel, quantised


class HeadByMethod(LanguageModel):
    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule(self.head_name)


def tied_by_data() -> LanguageModel:
    model = LanguageModel()
    model.head.weight.data = model.embed.weight.data
    return model


def tied_on_meta() -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(tied=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LanguageModel("lm_head"),
        lambda: LanguageModel(tied=True),
        lambda: HeadByMethod("output"),
        tied_by_data,
        tied_on_meta,
    ],
    ids=["named", "tied", "method", "tied-by-data", "tied-on-meta"],
)
def test_an_output_head_is_left_alone_by_default(make: Callable[[], LanguageModel]) -> None:
    model = make()
    head = model.get_submodule(model.head_name)
    epiloq.quantize_(model, "w8a8-int8")
    assert quantised(model) == IN_BLOCKS
    assert model.get_submodule(model.head_name) is head


class Listed(nn.Module):
    """Runs what it keeps in a list and in a dictionary, registered for the state dict alone; and a layer as usual."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.listed, self.named, self.usual = [layer(), nn.GELU()], {"last": [layer()]}, layer()
        self.add_module("0", self.listed[0])
        self.add_module("1", self.named["last"][0])

    def forward(self, x: Tensor) -> Tensor:
        return self.named["last"][0](self.listed[1](self.listed[0](self.usual(x))))


@pytest.mark.parametrize(
    ("scheme", "layer"),
    [("w8a16", lambda: nn.Linear(32, 32)), ("conv-w8a16", lambda: nn.Conv2d(32, 32, 1))],
    ids=["linear", "convolution"],
)
def test_layers_that_a_class_holds_beside_its_children(seed: int, scheme: str, layer: Callable[[], nn.Module]) -> None:
    """Another layer in the child's place would never run."""
    model = nn.Sequential(Listed(layer))
    kept, kind = model[0].listed[0], type(model[0].usual)
    with pytest.raises(ValueError, match=r"'0\.0': cannot be replaced, as Listed holds it in a list"):
        epiloq.quantize_(model, scheme, lambda module, name: True)
    with pytest.warns(UserWarning, match=r"0\.0, 0\.1 \(Listed holds it in a list or attribute besides its children"):
        epiloq.quantize_(model, scheme)
    assert model.get_submodule("0.0") is kept and type(model.get_submodule("0.1")) is kind
    assert type(model[0].usual).__module__.startswith("epiloq")


def test_equivalent_subclasses_are_converted_and_others_can_be_selected(seed: int) -> None:
    class Same(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    class Rectified(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    class Routing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).topk(2).indices  # type: ignore[no-any-return]

    class Adapted(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.adapter = nn.Parameter(torch.zeros(outputs))

    class Masked(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.register_buffer("mask", torch.ones(outputs, inputs))

    model = nn.Sequential(*(kind(16, 16) for kind in (nn.Linear, Same, Rectified, Routing, Adapted, Masked)))
    model.append(nn.MultiheadAttention(16, 2))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    x, exact = torch.randn(3, 16), model[1]
    expected = exact(x)
    epiloq.quantize_(model, "w8a8-int8")
    assert quantised(model) == ["0", "1"]
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items() if name[0] in "23456")
    assert float((model[1](x) - expected).detach().norm() / expected.detach().norm()) < 0.05
    epiloq.quantize_(model, "w8a8-int8", lambda module, name: isinstance(module, Rectified))
    assert quantised(model) == ["0", "1", "2"]


class Aside(nn.Module):
    """Has no forward, and is called by another method."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.Linear(16, 16)

    def twice(self, x: Tensor) -> Tensor:
        return self.h(self.h(x)) + self.h.weight.sum()  # type: ignore[no-any-return]


class Peeking(nn.Module):
    """Reads weights of its children in every way that counts, and in some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(16, 16) for _ in range(6))
        self.inner = nn.ModuleDict({"g": nn.Linear(16, 16)})
        self.slices, self.aside = 1, Aside()
        self.calls, self.first = 0, nn.Linear(16, 16)
        self.listed = nn.ModuleList(nn.ModuleDict({"i": nn.Linear(16, 16)}) for _ in range(2))
        self.looped = nn.ModuleList(nn.ModuleDict({"j": nn.Linear(16, 16)}) for _ in range(2))

    def _apply_b(self, x: Tensor) -> Tensor:
        return x @ self.b.weight

    @property
    def type_of_c(self) -> torch.dtype:
        return self.c.weight.dtype

    def reset(self) -> None:
        nn.init.zeros_(self.f.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.aside.twice(x) + self.listed[1].i.weight.mean()
        for number, layer in enumerate(self.looped[:2]):
            x = x + number * layer.j.weight.mean()
        x = nn.functional.linear(x, self.a.weight, self.a.bias)
        x = self._apply_b(x).to(self.type_of_c)
        inner = self.d
        x = x + inner.weight.sum() + self.inner.g.weight.sum()
        if self.training:
            return x @ self.e.weight
        if self.calls == 0:
            x = x + self.first.weight.mean()
        self.calls += 1
        if self.slices > 1 and x.shape[0] > 2:
            return x @ self.f.weight
        return self.f(self.e(self.d(self.c(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", ["w8a8-int8", "fp8-token", "w8a8-block", "w4a16-g32"])
def test_layers_whose_weight_is_read_are_kept_and_named(seed: int, scheme: str) -> None:
    model, x = nn.Sequential(Peeking(), nn.Linear(16, 16)).eval(), torch.randn(3, 16)
    same = copy.deepcopy(model)
    with torch.no_grad():
        with pytest.warns(
            UserWarning, match=r" 0\.a, .*0\.inner\.g, .*\(Peeking reads its weight\); 0\.aside\.h \(Aside reads"
        ) as warned:
            epiloq.quantize_(model, scheme)
        found = model(x)
    assert quantised(model) == ["0.e", "0.f", "1"]
    read = ["a", "b", "c", "d", "listed.0.i", "listed.1.i", "looped.0.j", "looped.1.j", "first"]
    assert {f"0.{name}" for name in read} <= set(re.findall(r"[\w.]+", str(warned[0].message)))
    for name in quantised(model):
        same.set_submodule(name, model.get_submodule(name))
    with torch.no_grad():
        assert torch.equal(found, same(x))


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ("0", ["0.0", "0.1"]),
        ("0.1", ["0.1"]),
        (["*.1"], ["0.1", "1.1"]),
        (["re:1\\.", "0.0"], ["0.0", "1.0", "1.1"]),
        (["?.0"], ["0.0", "1.0"]),
    ],
)
def test_layers_to_ignore(patterns: str | list[str], left: list[str]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)), nn.Linear(16, 16))
    epiloq.quantize_(model, "w8a16", ignore=patterns)
    assert quantised(model) == [name for name in ("0.0", "0.1", "1.0", "1.1", "2") if name not in left]


@pytest.mark.parametrize(
    ("pattern", "text"), [("*.q_proj", "no layer matches"), ("re:(", "expected a regular expression")]
)
def test_patterns_without_matches(pattern: str, text: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ValueError, match=f"quantize_: ignore: .*{text}"):
        epiloq.quantize_(model, "w8a16", ignore=pattern)
    assert type(model[0]) is nn.Linear


def test_unsupported_layers_are_kept_and_named(seed: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.float64), nn.Linear(16, 0))
    with pytest.warns(UserWarning, match=r"left in floating point: 1 \(.*float64\); 2 \(.*at least 1"):
        epiloq.quantize_(model, "w8a8-int8")
    assert quantised(model) == ["0"]


@pytest.mark.parametrize("mask", [False, True])
def test_fused_encoder_layers_still_run(mask: bool, seed: int) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    model = nn.Sequential(nn.Linear(8, 16), encoder).eval()
    epiloq.quantize_(model, "w8a8-int8")
    assert quantised(model) == ["0"]
    padding = torch.arange(5).expand(3, 5) >= torch.tensor([[5], [3], [2]]) if mask else None
    with torch.no_grad():
        assert model[1](model[0](torch.randn(3, 5, 8)), src_key_padding_mask=padding).isfinite().all()


def test_filter_fn_sees_linears_by_name_and_overrides_the_default(seed: int) -> None:
    model, seen = LanguageModel("lm_head", tied=True), []

    def takes(module: nn.Module, name: str) -> bool:
        seen.append(name)
        assert model.get_submodule(name) is module
        return name in ("lm_head", "blocks.2.down")

    epiloq.quantize_(model, "w8a8-int8", takes)
    assert seen == [*IN_BLOCKS, "lm_head"]
    assert quantised(model) == ["blocks.2.down", "lm_head"]
    assert isinstance(model.embed, nn.Embedding)
    assert model.embed.weight.dtype == torch.float32


def test_a_shared_layer_stays_shared(seed: int) -> None:
    shared = nn.Linear(12, 12)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared))
    inputs = torch.randn(64, 12)
    epiloq.quantize_(model, "w8a8-int8-static", calibrate=lambda m: m(inputs))
    assert isinstance(model[0], Int8Linear)
    assert model[2][0] is model[0]
    seen = torch.cat((inputs, shared(inputs).relu()))
    assert model[0].input_scale.item() == pytest.approx(((seen.max() - seen.min()) / 255).item())


def test_float_weights_are_released_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive: list[int] = []
    original = Int8Linear.from_linear

    def counting(linear: nn.Linear, **arguments: object) -> Int8Linear:
        alive.append(sum(ref() is not None for ref in weights))
        return original(linear, **arguments)

    monkeypatch.setattr(Int8Linear, "from_linear", counting)
    epiloq.quantize_(model, "w8a8-int8")
    assert alive == [4, 3, 2, 1]
    assert all(ref() is None for ref in weights)


def test_a_lazy_layer_is_left_with_its_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.LazyLinear(2))
    with pytest.warns(UserWarning, match=r"left in floating point: 1 \(its lazy weight has no shape yet"):
        epiloq.quantize_(model, "w8a16")
    assert isinstance(model[0], WeightOnlyLinear) and type(model[1]) is nn.LazyLinear
