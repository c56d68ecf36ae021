"""Table of conversions of ONNX operators, after the operator reference of ONNX, opsets 9 to 12."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional

from epiloq.demo.vision.onnx_graph import Builder, Op, ShapeOf, Size, Value

Convert = Callable[[Builder, Op], Value]


def _elementwise(function: Callable[..., Tensor]) -> Convert:
    """An elementwise function with broadcasting; it is evaluated at once if all inputs are constant."""

    def convert(build: Builder, op: Op) -> Value:
        if all(isinstance(value, Tensor) for value in op.inputs):
            return function(*op.inputs)
        return build.graph.call_function(function, tuple(build.operand(op, i) for i in range(len(op.inputs))))

    return convert


def _conv(build: Builder, op: Op) -> Value:
    weight = op.constant(1)
    op.demand(auto_pad=b"NOTSET")
    pads = op.attributes.get("pads", [0, 0, 0, 0])
    if weight.ndim != 4 or pads[:2] != pads[2:]:
        raise op.refuse(f"two dimensions, padded alike on both sides, got {list(weight.shape)} and pads {pads}")
    groups = op.attributes.get("group", 1)
    conv = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        (weight.shape[2], weight.shape[3]),
        tuple(op.attributes.get("strides", (1, 1))),
        tuple(pads[:2]),
        tuple(op.attributes.get("dilations", (1, 1))),
        groups,
        bias=op.has(2),
    )
    return build.module(op, _filled(conv, weight, op), op.node())


def _conv_transpose(build: Builder, op: Op) -> Value:
    """A transposed convolution without overlap, as a 1x1 convolution for every pixel of the window, to be quantised."""
    weight = op.constant(1)
    ci, co, *kernel = weight.shape
    op.demand(auto_pad=b"NOTSET", group=1, dilations=[1, 1], pads=[0, 0, 0, 0], strides=kernel, output_padding=[0, 0])
    if len(kernel) != 2 or kernel[0] != kernel[1] or "output_shape" in op.attributes or "strides" not in op.attributes:
        raise op.refuse(f"a square window of two dimensions, got {kernel}")
    pixels = kernel[0] ** 2
    conv = nn.Conv2d(ci, co * pixels, 1, bias=op.has(2))
    conv.weight.copy_(weight.reshape(ci, co * pixels, 1, 1).transpose(0, 1))
    if conv.bias is not None:
        conv.bias.copy_(op.constant(2).repeat_interleave(pixels))
    return build.module(op, nn.PixelShuffle(kernel[0]), build.module(op, conv, op.node()))


def _batch_norm(build: Builder, op: Op) -> Value:
    gain, shift, mean, variance = (op.constant(i) for i in range(1, 5))
    norm = nn.BatchNorm2d(gain.numel(), op.attributes.get("epsilon", 1e-5))
    assert norm.running_mean is not None and norm.running_var is not None
    for own, given in (
        (norm.weight, gain),
        (norm.bias, shift),
        (norm.running_mean, mean),
        (norm.running_var, variance),
    ):
        own.copy_(given)
    return build.module(op, norm, op.node())


def _matmul(build: Builder, op: Op) -> Value:
    weight = op.inputs[1]
    if isinstance(weight, Tensor) and weight.ndim == 2:
        return build.module(
            op, _filled(nn.Linear(weight.shape[0], weight.shape[1], bias=False), weight.t(), op), op.node()
        )
    return build.graph.call_function(torch.matmul, (op.node(0), op.node(1)))


def _gemm(build: Builder, op: Op) -> Value:
    op.demand(alpha=1.0, beta=1.0, transA=0)
    weight = op.constant(1) if op.attributes.get("transB", 0) else op.constant(1).t()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=op.has(2))
    return build.module(op, _filled(linear, weight, op), op.node())


def _filled(layer: nn.Conv2d | nn.Linear, weight: Tensor, op: Op) -> nn.Module:
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(op.constant(2).expand(layer.bias.shape))
    return layer


def _clip(build: Builder, op: Op) -> Value:
    ends = [float(op.constant(i)) if op.has(i) else op.attributes.get(name) for i, name in ((1, "min"), (2, "max"))]
    return build.graph.call_function(torch.clamp, (op.node(), *ends))


def _hard_sigmoid(build: Builder, op: Op) -> Value:
    scaled = build.graph.call_function(torch.mul, (op.node(), op.attributes.get("alpha", 0.2)))
    shifted = build.graph.call_function(torch.add, (scaled, op.attributes.get("beta", 0.5)))
    return build.graph.call_function(torch.clamp, (shifted, 0.0, 1.0))


def _softmax(build: Builder, op: Op) -> Value:
    """Softmax over all axes from `axis` on jointly, as defined before opset 13."""
    x, axis = op.node(), op.attributes.get("axis", 1)
    flat = build.graph.call_function(torch.flatten, (x, axis))
    shape = build.graph.call_function(getattr, (x, "shape"))
    return build.graph.call_function(torch.reshape, (build.graph.call_function(torch.softmax, (flat, -1)), shape))


def _average_pool(build: Builder, op: Op) -> Value:
    kernel = op.attributes["kernel_shape"]
    op.demand(auto_pad=b"NOTSET", ceil_mode=0, pads=[0] * 4)
    strides = tuple(op.attributes.get("strides", (1, 1)))
    return build.graph.call_function(functional.avg_pool2d, (op.node(), tuple(kernel), strides))


def _global_average_pool(build: Builder, op: Op) -> Value:
    return build.graph.call_function(functional.adaptive_avg_pool2d, (op.node(), 1))


def _reduce_mean(build: Builder, op: Op) -> Value:
    if "axes" not in op.attributes:
        raise op.refuse("axes")
    keep = bool(op.attributes.get("keepdims", 1))
    return build.graph.call_function(torch.mean, (op.node(), tuple(op.attributes["axes"]), keep))


def _resize(build: Builder, op: Op) -> Value:
    """Nearest-neighbour enlargement by whole factors."""
    if op.has(3) or not op.has(2):
        raise op.refuse("scales, not sizes")
    scales = op.constant(2).tolist()
    expected = {"mode": b"nearest", "coordinate_transformation_mode": b"asymmetric", "nearest_mode": b"floor"}
    found = {name: op.attributes.get(name) for name in expected}
    if found != expected or len(scales) != 4 or scales[:2] != [1.0, 1.0] or any(s < 1 or s % 1 for s in scales):
        raise op.refuse(f"{expected} by whole numbers, got {found} by {scales}")
    keywords: dict[str, Any] = {"scale_factor": tuple(scales[2:]), "mode": "nearest"}
    return build.graph.call_function(functional.interpolate, (op.node(),), keywords)


def _concat(build: Builder, op: Op) -> Value:
    if any(isinstance(value, list) for value in op.inputs):
        return [size for index in range(len(op.inputs)) for size in _sizes(op, index)]
    tensors = [op.node(index) for index in range(len(op.inputs))]
    return build.graph.call_function(torch.cat, (tensors, op.attributes["axis"]))


def _sizes(op: Op, index: int) -> list[Size]:
    value = op.inputs[index]
    return value if isinstance(value, list) else cast("list[Size]", op.constant(index).tolist())


def _reshape(build: Builder, op: Op) -> Value:
    x = op.node()
    sizes = [_size(build, x, i) if size == 0 else size for i, size in enumerate(_sizes(op, 1))]
    return build.graph.call_function(torch.reshape, (x, tuple(sizes)))


def _size(build: Builder, x: Node, axis: int) -> Node:
    return build.graph.call_method("size", (x, axis))


def _slice(build: Builder, op: Op) -> Value:
    starts, ends = op.constant(1).tolist(), op.constant(2).tolist()
    axes = op.constant(3).tolist() if op.has(3) else list(range(len(starts)))
    steps = op.constant(4).tolist() if op.has(4) else [1] * len(starts)
    if any(axis < 0 for axis in axes) or any(step < 1 for step in steps):
        raise op.refuse(f"axes from 0 on and steps forward, got {axes} by {steps}")
    parts = {axis: slice(*part) for axis, *part in zip(axes, starts, ends, steps, strict=True)}
    source = op.inputs[0]
    if isinstance(source, ShapeOf):
        if min(starts + ends) < 0:
            raise op.refuse(f"sizes counted from the front, got {starts} to {ends}")
        return [_size(build, source.node, axis) for axis in range(starts[0], ends[0], steps[0])]
    if isinstance(source, list):
        return source[parts[0]]
    index = tuple(parts.get(axis, slice(None)) for axis in range(max(axes) + 1))
    return build.graph.call_function(getitem, (op.node(), index))


def _cast(build: Builder, op: Op) -> Value:
    """A cast of sizes, which are Python integers whatever their type in the file; computed tensors remain float."""
    if isinstance(op.inputs[0], Node) or op.inputs[0] is None:
        raise op.refuse("sizes or a constant")
    return op.inputs[0]


def _with(function: Callable[..., Any], attribute: str) -> Convert:
    """A function of one tensor and a tuple of axes."""
    return lambda build, op: build.graph.call_function(function, (op.node(), tuple(op.attributes[attribute])))


def _shape(_: Builder, op: Op) -> Value:
    return ShapeOf(op.node())


OPS: dict[str, Convert] = {
    "Add": _elementwise(torch.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _elementwise(torch.div),
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average_pool,
    "HardSigmoid": _hard_sigmoid,
    "MatMul": _matmul,
    "Mul": _elementwise(torch.mul),
    "Pow": _elementwise(torch.pow),
    "ReduceMean": _reduce_mean,
    "Relu": _elementwise(functional.relu),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Sigmoid": _elementwise(torch.sigmoid),
    "Slice": _slice,
    "Softmax": _softmax,
    "Sqrt": _elementwise(torch.sqrt),
    "Squeeze": _with(torch.squeeze, "axes"),
    "Sub": _elementwise(torch.sub),
    "Transpose": _with(torch.permute, "perm"),
}
