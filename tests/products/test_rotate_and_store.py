"""rotate_and_store: bit for bit transformers' rotation, the norms before it, and the cache's update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from epiloq.ops.attention.cached_heads import quantize_heads
from epiloq.ops.attention.rotate_and_store import rotate_and_store, rotated

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "keys", "width"), [(1, 1, 32, 8, 128), (3, 5, 4, 2, 64), (2, 2, 3, 1, 10)]
)
@pytest.mark.parametrize(("shared", "first"), [(False, 7), (True, 7), (False, None)])
def test_same_bits(
    seed: int,
    batch: int,
    tokens: int,
    heads: int,
    keys: int,
    width: int,
    dtype: torch.dtype,
    shared: bool,
    first: int | None,
    device: str,
) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    wide = random(batch, tokens, heads + 2 * keys + 1, width)
    some = wide[:, :, 1:]  # a part of something larger
    cos, sin = (random(1 if shared else batch, tokens, width) for _ in range(2))
    caches = [random(batch, keys, 12, width) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    both = rotated(some[:, :, : heads + keys], cos, sin)
    written = slice(first or 0, (first or 0) + tokens)
    expected[0][:, :, written] = both[:, :, heads:].transpose(1, 2)
    expected[1][:, :, written] = some[:, :, heads + keys :].transpose(1, 2)
    position = None if first is None else torch.tensor(first, device=device)
    written_to = [t for t in (*caches, position) if t is not None]
    versions = [t._version for t in written_to]
    query = rotate_and_store(some, heads, cos, sin, *caches, position)
    assert torch.equal(query, both[:, :, :heads]) and query.is_contiguous()
    assert all(torch.equal(*pair) for pair in zip(caches, expected, strict=True))
    assert all(t._version > version for t, version in zip(written_to, versions, strict=True))
    assert position is None or int(position) == (first or 0) + tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("shared", [False, True])
def test_angles_of_half_a_head(seed: int, shared: bool, kind: str, dtype: torch.dtype, device: str) -> None:
    """They are those of both halves; bit for bit also GPT-OSS's own rotation."""
    batch, tokens, heads, keys, width = 2, 3, 5, 2, 64
    some = torch.randn(batch, tokens, heads + 2 * keys, width, device=device).to(dtype)
    cos, sin = (torch.randn(1 if shared else batch, tokens, width // 2, device=device).to(dtype) for _ in range(2))
    found = []
    for angles in ((cos, sin), (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))):
        caches = [torch.zeros(batch, keys, 9, width, device=device, dtype=dtype) for _ in range(2)]
        scales = [torch.zeros(batch, keys, 9, device=device, dtype=dtype) for _ in range(2 if kind == "int8" else 0)]
        if kind == "int8":
            caches = [cache.to(torch.int8) for cache in caches]
        norms = (None, None, 0.0) if kind == "int8" else ()
        found.append([rotate_and_store(some, heads, *angles, *caches, None, *norms, *scales), *caches, *scales])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    first, second = some[:, :, :heads].chunk(2, -1)
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    assert torch.equal(found[0][0], torch.cat((first * c - second * s, second * c + first * s), -1))
    with pytest.raises(ValueError, match="sin: expected"):
        rotate_and_store(some, heads, cos, torch.cat((sin, sin), -1), *caches)


def turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((-second, first), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", ["the same", "float32"])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "keys", "width"), [(1, 1, 32, 4, 128), (3, 5, 4, 2, 64), (2, 2, 3, 1, 10)]
)
def test_normed_heads(
    seed: int, batch: int, tokens: int, heads: int, keys: int, width: int, factors: str, dtype: torch.dtype, device: str
) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    some, eps = 3 * random(batch, tokens, heads + 2 * keys, width), 1e-3
    some[0, 0, 0] = 0
    cos, sin = (random(batch, tokens, width) for _ in range(2))
    norms = [torch.randn(width, device=device).to(torch.float32 if factors == "float32" else dtype) for _ in range(2)]
    caches = [torch.full((batch, keys, 12, width), float("nan"), device=device, dtype=dtype) for _ in range(2)]
    query = rotate_and_store(some, heads, cos, sin, *caches, torch.tensor(7, device=device), *norms, eps)
    found = torch.cat((query, caches[0][:, :, 7 : 7 + tokens].transpose(1, 2)), 2).double()
    both = some[:, :, : heads + keys].double()
    factor = torch.stack([norms[0]] * heads + [norms[1]] * keys).double()
    both = both / (both.square().mean(-1, keepdim=True) + eps).sqrt() * factor
    angles = [angle.double().unsqueeze(2) for angle in (cos, sin)]
    exact = both * angles[0] + turned(both) * angles[1]
    size = (both * angles[0]).abs() + (turned(both) * angles[1]).abs()
    # The norm, each product and their sum are rounded.
    half_unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[dtype]
    assert ((found - exact).abs() <= (3.1 * half_unit + 2.0**-19) * size + 2.0**-23).all()
    assert torch.equal(caches[1][:, :, 7 : 7 + tokens].transpose(1, 2), some[:, :, heads + keys :])
    assert all(cache[:, :, :7].isnan().all() and cache[:, :, 7 + tokens :].isnan().all() for cache in caches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "keys", "width"), [(1, 1, 32, 8, 128), (3, 5, 4, 2, 256), (2, 2, 3, 1, 10)]
)
def test_caches_of_8_bits(
    seed: int,
    batch: int,
    tokens: int,
    heads: int,
    keys: int,
    width: int,
    normed: bool,
    kind: str,
    dtype: torch.dtype,
    device: str,
) -> None:
    """The bits of `quantize_heads`, of what a cache of the heads' type holds; other tokens stay as they are."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    some = random(batch, tokens, heads + 2 * keys, width) * torch.rand(heads + 2 * keys, 1, device=device).to(dtype)
    some[0, 0, -1] = 0
    some[-1, -1, heads] *= 1e-6  # of subnormal scales in float16
    cos, sin = (random(batch, tokens, width) for _ in range(2))
    norms = (random(width), random(width), 1e-6) if normed else ()
    plain = [torch.zeros(batch, keys, 12, width, device=device, dtype=dtype) for _ in range(2)]
    expected = rotate_and_store(some, heads, cos, sin, *plain, torch.tensor(7, device=device), *norms)
    caches = [torch.full((batch, keys, 12, width), 3, device=device, dtype=torch.int8) for _ in range(2)]
    caches = [cache if kind == "int8" else cache.view(torch.uint8) for cache in caches]
    scales = {name: random(batch, keys, 12, 1)[..., 0] for name in ("key_scale", "value_scale")}
    before = [scale.clone() for scale in scales.values()]
    position = torch.tensor(7, device=device)
    query = rotate_and_store(some, heads, cos, sin, *caches, position, *(norms or (None, None, 0.0)), **scales)
    assert torch.equal(query, expected) and int(position) == 7 + tokens
    new = slice(7, 7 + tokens)
    for cache, scale, old, states in zip(caches, scales.values(), before, plain, strict=True):
        q, of_states = quantize_heads(states[:, :, new], kind)
        assert torch.equal(cache[:, :, new], q) and torch.equal(scale[:, :, new], of_states[..., 0])
        rest = torch.arange(12, device=device)
        rest = rest[(rest < 7) | (rest >= 7 + tokens)]
        assert (cache[:, :, rest].view(torch.int8) == 3).all() and torch.equal(scale[:, :, rest], old[:, :, rest])


@pytest.mark.gpu
def test_numbers_that_are_not_finite_in_8_bits(seed: int) -> None:
    """Of such a head the scale says so; other heads are as they were."""
    heads, angles = torch.randn(1, 1, 4, 64, device="cuda"), torch.ones(2, 1, 1, 64, device="cuda")
    heads[0, 0, 2, 5], heads[0, 0, 3, 9] = torch.nan, torch.inf
    caches = torch.zeros(2, 1, 1, 3, 64, device="cuda", dtype=torch.int8)
    scales = torch.zeros(2, 1, 1, 3, device="cuda")
    rotate_and_store(heads, 2, *angles, *caches, torch.tensor(1, device="cuda"), None, None, 0.0, *scales)
    assert scales[0, 0, 0, 1].isnan() and scales[1, 0, 0, 1].isinf()
    assert not scales[:, 0, 0, ::2].any() and not caches[:, :, :, ::2].any()


def test_refusals(seed: int) -> None:
    heads, angles = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 8)
    cache, position = torch.zeros(2, 2, 9, 8), torch.tensor(0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"heads": heads[:, :, :5]}, "heads: expected float32 .*2, 3, 6, 8"),
        ({"cos": angles[:, :2]}, "cos: expected float32 .*2, 3, 8"),
        ({"sin": angles.half()}, "sin: expected float32"),
        ({"value_cache": cache[:1].clone()}, "value_cache: expected float32 .*2, 2, 9, 8"),
        ({"value_cache": cache}, "key_cache: .*value_cache"),
        ({"position": torch.tensor(0.0)}, "position: expected int64"),
        ({"heads": heads[..., :7], "cos": angles[..., :7]}, "heads: expected an even width"),
        ({"key_cache": cache[:, :, :1], "value_cache": cache[:, :, :1]}, "heads: expected at most the 1 tokens of key"),
        ({"query_norm": torch.ones(8)}, "key_norm: expected both norms or none, got one"),
        ({"query_norm": torch.ones(7), "key_norm": torch.ones(8)}, "query_norm: expected"),
        ({"query_norm": torch.ones(8), "key_norm": torch.ones(8).half()}, "key_norm: expected float32"),
        ({"key_scale": torch.zeros(2, 2, 9)}, "key_scale: expected none unless keys and values have 8 bits"),
        ({"key_cache": cache.to(torch.int8)}, "value_cache: expected int8"),
        (
            {"key_cache": cache.to(torch.int8), "value_cache": cache.to(torch.int8)},
            "key_scale: expected scales with 8-bit keys and values, got none",
        ),
        (
            {
                "key_cache": cache.to(torch.int8),
                "value_cache": cache.to(torch.int8),
                "key_scale": torch.zeros(2, 2, 9),
                "value_scale": torch.zeros(2, 2, 8),
            },
            "value_scale: expected float32 .*2, 2, 9",
        ),
    ]
    for changed, message in cases:
        given = {"heads": heads, "cos": angles, "sin": angles, "key_cache": cache.clone(), "value_cache": cache.clone()}
        with pytest.raises(ValueError, match=message):
            arguments: dict[str, Any] = {"key_cache": cache} if message.startswith("key_cache") else {}
            rotate_and_store(query_heads=2, **{**given, "position": position, **changed, **arguments})
