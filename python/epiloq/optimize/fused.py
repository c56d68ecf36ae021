"""Decoder layers, gated MLPs and norms whose passes over memory are joined with the quantiser of the next product.

Each function is the ``forward`` of a module that `structure` recognised. Where something does not fit at run time (a
gradient is wanted, an adapter took the place of a layer, a call of another form), the module's own ``forward`` runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import epiloq
from epiloq.nn.base.prepared_linear import K_MULTIPLE
from epiloq.optimize import structure
from epiloq.optimize.rotary import ATTENTION, rotary_attention
from epiloq.optimize.siblings import Siblings, siblings_of
from epiloq.optimize.tokens import Quantized, multiply, quantises, quantizer_of

GATED = ("gate_proj", "up_proj")
_SILU = ("SiLU", "SiLUActivation")


def replacement(module: Any) -> Callable[..., Any] | str | None:
    """A faster ``forward`` of `module`, why there is none although it looks like one, or None."""
    if structure.has_form(module, structure.RMS_NORM):
        return partial(rms_norm, module)
    if structure.has_form(module, structure.GATED_MLP):
        siblings = group_of(module, GATED)
        if siblings is None or type(module.act_fn).__name__ not in _SILU or siblings.sizes[0] != siblings.sizes[1]:
            return None
        return partial(gated_mlp, module, siblings)
    if "forward" not in vars(module) and structure.attends_by_rotary(type(module)):
        siblings = group_of(module, ATTENTION)
        return (
            None
            if siblings is None
            else partial(rotary_attention, module, siblings, structure.norms_heads(type(module)))
        )
    if structure.has_form(module, structure.PRE_NORM_DECODER):
        norms = (module.input_layernorm, module.post_attention_layernorm)
        other = [type(norm).__name__ for norm in norms if structure.body_of(type(norm)) != structure.RMS_NORM]
        if other:
            return f"norms of another form ({other[0]})"
        parameters = inspect.signature(type(module).forward).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        readers = (_reader(module.self_attn, ATTENTION), _reader(module.mlp, GATED))
        return partial(pre_norm_decoder, module, defaults, *readers)
    return None


def group_of(module: nn.Module, names: tuple[str, ...]) -> Siblings | None:
    """The merged children of a module; None where there are none."""
    children = [child for name in names if (child := module._modules.get(name)) is not None]
    return siblings_of(*children) if len(children) == len(names) else None


def _reader(module: nn.Module, names: tuple[str, ...]) -> Siblings | None:
    """The layers that a module hands its input to, if it does nothing else with it and they take it quantised."""
    siblings = group_of(module, names)
    first: Any = None if siblings is None else siblings.layers[0]
    if first is None or quantizer_of(first) is None or first.in_features % K_MULTIPLE:
        return None
    argument = list(inspect.signature(type(module).forward).parameters)[1]
    return siblings if structure.only_projects(type(module), argument, names) else None


def _stand(module: Any, siblings: Siblings, names: tuple[str, ...]) -> bool:
    """Whether nothing, such as an adapter, took the place of a merged layer."""
    children = module._modules
    return all(children[name] is layer for name, layer in zip(names, siblings.layers, strict=True))


def _wants_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def gated_mlp(mlp: Any, siblings: Siblings, x: Tensor) -> Tensor:
    """``down(silu(gate(x)) * up(x))``: one product for gate and up, the activation with the quantiser of down."""
    if _wants_gradient(x) or not _stand(mlp, siblings, GATED):
        return type(mlp).forward(mlp, x)  # type: ignore[no-any-return]
    gate_up, down = siblings.whole(x), mlp.down_proj
    quantizer = quantizer_of(down)
    own = quantizer is None or down._forward_pre_hooks or down._forward_hooks
    if own or not quantises(down, gate_up[..., : siblings.sizes[0]]):
        gate, up = gate_up.chunk(2, -1)
        return down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]
    assert quantizer is not None
    q, scale = epiloq.silu_and_mul_quant(gate_up.view(-1, gate_up.shape[-1]), **quantizer)
    return multiply(down, Quantized(q, scale, gate_up.shape[:-1], gate_up.dtype))


def pre_norm_decoder(
    block: Any,
    defaults: dict[str, Any],
    attention: Siblings | None,
    mlp: Siblings | None,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """``h = x + attention(norm(x)); h + mlp(norm(h))``: a norm, the addition before it and the quantiser behind as one.

    `attention` and `mlp` are the layers that take the norms' integers, or None.
    """
    if args or _wants_gradient(hidden_states):
        return type(block).forward(block, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
    if attention is not None and not _stand(block.self_attn, attention, ATTENTION):
        attention = None
    if mlp is not None and not _stand(block.mlp, mlp, GATED):
        mlp = None
    x, _ = _normed(block.input_layernorm, hidden_states, None, attention)
    attended, _ = block.self_attn(hidden_states=x, **{**defaults, **kwargs})
    x, residual = _normed(block.post_attention_layernorm, attended, hidden_states, mlp)
    return residual + block.mlp(x)  # type: ignore[no-any-return]


def _normed(norm: Any, x: Tensor, residual: Tensor | None, reader: Siblings | None) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``, the norm as the reader's integers where there is one."""
    if reader is None or norm.weight.dtype != x.dtype or not quantises(reader.layers[0], x):
        total = x if residual is None else residual + x
        return norm(total), total
    quantizer = quantizer_of(reader.layers[0])
    assert quantizer is not None
    flat, total = x.reshape(-1, x.shape[-1]), x
    if residual is None:
        q, scale = epiloq.rms_norm_quant(flat, norm.weight, norm.variance_epsilon, **quantizer)
    else:
        before = residual.reshape(flat.shape)
        q, scale, added = epiloq.rms_norm_quant(flat, norm.weight, norm.variance_epsilon, residual=before, **quantizer)
        total = added.view(x.shape)
    return reader.hand(Quantized(q, scale, x.shape[:-1], x.dtype)), total


def rms_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    """Root mean square norm in one kernel."""
    weight = norm.weight
    if weight.dtype != hidden_states.dtype:
        return type(norm).forward(norm, hidden_states)  # type: ignore[no-any-return]
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, norm.variance_epsilon)
