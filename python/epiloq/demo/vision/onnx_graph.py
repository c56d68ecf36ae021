"""ONNX files as `torch.fx` modules, whose convolutions, norms and linear layers are ``torch.nn``'s own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

if TYPE_CHECKING:
    from onnx import ModelProto

# Opsets in which the operators of onnx_ops.py have the same meaning; from 13 on some axes are inputs.
OPSETS = range(9, 13)


@dataclass(frozen=True)
class ShapeOf:
    """Shape of a node's result."""

    node: Node


Size: TypeAlias = "int | Node"
Value: TypeAlias = "Node | Tensor | ShapeOf | list[Size]"
"""Value of an ONNX name: a result, a constant, a shape, or sizes taken from shapes."""


@dataclass(frozen=True)
class Op:
    """One operator of the file. Omitted optional inputs are None."""

    kind: str
    name: str
    inputs: tuple[Value | None, ...]
    attributes: dict[str, Any]

    def refuse(self, expected: str) -> ValueError:
        """Return the error for an unsupported operator."""
        return ValueError(f"load: {self.kind} {self.name!r}: expected {expected}")

    def node(self, index: int = 0) -> Node:
        """Return an input that the network computes."""
        value = self.inputs[index]
        if not isinstance(value, Node):
            raise self.refuse(f"input {index} to be computed, got {type(value).__name__}")
        return value

    def constant(self, index: int) -> Tensor:
        """Return a constant input, stored in the file."""
        value = self.inputs[index]
        if not isinstance(value, Tensor):
            raise self.refuse(f"input {index} to be constant, got {type(value).__name__}")
        return value

    def has(self, index: int) -> bool:
        """Whether an optional input is present."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def demand(self, **expected: Any) -> None:
        """Refuse the operator unless these attributes are absent or have these values."""
        for name, value in expected.items():
            if (found := self.attributes.get(name, value)) != value:
                raise self.refuse(f"{name} {value}, got {found}")


@dataclass
class Builder:
    """Builds a `torch.fx` graph, with its modules and parameters."""

    root: nn.Module = field(default_factory=nn.Module)
    graph: Graph = field(default_factory=Graph)

    def module(self, op: Op, module: nn.Module, x: Node) -> Node:
        """Add a call of a module, named after the operator."""
        name = f"{op.name}_{type(module).__name__}" if hasattr(self.root, op.name) else op.name
        self.root.add_module(name, module)
        return self.graph.call_module(name, (x,))

    def operand(self, op: Op, index: int) -> Node | float:
        """Return an input of an elementwise function; a constant becomes a number or a parameter."""
        value = op.inputs[index]
        if not isinstance(value, Tensor):
            return op.node(index)
        if value.numel() == 1 and value.ndim <= 1:
            return float(value)
        name = f"{op.name}_constant"
        self.root.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
        return self.graph.get_attr(name)


def load(path: Path) -> tuple[GraphModule, dict[str, str]]:
    """Load the network in an ONNX file (one float input, one output) in eval mode, and the file's metadata.

    Needs the package onnx. Raises ValueError for an operator or attribute that the table in onnx_ops.py lacks.
    """
    import onnx

    model = onnx.load(path)
    return convert(model), {entry.key: entry.value for entry in model.metadata_props}


@torch.no_grad()
def convert(model: ModelProto) -> GraphModule:
    """Convert an ONNX model; see `load`."""
    from onnx import helper

    from epiloq.demo.vision.onnx_ops import OPS

    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if set(opsets) - {"", "ai.onnx"} or not set(opsets.values()) <= set(OPSETS):
        raise ValueError(f"load: opset: expected {OPSETS[0]} to {OPSETS[-1]} of ai.onnx alone, got {opsets}")
    values: dict[str, Value] = {held.name: _tensor(held) for held in model.graph.initializer}
    inputs = [entry.name for entry in model.graph.input if entry.name not in values]
    if len(inputs) != 1 or len(model.graph.output) != 1:
        raise ValueError(f"load: graph: expected one input and one output, got {inputs}")
    build = Builder()
    values[inputs[0]] = build.graph.placeholder("x")
    for node in model.graph.node:
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type == "Constant":
            if set(attributes) != {"value"}:
                raise ValueError(f"load: Constant {node.output[0]!r}: expected a tensor, got {sorted(attributes)}")
            values[node.output[0]] = _tensor(attributes["value"])
            continue
        if node.op_type not in OPS:
            raise ValueError(f"load: {node.op_type} {node.output[0]!r}: expected one of {', '.join(OPS)}")
        operands = tuple(values[name] if name else None for name in node.input)
        op = Op(node.op_type, _identifier(node.output[0]), operands, attributes)
        values[node.output[0]] = OPS[node.op_type](build, op)
    result = values[model.graph.output[0].name]
    if not isinstance(result, Node):
        raise ValueError("load: graph: expected an output that depends on the input")
    build.graph.output(result)
    build.graph.lint()
    network = GraphModule(build.root, build.graph)
    network.graph.eliminate_dead_code()
    network.recompile()
    return network.eval()


def _tensor(held: Any) -> Tensor:
    from onnx import numpy_helper

    return torch.from_numpy(numpy_helper.to_array(held).copy())


def _identifier(name: str) -> str:
    """Module name for an operator, without the prefix and suffix that PaddlePaddle's exporter adds."""
    plain = re.sub(r"\W", "_", re.sub(r"^p2o\.|\.tmp_\d+$", "", name))
    return plain if plain[:1].isalpha() else f"op_{plain}"
