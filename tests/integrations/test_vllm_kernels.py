"""Ordinary checkpoints in vLLM's own layers, on epiloq's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

vllm_on_cpu = pytest.importorskip("vllm_on_cpu")
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from epiloq import nn as modules
from epiloq.compat import vllm as compat
from epiloq.formats.layouts import awq, gptq
from epiloq.integrations.vllm import kernels
from epiloq.integrations.vllm.mixed_precision import EpiloqMixedPrecisionLinearKernel
from epiloq.integrations.vllm.quantizer import EpiloqQuantFP8
from epiloq.weights.packed_weight import pack_weight
from vllm_checkpoints import arguments, compressed_tensors, words_of_compressed_tensors
from vllm_kernel_lists import only_epiloq

Tensors: TypeAlias = dict[str, Tensor]
K, SIZES = 256, [128, 64]

pytestmark = pytest.mark.usefixtures(only_epiloq.__name__)


def floats(n: int, k: int = K) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False, dtype=vllm_on_cpu.DTYPE)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return layer


def loaded(config: Any, shards: list[Tensors], bias: bool = False) -> Any:
    """A merged layer with a checkpoint's shards, loaded by the engine's loaders."""
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.merged(config, SIZES, K, "model.layers.0.mlp.gate_up_proj", bias)
        for index, tensors in enumerate(shards):
            vllm_on_cpu.load(layer, tensors, index)
        vllm_on_cpu.settle(layer)
    return layer


def inputs() -> Iterator[Tensor]:
    for shape in ((5, K), (1, K), (2, 3, K), (0, K)):
        yield torch.randn(shape, dtype=vllm_on_cpu.DTYPE)


def check(layer: Any, references: list[Any]) -> None:
    """The output of one merged product is those of epiloq's modules, side by side, bit for bit."""
    for x in inputs():
        y, _ = layer(x)
        assert torch.equal(y, torch.cat([reference(x) for reference in references], -1))


def check_product(layer: Any, kernel: Any, references: list[Any], input_scale: Tensor | None = None) -> None:
    """The output is the product in float64 of what the engine rounds activations to, rounded once."""
    weight = torch.cat([reference.dequantized_weight() for reference in references]).double()
    for x in inputs():
        rows = x.reshape(-1, K)
        q, scale = kernel.quant_fp8(rows, input_scale, None)
        spread = scale.double().reshape(-1, scale.shape[-1] if scale.ndim == 2 else 1)
        values = q.double() * spread.repeat_interleave(K // spread.shape[1], 1)
        y, _ = layer(x)
        assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], len(weight))
        expected = (values @ weight.t()).view(y.shape)
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)


def test_int8_of_compressed_tensors(seed: int) -> None:
    config = compressed_tensors(
        arguments(8, "int", "channel"), arguments(8, "int", "token", dynamic=True), "int-quantized"
    )
    references = [modules.Int8Linear.from_linear(floats(n)) for n in SIZES]
    shards = [{"weight": r.weight_q, "weight_scale": r.weight_scale.view(-1, 1)} for r in references]
    layer = loaded(config, shards)
    assert type(layer.scheme.kernel) is kernels.EpiloqInt8LinearKernel
    check(layer, references)


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_int8_of_compressed_tensors(seed: int, symmetric: bool) -> None:
    inputs = arguments(8, "int", "tensor") | {"symmetric": symmetric}
    config = compressed_tensors(arguments(8, "int", "channel"), inputs, "int-quantized")
    scale = torch.tensor(0.03125)
    zero = None if symmetric else torch.tensor(-7)
    options = {"activation": "static", "symmetric": symmetric, "input_scale": scale, "input_zero_point": zero}
    references = [modules.Int8Linear.from_linear(floats(n), **options) for n in SIZES]
    shards = [
        {"weight": r.weight_q, "weight_scale": r.weight_scale.view(-1, 1), "input_scale": scale.view(1)}
        | ({} if zero is None else {"input_zero_point": zero.view(1).to(torch.int8)})
        for r in references
    ]
    check(loaded(config, shards), references)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_fp8_of_compressed_tensors(seed: int, strategy: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without its library the engine cannot round parts of a tensor's scale to their largest: it is epiloq that does.
    monkeypatch.setattr("vllm._custom_ops.scaled_fp8_quant", compat.scaled_fp8_quant)
    rounded = arguments(8, "float", "tensor") if static else arguments(8, "float", "token", dynamic=True)
    config = compressed_tensors(arguments(8, "float", strategy), rounded, "float-quantized")
    references = [modules.Fp8Linear.from_linear(floats(n), weight=strategy) for n in SIZES]
    if strategy == "tensor":
        for reference in references:
            reference.weight_scale.data.copy_(references[0].weight_scale)
    shards = [r.file_state() for r in references]
    scale = torch.tensor([2.0**-6]) if static else None
    for shard in shards:
        shard["weight_scale"] = shard["weight_scale"].view(-1, 1) if strategy == "channel" else shard["weight_scale"]
        if scale is not None:
            shard["input_scale"] = scale
    layer = loaded(config, shards)
    assert type(layer.scheme.fp8_linear) is kernels.EpiloqFp8LinearKernel
    assert type(layer.scheme.fp8_linear.quant_fp8) is EpiloqQuantFP8
    check_product(layer, layer.scheme.fp8_linear, references, None if scale is None else scale.view(()))


@pytest.mark.parametrize(
    ("shape", "is_static"),
    [(GroupShape.PER_TOKEN, False), (GroupShape.PER_TENSOR, False), (GroupShape.PER_TENSOR, True), ((1, 128), False)],
)
def test_fp8_activations_as_the_engine_rounds_them(seed: int, shape: Any, is_static: bool) -> None:
    """Against the engine's own definition in torch, which multiplies by a reciprocal where epiloq divides."""
    columns: dict[str, Any] = {"column_major_scales": True, "use_ue8m0": False} if shape == (1, 128) else {}
    with vllm_on_cpu.engine():
        ours = EpiloqQuantFP8(static=is_static, group_shape=GroupShape(*shape), **columns)
    x = torch.randn(37, K, dtype=vllm_on_cpu.DTYPE) * torch.logspace(-2, 2, 37, dtype=vllm_on_cpu.DTYPE)[:, None]
    scale = torch.tensor([2.0**-5]) if is_static else None
    q, found = ours.forward_cuda(x, scale)
    expected_q, expected = ours.forward_native(x, scale)
    assert found.shape == expected.shape and torch.allclose(found, expected, rtol=2**-20, atol=0)
    steps = (codes(q) - codes(expected_q)).abs()
    assert q.dtype == expected_q.dtype and steps.max() <= 1 and steps.count_nonzero() <= steps.numel() // 100


def codes(q: Tensor) -> Tensor:
    """FP8 values as integers in their order."""
    bits = q.contiguous().view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def test_a_bound_of_fp8_scales(seed: int) -> None:
    with vllm_on_cpu.engine():
        ours = EpiloqQuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
    x, bound = torch.randn(5, K, dtype=vllm_on_cpu.DTYPE) * 10, torch.tensor([2.0])
    assert torch.equal(ours.forward_cuda(x, None, bound)[1], torch.full((5, 1), 2 / 448))


def test_fp8_blocks_as_deepseek_has_them(seed: int) -> None:
    config = Fp8Config(True, "dynamic", weight_block_size=[128, 128])
    references = [modules.Fp8BlockLinear.from_linear(floats(n)) for n in (128, 256)]
    with vllm_on_cpu.engine():
        layer = vllm_on_cpu.merged(config, [128, 256], K, "model.layers.0.mlp.gate_up_proj")
        for index, reference in enumerate(references):
            vllm_on_cpu.load(layer, reference.file_state(), index)
        vllm_on_cpu.settle(layer)
    kernel = layer.quant_method.fp8_linear
    assert type(kernel) is kernels.EpiloqFp8BlockLinearKernel
    check_product(layer, kernel, references)


def weight_only(n: int, bits: int, group_size: int, zeros: str) -> modules.WeightOnlyLinear:
    """Scales in the model's type, as the engine holds them."""
    return modules.WeightOnlyLinear.from_linear(floats(n), bits=bits, group_size=group_size, zeros=zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 128])
@pytest.mark.parametrize("zeros", ["none", "zero"])
def test_words_of_compressed_tensors(seed: int, bits: int, group_size: int, zeros: str) -> None:
    strategy = "channel" if group_size == -1 else "group"
    weights = arguments(bits, "int", strategy, group_size=None if group_size == -1 else group_size)
    config = compressed_tensors(weights | {"symmetric": zeros == "none"}, None, "pack-quantized")
    references = [weight_only(n, bits, group_size, zeros) for n in SIZES]
    layer = loaded(config, [words_of_compressed_tensors(r) for r in references])
    assert type(layer.scheme.kernel) is EpiloqMixedPrecisionLinearKernel
    check(layer, references)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks(seed: int, rank: int) -> None:
    """Columns of a merged layer, and inputs of a row-parallel one, each rank its half."""
    config = compressed_tensors(arguments(4, "int", "group", group_size=32), None, "pack-quantized")
    gate, up, down = weight_only(128, 4, 32, "none"), weight_only(64, 4, 32, "none"), weight_only(96, 4, 32, "none")
    with vllm_on_cpu.engine(rank, 2):
        layer = vllm_on_cpu.merged(config, SIZES, K, "model.layers.0.mlp.gate_up_proj")
        row = linear.RowParallelLinear(
            K, 96, bias=False, quant_config=config, prefix="model.layers.0.mlp.down_proj", reduce_results=False
        )
        for index, reference in enumerate((gate, up)):
            vllm_on_cpu.load(layer, words_of_compressed_tensors(reference), index)
        vllm_on_cpu.load(row, words_of_compressed_tensors(down))
        vllm_on_cpu.settle(layer)
        vllm_on_cpu.settle(row)
    x = torch.randn(3, K, dtype=vllm_on_cpu.DTYPE)
    expected = torch.cat([r(x).chunk(2, -1)[rank] for r in (gate, up)], -1)
    assert torch.equal(layer(x)[0], expected)
    half = x.chunk(2, -1)[rank]
    product = half.double() @ down.dequantized_weight().chunk(2, -1)[rank].double().t()
    torch.testing.assert_close(row(half)[0].double(), product, rtol=2**-8, atol=1e-5)


def test_awq(seed: int) -> None:
    config = AutoAWQConfig(4, 128, True, False, [], {})
    references = [weight_only(n, 4, 128, "zero") for n in SIZES]
    layer = loaded(config, [awq.from_packed(r.packed) for r in references])
    assert type(layer.quant_method.kernel) is EpiloqMixedPrecisionLinearKernel
    check(layer, references)


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(seed: int, act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the engine asks of its own kernel, which is for GPUs, before it looks at others.
    monkeypatch.setattr("vllm.model_executor.layers.quantization.auto_gptq.verify_marlin_supported", lambda **_: None)
    config = AutoGPTQConfig(4, 32, act_order, True, False, {}, {})
    monkeypatch.setattr(config, "get_quant_method", lambda layer, prefix: AutoGPTQLinearMethod(config))
    references = [weight_only(n, 4, 32, "none") for n in SIZES]
    shards = []
    order = torch.randperm(K)
    for index, reference in enumerate(references):
        q, scale, _ = reference.packed.unpack()
        perm = order if act_order else None
        references[index] = modules.WeightOnlyLinear.from_packed(
            pack_weight(q, scale, bits=4, group_size=32, perm=perm)
        )
        shards.append(gptq.from_packed(references[index].packed))
    layer = loaded(config, shards)
    assert type(layer.quant_method.kernel) is EpiloqMixedPrecisionLinearKernel
    for x in inputs():
        torch.testing.assert_close(layer(x)[0], torch.cat([r(x) for r in references], -1), rtol=2**-7, atol=2**-9)


def test_int8_sizes_that_kernels_pad(seed: int) -> None:
    config = compressed_tensors(
        arguments(8, "int", "channel"), arguments(8, "int", "token", dynamic=True), "int-quantized"
    )
    reference = modules.Int8Linear.from_linear(nn.Linear(250, 99, dtype=vllm_on_cpu.DTYPE))
    with vllm_on_cpu.engine():
        layer = linear.ReplicatedLinear(250, 99, quant_config=config, prefix="model.layers.0.gate")
        shard = reference.file_state()
        vllm_on_cpu.load(layer, shard | {"weight_scale": shard["weight_scale"].view(-1, 1)})
        vllm_on_cpu.settle(layer)
    x = torch.randn(7, 250, dtype=vllm_on_cpu.DTYPE)
    assert torch.equal(layer(x)[0], reference(x))


@pytest.mark.parametrize("symmetric", [True, False])
def test_int8_of_one_output(seed: int, symmetric: bool) -> None:
    """As of a classifier: one scale is for all rows, one column sum is for the only row."""
    tokens = arguments(8, "int", "token", dynamic=True) | {"symmetric": symmetric}
    reference = modules.Int8Linear.from_linear(floats(1), symmetric=symmetric)
    with vllm_on_cpu.engine():
        config = compressed_tensors(arguments(8, "int", "channel"), tokens, "int-quantized")
        layer = linear.ReplicatedLinear(K, 1, bias=False, quant_config=config, prefix="score")
        shard = {"weight": reference.weight_q, "weight_scale": reference.weight_scale.view(-1, 1)}
        vllm_on_cpu.load(layer, shard)
        vllm_on_cpu.settle(layer)
    for x in inputs():
        y, exact = layer(x)[0], reference(x)
        assert y.shape == exact.shape
        torch.testing.assert_close(y, exact, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("kind", ["int8", "w4a16"])
def test_layers_are_traced_whole_for_any_number_of_tokens(seed: int, kind: str) -> None:
    """As the engine compiles its models."""
    if kind == "int8":
        config = compressed_tensors(
            arguments(8, "int", "channel"), arguments(8, "int", "token", dynamic=True), "int-quantized"
        )
        modules_of = [modules.Int8Linear.from_linear(floats(n)) for n in SIZES]
        shards = [{"weight": r.weight_q, "weight_scale": r.weight_scale.view(-1, 1)} for r in modules_of]
    else:
        config = compressed_tensors(arguments(4, "int", "group", group_size=32), None, "pack-quantized")
        shards = [words_of_compressed_tensors(weight_only(n, 4, 32, "none")) for n in SIZES]
    layer = loaded(config, shards)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for tokens in (3, 17):
            x = torch.randn(tokens, K, dtype=vllm_on_cpu.DTYPE)
            assert torch.equal(compiled(x), layer(x)[0])


def test_weights_changed_in_place_are_used_by_later_calls(seed: int) -> None:
    """As by the engine's reloading, which copies new values into the parameters that its graphs read."""
    config = compressed_tensors(arguments(4, "int", "group", group_size=32), None, "pack-quantized")
    layer = loaded(config, [words_of_compressed_tensors(weight_only(n, 4, 32, "none")) for n in SIZES])
    x = torch.randn(3, K, dtype=vllm_on_cpu.DTYPE)
    before = layer(x)[0]
    layer.weight_scale.data.mul_(2)
    assert torch.equal(layer(x)[0], 2 * before)
