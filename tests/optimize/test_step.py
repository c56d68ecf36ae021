"""A decode step of an optimised layer as one function: when it is used, and that it changes no bit."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

import epiloq
from epiloq.optimize import optimize_
from epiloq.optimize.fused import pre_norm_decoder
from epiloq.optimize.step import Step
from small_models import SIZES, quantised, relative, tokens

SCHEMES = ("w4a16-g32", "w8a16", "w8a8-int8", "fp8-token", "w4a8-fp8")
PROMPT = 6


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a decoder layer was a step."""
    seen: list[bool] = []
    step = Step.__call__

    def counted(self: Step, x: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        result = step(self, x, arguments)
        seen.append(result is not None)
        return result

    monkeypatch.setattr(Step, "__call__", counted)
    return seen


def cache_of(model: Any, kind: str) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=16)
    if kind == "int8":
        return epiloq.QuantizedCache(model.config)
    return transformers.DynamicCache(config=model.config)


def held(cache: Any) -> dict[str, Any]:
    """The cache by the name that this version of transformers has for it."""
    named = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    return {"cache" if named else "past_key_values": cache}


@torch.no_grad()
def decoded(model: Any, x: Tensor, kind: str = "static", **options: Any) -> Tensor:
    """Logits of three steps after a prompt."""
    cache, found = cache_of(model, kind), []
    model(x[:, :PROMPT], use_cache=True, **held(cache))
    for i in range(PROMPT, PROMPT + 3):
        found.append(model(x[:, i : i + 1], use_cache=True, **held(cache), **options).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "static"),
        ("llama", "dynamic"),
        ("llama", "int8"),
        ("qwen2", "static"),
        ("qwen3", "dynamic"),
        ("gemma", "static"),
        ("gemma3", "static"),
        ("gemma3", "dynamic"),
        ("phi3", "static"),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_bit_changes(
    seed: int, monkeypatch: pytest.MonkeyPatch, steps: list[bool], scheme: str, family: str, kind: str
) -> None:
    model, x = quantised(family, scheme), tokens()
    optimize_(model)
    result = decoded(model, x, kind)
    assert steps == [False] * 2 + [True] * 6  # two layers; the prompt has several tokens
    monkeypatch.setattr(Step, "__call__", lambda *_: None)
    assert torch.equal(result, decoded(model, x, kind))


@pytest.mark.parametrize("scheme", ["w4a16-g32", "fp8-token"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_mixtures_of_experts(
    seed: int, monkeypatch: pytest.MonkeyPatch, steps: list[bool], family: str, scheme: str
) -> None:
    """Whose experts are called as a module, with its hooks; a replaced one ends the steps of its layer."""
    experts = {"num_local_experts": 4} if family == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 64}
    config = getattr(transformers, f"{family}Config")(**SIZES, **experts, head_dim=32, num_experts_per_tok=2)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    epiloq.quantize_(model, scheme)
    x, plain = tokens(), copy.deepcopy(model)
    optimize_(model)
    result = decoded(model, x)
    assert steps == [False] * 2 + [True] * 6
    if scheme == "w4a16-g32":
        assert relative(result, decoded(plain, x)) <= 1e-5
    seen: list[bool] = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(True))
    assert torch.equal(decoded(model, x), result) and steps[10:] == [True] * 6 and len(seen) == 4
    for which in (model, plain):
        which.model.layers[0].mlp = Doubled(which.model.layers[0].mlp)
    changed = decoded(model, x)
    assert steps[18:] == [False, True] * 3
    monkeypatch.setattr(Step, "__call__", lambda *_: None)
    assert torch.equal(changed, decoded(model, x))
    assert scheme != "w4a16-g32" or relative(changed, decoded(plain, x)) <= 1e-5


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("scheme", ["w4a16-g32", "fp8-token", "fp8-block"])
def test_half_precision(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch, steps: list[bool], scheme: str, sequences: int
) -> None:
    """With whole blocks of rows in each layer, and heads that `decode_attention` has a kernel for."""
    config = transformers.LlamaConfig(**SIZES, head_dim=64)
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    epiloq.quantize_(model, scheme)
    x = torch.randint(2, SIZES["vocab_size"], (sequences, 11), device=device)
    optimize_(model)
    result = decoded(model, x)
    assert steps[2:] == [True] * 6
    monkeypatch.setattr(Step, "__call__", lambda *_: None)
    assert torch.equal(result, decoded(model, x))


@pytest.mark.parametrize("scheme", ["w4a16-g32", "fp8-token"])
def test_fewer_calls(seed: int, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Host time by a measure that does not depend on the machine: calls of functions, in Python and C, by a layer."""
    model, x = quantised("llama", scheme), tokens()
    optimize_(model)

    def calls() -> int:
        count, inside, cache = 0, False, cache_of(model, "static")

        def counted(frame: Any, event: str, _: Any) -> None:
            nonlocal count, inside
            if frame.f_code is pre_norm_decoder.__code__ and event in ("call", "return"):
                inside = event == "call"
            count += inside and event in ("call", "c_call")

        with torch.no_grad():
            for i in range(PROMPT, PROMPT + 3):
                model(x[:, :PROMPT] if i == PROMPT else x[:, i : i + 1], **held(cache))
            sys.setprofile(counted)
            try:
                model(x[:, i + 1 : i + 2], **held(cache))
            finally:
                sys.setprofile(None)
        return count

    a_step = calls()
    monkeypatch.setattr(Step, "__call__", lambda *_: None)
    assert 0 < a_step < 0.9 * calls()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Doubled(nn.Module):
    """A module in the place of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(*args, **kwargs)


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, result: 2 * result)


def _pre_hook(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))


def _replaced(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj = Doubled(model.model.layers[0].self_attn.o_proj)


def _wrapped(model: Any) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    before = norm.forward
    norm.forward = lambda x: 2 * before(x)


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def _norm(model: Any) -> None:
    model.model.layers[0].input_layernorm = nn.LayerNorm(128)


def _norm_after(model: Any) -> None:
    """Gemma 3's norm of what the MLP adds."""
    model.model.layers[0].post_feedforward_layernorm = nn.LayerNorm(128)


def _dropout(model: Any) -> None:
    """Phi-3's before an addition."""
    model.model.layers[0].resid_mlp_dropout.register_forward_hook(lambda _, __, result: 2 * result)


def _other_dropout(model: Any) -> None:
    model.model.layers[0].resid_attn_dropout = Doubled(nn.Identity())


def _mlp(model: Any) -> None:
    model.model.layers[0].mlp = Doubled(model.model.layers[0].mlp)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        *(("llama", change) for change in (_hook, _pre_hook, _replaced, _wrapped, _activation, _norm, _mlp)),
        *(("gemma3", change) for change in (_hook, _wrapped, _activation, _norm_after, _mlp)),
        *(("phi3", change) for change in (_hook, _dropout, _other_dropout)),
    ],
)
def test_changed_layers_run_as_before(
    seed: int, steps: list[bool], family: str, change: Callable[[Any], None], after_a_step: bool
) -> None:
    model, x = quantised(family, "w4a16-g32"), tokens()
    plain = copy.deepcopy(model)
    optimize_(model)
    if after_a_step:
        decoded(model, x)
        steps.clear()
    for which in (model, plain):
        torch.manual_seed(1)
        change(which)
    result = decoded(model, x)
    # A layer that is replaced before the first step is called as it is, for its input and output are ordinary tensors.
    assert steps[2:] == [change is _replaced and not after_a_step, True] * 3
    assert relative(result, decoded(plain, x)) <= 1e-5


@pytest.mark.parametrize("around", ["gradients", "autocast", "a mode", "a hook of all modules", "attention"])
def test_other_surroundings(seed: int, steps: list[bool], around: str) -> None:
    model, x = quantised("llama", "w4a16-g32"), tokens()
    optimize_(model)
    # Some versions of transformers give a static cache one type; under autocast keys and values differ in theirs.
    kind = "dynamic" if around == "autocast" else "static"
    expected, seen = decoded(model, x, kind), []
    assert any(steps)
    steps.clear()
    if around == "attention":
        model.set_attn_implementation("sdpa")
    if around == "a hook of all modules":
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "gradients": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "a mode": Watching,
    }
    inside = decoded.__wrapped__ if around == "gradients" else decoded  # type: ignore[attr-defined]
    try:
        with contexts.get(around, nullcontext)():
            result = inside(model, x, kind)
    finally:
        if around == "a hook of all modules":
            handle.remove()
    assert steps and not any(steps)
    assert relative(result.float(), expected) <= (3e-2 if around == "autocast" else 1e-5)
    assert around != "a hook of all modules" or seen.count("WeightOnlyLinear") > 0


def test_captured_outputs(seed: int, steps: list[bool]) -> None:
    """transformers records hidden states and attentions with hooks."""
    model, x = quantised("llama", "w4a16-g32"), tokens()
    optimize_(model)
    expected = decoded(model, x)
    cache = cache_of(model, "static")
    with torch.no_grad():
        model(x[:, :PROMPT], **held(cache))
        out = model(x[:, PROMPT : PROMPT + 1], **held(cache), output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert relative(out.logits, expected[:, :1]) <= 1e-5


@pytest.mark.parametrize("scheme", ["w4a16-g32", "fp8-token"])
def test_weights_that_change_are_followed(seed: int, steps: list[bool], scheme: str) -> None:
    """Loaded, written in place, and given as other tensors."""
    model, other, x = quantised("llama", scheme), quantised("llama", scheme), tokens()
    optimize_(model)
    decoded(model, x)

    def fresh() -> Tensor:
        """Of a model that is optimised now."""
        copied = copy.deepcopy(other)
        optimize_(copied)
        return decoded(copied, x)

    model.load_state_dict(other.state_dict())
    assert torch.equal(decoded(model, x), fresh())
    with torch.no_grad():
        for which in (model, other):
            layer = which.model.layers[0]
            for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight_scale.mul_(3)
    assert torch.equal(decoded(model, x), fresh())
    for which in (model, other):
        layer = which.model.layers[1].self_attn.o_proj
        layer.weight_scale = nn.Parameter(layer.weight_scale * 2, requires_grad=False)
    assert torch.equal(decoded(model, x), fresh())
    assert steps.count(True) == (1 + 3 * 2) * 6


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_part_of_each_head_may_be_rotated(seed: int, steps: list[bool], factor: float) -> None:
    config = transformers.Phi3Config(**SIZES, pad_token_id=0, partial_rotary_factor=factor)
    model, x = transformers.Phi3ForCausalLM(config).eval(), tokens()
    epiloq.quantize_(model, "w4a16-g32")
    plain = copy.deepcopy(model)
    optimize_(model)
    assert relative(decoded(model, x), decoded(plain, x)) <= 1e-5
    assert steps[2:] == [factor == 1.0] * 6


@torch.no_grad()
def test_weights_of_offset_norms_are_followed(seed: int) -> None:
    """Gemma's norms multiply by one more than their weight, which is computed once: loaded weights, weights written in
    place, other memory, another type, and weights made in inference mode."""
    model, other, x = quantised("gemma3", "w4a16-g32"), quantised("gemma3", "w4a16-g32"), tokens()
    optimize_(model)

    def agree(bound: float = 1e-5) -> bool:
        return relative(decoded(model, x).float(), decoded(other, x).float()) <= bound

    assert not agree()
    model.load_state_dict(other.state_dict())
    assert agree()
    for change in (lambda w: w.mul_(2), lambda w: setattr(w, "data", w.data * 3), lambda w: w.zero_()):
        for which in (model, other):
            change(which.model.layers[1].pre_feedforward_layernorm.weight)
            change(which.model.layers[0].self_attn.q_norm.weight)
        assert agree(), change
    with torch.inference_mode():
        made = torch.rand(128)
    for which in (model, other):
        which.model.layers[0].input_layernorm.weight = nn.Parameter(made, requires_grad=False)
    assert agree()
    with torch.inference_mode():
        made.add_(1)
    assert agree()
    model.to(torch.bfloat16), other.to(torch.bfloat16)
    assert agree(3e-2)


def test_copies_have_their_own(seed: int, steps: list[bool]) -> None:
    model, x = quantised("llama", "w4a16-g32"), tokens()
    optimize_(model)
    expected = decoded(model, x)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    steps.clear()
    assert torch.equal(decoded(copied, x), expected)
    assert steps[2:] == [True] * 6


@torch.no_grad()
def test_a_mask_that_is_written_between_steps(seed: int) -> None:
    """The row of a mask is a view, which the layers of a model share."""
    model, x = quantised("llama", "w4a16-g32"), tokens()[:1]
    plain = copy.deepcopy(model)
    optimize_(model)
    mask, results = torch.ones(1, 1, 1, 16, dtype=torch.bool), []
    for first in (0, 3):
        mask[..., :first] = False
        mask[..., PROMPT + 1 :] = False
        for which in (model, plain):
            cache = cache_of(which, "static")
            which(x[:, :PROMPT], **held(cache))
            results.append(which(x[:, PROMPT : PROMPT + 1], attention_mask=mask, **held(cache)).logits)
    assert relative(results[0], results[1]) <= 1e-5 and relative(results[2], results[3]) <= 1e-5
    assert not torch.equal(results[0], results[2])
