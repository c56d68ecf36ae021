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
    kernel: tuple[bool, int, int] | None = None,
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
    kernel: tuple[bool, int, int] | None = None,
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
    kernel: tuple[bool, int, int] | None = None,
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
