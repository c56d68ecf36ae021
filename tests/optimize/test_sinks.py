"""GPT-OSS after `optimize_`: attention with sinks, norms that multiply in float32, an MLP that returns scores, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

import epiloq
from decode_steps import decoded
from epiloq import kv_cache
from epiloq.optimize import optimize_, structure
from epiloq.optimize.norms import float_rms_norm
from epiloq.optimize.rotary import rotary_attention
from epiloq.optimize.sinks import READS_STORED, sink_attention
from epiloq.optimize.step import Step
from small_models import relative

WINDOW = 8


def gpt_oss(device: str, dtype: torch.dtype = torch.float32, ignore: str = "") -> Any:
    """Layers with and without a window; sinks as large as scores."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    if not hasattr(transformers, "GptOssConfig"):
        pytest.skip("this version of transformers has no GPT-OSS")
    config = transformers.GptOssConfig(**sizes, **heads, **experts, max_position_embeddings=4096)
    with torch.device(device):
        model = transformers.GptOssForCausalLM._from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):
            parameter.data.normal_()
    return epiloq.quantize_(model, "w4a16-mxfp4", ignore=ignore or ())


def padded(device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(96, (2, 21), device=device)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def test_numbers_and_tokens_are_those_of_before(seed: int, device: str) -> None:
    model, given = gpt_oss(device), padded(device)
    seen = given["attention_mask"].bool()
    expected, tokens = model(**given).logits[seen], model.generate(**given, max_new_tokens=12, do_sample=False)
    report = optimize_(model)
    assert report.grouped_attention and model.config._attn_implementation == READS_STORED
    norms = [module for module in model.modules() if type(module).__name__ == "GptOssRMSNorm"]
    assert len(norms) == 9 and all(vars(norm)["forward"].func is float_rms_norm for norm in norms)
    assert relative(model(**given).logits[seen], expected) <= 1e-5
    # On a GPU experts of float32 rows are multiplied one by one, which graphs of a static cache cannot record.
    compiled = ({"cache_implementation": "static"}, {"custom_generate": epiloq.decode}) if device == "cpu" else ()
    for how in ({}, *compiled):
        assert torch.equal(model.generate(**given, max_new_tokens=12, do_sample=False, **how), tokens), how


@torch.no_grad()
def test_windows_of_one_token(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' growing cache keeps all tokens there, with a mask of one."""
    monkeypatch.setattr(sys.modules[__name__], "WINDOW", 1)
    model, given = gpt_oss(device), padded(device)
    caches: tuple[Callable[[], dict[str, Any]], ...] = (
        dict,
        lambda: {"past_key_values": epiloq.QuantizedCache(config=model.config)},
    )
    expected = [model.generate(**given, max_new_tokens=6, do_sample=False, **cache()) for cache in caches]
    optimize_(model)
    for cache, tokens in zip(caches, expected, strict=True):
        for how in ({}, {"custom_generate": epiloq.decode} if device == "cpu" else {}):
            result = model.generate(**given, max_new_tokens=6, do_sample=False, **cache(), **how)
            assert torch.equal(result, tokens)


@pytest.mark.parametrize("kind", ["static", "dynamic", "int8"])
@pytest.mark.parametrize("ignore", ["", "*self_attn*"])
def test_a_step_changes_no_bit(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch, steps: list[bool], ignore: str, kind: str
) -> None:
    """Of layers as one function, with heads rotated together; in OpenAI's files attention is in floating point."""
    model, x = gpt_oss(device, torch.bfloat16, ignore), torch.randint(96, (2, 9), device=device)
    plain = decoded(model, x, kind)
    optimize_(model)
    attentions = [layer.self_attn for layer in model.model.layers]
    assert all(vars(attention)["forward"].func is rotary_attention for attention in attentions)
    result = decoded(model, x, kind)
    assert steps == [False] * 4 + [True] * 12
    monkeypatch.setattr(Step, "__call__", lambda *_: None)
    assert torch.equal(result, decoded(model, x, kind))
    assert relative(result, plain) <= 0.02


@torch.no_grad()
def test_a_quantised_cache_is_read_as_stored(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = gpt_oss(device), torch.randint(96, (2, 13), device=device)
    optimize_(model)
    cache = epiloq.QuantizedCache(model.config)
    model(ids[:, :-1], past_key_values=cache)
    expected = model(ids, past_key_values=epiloq.QuantizedCache(model.config)).logits[:, -1]
    monkeypatch.setattr(kv_cache, "dequantize_heads", lambda *_: pytest.fail("the cache was dequantised"))
    assert relative(model(ids[:, -1:], past_key_values=cache).logits[:, -1], expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 19])
@torch.no_grad()
def test_against_float64(seed: int, device: str, dtype: torch.dtype, tokens: int) -> None:
    if tokens > 1 and device == "cpu":
        pytest.skip("the model's own function")
    attention = gpt_oss(device, dtype).model.layers[0].self_attn
    batch, length = 3, 27
    query = torch.randn(batch, 8, tokens, 64, device=device).to(dtype)
    key, value = (torch.randn(batch, 2, length, 64, device=device).to(dtype) for _ in range(2))
    mask = torch.rand(batch, 1, tokens, length, device=device) < 0.7
    mask[1, :, -1] = False  # the sink alone: zero
    result, _ = sink_attention(attention, query, key, value, mask, scaling=0.2)
    keys, values = (states.double().repeat_interleave(4, 1) for states in (key, value))
    scores = (query.double() @ keys.transpose(2, 3) * 0.2).masked_fill(~mask, -torch.inf)
    sinks = attention.sinks.double().view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
    weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    exact, size = (weights @ values).transpose(1, 2), (weights @ values.abs()).transpose(1, 2)
    # bfloat16 rounds scores, weights and the output, the output again once it is scaled for the sink.
    bound = 1e-5 if dtype == torch.float32 else 2.0**-6
    assert result.shape == exact.shape and result.dtype == dtype
    assert ((result.double() - exact).abs() <= bound * size + 1e-6).all()
    assert (result[1, -1] == 0).all()


def test_gradients_flow_through_the_own_function(seed: int, device: str) -> None:
    model, given = gpt_oss(device), padded(device)
    expected = torch.autograd.grad(model(**given).logits.square().sum(), model.model.layers[1].self_attn.sinks)[0]
    optimize_(model)
    found = torch.autograd.grad(model(**given).logits.square().sum(), model.model.layers[1].self_attn.sinks)[0]
    assert expected.norm() > 0 and relative(found, expected) <= 1e-4


@torch.no_grad()
def test_attentions_are_returned_when_wanted(seed: int, device: str) -> None:
    model, given = gpt_oss(device), padded(device)
    expected = model(**given, output_attentions=True).attentions
    optimize_(model)
    found = model(**given, output_attentions=True).attentions
    assert len(found) == 4 and all(relative(*pair) <= 1e-5 for pair in zip(found, expected, strict=True))
    steps = model.generate(**given, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True).attentions
    assert [len(step) for step in steps] == [4, 4, 4]


@torch.no_grad()
def test_norms_in_float32_and_a_quantised_cache(seed: int, device: str) -> None:
    """As transformers loads GPT-OSS: norms stay in float32."""
    model, given = gpt_oss(device, torch.bfloat16), padded(device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter.data.float())
    seen = given["attention_mask"].bool()
    expected = model(**given).logits[seen]
    optimize_(model)
    assert relative(model(**given).logits[seen], expected) <= 0.02
    ids = given["input_ids"]
    whole = model(ids, past_key_values=epiloq.QuantizedCache(model.config)).logits
    cache = epiloq.QuantizedCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:])]
    assert relative(torch.cat(parts, 1), whole) <= 0.05


@pytest.mark.parametrize("family", ["DeepseekV4", "HYV4"])
def test_other_attention_with_sinks_is_kept(family: str) -> None:
    """DeepSeek-V4's adds to its mask, HY-V4's chooses tokens."""
    kind = getattr(transformers, f"{family}PreTrainedModel", None)
    if kind is None:
        pytest.skip(f"this version of transformers has no {family}")
    named = vars(sys.modules[kind.__module__]).values()
    classes = [each for each in named if isinstance(each, type) and issubclass(each, torch.nn.Module)]
    with_sinks = [each for each in classes if "s_aux=" in (structure.body_of(each) or "")]
    assert with_sinks and not any(structure.attends_with_sinks({each}) for each in with_sinks)


def test_another_eager_attention_is_kept(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt_oss("cpu")
    name = "eager_attention_forward"
    monkeypatch.setattr(transformers.models.gpt_oss.modeling_gpt_oss, name, lambda *a, **k: None)
    structure._attends_with_sinks.cache_clear()
    report = optimize_(model)
    assert not report.grouped_attention and model.config._attn_implementation == "eager"
    assert report.left["attention"] == "attention with sinks of another form"
    structure._attends_with_sinks.cache_clear()
