"""`epiloq.decode` of models with sliding windows: transformers' tokens, in steps that the host does not prepare."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import StaticCache

import epiloq
from epiloq.generation import loop
from epiloq.generation.steps import FixedStep
from epiloq.models.cache_argument import cache_argument
from generating import NEW, WINDOW, WINDOWED, assert_same, assert_same_caches, ends_of, generated, model, prompts

# Tokens of the prompt and new ones: within the window, across its end, and after it.
LENGTHS = [(3, 4), (WINDOW - 1, NEW), (WINDOW, 1), (WINDOW, 2), (WINDOW + 5, NEW)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Classes of the steps that were taken."""
    kinds: list[type] = []
    made = loop._step_of

    def recorded(*arguments: Any) -> Any:
        result = made(*arguments)
        kinds.append(type(result[0]))
        return result

    monkeypatch.setattr(loop, "_step_of", recorded)
    return kinds


@pytest.mark.parametrize("family", WINDOWED)
def test_tokens(family: str, late: int, seed: int, as_on_gpu: None, taken: list[type]) -> None:
    found = model(family, **WINDOWED[family])
    for length, new in LENGTHS:
        inputs = prompts(length)
        assert_same(found, **inputs, max_new_tokens=new)
        single = {name: each[1:2] for name, each in inputs.items()}
        assert_same(found, **single, max_new_tokens=new, do_sample=True, top_k=9)
    inputs = prompts()
    ends = ends_of(found, **inputs)
    assert assert_same(found, **inputs, eos_token_id=ends).shape[1] < 7 + NEW
    assert_same(found, **inputs, cache_implementation="static", repetition_penalty=1.3)
    assert set(taken) == {FixedStep}


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_the_host_prepares_no_masks(family: str, seed: int, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = model(family, **WINDOWED[family]), []
    prepare = type(found).prepare_inputs_for_generation
    from epiloq.generation import support

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(support.GenerationMixin, "prepare_inputs_for_generation", counted)
    generated(found, epiloq.decode, **prompts())
    assert len(calls) == 2  # the prompt, and the first step


@pytest.mark.parametrize("length", [3, WINDOW, WINDOW + 3])
@pytest.mark.parametrize("kind", ["static", "int8", "fp8"])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_cache_of_the_user_is_left_as_transformers_does(
    family: str, kind: str, length: int, late: int, seed: int, taken: list[type]
) -> None:
    found, inputs = model(family, **WINDOWED[family]), prompts(length)
    ends, name, caches, results = ends_of(found, **inputs), cache_argument(found), [], []
    for custom in (None, epiloq.decode):
        cache: Any = StaticCache(config=found.config, max_cache_len=60)
        if kind != "static":
            cache = epiloq.QuantizedCache(found.config, kind, max_cache_len=60)
        first = generated(found, custom, **inputs, **{name: cache}, eos_token_id=ends)[0]
        second = torch.cat((first, torch.full((3, 2), 5)), 1)
        mask = torch.cat((inputs["attention_mask"], torch.ones(3, second.shape[1] - length, dtype=torch.long)), 1)
        again = {"input_ids": second, "attention_mask": mask, name: cache}
        results.append((first, generated(found, custom, **again, max_new_tokens=9)[0]))
        caches.append(cache)
    assert all(map(torch.equal, *results))
    if kind == "static" or family == "mistral":  # with full layers, 8 bits of a number on an edge may differ
        assert_same_caches(*caches)
    assert set(taken) == {FixedStep}


@pytest.mark.parametrize("length", [3, WINDOW + 3])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_returned_cache_grows_as_that_of_transformers(
    family: str, length: int, late: int, seed: int, as_on_gpu: None
) -> None:
    found, inputs = model(family, **WINDOWED[family]), prompts(length)
    options = {"eos_token_id": ends_of(found, **inputs), "return_dict_in_generate": True}
    results = [generated(found, each, **inputs, **options)[0] for each in (None, epiloq.decode)]
    assert torch.equal(results[0].sequences, results[1].sequences)
    name = cache_argument(found)
    assert_same_caches(results[0][name], results[1][name])
    assert_same(found, **inputs)


def test_chunks_are_not_taken_for_windows(late: int, seed: int, as_on_gpu: None, taken: list[type]) -> None:
    """Llama 4 stores its chunks as others store windows, but attends to the tokens of a chunk only."""
    options = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16, "attention_chunk_size": WINDOW}
    found = model("llama4_text", **options, intermediate_size_mlp=48, moe_layers=[1])
    for length, new in LENGTHS:
        assert_same(found, **prompts(length), max_new_tokens=new)
    assert FixedStep not in taken


def test_the_long_form_of_phi3_is_left_to_transformers(seed: int, as_on_gpu: None, taken: list[type]) -> None:
    """Its cache is dropped where the frequencies of the rotary embedding change."""
    options: dict[str, Any] = {"original_max_position_embeddings": 16, "pad_token_id": 0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    found = model("phi3", **options, rope_parameters=rope)
    assert_same(found, input_ids=torch.randint(1, 48, (1, 7)), max_new_tokens=14)
    assert not taken
    assert_same(found, input_ids=torch.randint(1, 48, (1, 7)), max_new_tokens=9)
    assert taken == [FixedStep]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "phi3"])
def test_on_a_gpu(family: str, seed: int, taken: list[type]) -> None:
    """In CUDA graphs, as `test_generation.test_on_a_gpu`: within the window and beyond it."""
    found = model(family, **WINDOWED[family]).cuda()
    for length, new in LENGTHS:
        inputs = {name: each.cuda() for name, each in prompts(length).items()}
        expected = generated(found, None, **inputs, max_new_tokens=new, cache_implementation="static")[0]
        for _ in range(3):  # runs, records and replays a graph
            assert torch.equal(generated(found, epiloq.decode, **inputs, max_new_tokens=new)[0], expected)
    assert set(taken) == {FixedStep}
