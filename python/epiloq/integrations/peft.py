"""PEFT adapters for quantised models: the import makes ``peft.LoraConfig`` support epiloq's linear layers.

    import epiloq.integrations.peft
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))

The weights stay quantised and frozen; the adapters are trained in float32, using the input gradients of the layers of
``epiloq.nn``. For PEFT, ``target_modules="all-linear"`` means ``nn.Linear`` only: pass `linear_names` of the model
instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn

from epiloq.nn.base.frozen import FrozenLinear
from epiloq.nn.experts.row_experts import Experts

_NAME = "epiloq.integrations.peft"
# Ways to begin that look at the weight, or change it, and variants that do.
_WEIGHTLESS = (True, False, "gaussian", "eva", "orthogonal")
_OF_WEIGHTS = ("use_dora", "kasa_config", "corda_config", "lora_ga_config", "loftq_config", "use_qalora")

_without_epiloq: Any = LoraConfig.__post_init__


class LoraLinear(Linear):
    """PEFT's LoRA layer around one of epiloq's quantised linear layers. Merging is not supported."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **more: Any) -> None:
        for option in _OF_WEIGHTS:
            if getattr(config, option, None):
                raise NotImplementedError(f"{_NAME}: {option}: expected none, for it needs a floating-point weight")
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
            holds_modules = isinstance(adapters, nn.Module)  # others hold numbers
            if holds_modules and adapter_name in adapters:
                adapters[adapter_name] = adapters[adapter_name].to(target)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        raise NotImplementedError(
            f"{_NAME}: merge: adapters cannot be merged into quantised weights; save the adapter by itself, or merge it"
            " into the floating-point model and quantise that"
        )


def linear_names(model: nn.Module) -> list[str]:
    """The names of a model's quantised linear layers, for ``LoraConfig(target_modules=...)``."""
    found = model.named_modules()
    return [name for name, module in found if isinstance(module, FrozenLinear) and not isinstance(module, Experts)]


def register() -> None:
    """Make every ``LoraConfig`` created from now on, including those of saved adapters, support epiloq's linear
    layers."""

    def with_epiloq(config: LoraConfig) -> None:
        _without_epiloq(config)
        config._register_custom_module({FrozenLinear: LoraLinear})

    LoraConfig.__post_init__ = with_epiloq  # type: ignore[method-assign]


def unregister() -> None:
    """Undo `register`."""
    LoraConfig.__post_init__ = _without_epiloq  # type: ignore[method-assign]


register()
