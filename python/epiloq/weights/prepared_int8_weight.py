"""PreparedInt8Weight: an int8 weight prepared for a convolution, with scales that can still change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from epiloq._torch.checks import as_number, limits
from epiloq._torch.threads import use_own_threads

Quantizer = tuple[float, int]


class Int8Parameters(NamedTuple):
    """The operands of include/epiloq/conv2d_int8.h."""

    scale: Tensor
    bias: Tensor | None
    correction: Tensor | None
    input_zero: int
    output_zero: int
    lo: float
    hi: float


class _Arguments(NamedTuple):
    """The operation whose arguments are checked, and the weight's name among them."""

    operation: str
    weight: str

    def check_tensors(self, q: Tensor, weight_scale: Tensor, bias: Tensor | None) -> None:
        for name, tensor, dtype in ((self.weight, q, torch.int8), ("weight_scale", weight_scale, torch.float32)):
            if not isinstance(tensor, Tensor):
                self._refuse(TypeError, name, "a tensor", type(tensor).__name__)
            if tensor.dtype != dtype:
                self._refuse(ValueError, name, str(dtype), f"{tensor.dtype} {list(tensor.shape)}")
        if q.ndim not in (2, 4):
            self._refuse(ValueError, self.weight, "[Co, Kh, Kw, Ci / groups] or [N, K]", f"{list(q.shape)}")
        if weight_scale.numel() != 1 and weight_scale.shape != (q.shape[0],):
            expected = f"1 element or [{q.shape[0]}], one per output channel"
            self._refuse(ValueError, "weight_scale", expected, f"{list(weight_scale.shape)}")
        if bias is not None and (not isinstance(bias, Tensor) or bias.dtype != torch.float32):
            self._refuse(ValueError, "bias", "a float32 tensor", getattr(bias, "dtype", type(bias).__name__))
        if bias is not None and bias.shape != (q.shape[0],):
            self._refuse(ValueError, "bias", f"shape [{q.shape[0]}]", f"{list(bias.shape)}")

    def quantizer(self, name: str, value: Quantizer) -> Quantizer:
        scale, zero = value
        scale = as_number(self.operation, f"{name}_scale", scale)
        if not 0 < scale < math.inf:
            self._refuse(ValueError, f"{name}_scale", "a positive, finite number", scale)
        if isinstance(zero, bool) or not isinstance(zero, int) or not -128 <= zero <= 127:
            self._refuse(ValueError, f"{name}_zero", "an integer from -128 to 127", zero)
        return scale, zero

    def _refuse(self, kind: type[Exception], argument: str, expected: str, got: object) -> NoReturn:
        raise kind(f"epiloq.{self.operation}: {argument}: expected {expected}, got {got}")


def quantizer_of(operation: str, name: str, scale: Any, zero: Any) -> Quantizer:
    """Convert numbers to a scale, rounded to float32, and a zero point. Raises ValueError if they are out of range."""
    number = as_number(operation, f"{name}_zero", zero)
    scale = as_number(operation, f"{name}_scale", scale)
    whole = int(number) if number.is_integer() else zero
    return _Arguments(operation, "weight").quantizer(name, (float(torch.tensor(scale).float()), whole))


@dataclass(frozen=True, eq=False, repr=False)
class PreparedInt8Weight:
    """An int8 weight ``weight_scale * q`` and a float bias, for a quantised input and optionally a quantised output.

    Made by `prepare` or `quantize`; immutable. `updated` returns a weight with other scales that shares ``q``; it
    does not need the float weight, since everything is derived from ``sums``.

    - ``q``: int8 ``[Co, Kh, Kw, Ci / groups]``, contiguous; ``sums``: int32 ``[Co]``, of each output channel;
    - ``weight_scale``: float32, one or ``[Co]``; ``bias``: float32 ``[Co]`` or None;
    - ``input``, ``output``: (scale, zero point); without an output results are floating-point numbers;
    - ``scale``, ``shift``, ``correction``: float32, float32 and int32, derived.
    """

    q: Tensor
    sums: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input: Quantizer
    output: Quantizer | None
    scale: Tensor
    shift: Tensor | None
    correction: Tensor | None

    @classmethod
    def prepare(
        cls,
        q: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        input: Quantizer,
        output: Quantizer | None = None,
    ) -> PreparedInt8Weight:
        """From integers ``[Co, Kh, Kw, Ci / groups]`` (or ``[N, K]``), one scale or ``[Co]``, and a bias ``[Co]``.

        Raises ValueError: a dtype, a shape, a scale that is not positive and finite or a zero point out of range;
        TypeError for arguments that are not tensors.
        """
        return cls._prepare(_Arguments("PreparedInt8Weight", "q"), q, weight_scale, bias, input, output)

    @classmethod
    def for_call(
        cls,
        operation: str,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input: Quantizer,
        output: Quantizer | None,
    ) -> PreparedInt8Weight:
        """`prepare` within a call of an operation, whose arguments are named in errors."""
        return cls._prepare(_Arguments(operation, "weight"), weight, weight_scale, bias, input, output)

    @classmethod
    def _prepare(
        cls,
        arguments: _Arguments,
        q: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input: Quantizer,
        output: Quantizer | None,
    ) -> PreparedInt8Weight:
        use_own_threads()
        arguments.check_tensors(q, weight_scale, bias)
        q = (q if q.ndim == 4 else q[:, None, None, :]).contiguous()
        weight_scale, bias = weight_scale.detach(), None if bias is None else bias.detach()
        sums = q.sum((1, 2, 3), dtype=torch.int32)
        input, output = arguments.quantizer("input", input), output and arguments.quantizer("output", output)
        derived = derive(sums, weight_scale, bias, input, output)
        return cls(q, sums, weight_scale, bias, input, output, *derived)

    @classmethod
    @torch.no_grad()
    def quantize(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        input: Quantizer,
        output: Quantizer | None = None,
    ) -> PreparedInt8Weight:
        """Create from a convolution's float weight ``[Co, Ci / groups, Kh, Kw]`` or a linear layer's ``[N, K]``.

        ``weight_scale = max |W| / 127`` of each output channel, at least 2^-126; ``q = round(W / weight_scale)``, half
        to even. A channel with a NaN or an infinity has a non-finite scale.
        """
        wide = weight.float()
        wide = wide.permute(0, 2, 3, 1) if wide.ndim == 4 else wide
        q, scale = nearest_int8(wide)
        return cls.prepare(q, scale, None if bias is None else bias.float(), input=input, output=output)

    def updated(self, input: Quantizer | None = None, output: Quantizer | None = None) -> PreparedInt8Weight:
        """The same weight with other quantisers; those that are None do not change."""
        arguments = _Arguments("PreparedInt8Weight", "q")
        input = arguments.quantizer("input", input or self.input)
        output = arguments.quantizer("output", output) if output else self.output
        scale, shift, correction = derive(self.sums, self.weight_scale, self.bias, input, output)
        return replace(self, input=input, output=output, scale=scale, shift=shift, correction=correction)

    def parameters(self, operation: str, *, to_int8: bool, clamp: tuple[float, float] | None) -> Int8Parameters:
        """The arguments of a call besides ``q``; ``clamp`` is not quantised."""
        if to_int8 != (self.output is not None):
            expected = "one with int8 output, got None" if to_int8 else "None with floating-point output, got one"
            raise ValueError(f"epiloq.{operation}: output_scale: expected {expected}")
        unit, zero = self.output or (1.0, 0)
        lo, hi = limits(operation, clamp)
        if to_int8:
            # Rounding is monotonic, so clamping to rounded limits gives the same as clamping before rounding.
            lo, hi = _rounded(lo / unit), _rounded(hi / unit)
        return Int8Parameters(self.scale, self.shift, self.correction, self.input[1], zero, lo, hi)

    def to(self, device: torch.device | str) -> PreparedInt8Weight:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"PreparedInt8Weight({list(self.q.shape)}, input={self.input}, output={self.output}, {self.q.device})"


def nearest_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a float32 weight ``[Co, …]`` to nearest symmetrically: q int8 and scale float32 ``[Co]``."""
    amax = weight.abs().flatten(1).amax(1) if weight.numel() else weight.new_zeros(weight.shape[0])
    # A tensor as divisor: see grid.Grid.
    scale = (amax / amax.new_tensor(127)).clamp(min=torch.finfo(torch.float32).tiny)
    q = torch.round(weight / scale.view(-1, *(1,) * (weight.ndim - 1))).nan_to_num_(0).clamp_(-127, 127)
    return q.to(torch.int8).contiguous(), scale


def derive(
    sums: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    input: tuple[float | Tensor, int],
    output: tuple[float | Tensor, int] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """scale, shift and correction: computed in float64, rounded once. In a graph scales are tensors in float64."""
    unit = 1.0 if output is None else output[0]
    return (
        (weight_scale.double() * (input[0] / unit)).float(),
        None if bias is None else (bias.double() / unit).float(),
        sums * input[1] if input[1] else None,
    )


def _rounded(value: float) -> float:
    # Limits beyond int8's range are all equivalent; infinities and NaN cannot be rounded.
    return float(round(value)) if -1024 < value < 1024 else value
