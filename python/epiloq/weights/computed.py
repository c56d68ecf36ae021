"""Weights that are computed by hooks before each call (older reparametrisations of torch.nn.utils, pruning), or by
torch.nn.utils.parametrize when they are read. Values written to them are lost with the next call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# For each kind of hook, a function that computes the tensor without an input and without changing the hook's state.
_KINDS: dict[type, Callable[[Any, nn.Module], None]] = {
    WeightNorm: lambda hook, module: setattr(module, hook.name, hook.compute_weight(module)),
    SpectralNorm: lambda hook, module: setattr(module, hook.name, hook.compute_weight(module, False)),
    BasePruningMethod: lambda hook, module: setattr(module, hook._tensor_name, hook.apply_mask(module)),
}

_PARTS = ("weight", "bias")
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# For each kind of hook, the function of torch that removes it and makes the computed tensor a parameter.
_REMOVALS: dict[type, Callable[[nn.Module, str], object]] = {
    WeightNorm: remove_weight_norm,
    SpectralNorm: remove_spectral_norm,
    BasePruningMethod: prune.remove,
}


class NotFiniteError(ValueError):
    """A weight contains NaN or infinity, which cannot be rounded to a grid."""


def check_readable(name: str, module: nn.Module, argument: str) -> None:
    """Raise ValueError, from the class `name`, unless a module's weight is a float tensor with values, or on "meta"."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        others = ", ".join(tensor for tensor, _ in [*module.named_parameters(), *module.named_buffers()])
        raise ValueError(
            f"{name}: {argument}.weight: expected a tensor, got none, but {others or 'no tensor'}: open a model that "
            "another library quantised with epiloq from its files, or quantise the float model"
        )
    expected, kind = "a dense tensor, one", str(weight.dtype)
    if is_traceable_wrapper_subclass(weight):
        kind = f"a {type(weight).__name__}, which is sharded or quantised already"
    elif weight.layout is torch.strided and weight.dtype in FLOAT_DTYPES:
        if weight.is_meta or weight.numel() == 0 or weight.untyped_storage().nbytes() > 0:
            return
        kind = "one whose memory has been freed, as by FSDP"
    elif weight.layout is not torch.strided:
        kind = f"one of layout {weight.layout}"
    else:
        expected = "one"
    dtypes = ", ".join(map(str, FLOAT_DTYPES))
    raise ValueError(f"{name}: {argument}.weight: expected {expected} of {dtypes}, got {kind}")


def check_bias(where: str, bias: object, channels: int, device: torch.device) -> None:
    """Raise ValueError, with the prefix `where`, unless a bias is None or floating-point ``[channels]`` on `device`.

    torch would broadcast some others."""
    if bias is None:
        return
    got = f"{bias.dtype} {list(bias.shape)} on {bias.device}" if isinstance(bias, Tensor) else type(bias).__name__
    fits = isinstance(bias, Tensor) and bias.is_floating_point() and bias.shape == (channels,)
    if not fits or cast(Tensor, bias).device != device:
        raise ValueError(f"{where}: expected a floating-point tensor [{channels}] on {device}, got {got}")


def check_finite(where: str, weight: Tensor) -> None:
    """Raise NotFiniteError, with the prefix `where`, unless all values are finite. Tensors on "meta" pass."""
    if weight.is_meta or weight.numel() == 0:
        return
    low, high = torch.aminmax(weight.detach())
    if not (torch.isfinite(low) & torch.isfinite(high)):
        raise NotFiniteError(f"{where}: expected finite numbers, got NaN or infinity")


def computed_parts(module: nn.Module) -> list[str]:
    """Return those of "weight" and "bias" that are computed."""
    return [part for part in _PARTS if part in module.__dict__ or parametrize.is_parametrized(module, part)]


def bake_(name: str, module: nn.Module) -> None:
    """Replace a computed weight and bias by parameters with their current values, so that they can be written to.

    Their parametrisations and hooks are removed. Call it in evaluation mode, in which computing them changes no state.
    Raises ValueError, with the prefix `name`, if a parametrisation cannot be removed.
    """
    parts = computed_parts(module)
    if not parts:
        return
    refresh(name, module)
    for part in parts:
        if parametrize.is_parametrized(module, part):
            try:
                parametrize.remove_parametrizations(module, part)
            except RuntimeError as error:
                raise ValueError(f"{name}: {part}: expected a parametrisation that can be removed: {error}") from error
    for kind, remove in _REMOVALS.items():
        hooks: list[Any] = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, kind)]
        for hook in hooks:
            remove(module, getattr(hook, "name", None) or hook._tensor_name)


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def carry_hooks_over(before: nn.Module, after: nn.Module) -> None:
    """Move hooks to another module, except those that compute a weight; their handles still remove them."""
    for name in _HOOKS:
        setattr(after, name, getattr(before, name))
    computing = {key for key, hook in before._forward_pre_hooks.items() if isinstance(hook, tuple(_KINDS))}
    if computing:
        others = {key: hook for key, hook in before._forward_pre_hooks.items() if key not in computing}
        after._forward_pre_hooks = OrderedDict(others)


def refresh(name: str, module: nn.Module) -> None:
    """Recompute tensors that hooks compute before each call of `module`, which may be stale after loading.

    Raises ValueError, with the prefix `name`, if an unknown hook computes the weight or the bias.
    """
    computed = [part for part in _PARTS if part in module.__dict__]
    if not computed:
        return
    unknown = []
    for hook in module._forward_pre_hooks.values():
        kind = next((kind for kind in _KINDS if isinstance(hook, kind)), None)
        if kind is None:
            unknown.append(getattr(hook, "__qualname__", type(hook).__qualname__))
            continue
        with torch.no_grad():
            _KINDS[kind](hook, module)
    if unknown or not module._forward_pre_hooks:
        by = f"the forward pre-hook {', '.join(unknown)}" if unknown else "other code"
        raise ValueError(
            f"{name}: {computed[0]}: expected a parameter, got a tensor that {by} may compute; make it a parameter"
            " first, as torch.nn.utils.remove_weight_norm and its like do"
        )
