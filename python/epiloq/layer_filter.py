"""Which layers of a model are quantised where nobody says which."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from epiloq.mixtures import routers

Filter = Callable[[nn.Module, str], bool]


def default_filter(model: nn.Module) -> Filter:
    """What `quantize_` takes without a ``filter_fn``; its docstring says which layers that are."""
    modules = list(model.modules())
    embedded = {_identity(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    encoders = (module for module in modules if isinstance(module, nn.TransformerEncoderLayer))
    left_out = {id(child) for encoder in encoders for child in encoder.children()}
    left_out |= {id(router) for router in routers(model).values()}
    output_embeddings = getattr(model, "get_output_embeddings", None)
    if output_embeddings is not None:
        left_out.add(id(output_embeddings()))

    def takes(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or id(module) in left_out or name.rpartition(".")[2] == "lm_head":
            return False
        return _identity(module.weight) not in embedded

    return takes


def _identity(weight: Tensor) -> tuple[object, int]:
    """Equal for weights that are one parameter or start at one address (tied through ``.data``, say)."""
    if weight.is_meta or weight.numel() == 0 or isinstance(weight, nn.parameter.UninitializedParameter):
        return "object", id(weight)
    return weight.device, weight.data_ptr()
