"""Tables of the functions, methods and modules of a traced network by their effect on int8."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional

# Elementwise functions of one tensor (and numbers).
POINTWISE = frozenset(
    {
        *(torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.clamp, torch.clip, torch.abs, torch.neg, torch.exp),
        *(
            torch.mul,
            torch.add,
            torch.sub,
            torch.div,
            torch.square,
            torch.sqrt,
            torch.pow,
            torch.maximum,
            torch.minimum,
        ),
        *(operator.mul, operator.add, operator.sub, operator.truediv, operator.neg, operator.pow),
        *(functional.relu, functional.relu_, functional.relu6, functional.hardtanh, functional.hardswish),
        *(functional.hardsigmoid, functional.silu, functional.gelu, functional.elu, functional.leaky_relu),
        *(functional.softplus, functional.mish, functional.sigmoid, functional.tanh, functional.logsigmoid),
        *("relu", "relu_", "sigmoid", "tanh", "clamp", "clamp_", "clip", "abs", "neg", "exp", "mul", "add", "sub"),
        *("div", "square", "sqrt", "pow"),
        *(nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.GELU),
        *(nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Mish),
    }
)
# Operations that are removed.
NOTHING = frozenset({nn.Identity, nn.Dropout, nn.Dropout2d})


@dataclass(frozen=True)
class Move:
    """An operation whose results are values of its first argument, a tensor or list of tensors, on the same grid."""

    grows: bool = False  # the output is larger than the input, so floats are quantised before
    carrier: torch.dtype | None = None  # dtype to compute in: uint8 reinterprets the bits, others convert
    allowed: Callable[[dict[str, Any]], bool] = lambda options: True


def _is_nearest(options: dict[str, Any]) -> bool:
    return options.get("mode", "nearest") in ("nearest", "nearest-exact")


def _gives_values_alone(options: dict[str, Any]) -> bool:
    return not options.get("return_indices", False)


_ANY, _MORE = Move(), Move(grows=True)
_NEAREST = Move(grows=True, carrier=torch.uint8, allowed=_is_nearest)
# float16 represents every int8 value; torch has no other exact pooling on CUDA.
_MAX_POOL = Move(carrier=torch.float16, allowed=_gives_values_alone)
MOVES: dict[object, Move] = {
    **dict.fromkeys(
        (torch.reshape, torch.flatten, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze), _ANY
    ),
    **dict.fromkeys((torch.cat, torch.concat), _MORE),
    **dict.fromkeys((functional.pixel_shuffle, functional.pixel_unshuffle, functional.channel_shuffle), _ANY),
    **dict.fromkeys(("reshape", "view", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "contiguous"), _ANY),
    **dict.fromkeys((nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle), _ANY),
    operator.getitem: _ANY,
    **dict.fromkeys((functional.interpolate, nn.Upsample), _NEAREST),
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d, nn.MaxPool2d), _MAX_POOL),
}


def module_of(model: GraphModule, node: Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def kind(model: GraphModule, node: Node) -> object:
    """The key of a node in the tables."""
    module = module_of(model, node)
    if module is not None:
        return type(module)
    return node.target if node.op in ("call_function", "call_method") else None


def move(model: GraphModule, node: Node) -> Move | None:
    """The table entry of a node that moves values."""
    rule, module = MOVES.get(kind(model, node)), module_of(model, node)
    options = node.kwargs if module is None else vars(module)
    return rule if rule is not None and moved(node) and rule.allowed(dict(options)) else None


def moved(node: Node) -> list[Node]:
    """The tensors whose values an operation moves."""
    first = node.args[0] if node.args else None
    given = list(first) if isinstance(first, (list, tuple)) else [first]
    return [value for value in given if isinstance(value, Node)] if all(isinstance(v, Node) for v in given) else []


def pointwise(model: GraphModule, node: Node) -> Node | None:
    """The only tensor argument of a pointwise node."""
    return node.all_input_nodes[0] if kind(model, node) in POINTWISE and len(node.all_input_nodes) == 1 else None


def is_about_size(node: Node) -> bool:
    """Whether a node reads only a tensor's size."""
    return (node.op == "call_method" and node.target in ("size", "dim")) or (
        node.target is getattr and node.args[1] in ("shape", "ndim")
    )
