"""quantize_'s head and embedding: tied, apart, of models of torch and of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import epiloq
from epiloq.nn import Fp8Linear, Int8Linear, QuantizedEmbedding, WeightOnlyLinear
from epiloq.vocabulary import find
from toy_language_model import IN_BLOCKS, LanguageModel, tokens


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_a_tied_pair_is_stored_once(seed: int) -> None:
    model, inputs = LanguageModel("lm_head", tied=True).eval(), tokens()
    assert find(model).tied and find(model).embeddings == ("embed",) and find(model).heads == ("lm_head",)
    expected, float_bytes = model(inputs), model.embed.weight.nbytes
    epiloq.quantize_(model, None, head="w8a16")
    assert type(model.embed) is QuantizedEmbedding and type(model.get_submodule("lm_head")) is WeightOnlyLinear
    assert model.get_submodule("lm_head").weight_q is model.embed.weight_q
    blocks = sum(p.nbytes for name, p in model.named_parameters() if name.startswith("blocks"))
    held = sum(p.nbytes for p in model.parameters()) - blocks
    # 33 rows of 20 columns, padded to 48 rows of 128 columns.
    assert held == model.embed.weight_bytes == 48 * 128 + 48 * 4 and float_bytes == 33 * 20 * 4
    assert 0 < relative(model(inputs), expected) < 0.02


@pytest.mark.parametrize("head", [None, "w8a16", "w4a16-g32", "fp8-token", "w8a8-int8"])
@pytest.mark.parametrize("embedding", [None, "w8a16", "w4a16-g32"])
def test_apart(head: str | None, embedding: str | None, seed: int) -> None:
    model, inputs = LanguageModel("lm_head").eval(), tokens()
    if head is None and embedding is None:
        with pytest.raises(ValueError, match="scheme: expected one, or a head or an embedding"):
            epiloq.quantize_(model, None)
        return
    expected = model(inputs)
    epiloq.quantize_(model, None, head=head, embedding=embedding)
    kinds = {None: nn.Linear, "fp8-token": Fp8Linear, "w8a8-int8": Int8Linear}
    assert type(model.get_submodule("lm_head")) is kinds.get(head, WeightOnlyLinear)
    assert type(model.embed) is (nn.Embedding if embedding is None else QuantizedEmbedding)
    assert all(type(model.get_submodule(name)) is nn.Linear for name in IN_BLOCKS)
    assert 0 < relative(model(inputs), expected) < 0.3


def test_beside_a_scheme_and_calibration(seed: int) -> None:
    model, inputs = LanguageModel("head", tied=True).eval(), tokens()
    expected = model(inputs)
    epiloq.quantize_(model, "w8a8-int8-static", embedding="w8a16", calibrate=lambda m: m(inputs))
    assert type(model.embed) is QuantizedEmbedding and type(model.get_submodule("head")) is WeightOnlyLinear
    assert all(type(model.get_submodule(name)) is Int8Linear for name in IN_BLOCKS)
    assert relative(model(inputs), expected) < 0.1


@pytest.mark.parametrize(
    ("tied", "options", "message"),
    [
        (True, {"head": "w8a16", "embedding": "w4a16-g32"}, "expected 'w8a16' as for the head, got 'w4a16-g32'"),
        (True, {"head": "fp8-token"}, "share one weight: expected one of w8a16, w4a16-g128, w4a16-g64, w4a16-g32"),
        (False, {"head": "w8a8-int8-static"}, "head: expected one of w8a8-int8, .*, got 'w8a8-int8-static'"),
        (False, {"head": "conv-w8a16"}, "head: expected one of .*, got 'conv-w8a16'"),
        (False, {"embedding": "fp8"}, "embedding: expected one of w8a16, .*, got 'fp8'"),
        (False, {"embedding": "w8"}, "embedding: expected one of w8a16, .*, got 'w8'"),
        (False, {"head": "w8a16", "scheme": "w8a16", "filter_fn": lambda m, n: True}, "lm_head is chosen by filter_fn"),
    ],
)
def test_refusal_does_not_change_the_model(tied: bool, options: dict[str, Any], message: str, seed: int) -> None:
    model = LanguageModel("lm_head", tied=tied)
    before = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    with pytest.raises(ValueError, match=message):
        epiloq.quantize_(model, **({"scheme": None} | options))
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == before


def test_models_that_lack_one() -> None:
    with pytest.raises(ValueError, match="head: expected a model with one, found none in LanguageModel"):
        epiloq.quantize_(LanguageModel("head"), None, head="w8a16")
    two = nn.ModuleDict({"one": nn.Embedding(4, 4), "two": nn.Embedding(4, 4)})
    with pytest.raises(ValueError, match="embedding: expected a model with one, found none in ModuleDict"):
        epiloq.quantize_(two, None, embedding="w8a16")
    limited = nn.ModuleDict({"table": nn.Embedding(4, 4, max_norm=1.0)})
    with pytest.raises(ValueError, match=r"layer 'table': .*max_norm: expected None"):
        epiloq.quantize_(limited, None, embedding="w8a16")
    shared = nn.ModuleDict({"table": nn.Embedding(4, 4), "conv": nn.Bilinear(4, 1, 4)})
    shared.table.weight = nn.Parameter(torch.randn(4, 4))
    shared.conv.register_parameter("also", shared.table.weight)
    with pytest.raises(ValueError, match=r"table: expected a weight of embeddings and heads alone, but conv\.also"):
        epiloq.quantize_(shared, None, embedding="w8a16")


def _models() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    bart = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48}
    bart |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "scale_embedding": True}
    t5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    gpt2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4}
    return {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads)),
        "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**small, **heads)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**t5, decoder_start_token_id=0)),
        "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**bart)),
    }


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "t5", "bart"])
def test_models_of_transformers(family: str, seed: int) -> None:
    model = _models()[family]().eval()
    ids = torch.randint(4, 60, (2, 7))
    given = {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}
    with torch.no_grad():
        expected = model(**given).logits
        found = find(model)
        assert found.tied == bool(model.config.tie_word_embeddings)
        epiloq.quantize_(model, None, head="w8a16", embedding="w8a16")
        assert isinstance(model.get_input_embeddings(), QuantizedEmbedding)
        assert isinstance(model.get_output_embeddings(), WeightOnlyLinear)
        held = {id(model.get_submodule(name).weight_q) for name in (*found.embeddings, *found.heads)}
        assert len(held) == (1 if found.tied else 2)
        assert not any(isinstance(m, nn.Embedding) and m.weight.shape[0] == 64 for m in model.modules())
        assert 0 < relative(model(**given).logits, expected) < 0.03
        model.tie_weights()  # as transformers does after some changes of a model
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[0] == 2
    model.to(torch.bfloat16)
    assert model(**given).logits.dtype == torch.bfloat16
