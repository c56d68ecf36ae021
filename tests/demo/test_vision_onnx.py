"""ONNX files as torch modules: each operator beside ONNX's own reference evaluator, refusals, and simplification."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx", reason="the demonstration of vision needs the extra vision")

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional

from epiloq.demo.vision import onnx_graph
from epiloq.demo.vision.onnx_ops import OPS
from epiloq.demo.vision.simplify import simplify

pytestmark = pytest.mark.usefixtures("seed")

Constants = dict[str, Any]


def model(nodes: list[Any], constants: Constants, opset: int = 12) -> Any:
    """A model from x to y; constants are initialisers."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def one(kind: str, inputs: str, constants: Constants | None = None, **attributes: Any) -> Any:
    """A model of one operator, its inputs named with spaces between them ("-": left out)."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return model([helper.make_node(kind, names, ["y"], **attributes)], constants or {})


def in_double(network: nn.Module, x: Tensor) -> Tensor:
    """What a network gives without float32's roundings."""
    found: Tensor = copy.deepcopy(network).double()(x.double())
    return found


def widened(proto: Any) -> Any:
    """With constants of float64 for those of float32, as ONNX's evaluator refuses to mix them."""
    wide = copy.deepcopy(proto)
    for constant in wide.graph.initializer:
        if constant.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(constant).astype(np.float64)
            constant.CopyFrom(numpy_helper.from_array(values, constant.name))
    return wide


def assert_as_onnx_says(proto: Any, x: Tensor, *, tolerance: float = 1e-7) -> nn.Module:
    """Convert, compare with ONNX's evaluator in float64 (attributes have float32's digits), and return the network."""
    expected = torch.from_numpy(np.asarray(ReferenceEvaluator(widened(proto)).run(None, {"x": x.double().numpy()})[0]))
    network = onnx_graph.convert(proto)
    found = in_double(network, x)
    assert found.shape == network(x).shape == expected.shape
    torch.testing.assert_close(found, expected.double(), rtol=tolerance, atol=tolerance)
    return network


def f32(*shape: int) -> Any:
    return torch.randn(shape).numpy()


def i64(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


IMAGE = (2, 6, 7, 5)
CASES: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: one("Add", "x c", {"c": f32(6, 1, 1)}), IMAGE),
    (lambda: one("Add", "c x", {"c": np.float32(3.5)}), IMAGE),
    (lambda: one("Mul", "c x", {"c": f32(1)}), IMAGE),
    (lambda: one("Mul", "x x"), IMAGE),
    (lambda: one("Sub", "c x", {"c": f32(5)}), IMAGE),
    (lambda: one("Div", "x c", {"c": np.float32(6)}), IMAGE),
    (lambda: one("Pow", "x c", {"c": np.float32(2)}), IMAGE),
    (lambda: one("Relu", "x"), IMAGE),
    (lambda: one("Sigmoid", "x"), IMAGE),
    (lambda: one("Clip", "x lo hi", {"lo": np.float32(-0.5), "hi": np.float32(1)}), IMAGE),
    (lambda: one("Clip", "x - hi", {"hi": np.float32(0.25)}), IMAGE),
    (lambda: one("HardSigmoid", "x", alpha=0.3, beta=0.4), IMAGE),
    (lambda: one("HardSigmoid", "x"), IMAGE),
    (lambda: one("Softmax", "x", axis=3), IMAGE),
    (lambda: one("GlobalAveragePool", "x"), IMAGE),
    (lambda: one("AveragePool", "x", kernel_shape=[3, 2], strides=[3, 2]), IMAGE),
    (lambda: one("ReduceMean", "x", axes=[-1]), IMAGE),
    (lambda: one("ReduceMean", "x", axes=[1, 2], keepdims=0), IMAGE),
    (lambda: one("Transpose", "x", perm=[0, 3, 1, 2]), IMAGE),
    (lambda: one("Squeeze", "x", axes=[2]), (2, 3, 1, 4)),
    (lambda: one("Concat", "x x", axis=1), IMAGE),
    (lambda: one("Reshape", "x s", {"s": i64(0, -1, 5)}), IMAGE),
    (lambda: one("Slice", "x b e a s", {"b": i64(1, 0), "e": i64(6, 9), "a": i64(1, 3), "s": i64(2, 1)}), IMAGE),
    (lambda: one("Slice", "x b e", {"b": i64(0, -3), "e": i64(1, -1)}), IMAGE),
    (
        lambda: one(
            "Resize", "x r s", {"r": f32(0), "s": np.array([1, 1, 2, 3], np.float32)}, mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        ),
        IMAGE,
    ),
    (lambda: one("MatMul", "x w", {"w": f32(5, 9)}), IMAGE),
    (lambda: one("MatMul", "x x"), (2, 3, 4, 4)),
    (lambda: one("Gemm", "x w b", {"w": f32(9, 5), "b": f32(9)}, transB=1), (4, 5)),
    (lambda: one("Gemm", "x w", {"w": f32(5, 9)}), (4, 5)),
    (lambda: one("Conv", "x w", {"w": f32(4, 6, 1, 1)}), IMAGE),
    (lambda: one("Conv", "x w b", {"w": f32(4, 6, 1, 3), "b": f32(4)}, pads=[0, 1, 0, 1]), IMAGE),
    (
        lambda: one(
            "Conv", "x w", {"w": f32(6, 1, 3, 3)}, group=6, strides=[2, 1], pads=[2, 1, 2, 1], dilations=[2, 1]
        ),
        IMAGE,
    ),
    (lambda: one("ConvTranspose", "x w", {"w": f32(6, 3, 2, 2)}, strides=[2, 2]), IMAGE),
    (lambda: one("ConvTranspose", "x w b", {"w": f32(6, 1, 3, 3), "b": f32(1)}, strides=[3, 3]), IMAGE),
]  # fmt: skip


@pytest.mark.parametrize(("proto", "shape"), CASES)
def test_operator_matches_onnx_reference(proto: Any, shape: tuple[int, ...]) -> None:
    assert_as_onnx_says(proto(), torch.randn(*shape))


def test_the_square_root() -> None:
    assert_as_onnx_says(one("Sqrt", "x"), torch.rand(3, 4))


# ONNX's evaluator gives these two the meaning of later opsets and that of training.


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_softmax_is_over_all_axes_from_one_on(axis: int) -> None:
    x = torch.randn(IMAGE)
    powers = x.double().exp()
    expected = powers / powers.sum(tuple(range(axis, 4)), keepdim=True)
    found = onnx_graph.convert(one("Softmax", "x", axis=axis))(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_batch_normalisation_uses_the_stored_statistics() -> None:
    x, gain, shift, mean, variance = torch.randn(IMAGE), f32(6), f32(6), f32(6), np.abs(f32(6)) + np.float32(0.1)
    constants = {"g": gain, "b": shift, "m": mean, "v": variance}
    found = onnx_graph.convert(one("BatchNormalization", "x g b m v", constants, epsilon=1e-3))(x)
    columns = [torch.from_numpy(values).double().view(6, 1, 1) for values in (gain, shift, mean, variance)]
    expected = (x.double() - columns[2]) / (columns[3] + 1e-3).sqrt() * columns[0] + columns[1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_every_operator_was_tried() -> None:
    tried = {node.op_type for proto, _ in CASES for node in proto().graph.node}
    assert set(OPS) - tried == {"BatchNormalization", "Cast", "Shape", "Sqrt"}  # in tests of their own


def test_layers_are_torch_s_own() -> None:
    for proto, kind, shape in (
        (one("Conv", "x w", {"w": f32(4, 6, 3, 3)}), nn.Conv2d, IMAGE),
        (one("MatMul", "x w", {"w": f32(5, 9)}), nn.Linear, IMAGE),
        (one("ConvTranspose", "x w", {"w": f32(6, 3, 2, 2)}, strides=[2, 2]), nn.Conv2d, IMAGE),
    ):
        assert any(type(module) is kind for module in assert_as_onnx_says(proto, torch.randn(*shape)).modules())


def test_sizes_are_taken_from_shapes_at_run_time() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Cast", ["shape"], ["narrow"], to=TensorProto.INT32),
        helper.make_node("Slice", ["narrow", "one", "two", "zero"], ["length"]),
        helper.make_node("Cast", ["length"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Cast", ["four32"], ["four"], to=TensorProto.INT64),
        helper.make_node("Concat", ["zero", "wide", "four", "rest"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["x", "sizes"], ["y"]),
    ]
    constants = {
        "zero": i64(0), "one": i64(1), "two": i64(2), "rest": i64(-1), "four32": np.array([4], np.int32)
    }  # fmt: skip
    for batch, length in ((2, 3), (1, 7)):
        assert_as_onnx_says(model(nodes, constants), torch.randn(batch, length, 12))


REFUSED = [
    (one("Tan", "x"), r"Tan 'y': expected one of Add, "),
    (one("Conv", "x w", {"w": np.zeros((4, 6, 3, 3), np.float32)}, pads=[0, 0, 1, 1]), "padded alike"),
    (one("Conv", "x w", {"w": np.zeros((4, 6, 3), np.float32)}), "two dimensions"),
    (one("Conv", "x w", {"w": np.zeros((4, 6, 3, 3), np.float32)}, auto_pad="SAME_UPPER"), "auto_pad"),
    (one("Conv", "x x"), "input 1 to be constant"),
    (one("ConvTranspose", "x w", {"w": np.zeros((6, 3, 3, 3), np.float32)}, strides=[2, 2]), "strides"),
    (one("ConvTranspose", "x w", {"w": np.zeros((6, 3, 2, 2), np.float32)}), "square window"),
    (one("Resize", "x r s", {"r": np.zeros(0, np.float32), "s": np.ones(4, np.float32)}, mode="linear"), "linear"),
    (one("ReduceMean", "x"), "axes"),
    (one("Cast", "x", to=TensorProto.FLOAT16), "sizes or a constant"),
    (model([helper.make_node("Relu", ["x"], ["y"])], {}, opset=17), "opset: expected 9 to 12"),
    (model([helper.make_node("Relu", ["c"], ["y"])], {"c": np.ones(3, np.float32)}), "depends on the input"),
]


@pytest.mark.parametrize(("proto", "message"), REFUSED)
def test_unknown_operators_are_refused_by_name(proto: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onnx_graph.convert(proto)


def test_a_file_with_metadata(tmp_path: Path) -> None:
    proto = one("Relu", "x")
    helper.set_model_props(proto, {"character": "a\nb"})
    onnx.save(proto, tmp_path / "model.onnx")
    network, metadata = onnx_graph.load(tmp_path / "model.onnx")
    assert metadata == {"character": "a\nb"} and not network.training
    assert torch.equal(network(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


# Simplification


def chain(*steps: tuple[str, str, str]) -> list[Any]:
    return [helper.make_node(kind, inputs.split(), [output]) for kind, inputs, output in steps]


def simplified(nodes: list[Any], constants: Constants, x: Tensor) -> tuple[nn.Module, list[Any]]:
    """The network after simplification, checked to give what it gave, and the functions that it still calls."""
    proto = model(nodes, constants)
    network = assert_as_onnx_says(proto, x)
    before, wide = in_double(network, x), copy.deepcopy(network).double()
    assert simplify(network) is network
    torch.testing.assert_close(simplify(wide)(x.double()), before, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(in_double(network, x), before, rtol=1e-5, atol=1e-5)
    return network, [node.target for node in network.graph.nodes if node.op == "call_function"]


SWISH = [("Add", "h three", "a"), ("Clip", "a zero six", "b"), ("Mul", "h b", "c"), ("Div", "c six", "y")]
NUMBERS = {"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6), "one": f32(1) * 0 + 1}


def test_hard_swish_is_recognised() -> None:
    nodes = chain(("Relu", "x", "h"), *SWISH)
    assert simplified(nodes, NUMBERS, 4 * torch.randn(5, 7))[1] == [functional.relu, functional.hardswish]


def test_silu_is_recognised() -> None:
    nodes = chain(("Relu", "x", "h"), ("Mul", "h one", "a"), ("Sigmoid", "a", "b"), ("Mul", "h b", "y"))
    assert simplified(nodes, NUMBERS, torch.randn(5, 7))[1] == [functional.relu, functional.silu]


@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1)])
def test_constants_after_a_convolution_go_into_it(shape: tuple[int, ...]) -> None:
    constants = {"w": f32(4, 6, 3, 3), "m": f32(*shape), "a": f32(*shape)}
    nodes = chain(("Conv", "x w", "c"), ("Mul", "m c", "d"), ("Add", "d a", "y"))
    assert simplified(nodes, constants, torch.randn(*IMAGE))[1] == []


def test_constants_after_a_linear_layer_go_into_it() -> None:
    nodes = chain(("MatMul", "x w", "c"), ("Add", "c b", "y"))
    assert simplified(nodes, {"w": f32(5, 9), "b": f32(9)}, torch.randn(2, 3, 5))[1] == []


def test_constants_after_an_enlarging_convolution_go_into_it() -> None:
    nodes = [helper.make_node("ConvTranspose", ["x", "w"], ["c"], strides=[2, 2]), *chain(("Add", "c b", "y"))]
    assert simplified(nodes, {"w": f32(6, 3, 2, 2), "b": f32(1, 3, 1, 1)}, torch.randn(*IMAGE))[1] == []


def test_constants_before_a_convolution_without_padding_go_into_it() -> None:
    constants = {"w": f32(4, 6, 1, 1), "b": f32(4), "m": f32(1), "a": f32(1)}
    nodes = chain(("Relu", "x", "h"), ("Mul", "m h", "c"), ("Add", "c a", "d"), ("Conv", "d w b", "y"))
    assert simplified(nodes, constants, torch.randn(*IMAGE))[1] == [functional.relu]


def test_constants_stay_where_they_would_change_something() -> None:
    padded = helper.make_node("Conv", ["a", "w"], ["y"], pads=[1, 1, 1, 1])
    nodes = [*chain(("Relu", "x", "h"), ("Add", "h m", "a")), padded]
    assert torch.add in simplified(nodes, {"w": f32(4, 6, 3, 3), "m": f32(1)}, torch.randn(*IMAGE))[1]

    shared = chain(("Conv", "x w", "c"), ("Mul", "c m", "d"), ("Add", "c d", "y"))
    assert torch.mul in simplified(shared, {"w": f32(4, 6, 1, 1), "m": f32(1)}, torch.randn(*IMAGE))[1]

    columns = chain(("Conv", "x w", "c"), ("Mul", "c m", "y"))  # a factor for each column, as many as channels
    assert torch.mul in simplified(columns, {"w": f32(5, 6, 1, 1), "m": f32(5)}, torch.randn(*IMAGE))[1]
