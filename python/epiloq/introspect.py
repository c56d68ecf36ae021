"""Tells whether a call is supported, and by which kernel, without making it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from epiloq import _core
from epiloq.ops.attention.scaled_bmm import explain as explain_scaled_bmm
from epiloq.ops.checks.problems import explain_problem
from epiloq.ops.convolutions.conv2d_int8 import explain as explain_conv2d_int8
from epiloq.ops.convolutions.conv2d_weight_only import explain as explain_conv2d_weight_only
from epiloq.ops.fp4_mm import explain as explain_fp4_mm
from epiloq.ops.fp8_weight_mm import explain as explain_fp8_weight_mm
from epiloq.ops.grouped_mm import grouped_mm
from epiloq.ops.grouped_packed_mm import explain as explain_grouped_packed
from epiloq.ops.groupwise_mm import explain as explain_groupwise
from epiloq.ops.groupwise_mm import groupwise_mm
from epiloq.ops.lookup_int8 import explain as explain_lookup_int8
from epiloq.ops.online_quant_mm import explain as explain_online_quant_mm
from epiloq.ops.packed_fp4_mm import explain as explain_packed_fp4_mm
from epiloq.ops.quantizers.quantize_blockwise_int8 import explain as explain_quantize_blockwise_int8
from epiloq.ops.quantizers.quantize_fp8 import explain as explain_quantize_fp8
from epiloq.ops.quantizers.quantize_int8 import explain as explain_quantize_int8
from epiloq.ops.quantizers.rms_norm import explain as explain_rms_norm
from epiloq.ops.quantizers.rms_norm_quant import explain as explain_rms_norm_quant
from epiloq.ops.quantizers.silu_and_mul import explain as explain_silu_and_mul
from epiloq.ops.quantizers.silu_and_mul_quant import explain as explain_silu_and_mul_quant
from epiloq.ops.requantized_mm import explain as explain_requantized_mm
from epiloq.ops.scaled_mm import explain as explain_product
from epiloq.ops.scaled_mm import scaled_mm, scaled_mm_azp
from epiloq.ops.table_mm import explain as explain_table_mm
from epiloq.ops.w4a8_mm import explain as explain_w4a8_mm
from epiloq.ops.weight_only_mm import explain as explain_weight_only_mm

_EXPLAIN: dict[str, Callable[..., str]] = {
    "conv2d_int8": explain_conv2d_int8,
    "conv2d_weight_only": explain_conv2d_weight_only,
    "fp4_mm": explain_fp4_mm,
    "fp8_weight_mm": explain_fp8_weight_mm,
    "grouped_mm": partial(explain_groupwise, grouped_mm),
    "grouped_packed_mm": explain_grouped_packed,
    "groupwise_mm": partial(explain_groupwise, groupwise_mm),
    "lookup_int8": explain_lookup_int8,
    "online_quant_mm": explain_online_quant_mm,
    "packed_fp4_mm": explain_packed_fp4_mm,
    "quantize_blockwise_int8": explain_quantize_blockwise_int8,
    "quantize_fp8": explain_quantize_fp8,
    "quantize_int8": explain_quantize_int8,
    "requantized_mm": explain_requantized_mm,
    "rms_norm": explain_rms_norm,
    "rms_norm_quant": explain_rms_norm_quant,
    "scaled_bmm": explain_scaled_bmm,
    "scaled_mm": partial(explain_product, scaled_mm),
    "scaled_mm_azp": partial(explain_product, scaled_mm_azp),
    "silu_and_mul": explain_silu_and_mul,
    "silu_and_mul_quant": explain_silu_and_mul_quant,
    "table_mm": explain_table_mm,
    "w4a8_mm": explain_w4a8_mm,
    "weight_only_mm": explain_weight_only_mm,
}


def explain(name: str, *args: Any, **kwargs: Any) -> str:
    """Name of the kernel that ``epiloq.<name>(*args, **kwargs)`` would use here; nothing is computed.

    `scaled_mm`, `scaled_mm_azp`, `scaled_bmm`, `groupwise_mm`, `grouped_mm`, `grouped_packed_mm`, `packed_fp4_mm`,
    `w4a8_mm`, `online_quant_mm` and `weight_only_mm` also accept sizes without tensors or a GPU:
    ``epiloq.explain("scaled_mm", m=16, n=4096, k=4096, arch="sm90")``. The keywords are ``m, n, k`` and options:
    ``arch`` (default "sm90"), ``sm_count`` (default: that of the architecture's first GPU), for `online_quant_mm` and
    `weight_only_mm` ``memory_gb_s`` (likewise), ``dtype`` (of the activations), ``bits``, ``group_size``, ``experts``
    (``m`` is then the rows of all, or of each with ``masked=True``) and others; an unknown option raises an error that
    lists them. Choices of `epiloq.tune` are considered for tensors only: they belong to a GPU.

    For these operations, except `scaled_bmm` and the two of packed weights of experts, ``terms=True`` adds the cost
    model's estimates for the kernel and the runner-up: waves and microseconds per K step, and for `weight_only_mm` also
    bytes, and microseconds for memory, arithmetic, loads, reduction and store.

    Raises what the call itself would raise.
    """
    if name not in _EXPLAIN:
        raise ValueError(f"epiloq.explain: name: expected one of {', '.join(_EXPLAIN)}, got {name!r}")
    if not args and any(size in kwargs for size in ("m", "n", "k")):
        return explain_problem(name, kwargs)
    return _EXPLAIN[name](*args, **kwargs)


def supports(name: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Whether ``epiloq.<name>(*args, **kwargs)`` would run here, and the kernel or the reason why it would not."""
    try:
        return True, explain(name, *args, **kwargs)
    except (ValueError, TypeError, NotImplementedError) as error:
        return False, str(error)


@contextmanager
def config(*, arch: str | None = None, batch_invariant: bool | None = None) -> Iterator[None]:
    """Context manager for settings of this thread's calls; None leaves a setting unchanged.

    Args:
        arch: "sm75", "sm80", "sm89" or "sm90" to use that architecture's kernels, so that older kernels can be tested
            on a newer GPU; "auto" for the best.
        batch_invariant: whether the result of a row is independent of the other rows, bit for bit. Overrides
            `set_batch_invariant`.

    Raises:
        ValueError: an unknown arch.
        TypeError: ``arch`` is not a str, or ``batch_invariant`` not a bool.
    """
    previous = _core.forced_arch(), _core.batch_invariant_here()
    if batch_invariant is not None:
        _expect_bool("config", "batch_invariant", batch_invariant)
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f'epiloq.config: arch: expected a name such as "sm90", got {arch!r}')
    if arch is not None:
        _core.force_arch(arch)
    if batch_invariant is not None:
        _core.set_batch_invariant_here(batch_invariant)
    try:
        yield
    finally:
        _core.force_arch(previous[0])
        _core.set_batch_invariant_here(previous[1])


def set_batch_invariant(on: bool = True) -> None:
    """Make the result of each row independent of the other rows, bit for bit, in all threads: for any M, and for any
    rows of other experts.

    epiloq's products then use only kernels that sum over K in one order. `explain` names them; operations without such
    a kernel raise NotImplementedError. Computations by torch, such as attention and an unquantised output head, are not
    covered. docs/numerics.md describes guarantees and cost. A compiled graph uses the setting at the time of the call.

    Raises:
        TypeError: ``on`` is not a bool.
    """
    _expect_bool("set_batch_invariant", "on", on)
    _core.set_batch_invariant(on)


def _expect_bool(function: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"epiloq.{function}: {argument}: expected True or False, got {value!r}")
