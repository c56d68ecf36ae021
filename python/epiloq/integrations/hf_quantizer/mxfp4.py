"""GPT-OSS's own checkpoints, ``quant_method`` "mxfp4": FP4 experts, everything else in floating point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epiloq.formats.configs.keys import check_keys, excludes, names
from epiloq.formats.configs.mxfp4 import KNOWN
from epiloq.formats.configs.mxfp4 import METHOD as METHOD
from epiloq.formats.io.architecture import submodule
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.safetensors_file import DTYPES
from epiloq.formats.layouts.base import FormatError, check_numbers, located
from epiloq.nn import Fp4Experts
from epiloq.nn.base.stored_tensors import StoredTensors

_MARKER = "gate_up_proj_blocks"


class StoredExperts(nn.Module):
    """The tensors of experts as stored, until the module that runs them is created from them."""

    def __init__(self, experts: Fp4Experts, origin: str) -> None:
        super().__init__()
        self.origin = origin
        # not a child, so that transformers does not load it
        self.__dict__["outline"] = experts
        for part, shape in experts.shapes().items():
            dtype = experts.get_parameter(part).dtype if part.endswith("_bias") else torch.uint8
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(part, nn.Parameter(tensor, requires_grad=False))

    @property
    def experts(self) -> int:
        """Number of experts."""
        outline: Fp4Experts = self.__dict__["outline"]
        return outline.experts

    def leave_to(self, read: Callable[[str], Tensor]) -> None:
        """Provide the reader with which `opened_part` loads tensors by the last part of their names; transformers will
        not load them."""
        self.__dict__["read"] = read
        self._parameters.clear()

    def opened_part(self, part: range) -> Fp4Experts:
        """Return only the experts of `part`, and copy only their tensors from the files. Raises FormatError as `opened`
        does."""
        outline: Fp4Experts = self.__dict__["outline"]
        read: Callable[[str], Tensor] = self.__dict__["read"]
        tensors = {name: read(name)[part.start : part.stop].clone() for name in outline.shapes()}
        with located(self.origin):
            check_numbers(tensors)
            return outline.some(part, tensors)

    def opened(self) -> Fp4Experts:
        """The experts. Raises FormatError, which names file and tensor, for a tensor without values, scales that are no
        powers of two, and biases that are not finite."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        offloaded = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
        if offloaded is not None:
            raise FormatError(
                f"{self.origin}: {offloaded}: its values are offloaded; use a device_map that keeps them on a device"
            )
        outline: Fp4Experts = self.__dict__["outline"]
        with located(self.origin):
            check_numbers(tensors)
            return outline.from_blocks(tensors).train(self.training)


def has_blocks(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has experts as GPT-OSS's own have them."""
    return bool(_quantised(checkpoint))


def _quantised(checkpoint: Checkpoint) -> list[str]:
    """Names of the experts of a checkpoint that are in blocks of FP4."""
    return [name.rpartition(".")[0] for name in checkpoint.files if name.rpartition(".")[2] == _MARKER]


def store_experts_(model: Any, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Replace experts that are quantised in a checkpoint by `StoredExperts`, into which transformers loads tensors.

    `config` is the ``quantization_config``. Raises FormatError, which names file and tensor, for unsupported entries,
    experts of other models than GPT-OSS, or tensors with wrong dtypes or shapes.
    """
    check_keys(config, KNOWN, METHOD)
    left = names(config, "modules_to_not_convert", METHOD)
    for name in _quantised(checkpoint):
        where = checkpoint.where(f"{name}.{_MARKER}")
        if excludes(left, name):
            raise FormatError(f"{where}: belongs to quantised experts, but config.json leaves them in floating point")
        stored = StoredExperts(_outline(_module(model, name, where), where), where)
        for part, held in stored.named_parameters():
            entry = checkpoint.entries.get(f"{name}.{part}")
            if entry is None:
                raise FormatError(f"{checkpoint.folder}: {name}.{part}: expected a tensor, found none")
            right = held.is_floating_point() or DTYPES[entry.dtype] == held.dtype
            if not right or tuple(entry.shape) != held.shape:
                raise FormatError(
                    f"{checkpoint.where(f'{name}.{part}')}: expected {held.dtype} {list(held.shape)}, "
                    f"got {entry.dtype} {list(entry.shape)}"
                )
        model.set_submodule(name, stored)


def open_experts_(model: nn.Module) -> None:
    """Replace stored experts by the modules that run them. Raises FormatError as `StoredExperts.opened` does."""
    for name in [name for name, module in model.named_modules() if isinstance(module, StoredExperts)]:
        stored = model.get_submodule(name)
        assert isinstance(stored, StoredExperts)
        model.set_submodule(name, stored.opened())


def check_experts_alone(model: nn.Module, where: str) -> None:
    """Raise FormatError if layers other than experts have been quantised, which the format has no tensors for."""
    for name, module in model.named_modules():
        if isinstance(module, StoredTensors) and not isinstance(module, Fp4Experts):
            raise FormatError(
                f"{where}: {name}: quantised since the directory was opened, whose format ({METHOD!r}) has FP4 experts "
                "alone; save it before, and quantise other layers again after opening it"
            )


def joined(parts: Sequence[Mapping[str, Tensor]], like: Fp4Experts) -> Fp4Experts:
    """All experts of a layer, joined from the `file_state` of its parts in order."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    made = like.some(range(like.whole or like.experts), whole)
    made.part = made.whole = None
    return made


def _module(model: Any, name: str, where: str) -> Any:
    module = submodule(model, name)
    if module is None:
        raise FormatError(f"{where}: expected experts {name} in {type(model).__name__}, found none")
    if type(module).__name__ != "GptOssExperts":
        raise FormatError(f"{where}: expected GptOssExperts, found {type(module).__name__}")
    return module


def _outline(module: Any, where: str) -> Fp4Experts:
    sizes = (module.num_experts, module.hidden_size, module.intermediate_size)
    options: dict[str, Any] = {"alpha": module.alpha, "limit": module.limit, "dtype": module.gate_up_proj.dtype}
    with located(where):
        return Fp4Experts(*sizes, **options, device="meta").train(module.training)
