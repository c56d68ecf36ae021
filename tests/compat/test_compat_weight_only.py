"""vLLM's AWQ and GPTQ products by name, against float64 products of the weights that their words define."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layout_definitions as definitions
from epiloq.compat import _packed_words, vllm
from epiloq.formats.layouts import awq
from reference import ulp
from weight_reference import PRECISION

# ExLlamaV2's pictures of its words, most significant bit first: the channel (in base 36) that a bit is of.
PICTURES = {
    2: ["ffddbb9977553311eeccaa8866442200"],
    3: [
        "v999777555333111u888666444222000",
        "vjjjhhhfffdddbbbuiiigggeeecccaaa",
        "vtttrrrpppnnnlllusssqqqooommmkkk",
    ],
    4: ["77775555333311116666444422220000"],
    8: ["33333333222222221111111100000000"],
}
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    vllm.forget_weights()
    yield
    vllm.forget_weights()


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(*shape: int) -> Tensor:
    return (torch.rand(shape) * 0.02 + 1e-3).half()


def awq_words(n: int, k: int, group_size: int) -> dict[str, Tensor]:
    groups = k // group_size
    return {"qweight": words(k, n // 8), "scales": scales(groups, n), "qzeros": words(groups, n // 8)}


def gptq_words(n: int, k: int, group_size: int, bits: int) -> dict[str, Tensor]:
    groups = k // group_size
    zeros = words(groups, n * bits // 32) & (0x7F7F7F7F if bits == 8 else -1)
    g_idx = (torch.randperm(k) // group_size).to(torch.int32)
    return {"qweight": words(k * bits // 32, n), "qzeros": zeros, "scales": scales(groups, n), "g_idx": g_idx}


def to(device: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def assert_product(y: Tensor, x: Tensor, dense: Tensor, *, rounded: bool = False) -> None:
    """The documented bound: one ulp of the output, fp32's rounding of a sum, and of weights where they are rounded."""
    assert y.shape == (x.shape[0], dense.shape[0]) and y.dtype == x.dtype
    exact, size = x.double() @ dense.t(), x.double().abs() @ dense.abs().t()
    k = x.shape[1]
    bound = ulp(exact, y.dtype) + 2.0**-23 * k**0.5 * size
    if rounded:
        bound += PRECISION[y.dtype] * size + 2.0**-25 * x.double().abs().sum(-1, keepdim=True)
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("m", [0, 1, 17])
@pytest.mark.parametrize(("n", "k", "group_size"), [(64, 256, 128), (40, 96, 32)])
def test_awq_gemm(seed: int, device: str, dtype: torch.dtype, m: int, n: int, k: int, group_size: int) -> None:
    tensors = awq_words(n, k, group_size)
    dense = definitions.awq_gemm(tensors, group_size)
    x = torch.randn(m, k).to(dtype)
    y = vllm.awq_gemm(x.to(device), **to(device, tensors), split_k_iters=8)
    assert_product(y.cpu(), x, dense)


def test_awq_dequantize(seed: int, device: str) -> None:
    tensors = awq_words(40, 96, 32)
    there = to(device, tensors)
    w = vllm.awq_dequantize(there["qweight"], there["scales"], there["qzeros"], 0, 0, 0)
    assert w.shape == (96, 40) and w.is_contiguous()
    assert torch.equal(w.cpu(), definitions.awq_gemm(tensors, 32).t().half())


@pytest.mark.parametrize("use_v2_format", [True, False])
@pytest.mark.parametrize("use_exllama", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_gemm(seed: int, device: str, bits: int, use_exllama: bool, use_v2_format: bool) -> None:
    n, k = 64, 256
    for ordered in (True, False):
        tensors = gptq_words(n, k, 32, bits)
        if ordered:
            tensors["g_idx"] = tensors["g_idx"].sort().values
        dense = definitions.gptq(tensors, bits, "gptq_v2" if use_v2_format else "gptq")
        there = to(device, tensors)
        weight, order = there["qweight"].clone(), there["g_idx"]
        if use_exllama:
            order = torch.empty(0, dtype=torch.int32, device=device if bits == 4 else "meta")
            if not ordered:
                order = there["g_idx"].argsort(stable=True).to(torch.int32)
            vllm.gptq_shuffle(weight, order, bits)
        for dtype in HALF:
            x = torch.randn(5, k).to(dtype)
            arguments = (weight, there["qzeros"], there["scales"], order, use_exllama, use_v2_format, bits)
            # The GPU has kernels for 4 and 8 bits, and dequantises others.
            rounded = device == "cuda" and bits in (2, 3)
            assert_product(vllm.gptq_gemm(x.to(device), *arguments).cpu(), x, dense, rounded=rounded)


@pytest.mark.parametrize("bits", PICTURES)
def test_gptq_shuffle_is_as_pictured(seed: int, bits: int) -> None:
    given = words(bits * 2, 3)
    shuffled = given.clone()
    vllm.gptq_shuffle(shuffled, torch.empty(0, dtype=torch.int32), bits)
    for column in range(3):
        fields = definitions.stream(given[:, column], bits)
        pictures = PICTURES[bits]
        for first in range(0, given.shape[0], len(pictures)):
            seen: dict[int, int] = {}
            start = first * 32 // bits
            for word, picture in enumerate(pictures):
                for place, channel in enumerate(reversed(picture)):
                    field = int(channel, 36)
                    expected = fields[start + field] >> seen.get(field, 0) & 1
                    seen[field] = seen.get(field, 0) + 1
                    assert (int(shuffled[first + word, column]) >> place & 1) == expected
            assert set(seen.values()) == {bits}


# --- what is kept


def kept() -> int:
    return len(_packed_words._kept)


def test_packed_weight_cache_is_freed_with_its_words(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    pack = awq.to_packed
    monkeypatch.setattr(awq, "to_packed", lambda *a, **k: made.append(a) or pack(*a, **k))
    tensors, x = awq_words(16, 64, 32), torch.randn(2, 64).half()
    first = vllm.awq_gemm(x, **tensors, split_k_iters=1)
    assert torch.equal(vllm.awq_gemm(x, **tensors, split_k_iters=8), first) and len(made) == 1 == kept()
    packed = weakref.ref(next(iter(_packed_words._kept.values())).weight)
    made.clear()
    del tensors
    gc.collect()
    assert kept() == 0 and packed() is None


def test_changed_tensors_are_packed_anew(seed: int) -> None:
    tensors, x = awq_words(16, 64, 32), torch.randn(2, 64).half()
    vllm.awq_gemm(x, **tensors, split_k_iters=1)
    for name in ("qweight", "scales", "qzeros"):
        tensors[name].copy_(awq_words(16, 64, 32)[name])
        assert_product(vllm.awq_gemm(x, **tensors, split_k_iters=1), x, definitions.awq_gemm(tensors, 32))
    for name in ("scales", "qzeros"):
        tensors[name] = awq_words(16, 64, 32)[name]
        assert_product(vllm.awq_gemm(x, **tensors, split_k_iters=1), x, definitions.awq_gemm(tensors, 32))
    tensors["qweight"].data = words(64, 2)
    assert_product(vllm.awq_gemm(x, **tensors, split_k_iters=1), x, definitions.awq_gemm(tensors, 32))
    assert kept() == 1
    tensors["qweight"].data.copy_(words(64, 2))  # Uncounted, as documented.
    vllm.forget_weights()
    assert_product(vllm.awq_gemm(x, **tensors, split_k_iters=1), x, definitions.awq_gemm(tensors, 32))


def test_ambiguous_configuration_keys(seed: int) -> None:
    """The key holds how words are read, not only where they are."""
    tensors, x = gptq_words(16, 64, 32, 4), torch.randn(2, 64).half()
    tensors["g_idx"] = torch.arange(64, dtype=torch.int32) // 32
    arguments = (tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors["g_idx"], False)
    for version in ("gptq", "gptq_v2", "gptq"):
        y = vllm.gptq_gemm(x, *arguments, version == "gptq_v2", 4)
        assert_product(y, x, definitions.gptq(tensors, 4, version))


def test_inference_tensors_are_not_kept(seed: int) -> None:
    with torch.inference_mode():
        tensors, x = awq_words(16, 64, 32), torch.randn(2, 64).half()
        assert_product(vllm.awq_gemm(x, **tensors, split_k_iters=1), x, definitions.awq_gemm(tensors, 32))
        tensors["qweight"].copy_(words(64, 2))
        assert_product(vllm.awq_gemm(x, **tensors, split_k_iters=1), x, definitions.awq_gemm(tensors, 32))
    assert kept() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(2, 64)}, "awq_gemm: input: expected torch"),
        ({"input": torch.zeros(64).half()}, "awq_gemm: input: expected 2 dimensions"),
        ({"input": torch.zeros(2, 65).half()}, "x: expected"),
        ({"qweight": words(65, 2)}, "awq_gemm: scales: expected groups that divide K = 65"),
        ({"qzeros": words(2, 3)}, "qzeros: expected"),
        ({"scales": words(2, 16)}, "scales: expected floating point"),
    ],
)
def test_awq_gemm_refuses(changes: dict[str, Tensor], message: str) -> None:
    valid = {"input": torch.zeros(2, 64).half(), **awq_words(16, 64, 32)}
    with pytest.raises(ValueError, match=message):
        vllm.awq_gemm(**{**valid, **changes}, split_k_iters=1)
    assert kept() == 0 or "x: expected" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bit": 5}, "gptq_gemm: bit: expected one of"),
        ({"b_g_idx": torch.zeros(64, dtype=torch.int32)}, "g_idx: expected 32 channels in each group"),
        ({"b_g_idx": torch.zeros(64, dtype=torch.int32), "use_exllama": True}, "gptq_gemm: perm: expected each of"),
        ({"b_q_weight": words(7, 16)}, "(g_idx|qzeros|scales): expected"),
        ({"b_gptq_scales": scales(3, 16)}, "scales: expected groups that divide K = 64"),
    ],
)
def test_gptq_gemm_refuses(changes: dict[str, Any], message: str) -> None:
    tensors = gptq_words(16, 64, 32, 4)
    valid = {"a": torch.zeros(2, 64).half(), "b_q_weight": tensors["qweight"], "b_gptq_qzeros": tensors["qzeros"]}
    valid |= {"b_gptq_scales": tensors["scales"], "b_g_idx": tensors["g_idx"]}
    flags: dict[str, Any] = {"use_exllama": False, "use_v2_format": False, "bit": 4}
    with pytest.raises(ValueError, match=message):
        vllm.gptq_gemm(**{**valid, **flags, **changes})
    with pytest.raises(ValueError, match="gptq_shuffle: perm: expected each of"):
        vllm.gptq_shuffle(tensors["qweight"], torch.zeros(64, dtype=torch.int32), 4)
