"""The cache that `epiloq.decode` keeps with a model: who may use it, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import LogitsProcessor, StaticCache

import epiloq
from epiloq.models.cache_argument import cache_argument
from generating import NEW, WINDOWED, assert_same, ends_of, generated, model, prompts

pytestmark = pytest.mark.usefixtures("as_on_gpu")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_it_outlives_inference_mode(family: str, late: int, seed: int) -> None:
    """Tensors of inference mode cannot be written outside it."""
    found, inputs = model(family), prompts()
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            assert_same(found, **inputs)


class _Asks(LogitsProcessor):  # type: ignore[misc]
    """A processor that generates with the model which it serves."""

    def __init__(self, found: Any, custom: Any, ids: Tensor) -> None:
        self.found, self.custom, self.ids, self.answers = found, custom, ids, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = self.found.generate(self.ids, max_new_tokens=3, do_sample=False, custom_generate=self.custom)
        self.answers.append(answer)
        return scores.roll(int(answer.sum()) % 7, -1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_calls_within_a_call_have_caches_of_their_own(family: str, late: int, seed: int) -> None:
    found, inputs, ids = model(family), prompts(), torch.randint(1, 48, (3, 5))
    results = []
    for custom in (None, epiloq.decode):
        asks = _Asks(found, custom, ids)
        results.append((generated(found, custom, **inputs, logits_processor=[asks])[0], *asks.answers))
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


class _Pauses:
    """A streamer that waits, after a few tokens, until another thread has generated."""

    def __init__(self) -> None:
        self.waits, self.goes_on, self.count = threading.Event(), threading.Event(), 0

    def put(self, value: Tensor) -> None:
        self.count += 1
        if self.count == 4:
            self.waits.set()
            assert self.goes_on.wait(60)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_threads_have_caches_of_their_own(family: str, late: int, seed: int) -> None:
    found, results = model(family), []
    first, second = torch.randint(1, 48, (1, 6)), torch.randint(1, 48, (1, 9))
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = [found.generate(ids, **options) for ids in (first, second)]
    found.generate(first, custom_generate=epiloq.decode, **options)
    streamer = _Pauses()

    def stream() -> None:
        results.append(found.generate(first, custom_generate=epiloq.decode, streamer=streamer, **options))

    thread = threading.Thread(target=stream)
    thread.start()
    assert streamer.waits.wait(60)
    other = found.generate(second, custom_generate=epiloq.decode, **options)
    streamer.goes_on.set()
    thread.join(60)
    assert torch.equal(results[0], expected[0]) and torch.equal(other, expected[1])


def test_it_is_free_again_after_an_error(late: int, seed: int) -> None:
    found, inputs = model("gemma2"), prompts()

    class Fails(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] > 9:
                raise RuntimeError("of the user")
            return scores

    assert_same(found, **inputs)
    kept = vars(found)["_epiloq_decoding"].cache
    with pytest.raises(RuntimeError, match="of the user"):
        generated(found, epiloq.decode, **inputs, logits_processor=[Fails()])
    assert_same(found, **inputs)
    assert vars(found)["_epiloq_decoding"].cache is kept


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_of_the_user_may_have_room_up_to_the_end_tokens_only(family: str, late: int, seed: int) -> None:
    """Then the host looks for them at once, as tokens after them would have no place."""
    found, inputs = model(family, **WINDOWED.get(family, {})), prompts()
    ends = ends_of(found, **inputs)
    length = generated(found, None, **inputs, eos_token_id=ends)[0].shape[1]
    assert length < 7 + NEW
    results = []
    for custom in (None, epiloq.decode):
        cache = StaticCache(config=found.config, max_cache_len=length - 1)
        results.append(generated(found, custom, **inputs, eos_token_id=ends, **{cache_argument(found): cache})[0])
    assert torch.equal(*results)


def test_prompts_in_chunks(late: int, seed: int) -> None:
    for family in ("llama", "gemma2"):
        found = model(family)
        for options in ({}, {"cache_implementation": "static"}):
            assert_same(found, **prompts(13), prefill_chunk_size=4, **options)
