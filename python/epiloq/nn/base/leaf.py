"""Layers in graphs of torch.fx: one call each, as torch's own layers."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.fx import Proxy


def is_symbolic(x: object) -> bool:
    """Whether `x` stands for a value in a graph that ``torch.fx.symbolic_trace`` records."""
    return isinstance(x, Proxy)


def as_leaf(layer: nn.Module, *inputs: Any, **named: Any) -> Tensor:
    """Record a call of `layer`, whose ``forward`` depends on values that a `Proxy` does not have.

    A tracer asks only torch's own layers to be leaves, and enters others. Raises TypeError for a layer with hooks:
    they have been, or will be, recorded too, and the recorded call would run them again.
    """
    kind = f"{type(layer).__module__}.{type(layer).__name__}"
    if layer._forward_pre_hooks or layer._forward_hooks:
        raise TypeError(
            f"{type(layer).__name__}: expected a layer without hooks under torch.fx's tracing, got one with hooks; "
            f"trace with a torch.fx.Tracer whose is_leaf_module returns True for {kind}"
        )
    tracer: Any = next(value for value in (*inputs, *named.values()) if is_symbolic(value)).tracer
    try:
        path = tracer.path_of_module(layer)
    except (AttributeError, NameError):
        path = ""
    if not path:
        raise TypeError(
            f"{type(layer).__name__}: expected to be part of the model that torch.fx traces, got a layer on its own; "
            "trace a module that contains it, such as torch.nn.Sequential(layer)"
        )
    return cast(Tensor, tracer.create_proxy("call_module", path, inputs, named))
