"""decode_attention: against float64, on caches of 16 and 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")  # which the cache is for

from epiloq import _core
from epiloq.kv_cache import quantize_heads
from epiloq.ops.attention.decode_attention import decode_attention

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# B, key heads, query heads per key head, tokens, width
SHAPES = [(2, 2, 4, 37, 64), (1, 1, 1, 1, 128), (3, 2, 3, 300, 128), (1, 8, 4, 2100, 128), (1, 1, 5, 70, 256)]
SHAPES += [(2, 1, 11, 95, 128)]  # more query heads than a CTA multiplies
ODD = [(2, 3, 2, 19, 80), (1, 2, 1, 40, 24)]  # widths without a kernel


def cache_of(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: str
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], Tensor, Tensor]:
    """Query, key, value and scales as the operation takes them, and key and value in float64."""
    batch, heads, group, tokens, width = shape
    query = torch.randn(batch, heads * group, width, device=device).to(dtype)
    states = [torch.randn(batch, heads, tokens, width, device=device).to(dtype) for _ in range(2)]
    if kind == "float":
        return query, *states, {}, *(state.double() for state in states)
    (key, key_scale), (value, value_scale) = (quantize_heads(state, kind) for state in states)
    wide = [(q if kind == "int8" else q.view(torch.float8_e4m3fn)).double() for q in (key, value)]
    exact = [q * scale.double() for q, scale in zip(wide, (key_scale, value_scale), strict=True)]
    return query, key, value, {"key_scale": key_scale[..., 0], "value_scale": value_scale[..., 0]}, *exact


def assert_close(
    y: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    """One rounding, and fp32's sums, of a result in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = scale * torch.einsum("bhd,bhtd->bht", query.double(), key)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    sink = scores.new_full(query.shape[1:2], -torch.inf) if sinks is None else sinks.double()
    scores = torch.cat((scores, sink.expand(len(query), -1).unsqueeze(-1)), -1)
    weights = torch.softmax(scores, -1)[..., :-1].nan_to_num(0)
    expected, size = torch.einsum("bht,bhtd->bhd", weights, value), torch.einsum("bht,bhtd->bhd", weights, value.abs())
    # SDPA rounds probabilities to 16 bits. Numbers below the normal ones have a spacing of their own.
    numbers = torch.finfo(y.dtype)
    bound = 2 * numbers.eps * size + 1e-5 * size + numbers.eps * numbers.tiny
    assert y.shape == expected.shape and y.dtype == query.dtype
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", ["float", "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + ODD)
def test_matches_float64(seed: int, shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: str) -> None:
    query, key, value, scales, exact_key, exact_value = cache_of(shape, dtype, kind, device)
    tokens = shape[3]
    shared = (torch.rand(1, tokens, device=device) < 0.5).expand(shape[0], tokens)
    masks = [
        None,
        torch.rand(shape[0], tokens, device=device) < 0.6,
        torch.rand(1, tokens, device=device) < 0.1,
        shared,
    ]
    masks[1][0] = False  # type: ignore[index]
    for mask in masks:
        y = decode_attention(query, key, value, mask, **scales)
        assert_close(y, query, exact_key, exact_value, mask, shape[4] ** -0.5)
        if mask is not None and not mask[0].any():
            assert torch.equal(y[0], torch.zeros_like(y[0]))
    out = torch.empty_like(query)
    assert decode_attention(query, key, value, scale=0.3, out=out, **scales) is out
    assert_close(out, query, exact_key, exact_value, None, 0.3)


@pytest.mark.parametrize("kind", ["float", "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2, 8, 9000, 64), *ODD])
def test_sinks(seed: int, shape: tuple[int, ...], dtype: torch.dtype, kind: str, device: str) -> None:
    """One score more, larger and smaller than the others, and none."""
    query, key, value, scales, exact_key, exact_value = cache_of(shape, dtype, kind, device)
    batch, tokens = shape[0], shape[3]
    sinks = 5 * torch.randn(query.shape[1], device=device).to(dtype)
    sinks[0], sinks[-1] = -torch.inf, 40
    mask = torch.rand(batch, tokens, device=device) < 0.6
    mask[0] = False
    for seen in (None, mask):
        y = decode_attention(query, key, value, seen, sinks=sinks, **scales)
        assert_close(y, query, exact_key, exact_value, seen, shape[4] ** -0.5, sinks)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    none = torch.full_like(sinks, -torch.inf)
    assert_close(
        decode_attention(query, key, value, sinks=none, **scales), query, exact_key, exact_value, None, shape[4] ** -0.5
    )
    sinks[0] = torch.nan
    y = decode_attention(query, key, value, mask, sinks=sinks, **scales)
    assert y[1:, 0].isnan().all() and y[:, 1:].isfinite().all()


@pytest.mark.parametrize("kind", ["float", "int8"])
def test_strided(seed: int, kind: str, device: str) -> None:
    """A query that is a part of a merged product, a part of a longer cache, of more heads."""
    query, key, value, scales, exact_key, exact_value = cache_of((2, 4, 2, 50, 64), torch.bfloat16, kind, device)
    wide = torch.randn(2, 12, 64, device=device).bfloat16()
    wide[:, :4] = query[:, :4]
    some = {name: scale[:, 1:3, :33] for name, scale in scales.items()}
    y = decode_attention(wide[:, :4], key[:, 1:3, :33], value[:, 1:3, :33], **some)
    assert_close(y, query[:, :4], exact_key[:, 1:3, :33], exact_value[:, 1:3, :33], None, 64**-0.5)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", ["float", "int8", "fp8"])
def test_heads_between_tokens(seed: int, kind: str, width: int, device: str) -> None:
    """A cache stored as ``[B, T, H, D]``; one sequence has a masked step, the other a masked token."""
    query, key, value, scales, exact_key, exact_value = cache_of((2, 3, 4, 77, width), torch.float16, kind, device)
    apart = [cached.transpose(1, 2).contiguous().transpose(1, 2) for cached in (key, value)]
    mask = torch.ones(2, 77, dtype=torch.bool, device=device)
    mask[0, 16:32] = mask[1, 5] = False
    y = decode_attention(query, *apart, mask, **scales)
    assert_close(y, query, exact_key, exact_value, mask, width**-0.5)
    if device == "cuda":
        assert torch.equal(decode_attention(query, key, value, mask, **scales), y)


def test_empty(device: str) -> None:
    for batch, heads, tokens in ((0, 2, 5), (2, 2, 0)):
        query, cache = torch.randn(batch, 4, 64, device=device), torch.randn(batch, heads, tokens, 64, device=device)
        for dtype in (torch.float32, torch.float16):
            y = decode_attention(query.to(dtype), cache.to(dtype), cache.to(dtype))
            assert y.shape == query.shape and torch.equal(y, torch.zeros_like(y))


def test_large_scores_and_nan(seed: int, device: str) -> None:
    query, key, value, _, exact_key, exact_value = cache_of((1, 1, 4, 200, 128), torch.float16, "float", device)
    y = decode_attention(query, key, value, scale=30.0)
    assert_close(y, query, exact_key, exact_value, None, 30.0)
    key[0, 0, 7, 3] = torch.nan
    assert decode_attention(query, key, value).isnan().all()
    mask = torch.ones(1, 200, dtype=torch.bool, device=device)
    mask[0, 7] = False
    if device == "cuda":  # torch on a CPU adds -inf to what is masked
        assert decode_attention(query, key, value, mask).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float", "int8", "fp8"])
def test_a_kernel_runs(seed: int, kind: str) -> None:
    query, key, value, scales, *_ = cache_of((2, 2, 4, 90, 128), torch.bfloat16, kind, "cuda")
    both = scales.get("key_scale"), scales.get("value_scale")
    assert _core.decode_attention(torch.empty_like(query), query, key, value, None, *both, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_masked_positions_are_not_read(seed: int, kind: str) -> None:
    query, key, value, scales, exact_key, exact_value = cache_of((2, 2, 4, 900, 128), torch.bfloat16, kind, "cuda")
    mask = torch.rand(2, 900, device="cuda") < 0.5
    expected = decode_attention(query, key, value, mask, **scales)
    assert_close(expected, query, exact_key, exact_value, mask, 128**-0.5)
    for cached in scales.values() if scales else (key, value):
        cached.transpose(1, 2)[~mask] = torch.nan
    assert torch.equal(decode_attention(query, key, value, mask, **scales), expected)


@pytest.mark.gpu
def test_long_context_with_and_without_workspace(seed: int) -> None:
    shape = (1, 2, 4, 9000, 128)
    query, key, value, _, exact_key, exact_value = cache_of(shape, torch.bfloat16, "float", "cuda")
    count = _core.decode_attention_workspace(1, 8, 2, 9000, 128, 0)
    assert count > 0
    out = torch.empty_like(query)
    arguments = (out, query, key, value, None, None, None, 128**-0.5, None)
    for workspace in (None, torch.full((count,), torch.nan, device="cuda")):
        assert _core.decode_attention(*arguments, workspace)
        assert_close(out, query, exact_key, exact_value, None, 128**-0.5)
    with pytest.raises(ValueError, match="workspace: expected"):
        _core.decode_attention(*arguments, torch.empty(count - 1, device="cuda"))


def test_refusals(seed: int) -> None:
    query, key = torch.randn(2, 4, 64), torch.randn(2, 2, 9, 64)
    q, scale = quantize_heads(key, "int8")
    scales = {"key_scale": scale[..., 0], "value_scale": scale[..., 0]}
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((query[:, :3], key, key), {}, "query: expected a multiple of the 2 heads"),
        ((query, key, key[:, :, :8]), {}, "value: expected float32 .*2, 2, 9, 64"),
        ((query, key.half(), key.half()), {}, "key: expected"),
        ((query, q, q), {}, "key_scale: expected scales with 8-bit"),
        ((query, key, key), scales, "key_scale: expected none unless keys and values have 8 bits"),
        ((query, q, q), {**scales, "value_scale": scale[:1, :, :, 0]}, "value_scale: expected"),
        ((query, key, key, torch.ones(2, 8, dtype=torch.bool)), {}, "mask: expected"),
        ((query, key, key, torch.ones(2, 9)), {}, "mask: expected torch.bool, got torch.float32"),
        ((query[0], key, key), {}, r"query: expected \[B, H, D\]"),
        ((query, key, key), {"sinks": torch.randn(3)}, "sinks: expected"),
        ((query, key, key), {"sinks": torch.randn(4).half()}, "sinks: expected"),
        ((query, key, key), {"sinks": torch.randn(8)[::2]}, "sinks: expected"),
        ((query, key[0], key), {}, r"key: expected \[B, H, T, D\]"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            decode_attention(*arguments, **options)


@pytest.mark.slow
def test_compiles_and_is_a_proper_operator(seed: int, device: str) -> None:
    query, key, value, scales, *_ = cache_of((2, 2, 4, 37, 64), torch.float32, "int8", device)
    mask = torch.rand(2, 37, device=device) < 0.7
    sinks = torch.randn(8, device=device)
    arguments = (query, key, value, mask, scales["key_scale"], scales["value_scale"], 0.2, sinks)
    torch.library.opcheck(torch.ops.epiloq.decode_attention, arguments)
    compiled = torch.compile(
        lambda *a: decode_attention(*a[:4], key_scale=a[4], value_scale=a[5], scale=0.2, sinks=a[7]), fullgraph=True
    )
    expected = decode_attention(query, key, value, mask, **scales, scale=0.2, sinks=sinks)
    assert torch.equal(compiled(*arguments), expected)
