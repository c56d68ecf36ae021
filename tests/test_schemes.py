"""epiloq.quantize_ and the table of schemes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq import schemes
from epiloq.nn import Int8Linear

NAMES = ("w8a8-int8", "w8a8-int8-azp", "w8a8-int8-static")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class LanguageModel(nn.Module):
    """Embedding, blocks, head, as language models are built; `head` is the head's attribute name."""

    def __init__(self, head: str = "head", tied: bool = False, width: int = 20, vocabulary: int = 33) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head_name = head
        self.add_module(head, nn.Linear(width, vocabulary, bias=False))
        if tied:
            self.get_submodule(head).weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.get_submodule(self.head_name)(x)


IN_BLOCKS = [f"blocks.{i}.{leaf}" for i in range(3) for leaf in ("up", "down")]


def tokens() -> Tensor:
    return torch.randint(0, 33, (4, 16))


def quantised(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]


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


def test_the_table() -> None:
    assert schemes.available() == NAMES
    assert all("\n" not in scheme.description and scheme.description for scheme in schemes.SCHEMES.values())


@pytest.mark.parametrize("scheme", NAMES)
def test_quantises_in_place_and_stays_close(scheme: str, seed: int) -> None:
    model, inputs = LanguageModel().eval(), tokens()
    expected = model(inputs)
    result = epiloq.quantize_(model, scheme, calibrate=lambda m: m(inputs))
    assert result is model
    assert quantised(model) == [*IN_BLOCKS, "head"]
    row = schemes.SCHEMES[scheme]
    layer = model.blocks[0].up
    assert (layer.activation, layer.symmetric) == (row.activation, row.symmetric)
    error = (model(inputs) - expected).norm() / expected.norm()
    assert 0 < error < 0.03


@pytest.mark.parametrize("scheme", NAMES)
def test_a_quantised_model_compiles(scheme: str, seed: int) -> None:
    model, inputs = LanguageModel().eval(), tokens()
    epiloq.quantize_(model, scheme, calibrate=lambda m: m(inputs))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(inputs), model(inputs))


def test_dynamic_schemes_equal_from_linear_and_do_not_calibrate(seed: int) -> None:
    model = LanguageModel()
    linear = copy.deepcopy(model.blocks[1].up)
    epiloq.quantize_(model, "w8a8-int8-azp", calibrate=lambda m: pytest.fail("calibrated"))
    x = torch.randn(5, 20)
    assert torch.equal(model.blocks[1].up(x), Int8Linear.from_linear(linear, symmetric=False)(x))


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


def test_subclasses_are_left_alone_by_default_but_can_be_chosen(seed: int) -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(16, 16), Special(16, 16))
    epiloq.quantize_(model, "w8a8-int8")
    assert quantised(model) == ["0"]
    epiloq.quantize_(model, "w8a8-int8", lambda module, name: isinstance(module, Special))
    assert quantised(model) == ["0", "1"]


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


@pytest.mark.parametrize(("symmetric", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.half)])
def test_calibration_takes_the_range_of_everything_seen(
    symmetric: bool, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = schemes.Scheme("test-static", "static activations", "static", symmetric)
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
def test_errors_leave_the_model_untouched(
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


def test_quantising_twice_is_refused(seed: int) -> None:
    model = epiloq.quantize_(LanguageModel(), "w8a8-int8")
    with pytest.raises(ValueError, match="already"):
        epiloq.quantize_(model, "w8a8-int8-azp")


def test_a_bare_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="from_linear"):
        epiloq.quantize_(nn.Linear(4, 4), "w8a8-int8")
