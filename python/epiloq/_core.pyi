"""The C++ half of epiloq: checks its arguments, picks a kernel, launches it."""

from collections.abc import Sequence

from torch import Tensor

__version__: str

def built_archs() -> list[str]: ...
def device_properties(device_index: int) -> dict[str, int]: ...
def force_arch(arch: str) -> None: ...
def forced_arch() -> str: ...
def use_openmp(parallel: int) -> None: ...
def scaled_bmm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_out: Tensor | None = None,
    threads: int = 1,
) -> None: ...
def scaled_bmm_on_host(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_out: Tensor | None = None,
    threads: int = 1,
) -> None: ...
def check_scaled_bmm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_out: Tensor | None = None,
    threads: int = 1,
) -> None: ...
def explain_scaled_bmm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale_out: Tensor | None = None,
    threads: int = 1,
) -> str: ...
def conv2d_int8(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    input_zero: int,
    output_zero: int,
    lo: float,
    hi: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: tuple[int, int] | None = None,
) -> None: ...
def check_conv2d_int8(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    input_zero: int,
    output_zero: int,
    lo: float,
    hi: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: tuple[int, int] | None = None,
) -> bool: ...
def conv2d_int8_on_host(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    input_zero: int,
    output_zero: int,
    lo: float,
    hi: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    threads: int = 1,
) -> None: ...
def explain_conv2d_int8(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    input_zero: int,
    output_zero: int,
    lo: float,
    hi: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    kernel: tuple[int, int] | None = None,
) -> str: ...
def finish_conv2d_int8(
    out: Tensor,
    acc: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    output_zero: int,
    lo: float,
    hi: float,
) -> None: ...
def conv2d_weight_only(
    out: Tensor,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    bits: int,
    n: int,
    kernel: Sequence[int],
    channels: int,
    padded_channels: int,
    group_size: int,
    depthwise: bool,
    lo: float,
    hi: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    threads: int = 1,
    forced: tuple[str, int, int] | None = None,
) -> bool: ...
def explain_conv2d_weight_only(
    out: Tensor,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    bits: int,
    n: int,
    kernel: Sequence[int],
    channels: int,
    padded_channels: int,
    group_size: int,
    depthwise: bool,
    lo: float,
    hi: float,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    threads: int = 1,
    forced: tuple[str, int, int] | None = None,
) -> str: ...
def scaled_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    azp_adj: Tensor | None = None,
    azp: Tensor | None = None,
    fast_accum: bool = False,
    constant_b: bool = False,
) -> None: ...
def scaled_mm_on_host(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    azp_adj: Tensor | None,
    azp: Tensor | None,
    threads: int,
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
    fast_accum: bool = False,
    constant_b: bool = False,
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
    fast_accum: bool = False,
    constant_b: bool = False,
) -> str: ...
def explain_scaled_mm_problem(
    m: int,
    n: int,
    k: int,
    aligned: bool = True,
    dtype: str = "int8",
    fast_accum: bool = False,
    batches: int = 1,
    int8_out: bool = False,
    arch: str = "sm90",
    sm_count: int = 0,
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
def groupwise_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    rows_per_scale: int = 1,
    columns_per_scale: int = 128,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    depth_per_scale: int = 128,
    constant_b: bool = False,
    threads: int = 1,
) -> None: ...
def groupwise_mm_on_host(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    rows_per_scale: int = 1,
    columns_per_scale: int = 128,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    depth_per_scale: int = 128,
    constant_b: bool = False,
    threads: int = 1,
) -> None: ...
def check_groupwise_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    rows_per_scale: int = 1,
    columns_per_scale: int = 128,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    depth_per_scale: int = 128,
    constant_b: bool = False,
    threads: int = 1,
) -> None: ...
def explain_groupwise_mm(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    rows_per_scale: int = 1,
    columns_per_scale: int = 128,
    offs: Tensor | None = None,
    masked_m: Tensor | None = None,
    depth_per_scale: int = 128,
    constant_b: bool = False,
    threads: int = 1,
) -> str: ...
def explain_groupwise_mm_problem(
    m: int,
    n: int,
    k: int,
    column_scales: bool = False,
    aligned: bool = True,
    experts: int = 1,
    whole_rows: bool = False,
    dtype: str = "float8_e4m3fn",
    arch: str = "sm90",
    sm_count: int = 0,
    has_experts: bool = False,
) -> str: ...
def multiply_int8(out: Tensor, a: Tensor, b: Tensor, threads: int = 1) -> None: ...
def quantize_blockwise_int8(
    q: Tensor, x: Tensor, scale: Tensor, offset: Tensor | None, sum: Tensor, group_size: int
) -> None: ...
def check_quantize_blockwise_int8(
    q: Tensor, x: Tensor, scale: Tensor, offset: Tensor | None, sum: Tensor, group_size: int
) -> None: ...
def lookup_int8(out: Tensor, x: Tensor, table: Tensor) -> None: ...
def int8_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    azp_adj: Tensor | None,
    input_scale: Tensor | None,
    input_zero_point: Tensor | None,
    threads: int,
) -> None: ...
def fp8_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    per_token: bool,
    threads: int,
) -> None: ...
def fp8_block_linear(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, weight_scale_inv: Tensor, threads: int
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
    products: Tensor | None = None,
    sums: Tensor | None = None,
) -> None: ...
def online_quant_mm_on_host(
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
    threads: int,
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
def online_quant_mm_needs_staging(group_size: int) -> bool: ...
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
def quantize_fp8(
    q: Tensor,
    x: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    is_static: bool,
    ue8m0: bool,
    eps: float,
    scale_ub: Tensor | None,
) -> None: ...
def explain_quantize_fp8(
    q: Tensor,
    x: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    is_static: bool,
    ue8m0: bool,
    eps: float,
    scale_ub: Tensor | None,
) -> str: ...
def rms_norm_quant(
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    granularity: str,
    group_size: int,
    ue8m0: bool,
) -> None: ...
def check_rms_norm_quant(
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    granularity: str,
    group_size: int,
    ue8m0: bool,
) -> None: ...
def explain_rms_norm_quant(
    q: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    residual: Tensor | None,
    residual_out: Tensor | None,
    eps: float,
    granularity: str,
    group_size: int,
    ue8m0: bool,
) -> str: ...
def silu_and_mul_quant(
    q: Tensor,
    x: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    ue8m0: bool,
) -> None: ...
def check_silu_and_mul_quant(
    q: Tensor,
    x: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    ue8m0: bool,
) -> None: ...
def explain_silu_and_mul_quant(
    q: Tensor,
    x: Tensor,
    scale: Tensor,
    granularity: str,
    group_size: int,
    ue8m0: bool,
) -> str: ...
def weight_only_mm(
    out: Tensor,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    lo: float,
    hi: float,
    kernel: tuple[str, int, int] | None = None,
    threads: int = 1,
) -> bool: ...
def check_weight_only_mm(
    out: Tensor,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    lo: float,
    hi: float,
    kernel: tuple[str, int, int] | None = None,
    threads: int = 1,
) -> None: ...
def explain_weight_only_mm(
    out: Tensor,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
    lo: float,
    hi: float,
    kernel: tuple[str, int, int] | None = None,
    threads: int = 1,
) -> str: ...
def dequantize_weight(
    out: Tensor,
    q: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bits: int,
    n: int,
    k: int,
    group_size: int,
) -> None: ...
def explain_weight_only_mm_problem(
    m: int, n: int, k: int, bits: int = 4, group_size: int = 128, arch: str = "sm90", sm_count: int = 0
) -> str: ...
