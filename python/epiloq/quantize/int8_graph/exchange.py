"""Linking of neighbouring int8 convolutions, without a float tensor between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Tracer
from torch.nn import functional

from epiloq.layer_filter import check_callable
from epiloq.nn import Int8Conv2d
from epiloq.observers import OBSERVERS, evaluating
from epiloq.quantize.int8_graph import kinds
from epiloq.quantize.int8_graph.plan import Plan

_INFINITY = math.inf
_RELU = (torch.relu, torch.relu_, functional.relu, functional.relu_, "relu", "relu_")
_RELU6 = (functional.relu6,)
_CLAMP = (torch.clamp, torch.clip, "clamp", "clamp_", "clip", functional.hardtanh)
_CLAMP_ENDS = {"min": 0, "max": 1, "min_val": 0, "max_val": 1}


class _LayersAsLeaves(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # epiloq's layers branch on sizes and memory formats of inputs, which are unknown while tracing.
        return m.__module__.startswith("epiloq.nn.") or super().is_leaf_module(m, module_qualified_name)


def exchange_int8(
    model: nn.Module, *, calibrate: Callable[[nn.Module], object] | None = None, observer: str = "percentile"
) -> GraphModule:
    """Link the `Int8Conv2d` layers of a model: fold activations into them, and pass int8 from one to the next.

    - A ReLU, ReLU6, clamp or hardtanh that is the only reader of an `Int8Conv2d` becomes its clamp.
    - If every reader of a layer's result is an `Int8Conv2d` and all expect the same scale and zero point (as layers
      calibrated on the same tensor do), the layer requantises its sums to these.
    - Between them, int8 values pass through operations that only move values: reshape, permute, concatenate,
      nearest-neighbour upsampling, pixel shuffle, max pooling (`kinds.MOVES`). The results are exactly those of
      quantising afterwards. Operations that enlarge their input run on the quantised values.
    - With `calibrate`, elementwise functions between layers (hard swish, sigmoid, constant factors and terms;
      `kinds.POINTWISE`) become int8 tables of the quantised function of each dequantised value. The preceding layer
      then requantises its output with a scale for the range that `observer` ("min-max", "percentile", "mse") finds
      while ``calibrate(model)`` runs, without the ends in which the function is constant. This adds one rounding.

    Identities and dropout are removed. The layers are changed in place and shared with the result, a
    ``torch.fx.GraphModule`` that replaces the model. Layers that are called more than once are not linked.

    Raises ValueError if the model is in training mode or cannot be traced, or for an unknown observer.
    """
    if model.training:
        raise ValueError("exchange_int8: model: expected evaluation mode")
    check_callable(calibrate, "exchange_int8: calibrate", "calibrate(model)")
    if not isinstance(observer, str) or observer not in OBSERVERS:
        raise ValueError(f"exchange_int8: observer: expected one of {', '.join(OBSERVERS)}, got {observer!r}")
    tracer = _LayersAsLeaves()
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise ValueError(f"exchange_int8: model: expected one that torch.fx can trace: {error}") from error
    linked = GraphModule(tracer.root, graph, type(model).__name__).eval()
    for node in list(graph.nodes):
        if kinds.kind(linked, node) in kinds.NOTHING:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    calls = Counter(id(_layer(linked, node)) for node in graph.nodes)
    own = {node: layer for node in graph.nodes if (layer := _layer(linked, node)) and calls[id(layer)] == 1}
    for node, layer in own.items():
        _fold_clamps(linked, node, layer)
    linked.recompile()
    free = {node: layer for node, layer in own.items() if layer.output is None}
    Plan(linked, free, {} if calibrate is None else _ranges(linked, free, calibrate, observer)).carry_out()
    graph.lint()
    linked.recompile()
    return linked


@torch.no_grad()
def _ranges(
    model: GraphModule, layers: Mapping[Node, Int8Conv2d], calibrate: Callable[[nn.Module], object], observer: str
) -> dict[Node, Tensor]:
    """Observe the output range, float32 ``[2]``, of each layer that ran with finite results."""
    observers = {node: OBSERVERS[observer]() for node in layers}

    def watch(node: Node) -> Callable[..., None]:
        return lambda module, inputs, result: observers[node].add(result)

    with ExitStack() as hooks, evaluating(model):
        for node, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(watch(node)))
        calibrate(model)
    ends = {node: seen.ends() for node, seen in observers.items()}
    return {node: end.cpu() for node, end in ends.items() if end is not None and bool(end.isfinite().all())}


def _layer(model: GraphModule, node: Node) -> Int8Conv2d | None:
    module = kinds.module_of(model, node)
    return module if isinstance(module, Int8Conv2d) else None


def _fold_clamps(model: GraphModule, node: Node, layer: Int8Conv2d) -> None:
    while len(node.users) == 1:
        (reader,) = node.users
        ends = _clamp_of(model, reader)
        if ends is None or reader.args[0] is not node:
            return
        lo, hi = layer.clamp or (-_INFINITY, _INFINITY)
        layer.clamp = min(max(lo, ends[0]), ends[1]), min(max(hi, ends[0]), ends[1])
        layer.set_quantizers()
        reader.replace_all_uses_with(node)
        model.graph.erase_node(reader)


def _clamp_of(model: GraphModule, node: Node) -> tuple[float, float] | None:
    """The limits of a node that clamps its first argument to constants; None for other nodes."""
    module, target = kinds.module_of(model, node), node.target
    if isinstance(module, nn.Hardtanh):  # the base class of ReLU6
        return module.min_val, module.max_val
    if isinstance(module, nn.ReLU) or target in _RELU:
        return 0.0, _INFINITY
    if target in _RELU6:
        return 0.0, 6.0
    if target not in _CLAMP:
        return None
    ends: list[object] = [None, None] if target is not functional.hardtanh else [-1.0, 1.0]
    for i, value in enumerate(node.args[1:3]):
        ends[i] = value
    for name, value in node.kwargs.items():
        if name in _CLAMP_ENDS:
            ends[_CLAMP_ENDS[name]] = value
    lo, hi = (default if end is None else end for end, default in zip(ends, (-_INFINITY, _INFINITY), strict=True))
    if not isinstance(lo, (int, float)) or not isinstance(hi, (int, float)) or lo > hi:
        return None
    return float(lo), float(hi)
