"""`epiloq.decode`: the tokens of transformers' own decoding loop, whatever the model, the arguments and the delay."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import Tensor
from transformers import LogitsProcessor, StaticCache, StoppingCriteria

import epiloq
from epiloq.models.cache_argument import cache_argument
from generating import FAMILIES, NEW, assert_same, assert_same_caches, ends_of, generated, model, prompts


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_each_family(family: str, cache: str | None, late: int, seed: int) -> None:
    found, inputs = model(family), prompts()
    options: dict[str, Any] = {**inputs, "cache_implementation": cache}
    assert_same(found, **options)
    ends = ends_of(found, **inputs)
    shorter = assert_same(found, **options, eos_token_id=ends)
    assert shorter.shape[1] < 7 + NEW
    assert_same(found, **options, eos_token_id=ends, do_sample=True, top_k=9, temperature=1.3)


OPTIONS: dict[str, dict[str, Any]] = {
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "nucleus": {"do_sample": True, "top_p": 0.7, "num_return_sequences": 2},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "sampled scores": {"return_dict_in_generate": True, "output_scores": True, "do_sample": True},
    "length": {"max_new_tokens": None, "max_length": 11},
    "one token": {"max_new_tokens": 1},
    "time": {"max_time": 600.0},
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(1 + row, 30))},
}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_generate(name: str, cache: str | None, late: int, seed: int) -> None:
    found, inputs = model(), prompts()
    if name == "no cache" and cache is not None:
        return
    assert_same(found, **inputs, cache_implementation=cache, eos_token_id=ends_of(found, **inputs), **OPTIONS[name])


@pytest.mark.parametrize("cache", [None, "static"])
def test_ids_in_int32(cache: str | None, late: int, seed: int) -> None:
    found, ids = model(), torch.randint(1, 48, (2, 5), dtype=torch.int32)
    result = assert_same(found, input_ids=ids, cache_implementation=cache, repetition_penalty=1.3)
    assert result.dtype == torch.int64


class _Counted(LogitsProcessor, StoppingCriteria):  # type: ignore[misc]
    """A user's processor or criterion, with a state."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.seen = ends, []

    def __call__(self, input_ids: Tensor, scores: Any) -> Tensor:
        self.seen.append(input_ids)
        if self.ends:
            return torch.full((len(input_ids),), len(self.seen) == 5)
        return scores.roll(len(self.seen), -1)


@pytest.mark.parametrize("ends", [False, True])
def test_parts_of_the_user_see_each_token_once(ends: bool, late: int, seed: int) -> None:
    found, inputs, seen = model(), prompts(), []
    argument = "stopping_criteria" if ends else "logits_processor"
    eos = None if ends else ends_of(found, **inputs)
    results = []
    for custom in (None, epiloq.decode):
        part = _Counted(ends)
        results.append(generated(found, custom, **inputs, eos_token_id=eos, **{argument: [part]})[0])
        seen.append(part.seen)
    assert torch.equal(*results)
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))


class _Streamer:
    def __init__(self) -> None:
        self.put_: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.put_.append(value)

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("static", [False, True])
def test_streamer(static: bool, late: int, seed: int) -> None:
    found, ids = model(), torch.randint(1, 48, (1, 7))
    eos = int(found.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 12])
    streams = []
    for custom in (None, epiloq.decode):
        stream = _Streamer()
        implementation = "static" if static else None
        options = {"cache_implementation": implementation, "eos_token_id": eos, "streamer": stream}
        generated(found, custom, input_ids=ids, **options)
        assert stream.ended
        streams.append(stream.put_)
    assert len(streams[0]) == len(streams[1]) and all(map(torch.equal, *streams))


@pytest.mark.parametrize("kind", ["static", "int8", "growing int8"])
def test_a_cache_of_the_user_ends_where_transformers_leaves_it(kind: str, late: int, seed: int) -> None:
    found, inputs = model(), prompts()
    ends, name, lengths, results = ends_of(found, **inputs), cache_argument(found), [], []
    for custom in (None, epiloq.decode):
        cache: Any = StaticCache(config=found.config, max_cache_len=40)
        if kind != "static":
            cache = epiloq.QuantizedCache(found.config, "int8", 40 if kind == "int8" else None)
        first = generated(found, custom, **inputs, **{name: cache}, eos_token_id=ends)[0]
        lengths.append(int(cache.get_seq_length()))
        more = torch.cat((first, torch.full((3, 2), 5)), 1)
        mask = torch.cat((inputs["attention_mask"], torch.ones(3, more.shape[1] - 7, dtype=torch.long)), 1)
        second = {"input_ids": more, "attention_mask": mask, name: cache, "max_new_tokens": 5}
        results.append(generated(found, custom, **second)[0])
    assert lengths[0] == lengths[1] and torch.equal(*results)


def test_a_cache_is_made_and_kept_as_on_a_gpu(late: int, seed: int, as_on_gpu: None) -> None:
    found, inputs = model(), prompts()
    assert_same(found, **inputs)
    kept = vars(found)["_epiloq_decoding"]
    cache, step = kept.cache, kept.step
    assert type(cache) is StaticCache
    assert_same(found, **inputs, max_new_tokens=NEW - 5)
    assert_same(found, input_ids=torch.randint(1, 48, (3, 9)))
    assert kept.cache is cache and kept.step is step
    assert_same(found, input_ids=torch.randint(1, 48, (1, 9)))
    assert kept.cache is not cache
    returned = [generated(found, each, **inputs, return_dict_in_generate=True)[0] for each in (None, epiloq.decode)]
    assert_same_caches(*(each[cache_argument(found)] for each in returned))
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert vars(copied)["_epiloq_decoding"].cache is None
        assert_same(copied, **inputs)


def test_what_it_cannot_do_is_refused(seed: int) -> None:
    found, inputs = model(), prompts()
    ids = inputs["input_ids"][:1]
    for options in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": model()}):
        with pytest.raises(ValueError, match=r"epiloq\.decode: generation_config: .*got assisted generation"):
            generated(found, epiloq.decode, input_ids=ids, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, "w4a16-g32"])
def test_on_a_gpu(scheme: str | None, seed: int) -> None:
    """The compiled step may round in another way than transformers' compiled one: tokens of a float32 model."""
    found, inputs = model().cuda(), {name: each.cuda() for name, each in prompts().items()}
    if scheme is not None:
        found = epiloq.quantize_(found, scheme)
        epiloq.optimize_(found)
    for options in ({}, {"do_sample": True, "top_k": 1}, {"eos_token_id": ends_of(found, **inputs)}):
        expected = generated(found, None, **inputs, cache_implementation="static", **options)[0]
        for _ in range(3):  # runs, records and replays a graph
            assert torch.equal(generated(found, epiloq.decode, **inputs, **options)[0], expected)
