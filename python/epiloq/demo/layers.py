"""Effect of quantisation on each layer: output errors on real activations, and bytes of weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers including padding; tensors that share storage (tied weights) count once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def quantised_layers(teacher: nn.Module, student: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Name -> (float layer, quantised layer) for each linear layer and convolution that the scheme replaced."""
    from torch import nn

    replaced = dict(student.named_modules())
    return {
        name: (module, replaced[name])
        for name, module in teacher.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and type(replaced[name]) is not type(module)
    }


def layer_errors(teacher: nn.Module, student: nn.Module, tokens: Tensor) -> dict[str, float]:
    """`output_errors` of a language model's layers on int64 [1, n] tokens."""
    inputs, dtype = tokens.to(next(teacher.parameters()).device), next(student.parameters()).dtype
    return output_errors(teacher, student, dtype, lambda: teacher(inputs, use_cache=False, logits_to_keep=1))


def output_errors(
    teacher: nn.Module, student: nn.Module, dtype: torch.dtype, run: Callable[[], Any]
) -> dict[str, float]:
    """Relative error ||y_student - y_teacher|| / ||y_teacher|| (Frobenius) of each quantised layer's output.

    Both layers get the teacher's activations while ``run()`` runs the teacher, so errors of earlier layers do not
    accumulate, and activations are not stored. Both models are on the same device; the student's layers take inputs
    in `dtype`.
    """
    import torch

    errors: dict[str, float] = {}

    def compare(name: str, quantised: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            exact = output.double()
            difference = quantised(inputs[0].to(dtype)).double() - exact
            errors[name] = float(difference.norm() / exact.norm())

        return hook

    pairs = quantised_layers(teacher, student)
    with ExitStack() as hooks, torch.inference_mode():
        for name, (layer, quantised) in pairs.items():
            hooks.enter_context(layer.register_forward_hook(compare(name, quantised)))
        run()
    return errors
