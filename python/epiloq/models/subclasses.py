"""Whether subclasses of ``nn.Linear`` (tested by running them) and ``nn.Conv2d`` compute what the base class does."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from epiloq.models.conv1d import TransposedConv1D

_IN, _OUT, _ROWS = 3, 5, 2
_SIZES = (1.0, 1e-3, 30.0, 1e6)
# parameters from which hooks of torch.nn.utils compute a weight
_OF_HOOKS = ("weight_g", "weight_v", "weight_orig", "weight_mask", "weight_u", "bias_orig", "bias_mask")

_QUANTISERS = (
    "auto_round",
    "bitsandbytes",
    "brevitas",
    "compressed_tensors",
    "modelopt",
    "neural_compressor",
    "optimum.quanto",
    "quark",
    "torch.ao",
    "torchao",
    "transformers.integrations",
)
"""Packages whose subclasses of torch's layers hold integers as weights, or round float weights in each call."""


def why_not_plain(module: nn.Module, kind: str) -> str:
    """The reason why a layer that is not plain stays as it is; `kind` is "linear layer" or "convolution"."""
    return why_quantised(module) or f"{type(module).__name__} is not a plain {kind}"


def why_quantised(module: nn.Module) -> str | None:
    """The reason why a layer of another quantiser stays as it is, even if it was chosen; None for other layers."""
    place = f"{type(module).__module__}."
    tool = next((name for name in _QUANTISERS if place.startswith(f"{name}.")), None)
    if tool is None:
        return None
    return f"{type(module).__name__} of {tool} quantises by itself: quantise the float model"


def is_plain(module: nn.Module) -> bool:
    """Whether a module is ``nn.Linear``, or a subclass that computes the same from its weight and bias only.

    torch's own subclasses are not plain, because other code handles them specially. A layer whose weight or bias is
    computed by torch.nn.utils.parametrize counts as its original class. A layer with a replaced ``forward`` (for
    example by accelerate's hooks) is not plain, unless compressed-tensors replaced it to round nothing but the weight.
    """
    replaced = "forward" in vars(module) and not _was_dequantised(module)
    if replaced or type(module).__call__ is not nn.Module.__call__:
        return False
    if parametrize.is_parametrized(module):
        computed = set(module.parametrizations)  # type: ignore[arg-type]
        return parametrize.type_before_parametrizations(module) is nn.Linear and computed <= {"weight", "bias"}
    if type(module) in (nn.Linear, TransposedConv1D):
        return True
    if not isinstance(module, nn.Linear) or type(module).__module__.startswith("torch."):
        return False
    parameters = dict(module.named_parameters())
    has_bias = module.bias is not None
    alone = not list(module.children()) and not list(module.buffers())
    return alone and parameters.keys() == {"weight", *(["bias"] if has_bias else [])} and _computes_linear(module)


def is_replaceable(module: nn.Module) -> bool:
    """Whether a layer that files hold quantised is `is_plain`, or the output projection of torch's attention, which
    reads the weight and the bias and never calls the layer."""
    return is_plain(module) or type(module) is NonDynamicallyQuantizableLinear


def _was_dequantised(module: nn.Module) -> bool:
    """Whether compressed-tensors left its ``forward`` on a layer that it dequantised, as transformers 5.17 has it do.

    That function rounds the weight to the grid that it is on, but would also quantise activations, if described.
    """
    function = getattr(vars(module)["forward"], "__func__", None)
    owner = getattr(function, "__globals__", {}).get("__name__", "")
    scheme, status = (getattr(module, f"quantization_{name}", None) for name in ("scheme", "status"))
    if not owner.startswith("compressed_tensors.") or getattr(status, "value", None) != "decompressed":
        return False
    return scheme is not None and scheme.input_activations is None and scheme.output_activations is None


@torch.no_grad()
def _computes_linear(module: nn.Linear) -> bool:
    """Whether a copy of the layer with other sizes and values computes ``x W^T + b``.

    Tested in float32 on the CPU, regardless of defaults: transformers opens models with the meta device and their dtype
    as default.
    """
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    small = copy.copy(module)
    small.in_features, small.out_features = _IN, _OUT
    weight = torch.arange(1.0, _IN * _OUT + 1, **plain).view(_OUT, _IN).sqrt()
    bias = None if module.bias is None else torch.arange(1.0, _OUT + 1, **plain).sqrt()
    values = {"weight": weight, "bias": bias}
    # its own dictionaries, because a copy shares the layer's
    small._parameters = {n: None if v is None else nn.Parameter(v, requires_grad=False) for n, v in values.items()}
    # Small and large values of both signs, because a layer that clamps its input or output is not plain either.
    sizes = torch.tensor(_SIZES, **plain)
    x = (torch.linspace(-1, 1, _ROWS * _IN, **plain) * sizes[:, None]).view(len(_SIZES), _ROWS, _IN)
    expected = nn.functional.linear(x, weight, bias)
    for training in (False, True):
        small.training = training
        try:
            y = type(module).forward(small, x)
        except Exception:  # a subclass that raises anything for a plain input is not plain
            return False
        if not isinstance(y, torch.Tensor) or y.shape != expected.shape or not torch.allclose(y, expected):
            return False
    return True


def is_plain_conv2d(module: nn.Module) -> bool:
    """Whether a module is ``nn.Conv2d``, or a subclass that computes nothing else and has no further tensors.

    Weight and bias may be computed by torch.nn.utils.parametrize.
    """
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        return False
    kind, computed = type(module), set[str]()
    if parametrize.is_parametrized(module):
        kind = parametrize.type_before_parametrizations(module)
        computed = set(module.parametrizations)  # type: ignore[arg-type]
    if not issubclass(kind, nn.Conv2d) or (kind is not nn.Conv2d and kind.__module__.startswith("torch.")):
        return False
    inherited = all(getattr(kind, name) is getattr(nn.Conv2d, name) for name in ("forward", "_conv_forward"))
    held = {name.partition(".")[0] for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    return inherited and held | computed <= {"weight", "bias", "parametrizations", *_OF_HOOKS}
