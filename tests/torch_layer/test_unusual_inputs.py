"""What a model may hand on, and what a caller may get wrong, that the operations' own tests do not ask."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epiloq
from epiloq import parallel
from epiloq.compat import deep_gemm, sglang, vllm
from epiloq.formats.layouts import awq, compressed_tensors, gptq
from epiloq.formats.layouts.base import FormatError

K, N = 64, 24
STATIC = {"activation": "static", "input_scale": 0.03}
LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": epiloq.nn.Int8Linear.from_linear,
    "int8 azp": lambda x: epiloq.nn.Int8Linear.from_linear(x, symmetric=False),
    "int8 static": lambda x: epiloq.nn.Int8Linear.from_linear(x, symmetric=False, input_zero_point=3, **STATIC),
    "fp8 token": epiloq.nn.Fp8Linear.from_linear,
    "fp8 block": epiloq.nn.Fp8BlockLinear.from_linear,
    "int8 in blocks": lambda x: epiloq.nn.OnlineQuantLinear.from_linear(x, group_size=32),
    "int4": lambda x: epiloq.nn.WeightOnlyLinear.from_linear(x, bits=4, group_size=32),
}
EXPERTS = [epiloq.nn.Int8Experts, epiloq.nn.Fp8Experts, epiloq.nn.Fp8BlockExperts]


@pytest.fixture
def convolution() -> epiloq.nn.Int8Conv2d:
    return epiloq.nn.Int8Conv2d.from_conv2d(
        nn.Conv2d(8, 16, 3), input_scale=0.03, input_zero_point=2, output=(0.05, -3)
    )


def refuses(message: str, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
    with pytest.raises(ValueError, match=message):
        call(*arguments, **named)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_take_rows_that_repeat_or_overlap(layer: str) -> None:
    """As nn.Linear does: a learned query that is expanded, a window that slides."""
    quantised = LAYERS[layer](nn.Linear(K, N))
    with torch.no_grad():
        for x in (torch.randn(1, 1, K).expand(5, 3, K), torch.randn(K + 6).unfold(0, K, 1), torch.randn(K, 5).t()):
            assert torch.equal(quantised(x), quantised(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_take_rows_that_repeat_or_alternate(kind: type[nn.Module]) -> None:
    experts = kind.from_weight(torch.randn(2, N, K))  # type: ignore[attr-defined]
    x, ends = torch.randn(1, K).expand(6, K), torch.tensor([2, 6], dtype=torch.int32)
    assert torch.equal(experts(x, offs=ends), experts(x.contiguous(), offs=ends))
    refuses("expected", experts, torch.randn(K), offs=ends)  # a token by itself has no expert
    counts = torch.tensor([6, 6], dtype=torch.int32)
    overlapping = torch.randn(8 * K).as_strided((2, 6, K), (K, K, 1))
    for x in (torch.randn(6, 2, K).transpose(0, 1), torch.randn(1, 6, K).expand(2, 6, K), overlapping):
        assert torch.equal(experts(x, masked_m=counts), experts(x.contiguous(), masked_m=counts))


def test_convolutions_are_mapped_and_compiled(convolution: epiloq.nn.Int8Conv2d) -> None:
    images = torch.randn(3, 1, 8, 6, 7)
    one_by_one = torch.stack([convolution(image) for image in images])
    assert torch.equal(torch.func.vmap(convolution)(images), one_by_one)
    compiled = torch.compile(convolution, fullgraph=True, backend="eager")
    assert torch.equal(compiled(images[0]), one_by_one[0])


def test_quantisers_may_be_numbers_of_any_kind(convolution: epiloq.nn.Int8Conv2d) -> None:
    for scale, zero in ((torch.tensor(0.25), torch.tensor(3)), (0.25, 3.0), (torch.tensor([0.25]), torch.tensor([3]))):
        convolution.set_quantizers(output=(scale, zero))
        assert convolution.output == (0.25, 3)


def test_a_part_of_a_convolution_leaves_its_quantiser(convolution: epiloq.nn.Int8Conv2d) -> None:
    x, before = torch.randn(2, 8, 6, 7), convolution.output
    found = convolution.load_state_dict({"bias": convolution.bias + 1}, strict=False)
    assert {"output_scale", "output_zero_point"} <= set(found.missing_keys)
    assert convolution.output == before
    assert convolution(x).dtype == torch.int8
    floats = epiloq.nn.Int8Conv2d.from_conv2d(nn.Conv2d(8, 16, 3), input_scale=0.03, input_zero_point=2)
    convolution.load_state_dict(floats.state_dict())  # all of a layer says that it hands on none
    assert convolution.output is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"output": (-1.0, 3)},
        {"output": (0.1, 500)},
        {"input": (float("nan"), 0)},
        {"input": (0.1, 3), "output": (float("inf"), 0)},
        {"input": (1e-50, 3)},  # none is left of it in float32
        {"input": (0.5, 9), "output": (1e-46, 3)},
        {"input": (0.5, 9), "output": (1e39, 3)},
        {"output": (0.1, 2.5)},
    ],
)
def test_quantisers_out_of_range_change_nothing(convolution: epiloq.nn.Int8Conv2d, wrong: dict[str, Any]) -> None:
    x = torch.randn(2, 8, 6, 7)
    before, state = convolution(x), {name: t.clone() for name, t in convolution.state_dict().items()}
    refuses("Int8Conv2d: (in|out)put_(scale|zero): expected", convolution.set_quantizers, **wrong)
    assert torch.equal(convolution(x), before)
    assert all(torch.equal(t, state[name]) for name, t in convolution.state_dict().items())


def test_outputs_may_be_written_into() -> None:
    """As what follows a layer in place does, with gradients and without."""
    image = torch.randn(2, 8, 6, 7, requires_grad=True)
    convolution = epiloq.nn.Int8Conv2d.from_conv2d(nn.Conv2d(8, 16, 3), input_scale=0.03, input_zero_point=2)
    rows = torch.randn(3, K, requires_grad=True)
    for layer, x in ((LAYERS["int8 static"](nn.Linear(K, N)), rows), (convolution, image)):
        (found,) = torch.autograd.grad(layer(x).relu_().sum(), x)
        (expected,) = torch.autograd.grad(layer(x).relu().sum(), x)
        assert torch.equal(found, expected) and found.any()
        with torch.no_grad():
            assert not layer(x).relu_().requires_grad
        assert not layer(x.detach()).requires_grad


def test_static_layers_are_traced(tmp_path: Path) -> None:
    image, rows = torch.randn(2, 8, 6, 7), torch.randn(3, K)
    convolution = epiloq.nn.Int8Conv2d.from_conv2d(nn.Conv2d(8, 16, 3), input_scale=0.03, input_zero_point=2)
    for first, layer, x in (
        (nn.Linear(K, K), LAYERS["int8 static"](nn.Linear(K, N)), rows),
        (nn.Conv2d(8, 8, 1), convolution, image),
    ):
        model = nn.Sequential(first, layer)  # whose first layer asks for gradients of what the second one takes
        torch.jit.trace(model, x).save(str(tmp_path / "traced.pt"))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            assert torch.equal(torch.jit.load(str(tmp_path / "traced.pt"))(x), model(x))  # type: ignore[no-untyped-call]


def test_scales_of_a_type_that_no_kernel_takes_are_not_loaded() -> None:
    layer = epiloq.nn.WeightOnlyLinear.from_linear(nn.Linear(K, N), bits=4, group_size=32)
    state = layer.state_dict()
    for dtype in (torch.float64, torch.float8_e4m3fn):
        with pytest.raises(RuntimeError, match=r"weight_scale: expected torch\.float32"):
            layer.load_state_dict({**state, "weight_scale": state["weight_scale"].to(dtype)})
    layer.load_state_dict({**state, "weight_scale": state["weight_scale"].half(), "bias": state["bias"].double()})


def test_a_bias_of_other_channels_is_not_prepared() -> None:
    q, scale = torch.zeros(4, 3, 3, 8, dtype=torch.int8), torch.ones(4)
    refuses(r"bias: expected shape \[4\]", epiloq.PreparedInt8Weight.prepare, q, scale, torch.ones(5), input=(0.1, 3))


@pytest.mark.parametrize(
    ("operation", "text", "message"),
    [
        ("weight_only_mm", {"group_size": 0}, "group_size: expected -1 or at least 1, got 0"),
        ("weight_only_mm", {"group_size": -7}, "group_size: expected -1 or at least 1, got -7"),
        ("weight_only_mm", {"bits": 5}, "bits: expected 2, 3, 4 or 8, got 5"),
        ("weight_only_mm", {"bits": True}, "bits: expected 2, 3, 4 or 8, got 1"),
        ("online_quant_mm", {"group_size": 0}, "group_size: expected 1 to .*, got 0"),
        ("online_quant_mm", {"bits": 7}, "bits: expected 4 or 8, got 7"),
        ("scaled_mm", {"k": 131072}, "k: expected at most 131071 of int8, got 131072"),
        ("scaled_mm_azp", {"k": 65794}, "k: expected at most 65793 of int8, got 65794"),
        ("grouped_mm", {"k": 131072, "dtype": torch.int8, "experts": 2, "per_row_scales": True}, "k: expected at most"),
    ],
)
def test_explain_refuses_invalid_sizes(operation: str, text: dict[str, Any], message: str) -> None:
    refuses(message, epiloq.explain, operation, **{"m": 16, "n": 64, "k": 64, **text})


def test_sizes_at_the_limits_are_explained() -> None:
    for operation, text in (
        ("scaled_mm", {"k": 131071}),
        ("scaled_mm", {"k": 2**20, "dtype": torch.float8_e4m3fn}),
        ("scaled_mm_azp", {"k": 65793}),
        ("groupwise_mm", {"k": 2**20}),
        ("weight_only_mm", {"k": 64, "group_size": -1, "bits": 3}),
    ):
        assert epiloq.explain(operation, m=16, n=64, **text)


def float8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (torch.tensor([0, 1], dtype=torch.int32), r"grouped_layout: expected torch.int32 \[3\], got torch.int32 \[2\]"),
        (torch.tensor([0.9, 1.7, 1.9]), r"grouped_layout: expected torch.int32 \[3\], got torch.float32"),
        (torch.tensor([0, 1, 2], dtype=torch.int32), "grouped_layout: expected experts below 2, got 2"),
    ],
)
def test_deep_gemm_refuses_a_layout(layout: Tensor, message: str) -> None:
    a, b = (float8(3, 256), torch.ones(3, 2)), (float8(2, 256, 256), torch.ones(2, 2, 2))
    d = torch.full((3, 256), 7.0)
    refuses(message, deep_gemm.m_grouped_fp8_gemm_nt_contiguous, a, b, d, layout)
    assert bool((d == 7).all())


@pytest.mark.parametrize("d", [torch.zeros(3, 8, dtype=torch.float64), torch.zeros(3, 7), torch.zeros(1, 8)])
def test_deep_gemm_refuses_an_output_beside_c(d: Tensor) -> None:
    a, b = (float8(3, 128), torch.ones(3, 1)), (float8(8, 128), torch.ones(1, 1))
    refuses(
        "fp8_gemm_nt: d: expected bfloat16, float16 or float32", deep_gemm.fp8_gemm_nt, a, b, d, torch.zeros_like(d)
    )
    assert bool((d == 0).all())


@pytest.mark.parametrize(
    ("q", "scale", "message"),
    [
        ((6, 32), torch.zeros(3, 2), "output_q: expected"),
        ((3, 64), torch.zeros(3, 1), "output_s: expected"),
        ((3, 64), torch.zeros(3, 2).half(), "output_s: expected"),
    ],
)
def test_sglang_refuses_outputs_of_int8_groups(q: tuple[int, ...], scale: Tensor, message: str) -> None:
    out, limits = torch.full(q, 7, dtype=torch.int8), (32, 1e-10, -128.0, 127.0)
    refuses(message, sglang.sgl_per_token_group_quant_8bit, torch.randn(3, 64), out, scale, *limits)
    assert bool((out == 7).all())


def test_non_tensors_are_named() -> None:
    missing: Any = None
    with pytest.raises(TypeError, match=r"cutlass_scaled_mm: .*: expected a tensor, got NoneType"):
        vllm.cutlass_scaled_mm(missing, missing, missing, missing, torch.bfloat16)
    with pytest.raises(TypeError, match=r"epiloq\.quantize_int8: x: expected a tensor, got NoneType"):
        epiloq.quantize_int8(missing, granularity="tensor")
    refuses(r"out: expected \(q, scale, azp\), got int", epiloq.quantize_int8, torch.randn(3, 64), out=3)
    named = {"input_scale": 0.1, "weight_scale": torch.ones(4), "output_scale": 1.0}
    supported, why = epiloq.supports("conv2d_int8", missing, torch.zeros(4, 3, 3, 8, dtype=torch.int8), **named)
    assert not supported
    assert "x_q: expected a tensor" in why
    refuses(
        r"epiloq\.requantized_mm: x_q: expected int8",
        epiloq.requantized_mm,
        torch.zeros(3, 8),
        torch.zeros(4, 8, dtype=torch.int8),
        **named,
    )


def test_empty_products() -> None:
    one, named = torch.ones(1), {"input_scale": 0.1, "weight_scale": torch.ones(4), "output_scale": 1.0}
    batches = torch.zeros(0, 3, 32, dtype=torch.int8)
    assert epiloq.scaled_bmm(batches, batches.mT, one, one).shape == (0, 3, 3)
    x, weight = torch.zeros(3, 0, dtype=torch.int8), torch.zeros(4, 0, dtype=torch.int8)
    refuses(
        "weight: expected a kernel with at least one tap and one channel", epiloq.requantized_mm, x, weight, **named
    )


def test_layouts_name_missing_tensors() -> None:
    words, missing = torch.zeros(8, 16, dtype=torch.int32), None
    wrong: Any = missing
    with pytest.raises(FormatError, match="weight_shape: expected one"):
        compressed_tensors.to_packed(weight_packed=words, weight_scale=torch.rand(8, 1), bits=3)
    with pytest.raises(FormatError, match="qweight: expected a tensor"):
        awq.to_packed(wrong, wrong, wrong, group_size=64)


def test_zero_points_without_metadata_are_a_format_error() -> None:
    """gptq's first version says 16 as 15; no other layout of 4 bits can."""
    q, scale, zero = torch.zeros(64, 64, dtype=torch.int32), torch.ones(64, 2).half(), torch.full((64, 2), 16)
    weight = epiloq.pack_weight(q, scale, zero, bits=4, group_size=32)
    for layout in (awq, compressed_tensors):
        with pytest.raises(FormatError, match="zero points below 16, got 16"):
            layout.from_packed(weight)
    assert gptq.from_packed(weight)["qzeros"].unique().tolist() == [-1]


@pytest.mark.parametrize("point", [-129, 128, 2**31 - 1])
def test_static_zero_point_outside_int8_is_not_loaded(point: int) -> None:
    layer = LAYERS["int8 static"](nn.Linear(K, N))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state = before | {"input_zero_point": torch.tensor([point], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match=rf"Int8Linear: input_zero_point: expected -128 to 127, got {point}"):
        layer.load_state_dict(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    layer.load_state_dict(before | {"input_zero_point": torch.tensor([-128], dtype=torch.int32)})
    assert layer.get_parameter("input_zero_point").item() == -128


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-127, math.inf, math.nan])
@pytest.mark.parametrize("kind", [epiloq.nn.Int8Linear, epiloq.nn.Fp8Linear])
def test_zero_static_scale_is_not_loaded(kind: Any, scale: float) -> None:
    layer = kind.from_linear(nn.Linear(K, N), **STATIC)
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"input_scale: expected 1\.17549e-38 to 3\.40282e\+38, got"):
        layer.load_state_dict(before | {"input_scale": torch.tensor([scale])})
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())
    layer.load_state_dict(before | {"input_scale": torch.tensor([2.0**-126])})
    assert layer.get_parameter("input_scale").item() == 2.0**-126


def test_objects_of_other_kinds_are_named() -> None:
    limited = epiloq.nn.Fp8Linear(K, N, limit=3.0)
    codes, one = torch.zeros(K * N // 2, dtype=torch.uint8), torch.ones(16)
    image, out = torch.zeros(1, 8, 4, 4, dtype=torch.int8), [0]
    weight: dict[str, Any] = {"weight": torch.zeros(8, 1, 1, 8, dtype=torch.int8), "weight_scale": torch.ones(8)}
    for refused, message, call in (
        (
            ValueError,
            r"x: expected float32 or float16 or bfloat16, got int64",
            lambda: limited(torch.ones(2, K).long()),
        ),
        (
            ValueError,
            r"epiloq.table_mm: x: expected at least one dimension, got a scalar",
            lambda: epiloq.table_mm(one[0], codes, one, one, out_features=N, block_size=K * N // 16, out=one[0]),
        ),
        (
            TypeError,
            r"epiloq.conv2d_int8: out: expected a tensor, got list",
            lambda: epiloq.conv2d_int8(image, **weight, input_scale=0.1, out=out),  # type: ignore[arg-type]
        ),
        (
            TypeError,
            r"epiloq.optimize_: model: expected a torch.nn.Module, got NoneType",
            lambda: epiloq.optimize_(None),
        ),  # type: ignore[arg-type]
        (ValueError, r"parallel.join: shards: expected at least one, got none", lambda: parallel.join([])),
        (ValueError, r"parallel.join: shards: expected results of shard_rows", lambda: parallel.join([limited])),
    ):
        with pytest.raises(refused, match=message):
            call()
