"""transformers models on several ranks: each opens its part of every quantised layer, one layer at a time."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from epiloq.environment import arithmetic
from epiloq.formats.io.checkpoint import Checkpoint
from epiloq.formats.layer_reader import BIAS
from epiloq.formats.layouts.base import FormatError
from epiloq.integrations.hf_quantizer import mxfp4
from epiloq.integrations.hf_quantizer.stored import SharedLayer, StoredLinear
from epiloq.models.mixtures import replace_module_, restack_complete_experts_
from epiloq.models.scaled_activation import ScaledActivation
from epiloq.nn import ExpertLinears, Fp4Experts
from epiloq.parallel.experts import as_linears, join_experts
from epiloq.parallel.ranks import check_same, ended, to_first, together
from epiloq.parallel.shards import bare, join, part_of
from epiloq.parallel.styles import ColwiseParallel, RowwiseParallel, sum_experts

_NAME = "epiloq.integrations.transformers: tp_plan"
# Styles of transformers by name, as this package has them; None leaves a layer whole.
_STYLES: dict[str, ParallelStyle | None] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    # A low-bit embedding has a row for every token.
    "embedding_rowwise": None,
    "embedding_colwise": None,
    "replicate": None,
    "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None,
}
_EXPERTS = (ExpertLinears, mxfp4.StoredExperts)
_SUMS = ("moe_tp_experts", "all_reduce")
"""Styles of modules whose outputs are sums over ranks, because the plan shards tensors inside them."""
_IN_LISTS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
"""Styles of the layers of experts that are a list of modules (Llama 4), for which transformers has none."""
_SAMPLE = 4096
"""Bytes at the beginning and end of each tensor that ranks compare to detect different files."""


def is_parallel(model: Any) -> bool:
    """Whether a model is opened by several ranks."""
    distributed = getattr(model.config, "distributed_config", None)
    return distributed is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


class Split:
    """Distribution of a model over ranks: the sharded layers, and the style of each."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        """Exclude the quantised layers of a model from what transformers loads and shards.

        Raises ValueError on every rank: other kinds of parallelism, numbers of heads not divisible by the number of
        ranks, ranks with different directories or machines, layers with an unsupported style.
        """
        distributed = model.config.distributed_config
        with together():
            _check(model, distributed)
            # Arithmetic: every rank computes some results itself, such as norms and the next token.
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            own = {"model": _outline(model), "directory": _fingerprint(checkpoint), **arithmetic(kind)}
        check_same(own, _NAME)
        self.checkpoint, self.names = checkpoint, list[str]()
        """Names of layers of which each rank has a part."""
        self.complete = list[str]()
        """Names of modules with whole outputs on each rank, which transformers would sum."""
        stored = {name: module for name, module in model.named_modules() if isinstance(module, StoredLinear)}
        self.experts = [name for name, module in model.named_modules() if isinstance(module, _EXPERTS)]
        for name in self.experts:
            if isinstance(module := model.get_submodule(name), mxfp4.StoredExperts):
                module.leave_to(partial(self._of_experts, name))
        for module in stored.values():
            module.leave_to(self._reader(module))
        known = model._keys_to_ignore_on_load_unexpected or ()
        left = (*stored, *self.experts)
        patterns = {rf"(^|\.){re.sub(r'[0-9]+', '[0-9]+', re.escape(name))}\." for name in left}
        model._keys_to_ignore_on_load_unexpected = {*known, *patterns}
        self.plan = self._without(model)

    def _of_experts(self, name: str, part: str) -> Tensor:
        return self.checkpoint.tensor(f"{name}.{part}")

    def _reader(self, module: StoredLinear) -> Any:
        def read() -> dict[str, Tensor]:
            tensors = {part: self.checkpoint.tensor(f"{module.layer}.{part}").clone() for part in module.parts}
            if BIAS in tensors:
                tensors[BIAS] = tensors[BIAS].to(module.dtype)
            return tensors

        return read

    def _without(self, model: Any) -> dict[str, str]:
        """Remove the rules that concern only quantised layers, or sum what is whole, from the model's plan, and return
        those of quantised layers."""
        modules = dict(model.named_modules())
        stored = {name for name, module in modules.items() if isinstance(module, (SharedLayer, StoredLinear))}
        mine, others = ({_generic(name) for name in names} for names in (stored, modules.keys() - stored))
        experts = tuple(_generic(name) for name in self.experts)
        plan = dict(model.tp_plan or {})
        self.complete = [name for name in modules if self._is_complete(model, name, plan)]
        summed = {_generic(name) for name in self.complete}
        summed -= {_generic(name) for name in modules.keys() - set(self.complete)}  # of these open_ removes it
        plan = {rule: style for rule, style in plan.items() if rule not in summed}
        for name in self.complete:
            plan = _styles_in_list(modules[name], name) | plan
        taken = {
            rule: style
            for rule, style in plan.items()
            if (rule in mine and rule not in others) or any(rule == e or rule.startswith(f"{e}.") for e in experts)
        }
        if len(taken) < len(plan):  # transformers takes no empty plan
            model._tp_plan = {rule: style for rule, style in plan.items() if rule not in taken}
        return taken

    def _is_complete(self, model: Any, name: str, plan: Mapping[str, str]) -> bool:
        """Whether transformers would sum a module's outputs over ranks although the plan shards no tensor in it.

        Raises FormatError for a module with quantised layers, in which it also shards other tensors.
        """
        style = plan.get(_generic(name))
        if style not in _SUMS or any(name == expert or name.startswith(f"{expert}.") for expert in self.experts):
            return False
        quantised, sharded = False, list[str]()
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            own = None if inner == name else plan.get(_generic(inner))
            if isinstance(module, StoredLinear):
                quantised = True
            elif not (isinstance(module, nn.Linear) and own in _STYLES):  # which return no summands
                parts = {f"{inner}.{part}" for part, _ in module.named_parameters(recurse=False)}
                styles = {part: plan.get(_generic(part), own) for part in sorted(parts)}
                sharded += [part for part, found in styles.items() if found and _STYLES.get(found, found) is not None]
        if quantised and sharded:
            raise FormatError(
                f"{_NAME}: {name}: expected all of its matrices quantised or none, because transformers sums its "
                f"outputs over ranks ({style}), but {sharded[0]} is a float tensor; open the directory in one process"
            )
        return not sharded

    def open_(self, model: Any) -> None:
        """Install this rank's part of every quantised layer. Raises ValueError on every rank."""
        mesh = _mesh(model)
        device = torch.device(mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        plan = self.plan | dict(model.tp_plan)
        for name in self.complete:
            model.get_submodule(name).__dict__.pop("forward", None)  # transformers' sum
        with together():
            for name in self.experts:
                module = model.get_submodule(name)
                own = part_of(module.experts, mesh.get_local_rank(), mesh.size())
                is_fp4 = isinstance(module, mxfp4.StoredExperts)
                replace_module_(
                    model, name, (module.opened_part(own) if is_fp4 else _opened_experts(module, own)).to(device)
                )
                restack_complete_experts_(model, name)
                sum_experts(model.get_submodule(name), mesh)
                self.names.append(name)
            for name in [name for name, module in model.named_modules() if isinstance(module, StoredLinear)]:
                style, layer = plan.get(_generic(name)), model.get_submodule(name).opened()
                if style is not None and style not in _STYLES:
                    expected = ", ".join(_STYLES)
                    raise FormatError(f"{_NAME}: {name}: expected of a quantised layer {expected}, got {style}")
                if style is not None and (mine := _STYLES[style]) is not None:
                    layer = parallelize_module(layer, mesh, mine)
                    self.names.append(name)
                model.set_submodule(name, layer.to(device))
        model._tp_plan = plan

    @contextmanager
    def whole(self, model: Any) -> Iterator[bool]:
        """Replace the parts by whole layers on the first rank; returns whether this is the first rank."""
        group, parts = _mesh(model).get_group(), dict[str, nn.Module]()
        try:
            for name in self.names:
                part = model.get_submodule(name)
                gathered = to_first(_sent(part, name in self.experts), group)
                if gathered is not None:
                    parts[name] = part
                    replace_module_(model, name, _received(gathered, part, name in self.experts))
            yield torch.distributed.get_rank(group) == 0
        finally:
            for name, part in parts.items():
                replace_module_(model, name, part)

    def gathered(self, model: Any) -> dict[str, Tensor]:
        """The sharded floating-point tensors as a whole, by name; only on the first rank."""
        found, first = dict[str, Tensor](), torch.distributed.get_rank(_mesh(model).get_group()) == 0
        gathered = dict[int, Tensor]()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, DTensor):
                if id(tensor) not in gathered:  # or two that are tied would be saved as two
                    with ended():
                        whole = tensor.full_tensor().detach()
                    gathered[id(tensor)] = whole.cpu() if first else whole.new_empty(0)
                if first:
                    found[name] = gathered[id(tensor)]
        return found


def _mesh(model: Any) -> Any:
    """The model's mesh of tensor parallelism. Newer versions of transformers keep several meshes, older ones one."""
    manager, mesh = getattr(model, "_mesh_manager", None), model._device_mesh
    if manager is not None:
        return manager.get_mesh("tp")
    if mesh is None:
        raise ValueError(f"{_NAME}: expected a device mesh of transformers, found none")
    return mesh["tp"] if mesh.ndim > 1 else mesh


def _sent(part: Any, is_experts: bool) -> Any:
    """A part of a layer in the form in which it is sent."""
    if isinstance(part, Fp4Experts):
        return {name: tensor.cpu() for name, tensor in part.file_state().items()}
    return as_linears(part) if is_experts else bare(part)


def _received(parts: list[Any], like: Any, is_experts: bool) -> nn.Module:
    """The whole layer, joined from its parts."""
    if isinstance(like, Fp4Experts):
        return mxfp4.joined(parts, like)
    return join_experts(parts) if is_experts else join(parts)


def _opened_experts(module: Any, own: range) -> ExpertLinears:
    module.__dict__.pop("forward", None)  # transformers' wrapper around experts that it shards
    experts = []
    for expert in own:
        layers = zip(module.projections.names, module.layers(expert), strict=True)
        experts.append({name: each.opened() if isinstance(each, StoredLinear) else each for name, each in layers})
    opened: ExpertLinears = module.others(experts)
    opened.part, opened.whole = own, module.experts
    return opened


def _styles_in_list(module: nn.Module, name: str) -> dict[str, str]:
    """Rules for the layers of experts in a list; none unless each expert has the layers of a gated MLP alone."""
    experts = [expert for expert, _ in module.named_children()] if isinstance(module, nn.ModuleList) else []
    layers = {inner for inner, layer in module.named_modules() if isinstance(layer, (nn.Linear, StoredLinear))}
    if layers != {f"{expert}.{part}" for expert in experts for part in _IN_LISTS}:
        return {}
    return {_generic(f"{name}.{layer}"): _IN_LISTS[layer.rpartition(".")[2]] for layer in layers}


def _generic(name: str) -> str:
    """A name in the form used by plans, with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _check(model: Any, distributed: Any) -> None:
    sizes = {name: getattr(distributed, name, 1) for name in ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size")}
    for name, size in sizes.items():
        if size not in (None, 1):
            raise ValueError(
                f"{_NAME}: {name}: expected 1, for quantised layers are shared by tp_size alone, got {size}"
            )
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % distributed.tp_size:
            raise ValueError(
                f"{_NAME}: expected a number of ranks that divides {name} ({heads}), got {distributed.tp_size}"
            )
    scaled = next((name for name, module in model.named_modules() if isinstance(module, ScaledActivation)), None)
    if scaled is not None:
        raise ValueError(
            f"{_NAME}: {scaled}: expected an activation function without scales of its own, which ranks cannot share; "
            "open such a directory (AutoAWQ's ScaledActivation) in one process"
        )
    for name, module in model.named_modules():
        if (
            isinstance(module, _EXPERTS)
            and module.experts - (distributed.tp_size - 1) * -(-module.experts // distributed.tp_size) < 1
        ):
            raise ValueError(f"{_NAME}: {name}: expected at most as many ranks as there are experts, {module.experts}")


def _outline(model: Any) -> Any:
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("_name_or_path",)}
    return type(model).__name__, zlib.crc32(repr(sorted(config.items(), key=str)).encode()), str(model.dtype)


def _fingerprint(checkpoint: Checkpoint) -> int:
    """A hash of names, dtypes, shapes and the first and last bytes of every tensor."""
    found = 0
    for name in sorted(checkpoint.entries):
        entry = checkpoint.entries[name]
        found = zlib.crc32(f"{name} {entry.dtype} {entry.shape}".encode(), found)
        values = checkpoint.tensor(name).contiguous().flatten().view(torch.uint8)
        for sample in (values[:_SAMPLE], values[-_SAMPLE:]):
            found = zlib.crc32(sample.numpy().tobytes(), found)
    return found
