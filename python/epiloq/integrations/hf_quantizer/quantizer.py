"""EpiloqQuantizer: called by transformers' ``from_pretrained`` and ``save_pretrained``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.base import HfQuantizer

from epiloq.formats import epiloq_modules
from epiloq.formats.configs.order import in_any_order
from epiloq.formats.description import Description
from epiloq.formats.embeddings import without
from epiloq.formats.io.checkpoint import Checkpoint, split_name
from epiloq.formats.io.names import Names, in_whole_model, saved_by_layer, unstacked_weights, without_stacking
from epiloq.formats.io.safetensors_file import DTYPES
from epiloq.formats.layer_reader import BIAS, Reader
from epiloq.formats.layouts.base import FormatError, located
from epiloq.formats.readers import leaving, parse, shared
from epiloq.integrations.hf_quantizer import mxfp4
from epiloq.integrations.hf_quantizer.config import EpiloqConfig, unknown_argument
from epiloq.integrations.hf_quantizer.layers import dequantize_, tensors_of
from epiloq.integrations.hf_quantizer.names import layers_without_tensors
from epiloq.integrations.hf_quantizer.parallel import Split, is_parallel
from epiloq.integrations.hf_quantizer.stored import open_layers, store_layers, stored_scales
from epiloq.models.mixtures import file_state, named_layers
from epiloq.nn.base.prepared_linear import FLOAT_DTYPES
from epiloq.parallel.ranks import together
from epiloq.schemes import SCHEMES, available, quantize_

_NAME = "epiloq.integrations.transformers"


class EpiloqQuantizer(HfQuantizer):
    """Opens quantised directories with epiloq's modules, and quantises floating-point models after loading.

    Tensors are loaded by transformers, so shards, devices and renamed tensors work as usual; only the quantised
    layers are epiloq's. Raises ValueError for mismatches before a model is returned.
    """

    quantization_config: EpiloqConfig

    def __init__(self, quantization_config: EpiloqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.readers: dict[str, Reader] = {}
        self.scales: dict[str, Tensor] = {}
        """Tensors of a quantised key-value cache or of activations, which are not used."""
        self.sharing: dict[str, str] = {}
        """Layers without a weight of their own, and the embeddings whose weights they share."""
        self.initialised: dict[str, type[torch.nn.Module]] = {}
        """Linear layers that are not in the files, such as a classifier's head on those of a language model."""
        self.unstacked_weights: list[str] = []
        """Weights of unstacked experts, which transformers would stack."""
        self.conversions: list[Any] = []
        """The model's own weight conversions, with those that stack experts."""
        self.in_float = False
        """Whether the files have no quantised layer, whatever config.json describes."""
        self.renamings: set[tuple[Any, ...]] | None = None
        """While a directory is loaded: the model's own renamings of tensors."""
        self.split: Split | None = None
        """The distribution of the model over ranks, if there are several."""

    @property
    def _is_mxfp4(self) -> bool:
        """Whether a directory was written as GPT-OSS's own are."""
        method = self.quantization_config.quant_method
        return bool(self.pre_quantized and method == mxfp4.METHOD and not self.in_float)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError for a scheme that `quantize_` could not apply after loading, TypeError for a dictionary with
        entries that `EpiloqConfig` does not have as arguments."""
        if self.pre_quantized:
            return
        scheme = self.quantization_config.scheme
        ends = self.quantization_config.head or self.quantization_config.embedding
        ready = [name for name in available() if not SCHEMES[name].static]
        if scheme not in ready and not (scheme is None and ends):
            raise ValueError(
                f"{_NAME}: EpiloqConfig: scheme: expected one of {', '.join(ready)} for a model in floating point, "
                f"got {scheme!r}"
            )
        if self.quantization_config.entries:
            raise unknown_argument(next(iter(self.quantization_config.entries)))

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The requested type of activations and of unquantised parameters."""
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"{_NAME}: dtype: expected one of {', '.join(map(str, FLOAT_DTYPES))}, got {dtype}")
        return dtype

    def _convert_model_for_quantization(self, model: Any) -> None:
        """Do nothing: experts are unstacked where the files have one matrix per expert, whatever the method is."""

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> Any:
        parallel = is_parallel(model)
        if parallel and not self.pre_quantized:
            raise ValueError(
                f"{_NAME}: tp_plan: expected a quantised directory, because scales are of whole layers; write one with "
                "`python -m epiloq quantize`, or by save_pretrained in one process"
            )
        if self.pre_quantized:
            if not checkpoint_files:
                raise ValueError(f"{_NAME}: state_dict: expected a directory to open instead")
            # An error in one rank's files also ends the others.
            with together() if parallel else nullcontext():
                checkpoint = _checkpoint([Path(file) for file in checkpoint_files])
                self._store(model, checkpoint)
            self.split = Split(model, checkpoint) if parallel and not self.in_float else None
        return model

    def _store(self, model: Any, checkpoint: Checkpoint) -> None:
        """Let transformers load a directory's quantised layers as stored."""
        if self._is_mxfp4 and mxfp4.has_blocks(checkpoint):
            mxfp4.store_experts_(model, checkpoint, self.quantization_config.to_dict())
            return
        self.renamings = {_patterns(each) for each in Names(model).renamings}
        self.readers = store_layers(model, checkpoint)
        self.scales = stored_scales(model, checkpoint, self.readers)
        self.in_float = not self.readers
        self.initialised = layers_without_tensors(model, checkpoint)
        self.unstacked_weights, self.sharing = unstacked_weights(model), shared(checkpoint)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.renamings = None
        self._restore_conversions(model)
        if self.split is not None:
            self.split.open_(model)
        _support_adapters()
        if self._is_mxfp4:
            mxfp4.open_experts_(model)
            return model
        if self.pre_quantized:
            open_layers(model, self.sharing)
            if self.in_float:  # also when it is saved
                self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
            return model
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(f"{_NAME}: device_map: expected every layer on a device, but some are offloaded")
        config = self.quantization_config
        left = tuple(config.modules_to_not_convert or ())
        return quantize_(model, config.scheme, ignore=left, head=config.head, embedding=config.embedding)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The type to which a tensor of the files is converted; None for those of 8 bits, which stay as they are, also
        in layers that transformers keeps in float32."""
        entry = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        kind = DTYPES.get(entry) if isinstance(entry, str) else entry
        if kind is not None and kind.itemsize == 1:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> Any:
        """transformers' weight conversions, but no stacking of unstacked experts; newer versions also pass the model.

        Raises ValueError for renamings that the caller of ``from_pretrained`` added: the layers are stored already.
        """
        for each in weight_conversions:
            if self.renamings is None or not isinstance(each, WeightRenaming):
                continue
            if _patterns(each) not in self.renamings:
                raise ValueError(
                    f"{_NAME}: key_mapping: expected none with a quantised directory, got {each.source_patterns[0]!r}; "
                    "rename the tensors in its files"
                )
        kept = without_stacking(weight_conversions, self.unstacked_weights)
        self.conversions = list(weight_conversions) if len(kept) < len(weight_conversions) else []
        return super().update_weight_conversions(kept, *model)  # type: ignore[no-untyped-call]

    def _restore_conversions(self, model: Any) -> None:
        """Make transformers split experts in floating point, which are stacked again, when it saves them."""
        own, self.conversions = self.conversions, []
        if own:
            used, kept = model._weight_conversions, without_stacking(own, self.unstacked_weights)
            own = [each for each in own if each in used or each not in kept]
            model._weight_conversions = own + [each for each in used if each not in own]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors to save, in the format of the directory that was opened, or in epiloq's own.

        If the model is distributed, all ranks must call this, and the first receives the whole layers. Nothing is
        exchanged afterwards, so a rank that dies leaves no partial file.
        """
        if self.split is None:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_meta:
                    raise FormatError(
                        f"{_NAME}: save_pretrained: {name}: its values are offloaded; bring them back first, by "
                        "accelerate.hooks.remove_hook_from_submodules(model)"
                    )
                if isinstance(tensor, DTensor) and not model._hf_peft_config_loaded:  # or adapters alone are saved
                    sizes = f"{list(tensor.to_local().shape)} of {list(tensor.shape)}"
                    raise FormatError(f"{_NAME}: save_pretrained: {name}: {epiloq_modules.in_part(sizes)}")
            return self._whole_state(model), {}
        state = dict[str, Tensor]()
        with self.split.whole(model) as first:
            with together():
                if first:
                    state = self._whole_state(model)
            whole = self.split.gathered(model)
        return {name: whole.get(name, tensor) for name, tensor in state.items()}, {}

    def _whole_state(self, model: Any) -> dict[str, Tensor]:
        config, state = self.quantization_config.to_dict(), file_state(model)
        if self._is_mxfp4:
            mxfp4.check_experts_alone(model, f"{_NAME}: save_pretrained")
            return state
        layers = epiloq_modules.layers_of(model)
        model._weight_conversions = saved_by_layer(model, [name for name in state if split_name(name)[0] in layers])
        if self.quantization_config.quant_method == epiloq_modules.METHOD:
            config, sharing = epiloq_modules.config_and_shared(model)
            model.config.quantization_config = self.quantization_config = EpiloqConfig.from_dict(config)
            return without(state, sharing)
        for name, module in named_layers(model, None):
            if name not in layers:
                continue
            for key in file_state(module).keys() - {BIAS}:
                del state[f"{name}.{key}"]
            with located(f"{_NAME}: save_pretrained: {name}"):
                if name not in self.readers:
                    raise FormatError("not a layer of the directory that was opened")
                tensors = tensors_of(module, self.readers[name], model.dtype)
            state |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
        changed = in_any_order(leaving(config, self.initialised), partial(self._described, model))
        if changed != config:
            model.config.quantization_config = self.quantization_config = EpiloqConfig.from_dict(changed)
        return state | self.scales

    def _described(self, model: Any, config: Mapping[str, Any]) -> list[Description | None]:
        """How a configuration describes each linear layer of the model."""
        rules = parse(config)
        linear = torch.nn.Linear
        names = [name for name, module in model.named_modules() if name in self.readers or isinstance(module, linear)]
        return [rules((name, in_whole_model(model, name)), linear) for name in names]

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        # config.json's is a text after some ways of saving
        dequantize_(model, dtype if isinstance(dtype, torch.dtype) else model.dtype, _NAME)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # everything except the quantised layers, which pass gradients on

    @property
    def is_compileable(self) -> bool:
        return True


def _support_adapters() -> None:
    """Make PEFT support the layers if it has been imported: its error for others does not mention epiloq."""
    if "peft" not in sys.modules:
        return
    try:
        import_module("epiloq.integrations.peft")
    except (ImportError, AttributeError):  # a version of PEFT that epiloq does not know
        return


def _patterns(renaming: Any) -> tuple[Any, ...]:
    return tuple(renaming.source_patterns), tuple(renaming.target_patterns)


def _checkpoint(files: list[Path]) -> Checkpoint:
    """The directory of the files that transformers loads. Raises FormatError unless they are those that epiloq reads:
    it reads some tensors itself, and checks all of them before."""
    checkpoint = Checkpoint(files[0].parent)
    loaded, read = {file.name for file in files}, set(checkpoint.files.values())
    if loaded != read:
        raise FormatError(
            f"{checkpoint.folder}: expected transformers to load {min(read)}, got {min(loaded - read or loaded)}; "
            "leave out variant= and use_safetensors=, and name a directory that holds these files alone"
        )
    return checkpoint
