"""epiloq's own format: the state dicts of the modules that run a model, so that every scheme is restored exactly.

A quantised layer has its module's state dict under its name; config.json has a ``quantization_config`` with
``format`` "epiloq", the format's version, the scheme's name (null where layers follow none) and, for each kind of
module, its class, its options and the names of its layers. Everything else is as in a model that is not quantised.
There is deliberately no ``quant_method``: without one transformers raises an error, whereas with an unknown one it only
warns and fills the model with random weights. `epiloq.integrations.transformers` registers the format with
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from epiloq import nn as modules
from epiloq.formats.embeddings import SHARED, TableOutline, shared_layers, without
from epiloq.formats.io.architecture import distinct, model_config
from epiloq.formats.io.checkpoint import LARGEST_SHARD, Writer, atomic_folder
from epiloq.formats.layouts.base import FormatError, Quantization, located
from epiloq.formats.module_kinds import KINDS as KINDS
from epiloq.formats.module_kinds import Kind
from epiloq.formats.module_kinds import Options as Options
from epiloq.formats.weights import BlockWeight, ModuleWeight, Weight
from epiloq.models.mixtures import named_layers
from epiloq.nn.base.prepared_linear import FP8_BLOCK
from epiloq.nn.base.stored_tensors import StoredTensors
from epiloq.nn.experts.gating import OwnGate
from epiloq.schemes import SCHEMES
from epiloq.weights.packed_weight import BITS

METHOD, VERSION = "epiloq", 4
# Versions 2 and 3 had another order of 2- and 3-bit values.
_READ, _OTHER_ORDER = (2, 3, VERSION), (2, 3)
# a hint for people who read the config.json
_OPENED_BY = "import epiloq.integrations.transformers"


_PACKED = "weight_"
# Modules of epiloq that contain layers but are not layers themselves.
_HOLD_LAYERS = (modules.ExpertLinears, OwnGate)


@dataclass(frozen=True)
class Group:
    """Layers of one kind with the same options."""

    module: str
    options: Options
    layers: list[str]

    @property
    def kind(self) -> Kind:
        """The class's row in the table."""
        return KINDS[self.module]

    @property
    def scheme(self) -> str | None:
        """The scheme of these layers, ignoring zero points and offsets."""
        for scheme in SCHEMES.values():
            same = all(self.options.get(name) == value for name, value in scheme.options.items() if name != "zeros")
            if scheme.module is self.kind.module and same and not self.options.keys() & self.kind.usual.keys():
                return scheme.name
        return None


def config(groups: Sequence[Group], shared: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The ``quantization_config``; `shared` maps layers without a weight of their own to the embedding that has it."""
    tables = modules.QuantizedEmbedding.__name__
    schemes = {group.scheme for group in groups if group.module != tables}
    return {
        "format": METHOD,
        "format_version": VERSION,
        "opened_by": _OPENED_BY,
        "scheme": schemes.pop() if len(schemes) == 1 else None,
        "modules": [
            {"class": group.module, "options": dict(group.options), "layers": sorted(group.layers)} for group in groups
        ],
        **({SHARED: dict(shared)} if shared else {}),
    }


def parse(found: Mapping[str, Any]) -> list[Group]:
    """The inverse of `config`. Raises FormatError, which names the entry, for what this version does not support."""
    where = "epiloq: quantization_config"
    if found.get("format_version") not in _READ:
        raise FormatError(f"{where}: format_version: expected {VERSION}, got {found.get('format_version')!r}")
    listed = found.get("modules")
    if not isinstance(listed, list) or not listed:
        raise FormatError(f"{where}: modules: expected a list of kinds of layers, got {listed!r}")
    groups = [_group(entry, where) for entry in listed]
    if found["format_version"] in _OTHER_ORDER:
        few = [group for group in groups if group.options.get("bits", 8) < 4]
        if few:
            raise FormatError(
                f"{where}: format_version: expected {VERSION} with {few[0].options['bits']} bits ({few[0].layers[0]}), "
                f"whose values changed their order, got {found['format_version']}; write the directory again from its "
                "source"
            )
    names = [name for group in groups for name in group.layers]
    if len(set(names)) < len(names):
        raise FormatError(f"{where}: modules: expected each layer once, got {max(names, key=names.count)} twice")
    return groups


def _group(entry: Any, where: str) -> Group:
    fields = entry if isinstance(entry, dict) else {}
    name, options, layers = (fields.get(key) for key in ("class", "options", "layers"))
    if not isinstance(name, str) or name not in KINDS:
        raise FormatError(f"{where}: modules: class: expected one of {', '.join(KINDS)}, got {name!r}")
    usual = KINDS[name].usual
    if not isinstance(options, dict) or (usual.keys() | options.keys()) != KINDS[name].options.keys():
        expected = ", ".join(option for option in KINDS[name].options if option not in usual) or "none"
        raise FormatError(f"{where}: modules: {name}: options: expected {expected}, got {options!r}")
    with located(f"{where}: modules"):
        KINDS[name].check(options)
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, str) for layer in layers):
        raise FormatError(f"{where}: modules: {name}: layers: expected names, got {layers!r}")
    return Group(name, options, layers)


def groups_of(layers: Mapping[str, tuple[str, Options]]) -> list[Group]:
    """Group layers, given by name with class and options, by equal class and options."""
    found: dict[str, Group] = {}
    for name, (module, options) in layers.items():
        known = found.setdefault(json.dumps([module, options], sort_keys=True), Group(module, options, []))
        known.layers.append(name)
    return list(found.values())


def layers_of(model: nn.Module) -> dict[str, tuple[str, Options]]:
    """A model's quantised layers by name. Raises FormatError for a module that the format cannot represent, for a part
    of a layer, or if there are none."""
    found: dict[str, tuple[str, Options]] = {}
    _check_whole(model)
    for name, module in named_layers(model):
        kind = KINDS.get(type(module).__name__)
        if kind is not None and type(module) is kind.module:
            found[name] = kind.module.__name__, kind.options_of(module)
        elif type(module).__module__.startswith(modules.__name__) and not isinstance(module, _HOLD_LAYERS):
            raise FormatError(f"epiloq: {name}: expected one of {', '.join(KINDS)}, got {type(module).__name__}")
    if not found:
        raise FormatError("epiloq: model: expected quantised layers, found none")
    return found


def _check_whole(model: nn.Module) -> None:
    """Raise FormatError for a layer of which this process has a part alone."""
    for name, module in model.named_modules():
        shard, experts = getattr(module, "shard", None), getattr(module, "part", None)
        if isinstance(module, StoredTensors) and shard is not None:
            sizes = f"[{len(shard.rows)}, {len(shard.columns)}] of [{shard.out_features}, {shard.in_features}]"
        elif isinstance(module, (modules.ExpertLinears, modules.GatedExperts)) and experts is not None:
            sizes = f"{len(experts)} of {module.whole} experts"
        else:
            continue
        raise FormatError(f"epiloq: {name}: {in_part(sizes)}")


def in_part(sizes: str) -> str:
    """Why a layer of which this process has a part cannot be saved, and what to do."""
    return (
        f"expected a whole layer to save, got a part ({sizes}): save the model before parallelize_module, or open its "
        "directory by from_pretrained(…, distributed_config=…), after which save_pretrained gathers the parts"
    )


def save(model: nn.Module, folder: str | Path, largest_shard: int = LARGEST_SHARD) -> None:
    """Write a transformers model quantised by `quantize_` into a new `folder`, atomically.

    Save a tokenizer into it with its own ``save_pretrained``. Raises FormatError if `folder` exists, for a quantised
    layer that the format cannot represent, or if there is none.
    """
    with atomic_folder(folder) as temporary:
        write(model, model_config(model), temporary, largest_shard)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(temporary)  # type: ignore[operator,union-attr]


def write(model: nn.Module, source: Mapping[str, Any], folder: Path, largest_shard: int = LARGEST_SHARD) -> None:
    """Do what `save` does, but directly in `folder`; `source` is the config.json to extend."""
    quantization_config, shared = config_and_shared(model)
    writer = Writer(folder, largest_shard)
    for name, tensor in without(distinct(model), shared).items():
        writer.add(name, tensor)
    writer.close({**source, "quantization_config": quantization_config})


def config_and_shared(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """The ``quantization_config`` of a model, and its layers without a weight of their own. Raises as `layers_of`."""
    shared = shared_layers(model)
    layers = {name: layer for name, layer in layers_of(model).items() if name not in shared}
    return config(groups_of(layers), shared), shared


def described(
    weight: Weight, quantization: Quantization | None, table: TableOutline | None = None
) -> tuple[str, Options]:
    """The class and the options of the module that runs a weight; of an embedding if its outline is given."""
    if table is not None:
        return table.described(*described(weight, quantization))
    if isinstance(weight, ModuleWeight):
        return weight.module, weight.options
    if isinstance(weight, BlockWeight):
        return "Fp8BlockLinear", {} if weight.rows == FP8_BLOCK else {"rows": weight.rows}
    if quantization is not None and quantization.activations is not None and not quantization.w4a8:
        activation = "dynamic" if weight.inputs is None else "static"
        return "Int8Linear", {"activation": activation, "symmetric": quantization.activations == "int8"}
    zeros = "none" if weight.zero is None else "zero"
    if quantization is not None and quantization.w4a8:
        options = {"activation": quantization.activations, "group_size": weight.group_size, "zeros": zeros}
        return "W4A8Linear", options
    bits = min(bits for bits in BITS if bits >= weight.bits)
    return "WeightOnlyLinear", {"bits": bits, "group_size": weight.group_size, "zeros": zeros}


def state_of(weight: Weight, quantization: Quantization | None) -> dict[str, Tensor]:
    """The state dict of that module without a bias."""
    if isinstance(weight, ModuleWeight):
        return dict(weight.state)
    if isinstance(weight, BlockWeight):
        return {"weight": weight.q, "weight_scale_inv": weight.scale.float()}
    if quantization is not None and quantization.activations is not None and not quantization.w4a8:
        state = {"weight": weight.q, "weight_scale": weight.scale[:, 0]}
        if weight.inputs is not None:
            state |= {"input_scale": weight.inputs.scale, "input_zero_point": weight.inputs.zero}
        return state
    return {f"{_PACKED}{name}": tensor for name, tensor in weight.pack().state_dict().items()}
