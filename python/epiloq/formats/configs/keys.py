"""Checks of configuration keys: understood, without effect, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from epiloq.formats.description import Description, Rules
from epiloq.formats.layouts.base import FormatError

# How a model was quantised, or how some library runs it: irrelevant to the meaning of the tensors.
TUNING = frozenset(
    """
    act_group_aware activation amp auto_forward_data_parallelism autoround_version backend batch_size
    block_name_to_quantize cache_block_outputs compute_device_filter damp_auto_increment damp_percent dataset
    dense_vram_strategy dequantize device disable_exllama do_fuse dtype enable_full_range enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input enable_torch_compile exllama_config fail_safe failsafe fallback
    foem fuse_max_seq_len gc_mode gptaq gptaq_alpha gradient_accumulate_steps hessian iters low_cpu_mem_usage
    low_gpu_mem_usage lm_head lr lr_scheduler max_input_length meta minmax_lr minmax_tuning mock_quantization
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
    modules_in_block_to_quantize modules_to_fuse momentum moe mse not_use_best_mse nblocks nsamples offload_to_disk
    offload_to_disk_path original_dtype pack_impl pad_token_id provider quant_lm_head run_compressed sampler
    scale_dtype seed seqlen static_groups super_bits super_group_size supported_types tokenizer train_bs
    transformers_version true_sequential use_cuda_fp16 use_exllama use_optimized_inference use_quant_input v2
    v2_alpha v2_memory_device version vllm_backend vram_strategy wait_for_submodule_finalizers weight_dtype
    """.split()  # noqa: SIM905
)
PACKED_IN = ("int32", "torch.int32", None)
"""Values of ``pack_dtype``: the words that hold the integers."""
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {}, "none", "None")
# Similarity and difference in length of a misspelled key; "moe_sparsity_config" is another one than "sparsity_config".
_SIMILAR, _LETTERS = 0.8, 2


def check_keys(found: Mapping[str, Any], known: Collection[str], where: str, harmless: Collection[str] = ()) -> None:
    """Raise FormatError, naming key and value, for an unknown entry with a non-empty value, or whose key is a known one
    misspelled: then the known one would have its default, which an empty value may not mean."""
    for key, value in found.items():
        if key in known or key in harmless:
            continue
        meant = misspelled(key, known)
        if meant is not None:
            raise FormatError(f"{where}: {key}: expected {meant}, got {key} with the value {value!r}")
        if not any(value == nothing for nothing in _NEUTRAL):
            raise FormatError(f"{where}: {key}: epiloq does not know what it does to the computation, got {value!r}")


def entries(value: Any, known: Collection[str], where: str, harmless: Collection[str] = ()) -> Mapping[str, Any]:
    """A value that is an object, with keys as for `check_keys`. Raises FormatError for other types."""
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, got {value!r}")
    check_keys(value, known, where, harmless)
    return value


def misspelled(key: object, known: Collection[str]) -> str | None:
    """The known key that an unknown one resembles in all but a few letters or in capitals, or None."""
    text = str(key)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower().replace("-", "_")
    if snake in known:
        return snake
    near = get_close_matches(text, known, 1, _SIMILAR)
    return near[0] if near and abs(len(near[0]) - len(text)) <= _LETTERS else None


def one_of(found: Mapping[str, Any], key: str, default: Any, choices: Sequence[Any], where: str) -> Any:
    """The value of an entry. Raises FormatError if it is not among the choices."""
    value = found.get(key, default)
    if value not in choices or isinstance(value, bool) != any(isinstance(choice, bool) for choice in choices):
        raise FormatError(f"{where}: {key}: expected {' or '.join(map(str, choices))}, got {value!r}")
    return value


def check_integers_alone(found: Mapping[str, Any], method: str) -> None:
    """Refuse what GPTQModel writes for other weights than 32-bit words of integers of a method, and for activations."""
    one_of(found, "pack_dtype", "int32", PACKED_IN, method)
    one_of(found, "method", method, (method, None), method)
    one_of(found, "data_type", "int", ("int", None), method)
    one_of(found, "act_bits", None, (None, 16, 32), method)


def mapping(found: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The value of an entry that is an object, empty or missing. Raises FormatError for other types."""
    value = found.get(key)
    if value is not None and not isinstance(value, dict):
        raise FormatError(f"{where}: {key}: expected an object or null, got {value!r}")
    return value or {}


def names(found: Mapping[str, Any], key: str, where: str) -> list[str]:
    """The value of an entry that is a list of names or missing. Raises FormatError for other types."""
    value = found.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise FormatError(f"{where}: {key}: expected a list of names, got {value!r}")
    return value or []


def pattern(text: str, where: str) -> re.Pattern[str]:
    """Compile a regular expression. Raises FormatError if it is invalid."""
    try:
        return re.compile(text)
    except re.error as error:
        raise FormatError(f"{where}: expected a regular expression, got {text!r}: {error}") from None


def all_but(left: Sequence[str], described: Description, leaves: Callable[[Sequence[str], str], bool]) -> Rules:
    """The rules of one description for all layers, except those that one of the names `left` leaves in floating
    point: `excludes` or `skips`."""
    return lambda layer, kind: None if any(leaves(left, name) for name in layer) else described


def excludes(patterns: Sequence[str], layer: str) -> bool:
    """Whether a layer is excluded by one of `names`: its name, a parent's, its last parts, or a regular expression."""
    dotted = f".{layer}."
    return any(f".{name.strip('.')}." in dotted or _means(name, layer) for name in patterns if name)


def skips(patterns: Sequence[str], layer: str) -> bool:
    """Whether transformers leaves a layer in floating point because of one of `names` (``should_convert_module``): its
    end, or its begin up to a dot or the end, by name or regular expression. A part in the middle ("mlp" of
    "model.layers.0.mlp.up_proj") does not count, so that such a layer is quantised."""
    return any(layer.endswith(name) or _begins(name, layer) for name in patterns if name)


def _begins(text: str, layer: str) -> bool:
    try:
        return re.match(rf"(?:{text})(?:(?<=\.)|(?=\.|$))", layer) is not None
    except re.error:
        return False


def _means(text: str, layer: str) -> bool:
    if not set(text) & set("*+?^$()[]{}|\\"):
        return False
    try:
        found = re.match(rf"(?:{text.removeprefix('re:')})(?=\.|$)", layer)
    except re.error:
        return False
    return found is not None
