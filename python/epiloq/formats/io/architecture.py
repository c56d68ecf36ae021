"""Models of transformers built from config.json without tensors, and their tensor names."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.io.converted import convert_
from epiloq.formats.io.gpt_oss import split_experts_
from epiloq.formats.io.limits import Limits
from epiloq.formats.io.names import Names, with_and_without_prefix
from epiloq.formats.io.safe_files import ADAPTER, reason, status
from epiloq.formats.layouts.base import FormatError
from epiloq.layer_filter import kept_in_float32
from epiloq.models.mixtures import file_state, stacked, unstack_experts_
from epiloq.models.parent_reads import changed_by_parents
from epiloq.models.scaled_activation import SCALES, scale_activations_
from epiloq.models.sequential_experts import unstack_
from epiloq.nn.base.quantized_layer import QuantizedLayer
from epiloq.weights.tensor_checks import Identity, identity


def architecture(checkpoint: Checkpoint) -> Any:
    """The class in transformers that a config.json names."""
    import transformers

    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    try:
        found = getattr(transformers, name, None) if name else None
    except Exception:  # e.g. a package that the model needs is missing
        found = None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise FormatError(
            f"{checkpoint.folder / 'config.json'}: architectures: expected a model that transformers has, got {names!r}"
        )
    return found


def transformers_config(checkpoint: Checkpoint) -> Any:
    """The config.json as transformers reads it. Raises FormatError where it cannot."""
    from transformers import AutoConfig

    where = checkpoint.folder / "config.json"
    if "auto_map" in checkpoint.config and not _is_known(checkpoint.config.get("model_type")):
        raise FormatError(
            f"{where}: auto_map: epiloq runs no code from a directory; open it by from_pretrained(…, "
            "trust_remote_code=True), and quantise it by epiloq.quantize_ and save_pretrained"
        )
    try:
        # Otherwise transformers would ask at the terminal whether to run code from the directory.
        return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # huggingface_hub has its own exceptions for values of a wrong type
        raise FormatError(f"{where}: transformers cannot read it: {reason(error)}") from error


def _is_known(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def positions(checkpoint: Checkpoint) -> int | None:
    """The context length of a language model, if its config.json has it, under any name."""
    return _positive(checkpoint, "max_position_embeddings")


def vocabulary(checkpoint: Checkpoint) -> int | None:
    """The vocabulary size of a language model, if its config.json has it."""
    return _positive(checkpoint, "vocab_size")


def _positive(checkpoint: Checkpoint, key: str) -> int | None:
    config = transformers_config(checkpoint)
    try:
        found = getattr(config.get_text_config(), key, None)
    except Exception as error:
        raise FormatError(f"{checkpoint.folder / 'config.json'}: {reason(error)}") from error
    return found if isinstance(found, int) and found > 0 else None


def skeleton(checkpoint: Checkpoint, device: str = "cpu") -> nn.Module:
    """The model that a checkpoint describes, in its own dtype and evaluation mode, with uninitialised values.

    On "meta" it takes no memory. Experts are unstacked if the files have one matrix per expert, and afterwards the
    checkpoint's tensors have the model's names. Raises FormatError for a model that transformers cannot build, or that
    is far larger than the files.
    """
    if status(checkpoint.folder / ADAPTER) is not None:
        raise FormatError(
            f"{checkpoint.folder / ADAPTER}: describes an adapter, which transformers applies to the model: merge it "
            "(merge_and_unload) and save the result in another folder, or move the adapter's files away"
        )
    config = transformers_config(checkpoint)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    limits, kind = checkpoint.limits, architecture(checkpoint)
    outline = renamed(_built(kind, config, limits, "meta"), checkpoint)
    try:
        limits.check_size(outline)
    except FormatError as error:
        raise _first_other_shape(outline, checkpoint) or error from None
    return outline if device == "meta" else renamed(_built(kind, config, limits, device), checkpoint)


def _built(kind: Any, config: Any, limits: Limits, device: str) -> nn.Module:
    """Build a model from a configuration. Raises FormatError for any error of transformers."""
    dtype = config.dtype or torch.float32
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise FormatError(f"{limits.where}: dtype: expected a floating-point type of 2 to 8 bytes, got {dtype!r}")
    try:
        with _default_dtype(dtype), torch.device(device), limits.while_building():
            model: nn.Module = kind(config).eval()
    except FormatError:
        raise
    except Exception as error:  # wrong values raise arbitrary errors where they are used
        raise FormatError(f"{limits.where}: transformers cannot build the model: {reason(error)}") from error
    kept = kept_in_float32(model, dtype)
    for name, parameter in model.named_parameters():
        if kept(name):
            parameter.data = parameter.data.float()
    return model


def skeleton_without_parameters(checkpoint: Checkpoint) -> nn.Module | None:
    """The model that a checkpoint describes, with parameters on "meta" and initialised buffers. None if config.json
    does not state a dtype. Raises FormatError as `skeleton` does.
    """
    config = transformers_config(checkpoint)
    if config.dtype is None:
        return None
    skeleton(checkpoint, "meta")  # refuses a model that would take gigabytes
    thread = threading.get_ident()

    def without_value(_: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    with register_module_parameter_registration_hook(without_value):
        return _built(architecture(checkpoint), config, checkpoint.limits, "cpu")


def _first_other_shape(model: nn.Module, checkpoint: Checkpoint) -> FormatError | None:
    """Return an error for the first tensor with another shape in the files, if any, of a model that is too large."""
    for name, target in model.state_dict(keep_vars=True).items():
        entry = checkpoint.entries.get(name)
        if entry is not None and target.numel() > 8 * max(1, entry.nbytes):
            wanted, found = list(target.shape), list(entry.shape)
            return FormatError(f"{checkpoint.where(name)}: config.json asks for {wanted}, got {entry.dtype} {found}")
    return None


def renamed(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """A transformers model with experts unstacked as in a checkpoint, whose tensors are renamed to the model's names.

    Raises FormatError if two tensors would have the same name.
    """
    if hasattr(model, "base_model_prefix"):
        split_experts_(checkpoint)
        names = names_in(model, checkpoint)
        if not checkpoint.stored:
            checkpoint.rename(names.by_stored(checkpoint.files))
        convert_(checkpoint, model, names)
    return model


def names_in(model: nn.Module, checkpoint: Checkpoint) -> Names:
    """Mapping from names of tensors in files to names in a transformers model.

    From now on the model has unstacked experts and scaled activation functions if the checkpoint has them.
    """
    names = Names(model)
    if checkpoint.quantization is not None:
        scales = {name: entry.shape for name, entry in checkpoint.entries.items() if name.endswith(SCALES)}
        if scales and scale_activations_(model, {names.of(name): shape for name, shape in scales.items()}):
            names = Names(model)
    if not stacked(model):
        return names
    # Of "model.layers.0.mlp.experts.7.up_proj.weight" what is before the number.
    matrices = {names.of(name).rsplit(".", 3)[0] for name in checkpoint.files}
    # The prefix of the base model is known only for names that the model has.
    matrices |= {other for name in matrices for other in with_and_without_prefix(model, name)}
    changed = unstack_experts_(model, lambda name: name in matrices)
    changed += unstack_(model, None, lambda name: name in matrices)
    return Names(model) if changed else names


def check_unchanged(model: nn.Module, quantised: Mapping[str, str]) -> None:
    """Raise FormatError for a quantised layer to whose weight the model writes when it runs, as RWKV does.

    `quantised` are names in the model and where the layers are stored.
    """
    for name, writer in changed_by_parents(model).items():
        if name in quantised:
            raise FormatError(
                f"{quantised[name]}: expected a floating-point weight, because the model changes it when it runs "
                f"({writer}), which quantised weights do not allow: leave the layer in floating point when quantising"
                + (", or turn this off in config.json" if "config." in writer else "")
            )


def ignores_tensor(model: nn.Module, name: str) -> bool:
    """Whether a transformers model deliberately ignores a tensor or layer in files, such as multi-token prediction
    layers.

    Layers that the model has are never ignored: the patterns may be meant for another size (GLM-4.5 Air ignores the
    layer after its last, which GLM-4.5 has), or for the names of a part of the model.
    """
    patterns: list[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    return any(re.search(pattern, name) for pattern in patterns) and not has(model, name)


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """The module of this name, or None."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def has(model: nn.Module, name: str) -> bool:
    """Whether a model has a parameter, buffer or module of this name."""
    parent, _, leaf = name.rpartition(".")
    holder = submodule(model, parent)
    return holder is not None and any(leaf in held for held in (holder._parameters, holder._buffers, holder._modules))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def untie_(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Untie weights that a model ties but that differ in a checkpoint.

    transformers does the same. Otherwise the loaded value would depend on the tensors' order in the files.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for one, other in tied.items():
        if one not in checkpoint.files or other not in checkpoint.files:
            continue
        a, b = checkpoint.tensor(one), checkpoint.tensor(other)
        if a.shape == b.shape and torch.equal(a, b):
            continue
        parent, _, leaf = one.rpartition(".")
        parameter = model.get_parameter(one)
        own = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(parent), leaf, own)


def model_config(model: nn.Module) -> dict[str, Any]:
    """The config.json of a transformers model in memory."""
    found: dict[str, Any] = json.loads(model.config.to_json_string())  # type: ignore[operator,union-attr]
    dtype = str(float_dtype(model)).removeprefix("torch.")
    return found | {"architectures": [type(model).__name__], "dtype": dtype}


def float_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's floating-point parameters, or of the float layer that a quantised first layer replaced."""
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            return module.dtype
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.get_default_dtype()


def distinct(model: nn.Module) -> Mapping[str, Tensor]:
    """The state dict as saved in files: tied weights appear under one name only."""
    seen: set[Identity] = set()
    found = {}
    for name, tensor in file_state(model).items():
        same = identity(tensor)
        if same not in seen:
            found[name] = tensor
        seen.add(same)
    return found


def is_missing_in_saved(model: nn.Module, checkpoint: Checkpoint, part: str) -> bool:
    """Whether a part of a transformers model has no tensor in the files, and the class that wrote them has no such
    part. transformers initialises it. Such is the pooler of encoders: a base model has it, and the same model with a
    head for masked tokens has not."""
    names = with_and_without_prefix(model, part)
    if any(file.startswith(f"{name}.") for file in checkpoint.files for name in names):
        return False
    saved = _outline(architecture(checkpoint), transformers_config(checkpoint))
    return saved is not None and not any(has(saved, name) for name in names)


def layers_of_base_model(model: nn.Module) -> set[str]:
    """Names of linear layers that the base model's class has and `model` has not, with and without its prefix."""
    config = getattr(model, "config", None)
    if config is None or not getattr(model, "base_model_prefix", ""):
        return set()
    from transformers import MODEL_MAPPING

    kind = MODEL_MAPPING.get(type(config), None)
    base = _outline(kind, config) if isinstance(kind, type) and type(model) is not kind else None
    if base is None:
        return set()
    layers = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    both = [with_and_without_prefix(model, name) for name in layers]
    return {name for names in both if not any(has(model, name) for name in names) for name in names}


def _outline(kind: Any, config: Any) -> nn.Module | None:
    """A model without values; None if transformers cannot build it."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"):
            model: nn.Module = kind(config)
            return model
    except Exception:  # e.g. a package that the class needs is missing
        return None
