"""int8 quantisation of activations: static or dynamic, per tensor or per token, symmetric or with a zero point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epiloq import _core
from epiloq._library import LIBRARY, direct

_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
_INT32 = torch.iinfo(torch.int32)

LIBRARY.define("quantize_int8_symmetric(Tensor x, int pad_to) -> (Tensor, Tensor)")
LIBRARY.define("quantize_int8_asymmetric(Tensor x, int pad_to, bool range_includes_zero) -> (Tensor, Tensor, Tensor)")
LIBRARY.define("quantize_int8_static(Tensor x, Tensor scale, Tensor? azp, int pad_to) -> Tensor")
LIBRARY.define(
    "quantize_int8_out(Tensor x, Tensor(a!) q, Tensor(b!) scale, Tensor(c!)? azp, bool is_static,"
    " bool range_includes_zero) -> ()"
)


def quantize_int8(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    symmetric: bool = True,
    granularity: str = "token",
    pad_to: int = 1,
    range_includes_zero: bool = True,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``q = clamp(round(x / scale) + azp, -128, 127)``, dividing and rounding ties to even; CPU and GPU bit-equal.

    Without ``scale`` the parameters are measured, one set a token (a row of ``x``) or one for the tensor:

    - symmetric: ``scale = amax / 127``, no zero point;
    - asymmetric: ``scale = (hi - lo) / 255``, ``azp = round(-128 - lo / scale)``, where [lo, hi] is the range of the
      values widened to hold 0, so that ``azp`` stays in [-128, 127] and 0 is represented exactly.

    ``scale`` is never below 2^-126: zeros give zeros. A row that holds NaN or Inf gets a scale that is not finite and
    ``q`` 0, so what is computed from it is NaN, as in floating point. With a static scale NaN counts as 0 and
    infinities saturate.

    Args:
        x: ``[.., K]`` float32, float16 or bfloat16, rows dense.
        scale: static: float32, one element or one a row. It is returned as it came.
        azp: static and asymmetric: int32, as many elements as ``scale``.
        symmetric: False asks for zero points; taken from ``azp`` where ``scale`` is given.
        granularity: "token" or "tensor"; of measured scales.
        pad_to: q's columns are rounded up to a multiple of this and the extra ones are 0 (16 suits `scaled_mm`).
        range_includes_zero: False measures [lo, hi] as it is (unless lo == hi), in the manner of vLLM.
        out: ``(q, scale, azp)`` to write into, azp None when symmetric; dynamic per token, or static with the same
            scale. They are written and returned.

    Returns:
        ``q`` int8 ``[.., K']``, ``scale`` float32 and ``azp`` int32 or None: ``[.., 1]`` per token, ``[1]`` per tensor.
    """
    if granularity not in ("token", "tensor"):
        raise ValueError(f'epiloq.quantize_int8: granularity: expected "token" or "tensor", got {granularity!r}')
    if pad_to < 1:
        raise ValueError(f"epiloq.quantize_int8: pad_to: expected a positive integer, got {pad_to}")
    if scale is None and azp is not None:
        raise ValueError("epiloq.quantize_int8: azp: expected None where scale is None (both are measured)")
    if scale is not None and azp is None and not symmetric:
        raise ValueError("epiloq.quantize_int8: azp: expected a zero point beside scale with symmetric=False, got None")
    if out is not None:
        _into(x, out[0], out[1], out[2], scale is not None, range_includes_zero)
        return out
    if scale is None and granularity == "tensor":
        scale, azp = _measure_tensor(x, symmetric, range_includes_zero)
    if scale is not None:
        static = _static if direct(x, scale, azp) else torch.ops.epiloq.quantize_int8_static
        return static(x, scale, azp, pad_to), scale, azp
    if symmetric:
        dynamic = _symmetric if direct(x) else torch.ops.epiloq.quantize_int8_symmetric
        return *dynamic(x, pad_to), None
    asymmetric = _asymmetric if direct(x) else torch.ops.epiloq.quantize_int8_asymmetric
    return asymmetric(x, pad_to, range_includes_zero)  # type: ignore[no-any-return]


def _measure(lo: Tensor, hi: Tensor, symmetric: bool, range_includes_zero: bool) -> tuple[Tensor, Tensor | None]:
    """float32 lowest and highest values -> scale and zero point. The same steps as the kernel's, one for one."""
    if symmetric:
        return (torch.maximum(-lo, hi) / 127).clamp_(min=_SMALLEST_NORMAL), None
    widen = torch.ones_like(lo, dtype=torch.bool) if range_includes_zero else lo == hi
    lo = torch.where(widen, lo.clamp(max=0), lo)
    hi = torch.where(widen, hi.clamp(min=0), hi)
    scale = ((hi - lo) / 255).clamp_(min=_SMALLEST_NORMAL)
    azp = torch.round(-128 - lo / scale).nan_to_num_(nan=0)
    return scale, azp.to(torch.float64).clamp_(_INT32.min, _INT32.max).to(torch.int32)


def _measure_tensor(x: Tensor, symmetric: bool, range_includes_zero: bool) -> tuple[Tensor, Tensor | None]:
    if x.numel() == 0:
        raise ValueError(f"epiloq.quantize_int8: x: expected elements to measure, got shape {list(x.shape)}")
    lo, hi = torch.aminmax(x)
    return _measure(lo.float().reshape(1), hi.float().reshape(1), symmetric, range_includes_zero)


def _round_to_int8(x: Tensor, scale: Tensor, azp: Tensor | None) -> Tensor:
    q = torch.round(x.to(torch.float32) / scale).nan_to_num_(nan=0)
    if azp is not None:
        q += azp
    return q.clamp_(-128, 127).to(torch.int8)


def _run_on_cpu(x: Tensor, q: Tensor, scale: Tensor, azp: Tensor | None, is_static: bool, with_zero: bool) -> None:
    _core.check_quantize_int8(q, x, scale, azp, is_static, with_zero)
    if x.shape[:-1].numel() == 0:
        return
    columns = x.shape[-1]
    if not is_static:
        if columns:
            lo, hi = torch.aminmax(x.to(torch.float32), dim=-1, keepdim=True)
        else:
            lo = hi = torch.zeros((*x.shape[:-1], 1))
        measured, zero_point = _measure(lo, hi, azp is None, with_zero)
        scale.copy_(measured.view(scale.shape))
        if azp is not None and zero_point is not None:
            azp.copy_(zero_point.view(azp.shape))
    rows = (1,) if scale.numel() == 1 else (*x.shape[:-1], 1)
    q[..., :columns].copy_(_round_to_int8(x, scale.reshape(rows), None if azp is None else azp.reshape(rows)))
    q[..., columns:].zero_()


def _run(x: Tensor, q: Tensor, scale: Tensor, azp: Tensor | None, is_static: bool, range_includes_zero: bool) -> None:
    if x.is_cuda:
        _core.quantize_int8(q, x, scale, azp, is_static, range_includes_zero)
    else:
        _run_on_cpu(x, q, scale, azp, is_static, range_includes_zero)


def _into(x: Tensor, q: Tensor, scale: Tensor, azp: Tensor | None, is_static: bool, range_includes_zero: bool) -> None:
    run = _run if direct(x, q, scale, azp) else torch.ops.epiloq.quantize_int8_out
    run(x, q, scale, azp, is_static, range_includes_zero)


def _empty_q(x: Tensor, pad_to: int) -> Tensor:
    if x.ndim == 0:
        raise ValueError("epiloq.quantize_int8: x: expected at least one dimension, got a scalar")
    return x.new_empty((*x.shape[:-1], (x.shape[-1] + pad_to - 1) // pad_to * pad_to), dtype=torch.int8)


def _empty_parameter(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=dtype)


def _symmetric(x: Tensor, pad_to: int) -> tuple[Tensor, Tensor]:
    q, scale = _empty_q(x, pad_to), _empty_parameter(x, torch.float32)
    _run(x, q, scale, None, False, True)
    return q, scale


def _asymmetric(x: Tensor, pad_to: int, range_includes_zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, scale, azp = _empty_q(x, pad_to), _empty_parameter(x, torch.float32), _empty_parameter(x, torch.int32)
    _run(x, q, scale, azp, False, range_includes_zero)
    return q, scale, azp


def _static(x: Tensor, scale: Tensor, azp: Tensor | None, pad_to: int) -> Tensor:
    q = _empty_q(x, pad_to)
    _run(x, q, scale, azp, True, True)
    return q


def explain(x: Tensor, **kwargs: Any) -> str:
    """`epiloq.explain` for `quantize_int8`."""
    _core.check_quantize_int8(_empty_q(x, kwargs.get("pad_to", 1)), x, _empty_parameter(x, torch.float32))
    if not x.is_cuda:
        return "cpu torch"
    whole = x.shape[-1] % 8 == 0 and x.shape[-1] <= 32768
    return "cuda, the row in registers, one pass" if whole else "cuda, an element at a time, two passes"


def _fake_symmetric(x: Tensor, pad_to: int) -> tuple[Tensor, Tensor]:
    return _empty_q(x, pad_to), _empty_parameter(x, torch.float32)


def _fake_asymmetric(x: Tensor, pad_to: int, range_includes_zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_q(x, pad_to), _empty_parameter(x, torch.float32), _empty_parameter(x, torch.int32)


def _fake_static(x: Tensor, scale: Tensor, azp: Tensor | None, pad_to: int) -> Tensor:
    return _empty_q(x, pad_to)


def _fake_out(*_: Any) -> None:
    return None


_IMPLEMENTATIONS = {
    "symmetric": (_symmetric, _fake_symmetric),
    "asymmetric": (_asymmetric, _fake_asymmetric),
    "static": (_static, _fake_static),
    "out": (_run, _fake_out),
}
for _name, (_function, _fake) in _IMPLEMENTATIONS.items():
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(f"quantize_int8_{_name}", _function, _device)
    torch.library.register_fake(f"epiloq::quantize_int8_{_name}", _fake, lib=LIBRARY)
