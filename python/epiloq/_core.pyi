"""The C++ half of epiloq: checks its arguments, picks a kernel, launches it."""

from torch import Tensor

__version__: str

def built_archs() -> list[str]: ...
def device_properties(device_index: int) -> dict[str, int]: ...
def force_arch(arch: str) -> None: ...
def forced_arch() -> str: ...
def scaled_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
) -> None: ...
def check_scaled_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
) -> None: ...
def explain_scaled_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
) -> str: ...
def explain_scaled_mm_problem(
    m: int, n: int, k: int, aligned: bool = True, arch: str = "sm90", sm_count: int = 0
) -> str: ...
def evaluate_epilogue(
    out: Tensor,
    acc: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
) -> None: ...
def quantize_int8(
    q: Tensor,
    x: Tensor,
    scale: Tensor,
    azp: Tensor | None = None,
    is_static: bool = False,
    range_includes_zero: bool = True,
) -> None: ...
def check_quantize_int8(
    q: Tensor,
    x: Tensor,
    scale: Tensor,
    azp: Tensor | None = None,
    is_static: bool = False,
    range_includes_zero: bool = True,
) -> None: ...
def quantize_blockwise_int8(
    q: Tensor, x: Tensor, scale: Tensor, offset: Tensor | None, sum: Tensor, group_size: int
) -> None: ...
def check_quantize_blockwise_int8(
    q: Tensor, x: Tensor, scale: Tensor, offset: Tensor | None, sum: Tensor, group_size: int
) -> None: ...
def online_quant_mm(
    out: Tensor,
    x: Tensor,
    values: Tensor,
    parameters: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    bits: int,
    lo: float,
    hi: float,
    staged: bool,
    x_values: Tensor,
    x_parameters: Tensor,
    products: Tensor | None = None,
    sums: Tensor | None = None,
) -> None: ...
def check_online_quant_mm(
    out: Tensor,
    x: Tensor,
    values: Tensor,
    parameters: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    bits: int,
    lo: float,
    hi: float,
    staged: bool,
) -> None: ...
def online_quant_mm_needs_staging(group_size: int, device_index: int) -> bool: ...
def explain_online_quant_mm(
    out: Tensor,
    x: Tensor,
    values: Tensor,
    parameters: Tensor,
    bias: Tensor | None,
    in_features: int,
    group_size: int,
    bits: int,
    lo: float,
    hi: float,
    staged: bool,
) -> str: ...
def explain_online_quant_mm_problem(
    m: int, n: int, k: int, group_size: int = 128, bits: int = 8, arch: str = "sm90", sm_count: int = 0
) -> str: ...
