"""Folding batch normalisation into the convolution before it."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.fx import Node, symbolic_trace

from epiloq.weights.computed import computed_parts


@torch.no_grad()
def fold_batch_norm_(model: nn.Module) -> list[str]:
    """Fold every ``nn.BatchNorm2d`` that is the only reader of an ``nn.Conv2d`` into it, in place and in float64.

    The norm becomes ``nn.Identity``; an ``nn.PixelShuffle`` may be between them. The model is traced with
    ``torch.fx.symbolic_trace``. Unchanged are norms without running statistics, layers that are called twice, and
    convolutions whose weight is computed (`torch.nn.utils.parametrize`), or whose weight or output has other readers.

    Returns the names of the folded norms.

    Raises ValueError if the model is in training mode, or cannot be traced (the message gives the reason).
    """
    if model.training:
        raise ValueError(
            "fold_batch_norm_: model: expected evaluation mode, in which norms use their running statistics"
        )
    try:
        graph = symbolic_trace(model).graph
    except Exception as error:
        raise ValueError(f"fold_batch_norm_: model: expected one that torch.fx can trace: {error}") from error
    calls = Counter(id(_module(model, node)) for node in graph.nodes if node.op == "call_module")
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    folded = []
    for node in graph.nodes:
        source, places = _only_module(node), 1
        if source is not None and isinstance(shuffle := _module(model, source), nn.PixelShuffle):
            source, places = _only_module(source), shuffle.upscale_factor**2
        if source is None:
            continue
        norm, conv = _module(model, node), _module(model, source)
        if type(norm) is not nn.BatchNorm2d or type(conv) is not nn.Conv2d or norm.running_mean is None:
            continue
        if computed_parts(conv):
            continue
        if calls[id(norm)] == 1 and calls[id(conv)] == 1 and holders[id(conv.weight)] == 1:
            _fold(conv, norm, places)
            model.set_submodule(str(node.target), nn.Identity())
            folded.append(str(node.target))
    return folded


def _module(model: nn.Module, node: Node) -> nn.Module:
    return model.get_submodule(str(node.target))


def _only_module(node: Node) -> Node | None:
    """The module whose only reader is this node."""
    source = node.args[0] if node.op == "call_module" and node.args else None
    return source if isinstance(source, Node) and source.op == "call_module" and len(source.users) == 1 else None


def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d, places: int) -> None:
    """Fold a norm; `places` is the number of convolution channels per channel of the norm."""
    assert norm.running_mean is not None and norm.running_var is not None
    gain = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.affine:
        gain = gain * norm.weight.double()
    shift = -norm.running_mean.double() * gain
    if norm.affine:
        shift += norm.bias.double()
    gain, shift = (values.repeat_interleave(places) for values in (gain, shift))
    if conv.bias is not None:
        shift += conv.bias.double() * gain
    weight = conv.weight.double() * gain.view(-1, 1, 1, 1)
    conv.weight.copy_(weight)
    conv.bias = nn.Parameter(shift.to(conv.weight.dtype), requires_grad=conv.weight.requires_grad)
