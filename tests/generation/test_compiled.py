"""What `epiloq.decode` compiles, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from torch._dynamo.utils import counters
from transformers import CompileConfig

import epiloq
from epiloq.generation import loop
from epiloq.generation.workspace import rounded
from epiloq.models.cache_argument import cache_argument
from generating import WINDOWED, generated, model


@pytest.fixture
def compiles(as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Graphs made by a call of `generate`, whose tokens are compared with those of transformers."""
    monkeypatch.setitem(loop.LAG, "cpu", 2)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()

    def graphs(found: Any, batch: int = 1, length: int = 7, **options: Any) -> int:
        ids, before = torch.randint(1, 48, (batch, length)), counters["stats"]["unique_graphs"]
        cache = options.pop("cache", None)
        given = {} if cache is None else {cache_argument(found): cache}
        result, after = generated(found, epiloq.decode, input_ids=ids, compile_config=config, **given, **options)
        made = counters["stats"]["unique_graphs"] - before
        expected, after_theirs = generated(found, None, input_ids=ids, **options)
        assert torch.equal(result, expected) and torch.equal(after, after_theirs)
        return int(made)

    return graphs


@pytest.mark.slow
@pytest.mark.parametrize(("family", "scheme"), [("gemma2", None), ("mistral", "w8a8-int8")])
def test_calls_with_windows_share_graphs(
    family: str, scheme: str | None, compiles: Callable[..., int], seed: int
) -> None:
    found = model(family, **WINDOWED[family])
    if scheme is not None:
        epiloq.optimize_(epiloq.quantize_(found, scheme))
    assert compiles(found) == 1
    assert compiles(found, length=13) == compiles(found, max_new_tokens=40) == 0
    assert compiles(found, batch=3, max_new_tokens=60) <= 1
    assert compiles(found, batch=3) == compiles(found) == 0


@pytest.mark.slow
def test_calls_share_graphs(compiles: Callable[..., int], seed: int) -> None:
    found = model()
    epiloq.optimize_(epiloq.quantize_(found, "w4a16-g32"))
    assert compiles(found) == 1
    # The same sizes, another prompt, more new tokens, and end tokens.
    assert compiles(found) == 0
    assert compiles(found, length=13) == 0
    assert compiles(found, max_new_tokens=40) == 0
    assert compiles(found, eos_token_id=3) == compiles(found, eos_token_id=[3, 5, 7]) == 0
    assert compiles(found, pad_token_id=None) == compiles(found, cache_implementation="static") == 0
    # Up to the logits only.
    assert compiles(found, do_sample=True) == 1
    assert compiles(found, do_sample=True, top_k=5) == compiles(found, repetition_penalty=1.2) == 0
    # A longer cache, which then serves shorter calls, too.
    assert compiles(found, max_new_tokens=150) <= 1
    assert compiles(found) == compiles(found, max_new_tokens=150) == 0
    assert compiles(found, batch=3) <= 1
    assert compiles(found, batch=3) == compiles(found) == compiles(found, batch=3) == 0
    assert compiles(found, return_dict_in_generate=False, batch=3, length=2) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_new_caches_of_the_same_size_share_graphs(kind: str, compiles: Callable[..., int], seed: int) -> None:
    found = model()
    epiloq.optimize_(epiloq.quantize_(found, "w4a16-g32"))
    made = []
    for new in (9, 9, 20):
        ids = torch.randint(1, 48, (2, 7))
        before = counters["stats"]["unique_graphs"]
        results: list[Tensor] = []
        for custom in (None, epiloq.decode):
            cache = epiloq.QuantizedCache(found.config, kind, max_cache_len=40)
            options = {cache_argument(found): cache, "max_new_tokens": new}
            config = CompileConfig(fullgraph=True, backend="eager", mode=None)
            config._compile_all_devices = custom is not None
            results.append(generated(found, custom, input_ids=ids, compile_config=config, **options)[0])
        assert torch.equal(*results)
        made.append(counters["stats"]["unique_graphs"] - before)
    assert made == [1, 0, 0]


@pytest.mark.slow
def test_models_do_not_use_up_each_others_graphs(compiles: Callable[..., int], seed: int) -> None:
    """torch stops compiling a function after so many graphs."""
    limit = 2
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        for _ in range(limit + 2):
            found = model()
            assert compiles(found) == 1
            assert compiles(found) == 0


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000, 1025, 3000, 40000])
def test_lengths_of_caches(length: int) -> None:
    assert length <= rounded(length) <= max(length + 128, length * 9 / 8)
    assert rounded(rounded(length)) == rounded(length)
