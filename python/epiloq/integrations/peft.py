"""PEFT adapters for quantised models: the import makes ``peft.LoraConfig`` support epiloq's linear layers.

    import epiloq.integrations.peft
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))

The weights stay quantised and frozen; the adapters are trained in float32, using the input gradients of the layers of
``epiloq.nn``. ``target_modules="all-linear"`` includes the quantised layers, and ``modules_to_save`` refuses them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from peft import LoraConfig, LoraModel
from peft.tuners import tuners_utils
from peft.tuners.lora.layer import Linear
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.nn.experts.row_experts import Experts

_NAME = "epiloq.integrations.peft"
# Ways to begin that look at the weight, or change it, and variants that do.
_WEIGHTLESS = (True, False, "gaussian", "eva", "orthogonal")
_OF_WEIGHTS = ("use_dora", "kasa_config", "corda_config", "lora_ga_config", "loftq_config", "use_qalora")
_ALL_LINEAR = "all-linear"
_MERGING = (
    f"{_NAME}: merge: adapters cannot be merged into quantised weights; save the adapter by itself, or merge it into"
    " the floating-point model and quantise that"
)

_post_init: Any = LoraConfig.__post_init__
_check_module: Any = ModulesToSaveWrapper.check_module
_resolve_all_linear: Any = tuners_utils._maybe_include_all_linear_layers
_check_merge: Any = LoraModel._check_merge_allowed


class LoraLinear(Linear):
    """PEFT's LoRA layer around one of epiloq's quantised linear layers. Merging is not supported."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **more: Any) -> None:
        for option in _OF_WEIGHTS:
            if getattr(config, option, None):
                raise NotImplementedError(
                    f"{_NAME}: {option}: not supported on quantised layers: it needs a floating-point weight; omit it"
                )
        if config.init_lora_weights not in _WEIGHTLESS:
            raise NotImplementedError(
                f"{_NAME}: init_lora_weights: expected one of {', '.join(map(str, _WEIGHTLESS))} (the others begin from"
                f" a floating-point weight), got {config.init_lora_weights!r}"
            )
        super().__init__(base_layer, adapter_name, config, **more)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, FrozenLinear)
        return module.in_features, module.out_features

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move to the device of the quantised tensors, but not to their dtype, which cannot be trained."""
        base = self.get_base_layer()
        target = device or next(tensor.device for tensor in (*base.buffers(), *base.parameters()))
        for name in (*self.adapter_layer_names, *self.other_param_names):
            adapters: Any = getattr(self, name, None)
            holds_modules = isinstance(adapters, nn.Module)  # other dictionaries contain numbers
            if not holds_modules or adapter_name not in adapters:
                continue
            if not any(tensor.is_meta for tensor in adapters[adapter_name].parameters()):  # by low_cpu_mem_usage
                adapters[adapter_name] = adapters[adapter_name].to(target)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        raise NotImplementedError(_MERGING)


def linear_names(model: nn.Module) -> list[str]:
    """The names of a model's quantised linear layers, for ``LoraConfig(target_modules=...)``; those with an adapter by
    the name of the layer that wraps them."""
    modules = dict(model.named_modules())
    found = [n for n, module in modules.items() if isinstance(module, FrozenLinear) and not isinstance(module, Experts)]
    return [_outermost(name, modules) for name in found]


def _outermost(name: str, modules: dict[str, nn.Module]) -> str:
    """The name of a layer, or of the layers of adapters around it."""
    outer, _, child = name.rpartition(".")
    if child == "base_layer" and isinstance(modules[outer], tuners_utils.BaseTunerLayer):
        return _outermost(outer, modules)
    return name


def register() -> None:
    """Make PEFT support epiloq's layers.

    Every ``LoraConfig`` created from now on, including those of saved adapters, supports the linear ones;
    ``target_modules="all-linear"`` includes them; ``modules_to_save``, which would train nothing in them, refuses them.
    """
    for owner, name, _, replacement in _REPLACED:
        setattr(owner, name, replacement)


def unregister() -> None:
    """Undo `register`."""
    for owner, name, original, _ in _REPLACED:
        setattr(owner, name, original)


def _support_linear_layers(config: LoraConfig) -> None:
    _post_init(config)
    config._register_custom_module({FrozenLinear: LoraLinear})


def _refuse_quantized(wrapper: Any) -> None:
    """PEFT's checks of a module to be trained, and that it has no quantised layers."""
    for name, module in wrapper.original_module.named_modules():
        if isinstance(module, StoredTensors):
            where = f" as its {name}" if name else ""
            raise TypeError(
                f"{_NAME}: modules_to_save: expected modules that can be trained, got a frozen"
                f" {type(module).__name__}{where}; leave it in floating point when quantising (ignore=)"
            )
    _check_module(wrapper)


def _include_quantized(config: Any, model: nn.Module) -> Any:
    """Resolves "all-linear" as PEFT does, including quantised layers."""
    given = getattr(config, "target_modules", None)
    config = _resolve_all_linear(config, model)
    if isinstance(given, str) and given.lower() == _ALL_LINEAR:
        config.target_modules |= {name for name in linear_names(model) if not _is_left_out(config, model, name)}
    return config


def _refuse_merging(model: LoraModel) -> None:
    """PEFT's check before it merges, layer by layer, and that no layer would refuse after others were merged."""
    if any(isinstance(module, LoraLinear) for module in model.modules()):
        raise NotImplementedError(_MERGING)
    _check_merge(model)


def _is_left_out(config: Any, model: Any, name: str) -> bool:
    """Whether PEFT leaves such a layer out of "all-linear": the output head, or the head of a classifier."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        return model.get_submodule(name) is head
    return config.task_type == "SEQ_CLS" and name in SEQ_CLS_HEAD_NAMES


# Functions of PEFT: owner, name, PEFT's own, and the one that knows epiloq's layers.
_REPLACED: tuple[tuple[Any, str, Any, Any], ...] = (
    (LoraConfig, "__post_init__", _post_init, _support_linear_layers),
    (ModulesToSaveWrapper, "check_module", _check_module, _refuse_quantized),
    (LoraModel, "_check_merge_allowed", _check_merge, _refuse_merging),
    (tuners_utils, "_maybe_include_all_linear_layers", _resolve_all_linear, _include_quantized),
)

register()
