"""Models whose products are merged and whose passes are fused compute what they computed before."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers

import epiloq
from epiloq.optimize import optimize_
from epiloq.optimize.siblings import siblings_of
from small_models import FAMILIES, SIZES, equal_sequences, logits, quantised, relative, rounding_noise, tokens

FLOAT_INPUTS = ("w4a16-g32", "w8a16", "w4a16-mxfp4", "w8a16-fp8", "w8a16-fp8-block")
SCHEMES = (
    *FLOAT_INPUTS,
    "w8a8-block",
    "w8a8-int8-azp",
    "fp8",
    "w8a8-int8",
    "fp8-token",
    "fp8-block",
    "w4a8-fp8",
    "w4a8-int8",
    "w4a8-mxfp4-fp8",
    "w4a8-nvfp4-fp8",
)


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    mine, other = a.state_dict(), b.state_dict()
    assert list(mine) == list(other)
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape
        assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (tensor, other[name]))), name


def assert_same_logits(model: nn.Module, plain: nn.Module, scheme: str, x: Tensor) -> None:
    """Of an optimised model and a plain one with the same weights, on `x`; on fresh tokens too where they are rounded.

    Activations near a tie may be rounded the other way, which is no more than the noise of rounding.
    """
    floats = scheme in FLOAT_INPUTS
    assert relative(logits(model, x), logits(plain, x)) <= (1e-5 if floats else rounding_noise(plain, x))
    assert floats or equal_sequences(model, plain) >= 4


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_state(seed: int, family: str, scheme: str) -> None:
    model, x = quantised(family, scheme), tokens()
    before = copy.deepcopy(model)
    report = optimize_(model)
    # Key and value have 64 rows, and blocks 128: those layers stay apart, and their attention as it is.
    merged, fused = FAMILIES[family][2:]
    apart = 2 if scheme.endswith("fp8-block") and merged else 0
    # A decoder layer with norms after attention and MLP has nothing to join but a step of the whole.
    stepped = apart if family == "gemma3" else 0
    assert len(report.merged) == merged - apart
    assert len(report.fused) == fused - apart - stepped
    assert_same_logits(model, before, scheme, x)
    assert_same_state(model, before)


def test_nvfp4_is_merged_where_the_scale_of_the_weight_is_one(seed: int) -> None:
    """As `quantize_` shares it among layers of one input; scales of their own are named, and all else is joined."""
    model, x = quantised("llama", "w4a16-nvfp4"), tokens()
    plain, expected = copy.deepcopy(model), logits(model, x)
    assert len(optimize_(model).merged) == 4
    assert relative(logits(model, x), expected) <= 1e-5
    for block in plain.model.layers:
        block.mlp.up_proj.weight_global_scale.data.mul_(2)
    expected = logits(plain, x)
    report = optimize_(plain)
    assert len(report.merged) == 2 and set(report.left.values()) == {"different weight_global_scale"}
    assert report.fused and relative(logits(plain, x), expected) <= 1e-5


def test_a_kind_that_is_not_merged_is_named(seed: int) -> None:
    model, x = quantised("llama", "w8a16"), tokens()
    for block in model.model.layers:
        for name in ("up_proj", "gate_proj"):
            layer = block.mlp.get_submodule(name)
            table = epiloq.nn.TableLinear(layer.in_features, layer.out_features, False, dtype=torch.float32)
            block.mlp.set_submodule(name, table.eval())
    expected = logits(model, x)
    report = optimize_(model)
    assert report.left["model.layers.1.mlp.{gate_proj,up_proj}"] == "TableLinear has no merged form"
    assert relative(logits(model, x), expected) <= 1e-5


def test_tensors_are_stored_once(seed: int) -> None:
    model = quantised("llama", "w4a16-g32")
    optimize_(model)
    attention = model.model.layers[0].self_attn
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    siblings = siblings_of(*layers)
    assert siblings is not None
    whole = siblings.merged().weight_q
    assert [layer.weight_q.untyped_storage().data_ptr() for layer in layers] == 3 * [whole.untyped_storage().data_ptr()]


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8", "w8a8-block", "w8a8-int8-azp"])
def test_loaded_and_moved_weights_are_used(seed: int, scheme: str) -> None:
    model, other, x = quantised("llama", scheme), quantised("llama", scheme), tokens()
    optimize_(model)
    logits(model, x)
    model.load_state_dict(other.state_dict())
    expected = logits(other, x)
    assert_same_logits(model, other, scheme, x)
    copies = {"deepcopy": copy.deepcopy(model)}
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies["pickle"] = torch.load(buffer, weights_only=False)
    for name, made in copies.items():
        assert torch.equal(logits(made, x), logits(model, x)), name
        made.load_state_dict(quantised("llama", scheme).state_dict())
        assert torch.equal(logits(model, x), logits(model, x)) and relative(logits(made, x), expected) > 0.1, name
    model.to(torch.bfloat16)
    assert relative(logits(model, x).float(), logits(other.to(torch.bfloat16), x).float()) <= 0.1


def test_single_layers(seed: int) -> None:
    """Each with an input of its own, in any order, the same input twice, and one that is written in between."""
    model = quantised("qwen2", "w4a16-g32")
    plain = copy.deepcopy(model).model.layers[0].self_attn
    optimize_(model)
    merged = model.model.layers[0].self_attn
    inputs = [torch.randn(3, 128) for _ in range(2)]
    with torch.no_grad():
        for name, which in (("v_proj", 0), ("q_proj", 1), ("k_proj", 0), ("k_proj", 0), ("q_proj", 0), ("v_proj", 1)):
            x = inputs[which]
            assert torch.equal(getattr(merged, name)(x), getattr(plain, name)(x)), name
        merged.q_proj(x)
        x.mul_(2)
        assert torch.equal(merged.k_proj(x), plain.k_proj(x))


class Adapter(nn.Module):
    """Replaces a layer as PEFT does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(128, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a8-int8"])
@pytest.mark.parametrize("place", ["self_attn.q_proj", "mlp.up_proj"])
def test_adapter_added_after_quantisation(seed: int, scheme: str, place: str) -> None:
    model, x = quantised("llama", scheme), tokens()
    other = copy.deepcopy(model)
    optimize_(model)
    adapter = Adapter(model.model.layers[0].get_submodule(place))
    for target, base in ((model, adapter.base), (other, other.model.layers[0].get_submodule(place))):
        parent, _, leaf = place.rpartition(".")
        made = Adapter(base)
        made.a, made.b = adapter.a, adapter.b
        setattr(target.model.layers[0].get_submodule(parent), leaf, made)
    assert relative(logits(model, x), logits(other, x)) <= 5e-3
    adapter.b.weight.data.zero_()


def test_hooks_are_respected(seed: int) -> None:
    model, x, seen = quantised("llama", "w8a8-int8"), tokens(), []
    attention = model.model.layers[1].self_attn
    attention.k_proj.register_forward_hook(lambda *call: seen.append(call[1][0].dtype))
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)
    expected = logits(model, x)
    report = optimize_(model)
    assert report.left["model.layers.1.self_attn.{q_proj,k_proj,v_proj}"] == "a layer has hooks"
    assert report.left["model.layers.0"] == "it has hooks"
    assert "left as it is" in str(report)
    assert relative(logits(model, x), expected) <= 5e-3
    assert seen == 2 * [torch.float32]


def test_refused_models_are_not_changed(seed: int) -> None:
    model = quantised("llama", "w8a8-int8")
    model.train()
    with pytest.raises(ValueError, match="model: expected eval mode"):
        optimize_(model)
    assert all("forward" not in vars(module) for module in model.modules())
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with pytest.raises(ValueError, match="expected quantised linear layers, got none"):
        optimize_(plain)


def test_twice_is_once(seed: int) -> None:
    model, x = quantised("llama", "fp8-token"), tokens()
    optimize_(model)
    expected = logits(model, x)
    report = optimize_(model)
    assert not report.merged and not report.fused
    assert torch.equal(logits(model, x), expected)


def test_shared_modules_and_mixed_schemes(seed: int) -> None:
    model, x = quantised("llama", "w8a8-int8"), tokens()
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    floats = nn.Linear(128, 64, bias=False)
    layers[1].self_attn.v_proj = floats
    layers[0].self_attn.v_proj = layers[0].self_attn.k_proj
    expected = logits(model, x)
    report = optimize_(model)
    assert report.merged == ["model.layers.0.mlp.{gate_proj,up_proj}"]
    reasons = {name.split(".")[2]: reason for name, reason in report.left.items()}
    assert reasons["0"] == "one layer under several names"
    assert reasons["1"] == "not layers of one quantised kind: Int8Linear, Int8Linear, Linear"
    assert relative(logits(model, x), expected) <= 5e-3


def test_unknown_forward_is_not_replaced(seed: int) -> None:
    class Scaled(transformers.models.llama.modeling_llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    model, x = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval(), tokens()
    model.model.layers[0].mlp.__class__ = Scaled
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    epiloq.quantize_(model, "w8a8-int8")
    expected = logits(model, x)
    report = optimize_(model)
    assert [name for name in report.fused if name.endswith(".mlp")] == ["model.layers.1.mlp"]  # of any activation
    assert len(report.merged) == 4
    assert relative(logits(model, x), expected) <= 5e-3


def test_gradients_flow_through_the_layer(seed: int) -> None:
    model = quantised("llama", "w4a16-g32")
    other = copy.deepcopy(model)
    optimize_(model)
    x = torch.randn(1, 5, 128)
    grads = []
    for each in (model, other):
        embedded = x.clone().requires_grad_()
        each(inputs_embeds=embedded).logits.square().sum().backward()
        grads.append(embedded.grad)
    assert relative(*grads) <= 1e-5


def test_threads_do_not_mix_their_inputs(seed: int) -> None:
    model = quantised("llama", "w8a8-int8")
    optimize_(model)
    inputs = [tokens() for _ in range(4)]
    expected = [logits(model, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for actual, wanted in zip(pool.map(lambda x: logits(model, x), inputs), expected, strict=True):
                assert torch.equal(actual, wanted)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "fp8-block"])
def test_generate(seed: int, scheme: str, cache: str | None) -> None:
    model, x = quantised("llama", scheme), tokens()
    other = copy.deepcopy(model)
    assert optimize_(model).grouped_attention
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    if cache is not None:
        options["cache_implementation"] = cache
    assert torch.equal(model.generate(x, **options), other.generate(x, **options))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiles_as_one_graph(seed: int, scheme: str) -> None:
    torch._dynamo.reset()
    model, x = quantised("llama", scheme), tokens()
    bound = 1e-5 if scheme in FLOAT_INPUTS else rounding_noise(model, x)
    optimize_(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # A graph has torch's norms and activations, whose last bit may, rarely, round a quantised activation the other way.
    assert relative(logits(compiled, x), logits(model, x)) <= bound
    assert scheme in FLOAT_INPUTS or equal_sequences(compiled, model) >= 4


@pytest.mark.parametrize("scheme", ["w4a8-fp8", "w4a8-int8", "w4a8-mxfp4-fp8"])
@pytest.mark.parametrize("family", ["llama", "gemma"])  # with norms that quantise, and without
def test_weight_only_for_few_tokens(seed: int, family: str, scheme: str) -> None:
    """Below the number of tokens the model is that of weights alone, from there on that of the scheme."""
    model, x = quantised(family, scheme), tokens()  # 22 of them
    of_scheme, alone = copy.deepcopy(model), copy.deepcopy(model)
    optimize_(of_scheme)
    optimize_(alone, weight_only_below=10**9)
    assert relative(logits(alone, x), logits(of_scheme, x)) > 1e-4
    optimize_(model, weight_only_below=22)
    assert torch.equal(logits(model, x), logits(of_scheme, x))
    assert torch.equal(logits(model, x[:1]), logits(alone, x[:1]))
    optimize_(model, weight_only_below=0)
    assert torch.equal(logits(model, x[:1]), logits(of_scheme, x[:1]))
    optimize_(model, weight_only_below=22)
    with epiloq.config(batch_invariant=True), pytest.raises(NotImplementedError, match="weight_only_below"):
        logits(model, x)


def test_weight_only_below_is_checked_before_anything_changes(seed: int) -> None:
    for scheme, below, message in (
        ("w8a8-int8", 256, "expected a model with W4A8Linear or W4A8Fp4Linear layers"),
        ("w4a8-fp8", -1, "expected a number of tokens from 0 on, got -1"),
        ("w4a8-fp8", 2.5, "expected a number of tokens from 0 on, got 2.5"),
    ):
        model = quantised("llama", scheme)
        with pytest.raises(ValueError, match=f"weight_only_below: {message}"):
            optimize_(model, weight_only_below=below)  # type: ignore[arg-type]
        assert all("forward" not in vars(module) for module in model.modules())
