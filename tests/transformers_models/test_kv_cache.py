"""epiloq.QuantizedCache: what attention reads, memory, and what generation does to a cache."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import Tensor

import epiloq
from epiloq import kv_cache
from epiloq.kv_cache import QuantizedCache, dequantize_heads, quantize_heads
from tiny_teacher import tiny_model

KINDS = ("int8", "fp8")
# Half a step of 127, and half of the last of 3 bits of mantissa, of the largest magnitude or of the value.
BOUND = {"int8": 0.5 / 127, "fp8": 2**-4}


def model(**more: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    return tiny_model(**sizes, num_attention_heads=4, num_key_value_heads=2, **more)


def of_one_layer() -> Any:
    """Whose states are the same bits however it attends; in a second layer some may go across a rounding."""
    return epiloq.quantize_(model(num_hidden_layers=1), "w8a16")


def argument(found: Any) -> str:
    """What this version of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(type(found).forward).parameters else "past_key_values"


def states(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * torch.rand(*shape[:-1], 1).exp() * 5).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_for_each_token_and_head(kind: str, dtype: torch.dtype, seed: int) -> None:
    x = states(2, 3, 5, 16, dtype=dtype)
    x[0, 0, 0] = 0
    q, scale = quantize_heads(x, kind)
    assert q.shape == x.shape and q.element_size() == 1 and scale.shape == (2, 3, 5, 1) and scale.dtype == dtype
    restored = dequantize_heads(q, scale, kind)
    assert restored.dtype == dtype and torch.equal(restored[0, 0, 0], x[0, 0, 0])
    largest = x.double().abs().amax(-1, keepdim=True)
    # The scale is rounded to the type, which takes that part of the largest values away, and the result is.
    allowed = largest * (BOUND[kind] + 2 * torch.finfo(dtype).eps) + 1e-30
    assert bool(((restored.double() - x.double()).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4, 1e-5])
def test_small_float16_states_keep_their_precision(kind: str, size: float, seed: int) -> None:
    """Their scales are subnormal: rounded up by less than 2^-24, and so is half a step; the result is rounded, too."""
    x = (torch.randn(2, 3, 50, 16) * size).half()
    q, scale = quantize_heads(x, kind)
    restored = dequantize_heads(q, scale, kind)
    largest = x.double().abs().amax(-1, keepdim=True)
    assert bool((kv_cache.KINDS[kind][1] * scale.double() >= largest * (1 - 2**-11)).all())
    allowed = largest * (BOUND[kind] + 2 * torch.finfo(x.dtype).eps) + 2**-24
    assert bool(((restored.double() - x.double()).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [None, 40])
def test_close_to_the_float_cache_and_independent_of_cuts(kind: str, length: int | None, seed: int) -> None:
    # In float64 another order of operations does not move a state across a rounding.
    found, ids = model().double(), torch.randint(256, (2, 20))
    name = argument(found)
    with torch.no_grad():
        expected = found(ids).logits
        whole = found(ids, use_cache=True, **{name: QuantizedCache(found.config, kind, length)}).logits
        cache: Any = QuantizedCache(found.config, kind, length)
        parts = [found(ids[:, a:b], use_cache=True, **{name: cache}).logits for a, b in ((0, 7), (7, 8), (8, 20))]
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    error = float((whole - expected).norm() / expected.norm())
    assert 0 < error < (0.02 if kind == "int8" else 0.1)


@pytest.mark.parametrize("length", [None, 32])
def test_memory_is_about_half(length: int | None) -> None:
    found = model().to(torch.bfloat16)
    cache: Any = QuantizedCache(found.config, max_cache_len=length)
    usual = transformers.DynamicCache(config=found.config)
    if length is not None:
        usual = transformers.StaticCache(config=found.config, max_cache_len=length)
    ids, name = torch.zeros(2, 32, dtype=torch.long), argument(found)
    with torch.no_grad():
        found(ids, use_cache=True, **{name: cache})
        found(ids, use_cache=True, **{name: usual})
    before = sum(layer.keys.nbytes + layer.values.nbytes for layer in usual.layers)
    # 16 numbers of a byte and a scale of two, for 16 of two bytes.
    assert cache.nbytes == before * (16 + 2) / (16 * 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [None, 64])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_generates(kind: str, length: int | None, options: dict[str, Any], seed: int) -> None:
    """Beams are reordered as in the float cache: the same tokens, unless a likelihood was on an edge."""
    found, ids = model(), torch.randint(1, 256, (2, 9))
    # Sharp, so that 8 bits decide nothing.
    found.lm_head.weight.data *= 30
    given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}
    cache = QuantizedCache(found.config, kind, length)
    result = found.generate(ids, **{argument(found): cache}, **given)
    expected = found.generate(ids, **given)
    assert result.shape == expected.shape
    assert float((result == expected).double().mean()) > 0.7


@pytest.mark.parametrize("length", [None, 16])
def test_reorder(length: int | None, seed: int) -> None:
    found = model()
    cache: Any = QuantizedCache(found.config, max_cache_len=length)
    keys, values = states(3, 2, 5, 16), states(3, 2, 5, 16)
    whole, _ = cache.update(keys, values, 0)
    order = torch.tensor([2, 0, 0])
    cache.layers[0].reorder_cache(order)
    again, _ = cache.update(keys[:, :, :1], values[:, :, :1], 0)
    assert torch.equal(again[:, :, :5], whole[order][:, :, :5])


def test_crop_reset_and_batches(seed: int) -> None:
    found = model()
    cache: Any = QuantizedCache(found.config)
    keys, values = states(2, 2, 6, 16), states(2, 2, 6, 16)
    whole, _ = cache.update(keys, values, 0)
    layer = cache.layers[0]
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 3]))
    layer.crop(-2)
    assert cache.get_seq_length() == 4 and layer.key_scale.shape == (2, 2, 4, 1)
    again, _ = cache.update(keys[:, :, 4:], values[:, :, 4:], 0)
    assert torch.equal(again, whole)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert torch.equal(cache.update(keys, values, 0)[0], whole)


def test_static_crop_and_reset(seed: int) -> None:
    found = model()
    cache: Any = QuantizedCache(found.config, "fp8", 8)
    keys, values = states(2, 2, 6, 16), states(2, 2, 6, 16)
    whole = cache.update(keys, values, 0)[0].clone()
    address = cache.layers[0].keys.data_ptr()
    cache.layers[0].crop(-2)
    assert torch.equal(cache.update(keys[:, :, 4:], values[:, :, 4:], 0)[0], whole)
    cache.reset()
    assert torch.equal(cache.update(keys, values, 0)[0], whole) and cache.layers[0].keys.data_ptr() == address


@pytest.mark.slow
def test_compiles_whole(seed: int) -> None:
    # In float64 another order of operations does not move a state across a rounding of the cache.
    found, ids = model().double(), torch.randint(256, (2, 5))
    name = argument(found)
    caches = [QuantizedCache(found.config, "int8", 12) for _ in range(2)]
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for cache in caches:
            found(ids, use_cache=True, **{name: cache})
        for token in ids.split(1, 1):
            expected = found(token, use_cache=True, **{name: caches[0]}).logits
            torch.testing.assert_close(compiled(token, use_cache=True, **{name: caches[1]}).logits, expected)
    assert caches[1].is_compileable and not QuantizedCache(found.config).is_compileable


def test_sliding_layers_keep_the_models_type(seed: int) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=4, layer_types=kinds
    )
    found, ids = transformers.Gemma3ForCausalLM(config).eval(), torch.randint(64, (1, 10))
    for length in (None, 16):
        cache: Any = QuantizedCache(config, max_cache_len=length)
        names = [type(layer).__name__ for layer in cache.layers]
        assert names[0].endswith("SlidingWindowLayer") and names[1].startswith("Quantized")
        with torch.no_grad():
            expected = found(ids).logits
            logits = found(ids, use_cache=True, **{argument(found): cache}).logits
        assert 0 < float((logits - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("length", [None, 40])
@torch.no_grad()
def test_a_copy_is_of_the_same_model(length: int | None, seed: int) -> None:
    """As a prompt that several answers begin with: the model may attend in another way by then."""
    made = epiloq.quantize_(model(), "w8a16")
    ids, name = torch.randint(0, 64, (2, 5)), argument(made)
    cache = epiloq.QuantizedCache(made.config, max_cache_len=length)
    before = copy.deepcopy(cache)
    epiloq.optimize_(made)
    made(ids, **{name: cache})
    copied, both = copy.deepcopy(cache), copy.deepcopy((made, cache))
    expected = made(ids[:, :1], **{name: cache}).logits
    assert torch.equal(both[0](ids[:, :1], **{name: both[1]}).logits, expected)
    made.set_attn_implementation("eager")
    both[0].set_attn_implementation("eager")
    for each, states in ((made, copied), (both[0], copy.deepcopy(both[1]))):
        assert each(ids[:, :1], **{name: states}).logits.isfinite().all()
    assert before.layers[0].config is made.config


def test_refused() -> None:
    config = model().config
    with pytest.raises(ValueError, match="dtype: expected int8 or fp8, got 'int4'"):
        epiloq.QuantizedCache(config, "int4")
    for wrong in (0, 2.5, "9"):
        with pytest.raises(ValueError, match=f"max_cache_len: expected at least 1 token, got {wrong!r}"):
            epiloq.QuantizedCache(config, max_cache_len=wrong)  # type: ignore[arg-type]
    for given in (None, model()):
        with pytest.raises(ValueError, match=r"config: expected the model's configuration, model.config, got"):
            epiloq.QuantizedCache(given)
    hybrid = getattr(transformers, "Qwen3NextConfig", None)
    if hybrid is not None:
        with pytest.raises(ValueError, match="expected layers of full attention or sliding windows, got Linear"):
            epiloq.QuantizedCache(hybrid(num_hidden_layers=4))


def test_a_fixed_size_that_is_too_small_is_named() -> None:
    found, ids = model(), torch.zeros(1, 6, dtype=torch.long)
    name = argument(found)
    cache = QuantizedCache(found.config, max_cache_len=4)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="max_cache_len: expected room for 6 tokens, got 4: create it"),
    ):
        found(ids, **{name: cache})
    cache = QuantizedCache(found.config, max_cache_len=8)
    with pytest.raises(ValueError, match="max_cache_len: expected room for 9 tokens, got 8"):
        found.generate(ids, **{name: cache}, max_new_tokens=5, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [None, 40])
@torch.no_grad()
def test_a_cache_of_another_model_that_attends_otherwise(attention: str, length: int | None, seed: int) -> None:
    """The optimised one's gives what is stored, which other attention cannot read; the other way round is right."""
    optimised, plain = of_one_layer(), model(num_hidden_layers=1)
    ids, name = torch.randint(0, 64, (2, 5)), argument(plain)
    expected = optimised(ids, **{name: epiloq.QuantizedCache(plain.config, max_cache_len=length)}).logits
    epiloq.optimize_(optimised)
    plain.set_attn_implementation(attention)
    with pytest.raises(ValueError, match=r"QuantizedCache: config: expected that of the model that uses the cache"):
        plain(ids, **{name: epiloq.QuantizedCache(optimised.config, max_cache_len=length)})
    found = optimised(ids, **{name: epiloq.QuantizedCache(plain.config, max_cache_len=length)}).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [None, 40])
def test_decode_reads_what_is_stored(kind: str, length: int | None, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `optimize_` a step of decode dequantises nothing, a padded one neither, and gives what it gave before."""
    found, ids = of_one_layer(), torch.randint(1, 256, (2, 12))
    name, mask = argument(found), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0

    def steps() -> list[Tensor]:
        cache: Any = QuantizedCache(found.config, kind, length)
        logits = [found(ids[:, :9], attention_mask=mask[:, :9], use_cache=True, **{name: cache}).logits]
        for at in (9, 10, 11):
            if logits[1:]:
                monkeypatch.setattr(kv_cache, "dequantize_heads", refuse)
            some = found(ids[:, at : at + 1], attention_mask=mask[:, : at + 1], use_cache=True, **{name: cache})
            logits.append(some.logits)
        monkeypatch.undo()
        return logits[1:]

    def refuse(*_: Any) -> Any:
        if found.config._attn_implementation in kv_cache.READERS:
            raise AssertionError("the cache was dequantised")
        return original(*_)

    original = kv_cache.dequantize_heads
    with torch.no_grad():
        expected = steps()
        assert epiloq.optimize_(found).grouped_attention
        assert found.config._attn_implementation in kv_cache.READERS
        for after, before in zip(steps(), expected, strict=True):
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
        # Back on another attention the same cache gives keys and values dequantised.
        found.set_attn_implementation("eager")
        for after, before in zip(steps(), expected, strict=True):
            torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_decode_of_what_is_stored_compiles(seed: int) -> None:
    found, ids = epiloq.optimize_, torch.randint(1, 256, (1, 6))
    made = of_one_layer()
    found(made)
    name = argument(made)
    logits = []
    for call in (made, torch.compile(made, fullgraph=True, backend="aot_eager")):
        cache: Any = QuantizedCache(made.config, "int8", 16)
        with torch.no_grad():
            made(ids, use_cache=True, **{name: cache})
            logits.append(call(ids[:, :1], use_cache=True, **{name: cache}).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
