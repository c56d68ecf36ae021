"""The layouts of FP4 layers: compressed-tensors', ModelOpt's, those of DeepSeek's experts, and Quark's.

All have two codes to a byte along K, the even column in the low half, and scales of blocks of a row. They differ in
names, in types of the same bytes, and in whether the scale of the whole weight is the factor or its reciprocal.
compressed-tensors' are defined by its compressors (``compressed_tensors/compressors/{nvfp4,mxfp4}``), ModelOpt's by its
``NVFP4QTensor`` and ``MXFP4QTensor``, DeepSeek's by the ``inference/convert.py`` of its repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import epiloq
from epiloq.formats.description import FP4_OF_BLOCKS, Description
from epiloq.formats.layouts.base import Expected, FormatError, check_multiple, require
from epiloq.formats.weights import ModuleWeight, Weight
from epiloq.nn.base.w4a8_layer import STATIC
from epiloq.weights.fp4 import FORMATS, NAN, Fp4Format

_GLOBAL = "weight_global_scale"
_STATIC = "input_scale"
_BYTES = (torch.uint8, torch.int8)


@dataclass(frozen=True)
class Names:
    """Names of a layer's tensors in a layout.

    whole, reciprocal
        NVFP4's scale of the whole weight, and whether it is stored as the factor's reciprocal.
    inputs
        The scale of FP4 activations (unused, because they stay in floating point); None if there is none. The scale of
        FP8 activations is called input_scale in every layout.
    codes_dtype, scale_dtype
        Dtypes of codes and of MXFP4's scales; other 1-byte dtypes are also accepted when reading.
    """

    codes: str = "weight_packed"
    scale: str = "weight_scale"
    whole: str = _GLOBAL
    reciprocal: bool = True
    inputs: str | None = "input_global_scale"
    codes_dtype: torch.dtype = torch.uint8
    scale_dtype: torch.dtype = torch.uint8

    def parts(self, described: Description) -> frozenset[str]:
        """Every tensor that a layer may have other than its bias, by the last part of its name."""
        whole = {self.whole} if _format(described).has_global_scale else set()
        return frozenset({self.codes, self.scale} | whole | ({_STATIC} if _is_static(described) else set()))

    def unused(self, described: Description) -> frozenset[str]:
        """Tensors that a layer may have and that epiloq does not use."""
        if described.inputs is None or self.inputs is None:
            return frozenset()
        return frozenset({self.inputs, _STATIC, "input_zero_point"}) - self.parts(described)


def _format(described: Description) -> Fp4Format:
    return FORMATS[FP4_OF_BLOCKS[described.group_size]]


def _is_static(described: Description) -> bool:
    """Whether activations are quantised with a scale in the files."""
    return described.kind_of_inputs == STATIC


def checked(
    tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int], names: Names
) -> dict[str, Tensor]:
    """A layer's tensors, codes and the bytes of E8M0 as uint8. Raises FormatError for other types and shapes."""
    chosen, (rows, columns) = _format(described), shape
    found = {name: t.reshape(1) if t.ndim == 0 else t for name, t in tensors.items()}
    for name, kinds in ((names.codes, _BYTES), (names.scale, (torch.float8_e8m0fnu,))):
        if name in found and found[name].dtype in kinds:
            found[name] = found[name].view(torch.uint8)
    whole: Expected = {names.whole: (torch.float32, (1,))} if chosen.has_global_scale else {}
    static: Expected = {_STATIC: (None, (1,))} if _is_static(described) else {}
    expected: Expected = {
        names.codes: (torch.uint8, (rows, -(-columns // 2))),
        names.scale: (chosen.scale_dtype, (rows, -(-columns // chosen.block_size))),
        **whole,
        **static,
    }
    require(found, expected)
    return found


def from_tensors(
    tensors: Mapping[str, Tensor], described: Description, shape: tuple[int, int], names: Names
) -> ModuleWeight:
    """The weight that a layer's tensors represent. Raises FormatError for inconsistent tensors."""
    found = checked(tensors, described, shape, names)
    codes, scale, whole = found[names.codes], found[names.scale], found.get(names.whole)
    if scale.dtype == torch.uint8 and not scale.is_meta and bool((scale == NAN).any()):
        raise FormatError(f"{names.scale}: expected powers of two, got NaN ({NAN})")
    state = {"weight": codes, "weight_scale": scale} | ({} if whole is None else {_GLOBAL: whole})
    if _STATIC in found:
        state[_STATIC] = found[_STATIC].float()

    def values() -> Tensor:
        factor = whole.reciprocal() if whole is not None and names.reciprocal else whole
        return epiloq.fp4_dequantize(codes.contiguous(), scale.contiguous(), in_features=shape[1], global_scale=factor)

    module, options = described.module
    options = {**options, **({} if whole is None or names.reciprocal else {"reciprocal": False})}
    return ModuleWeight(module, options, state, values, columns=shape[1])


def to_tensors(weight: Weight, described: Description, names: Names) -> dict[str, Tensor]:
    """The inverse of `from_tensors`. Raises FormatError for another kind of weight, and for a short last block."""
    chosen = _format(described)
    module, options = described.module
    if not isinstance(weight, ModuleWeight) or (weight.module, {**weight.options, **options}) != (
        module,
        dict(weight.options),
    ):
        actual = weight.described if isinstance(weight, ModuleWeight) else "other numbers than FP4"
        raise FormatError(f"{described.layout}: cannot represent {actual}")
    codes, scale = weight.state["weight"], weight.state["weight_scale"]
    # Readers support full blocks only.
    columns = 2 * codes.shape[1] if weight.columns is None else weight.columns
    check_multiple("in_features", columns, chosen.block_size, described.layout)
    found = {names.codes: codes.view(names.codes_dtype), names.scale: scale}
    if _is_static(described):
        found[_STATIC] = weight.state[_STATIC] if names.reciprocal else weight.state[_STATIC].reshape(())
    if not chosen.has_global_scale:
        return found | {names.scale: scale.view(names.scale_dtype)}
    whole = weight.state[_GLOBAL]
    if weight.options.get("reciprocal", True) != names.reciprocal:
        whole = _divisor_of(whole) if names.reciprocal else whole.reciprocal()
    return found | {names.whole: whole if names.reciprocal else whole.reshape(())}


def _divisor_of(factor: Tensor) -> Tensor:
    """The float32 number whose rounded reciprocal is the given factor. Raises FormatError if there is none."""
    if factor.is_meta:
        return factor
    nearest = factor.reciprocal()
    for divisor in (nearest, *(torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (0, torch.inf))):
        if torch.equal(divisor.reciprocal(), factor):
            return divisor
    raise FormatError(
        f"cannot represent the global scale {factor.item()!r}: the format stores its reciprocal, and float32 has no "
        "number whose reciprocal it is"
    )
