"""With `batch_invariant` a row of tokens gets the same bits whatever rows are beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq import _core
from epiloq.introspect import _EXPLAIN
from epiloq.nn import (
    Fp8BlockExperts,
    Fp8Experts,
    Fp8WeightOnlyLinear,
    Int8Experts,
    PackedExperts,
    PackedFp4Experts,
    TableLinear,
    W4A8Experts,
    W4A8Fp4Experts,
)
from epiloq.ops.attention.decode_attention import decode_attention

SCHEMES = (
    *("w8a8-int8", "w8a8-int8-azp", "w8a8-block", "w4a8-block", "fp8-token", "fp8-block", "w4a8-fp8", "w4a8-int8"),
    *("w4a8-mxfp4-fp8", "w4a8-nvfp4-fp8"),
    *("w8a16", "w4a16-g128", "w4a16-g64", "w4a16-g32", "w4a16-mxfp4", "w4a16-nvfp4"),
)
EXPERTS: dict[str, Callable[[Tensor], nn.Module]] = {
    "int8": Int8Experts.from_weight,
    "fp8": Fp8Experts.from_weight,
    "fp8-block": Fp8BlockExperts.from_weight,
    "w4a16": lambda w: PackedExperts.from_weight(w, group_size=32, dtype=w.dtype),
    "w4a8": lambda w: W4A8Experts.from_weight(w, group_size=32, dtype=w.dtype),
    "mxfp4": lambda w: PackedFp4Experts.from_weight(w, format="mxfp4"),
    # Of three matrices with global scales of their own.
    "nvfp4": lambda w: PackedFp4Experts.from_weight(w, format="nvfp4", matrices=3),
    "mxfp4-fp8": lambda w: W4A8Fp4Experts.from_weight(w, format="mxfp4"),
    "nvfp4-fp8": lambda w: W4A8Fp4Experts.from_weight(w, format="nvfp4", matrices=3),
}
MOST = 300


@pytest.fixture
def invariant() -> Iterator[None]:
    with epiloq.config(batch_invariant=True):
        yield


def counts(seed: int, most: int = MOST) -> list[int]:
    """Every number of rows from which another kernel may be chosen, and some more."""
    edges = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, most}
    return sorted({m for m in edges if m <= most} | set(Random(seed).sample(range(1, most + 1), 12)))


def assert_rows_alike(call: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> None:
    """Windows of the rows, their first row any one, give what all rows give."""
    whole, random = call(x), Random(seed)
    for m in counts(seed, len(x)):
        first = random.randint(0, len(x) - m)
        window = call(x[first : first + m].clone())
        assert torch.equal(window, whole[first : first + m]), (m, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_linear_layers(scheme: str, dtype: torch.dtype, device: str, seed: int, invariant: None) -> None:
    if device == "cuda" and dtype == torch.float32 and "a16" in scheme:
        pytest.skip("refused, see test_refusals_on_a_gpu")
    for n, k in ((96, 256), (130, 200), (512, 1024)):
        layer = epiloq.quantize_(nn.Sequential(nn.Linear(k, n, dtype=dtype, device=device)), scheme)[0]
        assert_rows_alike(layer, torch.randn(MOST, k, dtype=dtype, device=device), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_layers_of_language_models(scheme: str, seed: int, invariant: None) -> None:
    """Sizes at which a GPU splits K, several waves of tiles and a partial last one."""
    for n, k in ((4096, 4096), (1280, 8192), (14336, 1024), (5120, 2880)):
        layer = epiloq.quantize_(nn.Sequential(nn.Linear(k, n, dtype=torch.bfloat16, device="cuda")), scheme)[0]
        assert_rows_alike(layer, torch.randn(4096, k, dtype=torch.bfloat16, device="cuda"), seed)


@pytest.mark.parametrize("kind", EXPERTS)
@torch.no_grad()
def test_experts(kind: str, device: str, seed: int, invariant: None) -> None:
    """Whatever the other rows of the expert, and the other experts' rows."""
    dtype, random, (experts, n, k) = torch.bfloat16, Random(seed), (3, 48, 128)
    layer = EXPERTS[kind](torch.randn(experts, n, k, dtype=dtype, device=device))
    x, own = torch.randn(90, k, dtype=dtype, device=device), sorted(random.choices(range(experts), k=90))

    def call(rows: list[int]) -> Tensor:
        ends = [sum(own[row] <= expert for row in rows) for expert in range(experts)]
        return layer(x[rows], offs=torch.tensor(ends, dtype=torch.int32, device=device))

    whole = call(list(range(90)))
    for size in (1, 2, 7, 17, 40, 80):
        rows = sorted(random.sample(range(90), size))
        assert torch.equal(call(rows), whole[rows]), rows


@pytest.mark.parametrize("cols", [64, 576, 4096])
@torch.no_grad()
def test_fused_quantisers(cols: int, device: str, seed: int, invariant: None) -> None:
    weight = torch.randn(cols, dtype=torch.bfloat16, device=device)

    def norm(x: Tensor) -> Tensor:
        q, scale = epiloq.rms_norm_quant(x, weight, 1e-6, dtype=torch.int8, granularity="token")
        return q.float() * scale

    def gate(x: Tensor) -> Tensor:
        q, scale = epiloq.silu_and_mul_quant(x, dtype=torch.float8_e4m3fn, granularity="token")
        return q.float() * scale

    calls = (
        (norm, cols),
        (gate, 2 * cols),
        (lambda x: epiloq.rms_norm(x, weight), cols),
        (epiloq.silu_and_mul, 2 * cols),
    )
    for call, width in calls:
        assert_rows_alike(call, torch.randn(MOST, width, dtype=torch.bfloat16, device=device), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float", "int8"])
def test_decode_attention(kind: str, seed: int, invariant: None) -> None:
    """A sequence decodes to the same bits beside any others, in caches of one length."""
    quantize_heads = pytest.importorskip("epiloq.kv_cache").quantize_heads  # without transformers there is no cache
    query = torch.randn(40, 8, 128, dtype=torch.bfloat16, device="cuda")
    states = [torch.randn(40, 2, 700, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    scales: list[Tensor] = []
    if kind == "int8":
        pairs = [quantize_heads(state, kind) for state in states]
        states, scales = [q for q, _ in pairs], [scale[..., 0] for _, scale in pairs]

    def call(rows: slice) -> Tensor:
        some = dict(zip(("key_scale", "value_scale"), (scale[rows] for scale in scales), strict=False))
        return decode_attention(query[rows], *(state[rows] for state in states), **some)

    whole = call(slice(None))
    for first, count in ((0, 1), (3, 1), (5, 2), (7, 17), (8, 32)):
        rows = slice(first, first + count)
        assert torch.equal(call(rows), whole[rows]), rows


def test_kernels_differ_without_batch_invariance(seed: int) -> None:
    """Otherwise the tests above would test nothing."""
    layer = epiloq.quantize_(nn.Sequential(nn.Linear(1024, 512)), "w4a16-g64")[0]
    x = torch.randn(64, 1024)
    assert not torch.equal(layer(x)[:3], layer(x[:3].clone()))


def message(name: str, m: int, sizes: dict[str, Any]) -> str:
    return epiloq.explain(name, m=m, **sizes)


CHOICES: dict[str, dict[str, Any]] = {
    "scaled_mm": {"dtype": "float8_e4m3fn"},
    "groupwise_mm": {},
    "grouped_mm": {"experts": 8},
    "weight_only_mm": {"bits": 4, "group_size": 128},
    "online_quant_mm": {"bits": 8, "group_size": 128},
}


SPLITS = re.compile(r"\d+ (?:warpgroups )?along K|K over clusters of \d+")


@pytest.mark.parametrize("name", CHOICES)
def test_kernels_of_a_layer_sum_in_one_order(name: str, seed: int, invariant: None) -> None:
    """On SM90: as many warpgroups along K and as many CTAs for every number of tokens; no GPU is needed to ask."""
    random = Random(seed)
    for _ in range(8):
        sizes = {"n": random.randrange(128, 16384, 128), "k": random.randrange(256, 16384, 128), **CHOICES[name]}
        kernels = {message(name, m, sizes) for m in (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 129, 300, 1024, 5000, 20000)}
        assert len({tuple(SPLITS.findall(kernel)) for kernel in kernels}) == 1, kernels
        assert all("rounded" not in kernel and "last wave" not in kernel for kernel in kernels)
        clusters = [int(number) for kernel in kernels for number in re.findall(r"clusters of (\d+)", kernel)]
        assert max(clusters, default=1) <= 2


def test_other_architectures_keep_a_kernel(invariant: None) -> None:
    for arch, name, options in (
        ("sm89", "scaled_mm", {"dtype": "float8_e4m3fn"}),
        ("sm80", "online_quant_mm", {"bits": 8, "group_size": 64}),
        ("sm75", "online_quant_mm", {"bits": 4, "group_size": 32}),
    ):
        sizes = {"n": 4096, "k": 4096, "arch": arch, **options}
        assert len({message(name, m, sizes) for m in (1, 16, 100, 2000)}) == 1
    tiled = {message("weight_only_mm", m, {"n": 512, "k": 4096, "arch": "sm80", "bits": 4}) for m in (1, 16, 300, 5000)}
    assert all(kernel.startswith("mma.sync") and "clusters" not in kernel for kernel in tiled)


def test_every_operation_is_batch_invariant_or_refuses() -> None:
    """A new operation belongs into one of these, and into the tests of it."""
    exact = {"scaled_mm_azp", "conv2d_int8", "requantized_mm", "lookup_int8", "scaled_bmm", "quantize_blockwise_int8"}
    by_layers = {"scaled_mm", "groupwise_mm", "online_quant_mm", "weight_only_mm", "w4a8_mm", "packed_fp4_mm"}
    by_layers |= {"quantize_int8", "quantize_fp8"}
    here = {"grouped_mm", "grouped_packed_mm", "rms_norm", "rms_norm_quant", "silu_and_mul", "silu_and_mul_quant"}
    refused = {"table_mm", "fp4_mm", "fp8_weight_mm", "conv2d_weight_only"}
    assert set(_EXPLAIN) == exact | by_layers | here | refused


@torch.no_grad()
def test_refusals(seed: int, invariant: None) -> None:
    whole = epiloq.quantize_(nn.Sequential(nn.Linear(32, 16)), "fp8")[0]
    with pytest.raises(NotImplementedError, match="Fp8Linear: batch_invariant: a scale per tensor depends"):
        whole(torch.randn(3, 32))
    table = TableLinear(64, 16)
    with pytest.raises(NotImplementedError, match="table_mm: batch_invariant: torch's product of the dequantised"):
        table(torch.randn(3, 64))
    widened = Fp8WeightOnlyLinear(64, 16)
    with pytest.raises(NotImplementedError, match="Fp8WeightOnlyLinear: batch_invariant: torch's product"):
        widened(torch.randn(3, 64))
    with pytest.raises(NotImplementedError, match="fp4_mm: batch_invariant: torch's product"):
        epiloq.fp4_mm(torch.randn(3, 64), torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 2, dtype=torch.uint8))
    conv = epiloq.quantize_(nn.Sequential(nn.Conv2d(32, 16, 3)), "conv-w8a16")[0]
    with pytest.raises(NotImplementedError, match="conv2d_weight_only: batch_invariant"):
        conv(torch.randn(1, 32, 5, 5))
    with pytest.raises(NotImplementedError, match="weight_only_mm: batch_invariant: no kernel for this product"):
        epiloq.explain("weight_only_mm", m=16, n=64, k=64, bits=4, group_size=16)
    assert not epiloq.supports("weight_only_mm", m=16, n=64, k=64, bits=4, group_size=16)[0]
    assert epiloq.supports("weight_only_mm", m=16, n=64, k=64, bits=2)[0]
    with epiloq.config(batch_invariant=False):
        assert whole(torch.randn(3, 32)).shape == (3, 16)


@pytest.mark.gpu
@torch.no_grad()
def test_refusals_on_a_gpu(seed: int, invariant: None) -> None:
    layer = epiloq.quantize_(nn.Sequential(nn.Linear(256, 64, device="cuda")), "w4a16-g32")[0]
    with pytest.raises(NotImplementedError, match=r"weight_only_mm: batch_invariant: no kernel .*float32"):
        layer(torch.randn(3, 256, device="cuda"))
    packed = epiloq.nn.Fp4Linear(64, 16, device="cuda")
    with pytest.raises(NotImplementedError, match="packed_fp4_mm: batch_invariant: torch's product"):
        packed(torch.randn(3, 64, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@torch.no_grad()
def test_fp4_by_the_kernel_at_any_m(form: str, seed: int, invariant: None) -> None:
    """And one kernel, whether a layer is called alone or as an expert of a mixture."""
    experts, n, k = 3, 96, 520
    layer = PackedFp4Experts.from_weight(torch.randn(experts, n, k, dtype=torch.bfloat16, device="cuda"), format=form)
    x = torch.randn(700, k, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([100, 100, 700], dtype=torch.int32, device="cuda")
    y = layer(x, offs=ends)
    q, scale, factor = layer._made
    for expert, rows in ((0, slice(0, 100)), (2, slice(100, 700))):
        parts = layer._of_expert([q, scale, factor], expert)
        weight = layer._value(*parts, n)  # type: ignore[arg-type]
        message = {epiloq.explain("packed_fp4_mm", x[:m], weight) for m in (1, 7, 64, 65, 700)}
        assert all("split-K 1" in kernel for kernel in message)
        assert len({kernel.split(",")[1] for kernel in message}) == 1, message
        for m in (1, 33, 100):
            part = x[rows][:m].clone()
            assert torch.equal(epiloq.packed_fp4_mm(part, weight), y[rows][:m])


def test_the_setting(seed: int) -> None:
    """Of all threads, and before it of this one; contexts nest, and leave what they were not asked for."""

    def in_another_thread() -> bool:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_core.batch_invariant).result()

    assert not _core.batch_invariant()
    with epiloq.config(batch_invariant=True, arch="sm80"):
        assert _core.batch_invariant() and not in_another_thread()
        with epiloq.config():
            assert _core.batch_invariant() and _core.forced_arch() == "sm80"
        with epiloq.config(batch_invariant=False, arch="auto"):
            assert not _core.batch_invariant() and _core.forced_arch() == "auto"
    try:
        epiloq.set_batch_invariant()
        assert _core.batch_invariant() and in_another_thread()
        with epiloq.config(batch_invariant=False):
            assert not _core.batch_invariant() and in_another_thread()
    finally:
        epiloq.set_batch_invariant(False)
    assert not _core.batch_invariant() and _core.forced_arch() == "auto"
    with pytest.raises(TypeError, match="set_batch_invariant: on: expected True or False, got 1"):
        epiloq.set_batch_invariant(1)  # type: ignore[arg-type]
    wrong: Any = {"batch_invariant": "yes", "arch": "sm80"}
    with pytest.raises(TypeError, match="config: batch_invariant: expected True or False"), epiloq.config(**wrong):
        pass
    assert _core.forced_arch() == "auto"


@pytest.mark.slow
@torch.no_grad()
def test_compiled(seed: int, invariant: None) -> None:
    layer = epiloq.quantize_(nn.Sequential(nn.Linear(256, 64)), "w4a8-fp8")
    x = torch.randn(20, 256)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x)[3:5], compiled(x[3:5].clone()))
    whole = torch.compile(epiloq.quantize_(nn.Sequential(nn.Linear(32, 16)), "fp8"), backend="aot_eager")
    with pytest.raises(Exception, match="a scale per tensor depends on all tokens"):
        whole(torch.randn(3, 32))
