"""A decode step of an optimised layer as one function: when it is used, and that it changes no bit."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import epiloq
from decode_steps import PROMPT, Doubled, cache_of, decoded, held
from epiloq.optimize import optimize_
from epiloq.optimize.fused import pre_norm_decoder
from epiloq.optimize.step import Step
from small_models import SIZES, quantised, relative, tokens

SCHEMES = ("w4a16-g32", "w8a16", "w8a8-int8", "fp8-token", "w4a8-fp8", "w4a8-nvfp4-fp8")


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


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_attention_in_floating_point(
    seed: int, monkeypatch: pytest.MonkeyPatch, steps: list[bool], family: str, kind: str
) -> None:
    """Its heads are rotated together, though its layers are not merged; its weights are trained as before."""
    model, x = quantised(family, "w4a16-g32", ignore="*self_attn*"), tokens()
    plain = copy.deepcopy(model)
    optimize_(model)
    result = decoded(model, x, kind)
    assert steps == [False] * 2 + [True] * 6 and relative(result, decoded(plain, x, kind)) <= 1e-5
    monkeypatch.setattr(Step, "__call__", lambda *_: None)
    assert torch.equal(result, decoded(model, x, kind))
    weights = [each.model.layers[0].self_attn.o_proj.weight for each in (model, plain)]
    gradients = []
    for each, weight in zip((model, plain), weights, strict=True):
        loss = each(x).logits.square().sum()
        first = next(p for name, p in each.named_parameters() if "self_attn.q" in name and p.is_floating_point())
        gradients.append(torch.autograd.grad(loss, [weight, first]))
    assert all(relative(*pair) <= 1e-4 and pair[1].norm() > 0 for pair in zip(*gradients, strict=True))
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(decoded(copied, x, kind), result) and copied.state_dict().keys() == plain.state_dict().keys()


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
