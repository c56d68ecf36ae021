"""Simplification of the graph: activations as one call, constant factors and terms folded into layers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional


@torch.no_grad()
def simplify(model: GraphModule) -> GraphModule:
    """Simplify a module from `onnx_graph.load` in place; its outputs are the same up to rounding."""
    for match in (_once, _hard_swish, _silu, _folded_after, _folded_before):
        for node in list(model.graph.nodes):
            if (instead := match(model, node)) is not None:
                node.replace_all_uses_with(instead)
                model.graph.erase_node(node)
    model.graph.eliminate_dead_code()
    model.graph.lint()
    model.recompile()
    return model


def _calls(node: object, function: Callable[..., object]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is function


def _once(model: GraphModule, node: Node) -> Node | None:
    """Remove a product with 1."""
    if _calls(node, torch.mul) and 1.0 in node.args:
        return next((x for x in node.args if isinstance(x, Node)), None)
    return None


def _hard_swish(model: GraphModule, node: Node) -> Node | None:
    """Replace ``x * clamp(x + 3, 0, 6) / 6`` by hardswish."""
    product = node.args[0] if _calls(node, torch.div) and node.args[1] == 6.0 else None
    if not isinstance(product, Node) or not _calls(product, torch.mul):
        return None
    for x, gate in permutations(product.args):
        if isinstance(x, Node) and isinstance(gate, Node) and _calls(gate, torch.clamp) and gate.args[1:] == (0.0, 6.0):
            shifted = gate.args[0]
            if isinstance(shifted, Node) and _calls(shifted, torch.add) and shifted.args in ((x, 3.0), (3.0, x)):
                return _inserted(model, node, functional.hardswish, x)
    return None


def _silu(model: GraphModule, node: Node) -> Node | None:
    """Replace ``x * sigmoid(x)`` by SiLU."""
    if not _calls(node, torch.mul):
        return None
    for x, gate in permutations(node.args):
        if isinstance(x, Node) and isinstance(gate, Node) and _calls(gate, torch.sigmoid) and gate.args == (x,):
            return _inserted(model, node, functional.silu, x)
    return None


def _inserted(model: GraphModule, before: Node, function: Callable[..., object], x: Node) -> Node:
    with model.graph.inserting_before(before):
        return model.graph.call_function(function, (x,))


def _constant_step(model: GraphModule, node: Node) -> tuple[Node, Tensor] | None:
    """Split a product or a sum with a constant into the other operand and the constant in float64."""
    if not _calls(node, torch.mul) and not _calls(node, torch.add):
        return None
    for x, given in permutations(node.args):
        if not isinstance(x, Node) or x.op == "get_attr":
            continue
        if isinstance(given, float):
            return x, torch.tensor(given, dtype=torch.float64)
        if isinstance(given, Node) and given.op == "get_attr":
            return x, model.get_parameter(str(given.target)).double()
    return None


def _layer(model: GraphModule, node: object) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if isinstance(node, Node) and node.op == "call_module" else None


def _folded_after(model: GraphModule, node: Node) -> Node | None:
    """Fold a constant factor or term per output channel into the preceding layer, if nothing else reads its result."""
    step = _constant_step(model, node)
    if step is None or len(step[0].users) != 1:
        return None
    result, constant = step
    layer, repeats = _layer(model, result), 1
    if isinstance(layer, nn.PixelShuffle):
        source = result.args[0]
        if not isinstance(source, Node) or len(source.users) != 1:
            return None
        repeats = layer.upscale_factor**2
        layer = _layer(model, source)
    if not isinstance(layer, (nn.Conv2d, nn.Linear)):
        return None
    channels = layer.weight.shape[0]
    values = _by_channel(constant, channels // repeats, image=isinstance(layer, nn.Conv2d))
    if values is None:
        return None
    values = values.repeat_interleave(repeats)
    weight = layer.weight.double()
    bias = layer.bias.double() if layer.bias is not None else torch.zeros(channels, dtype=torch.float64)
    if _calls(node, torch.mul):
        _set(layer, weight * values.view(-1, *(1 for _ in weight.shape[1:])), bias * values)
    else:
        _set(layer, weight, bias + values)
    return result


def _by_channel(constant: Tensor, channels: int, image: bool) -> Tensor | None:
    """Return a constant's value per channel, [channels]; None if it varies within a channel."""
    if constant.numel() == 1:
        return constant.reshape(1).expand(channels)
    shape = (channels, 1, 1) if image else (channels,)
    fits = constant.numel() == channels and constant.shape[-len(shape) :] == shape
    return constant.reshape(channels) if fits else None


def _folded_before(model: GraphModule, node: Node) -> Node | None:
    """Fold factors and a term common to all channels into the following convolution, if only it reads them unpadded."""
    readers = list(node.users)
    conv = _layer(model, readers[0]) if len(readers) == 1 else None
    if not isinstance(conv, nn.Conv2d) or conv.padding != (0, 0):
        return None
    gain, shift, source = 1.0, 0.0, node
    while (step := _constant_step(model, source)) is not None and step[1].numel() == 1 and step[1].ndim == 0:
        if source is not node and len(source.users) != 1:
            break
        constant = float(step[1])
        gain, shift = (gain * constant, shift) if _calls(source, torch.mul) else (gain, shift + gain * constant)
        source = step[0]
    if source is node:
        return None
    weight = conv.weight.double()
    bias = conv.bias.double() if conv.bias is not None else torch.zeros(len(weight), dtype=torch.float64)
    _set(conv, weight * gain, bias + shift * weight.sum((1, 2, 3)))
    return source


def _set(layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Set weight and bias, rounded to the layer's dtype."""
    layer.weight.copy_(weight)
    layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
