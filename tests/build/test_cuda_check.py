"""The log of a kernel build is read right: spills, stack frames, serialised wgmma; and what product code must have."""

from __future__ import annotations

import shutil

import pytest

ptxas = pytest.importorskip("ptxas", reason="the repository's tools are not here")
cuda_check = pytest.importorskip("cuda_check", reason="the repository's tools are not here")

pytestmark = pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt is not installed")

GENERIC = "_ZN6epiloq4gemm14generic_kernelI6__halfNS_8epilogue6ScaledEEEvNS0_7ProblemE"
QUANTISER = "_ZN6epiloq3ops13quantize_int843_GLOBAL__N__454d6833_10_kernels_cu_d6557b618one_passIfLi4EEEvNS1_7ProblemE"
# Recorded from a build; pip indents what the build prints.
HEADER = "  [7/44] Building CUDA object src/ops/scaled_mm/CMakeFiles/epiloq_scaled_mm_{0}.dir/{0}_Float16_Scaled_0.cu.o"


def entry(
    symbol: str, arch: str, stack: int = 0, stores: int = 0, loads: int = 0, used: str = "Used 62 registers"
) -> str:
    return f"""\
  ptxas info    : Compiling entry function '{symbol}' for '{arch}'
  ptxas info    : Function properties for {symbol}
      {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
  ptxas info    : {used}
  ptxas info    : Compile time = 36.931 ms
"""


def parse(*parts: str) -> tuple[list[ptxas.Kernel], list[str]]:
    return ptxas.parse("\n".join(parts).splitlines())


def test_a_clean_log_has_no_faults() -> None:
    used = "Used 62 registers, used 1 barriers, 8704 bytes smem, 464 bytes cmem[0]"
    quantiser = "  [9/44] Building CUDA object src/ops/quantize_int8/CMakeFiles/epiloq_quantize_int8.dir/kernels.cu.o"
    kernels, warnings = parse(
        HEADER.format("generic"),
        entry(GENERIC, "sm_75", used=used),
        entry(GENERIC, "sm_80", used="Used 39 registers"),
        quantiser,
        entry(QUANTISER, "sm_90"),
    )
    assert [(kernel.source, kernel.name, kernel.arch, kernel.registers, kernel.shared) for kernel in kernels] == [
        ("scaled_mm_generic/generic_Float16_Scaled_0", "generic_kernel<__half, Scaled>", "sm_75", 62, 8704),
        ("scaled_mm_generic/generic_Float16_Scaled_0", "generic_kernel<__half, Scaled>", "sm_80", 39, 0),
        ("quantize_int8/kernels", "one_pass<float, 4>", "sm_90", 62, 0),
    ]
    assert warnings == []
    assert ptxas.faults(kernels) == []


@pytest.mark.parametrize(("stack", "stores", "loads"), [(0, 8, 0), (0, 0, 4), (16, 0, 0), (24, 8, 12)])
def test_local_memory_is_a_fault_of_its_kernel_alone(stack: int, stores: int, loads: int) -> None:
    kernels, _ = parse(HEADER.format("generic"), entry(GENERIC, "sm_75", stack, stores, loads), entry(GENERIC, "sm_80"))
    (fault,) = ptxas.faults(kernels)
    assert "(sm_75)" in fault
    assert f"{stack} bytes of stack, {stores + loads} bytes of spills" in fault


def test_a_function_that_the_kernel_calls_counts_as_the_kernel() -> None:
    called = """\
ptxas info    : Function properties for _ZN6epiloq6calledEv
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
    kernels, _ = parse(HEADER.format("generic"), entry(GENERIC, "sm_80"), called)
    assert [kernel.stack for kernel in kernels] == [32]


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7518"])
def test_slow_kernel_warning_is_reported_once(code: str) -> None:
    message = (
        f"  ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    )
    _, warnings = parse(message, entry(GENERIC, "sm_90a"), message)
    assert warnings == [message.strip()]


@pytest.mark.parametrize(
    ("demangled", "expected"),
    [
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
            "epiloq::gemm::EarlyWeights<cutlass::gemm::collective::CollectiveMma<"
            "cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<11, cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> >, "
            "cutlass::gemm::KernelTmaWarpSpecializedPingpong>, cute::tuple<cute::C<64>, cute::C<16>, cute::C<256> >, "
            "signed char, cute::tuple<long, cute::C<1>, long>",
            "64x16x256 cluster 2x1 11 stages pingpong",
        ),
        (
            "void cutlass::Kernel2<cutlass::gemm::kernel::DefaultGemmWithVisitor<signed char, "
            "cutlass::layout::RowMajor, (cutlass::ComplexTransform)0, 16, cutlass::arch::Sm75, "
            "cutlass::gemm::GemmShape<128, 128, 64>, cutlass::gemm::GemmShape<64, 64, 64>, cutlass::gemm::GemmShape<8",
            "128x128x64 warp 64x64x64",
        ),
    ],
)
def test_cutlass_kernels_go_by_their_tiles(demangled: str, expected: str) -> None:
    assert ptxas.short_name(demangled) == expected


RING, WGMMA = "_ZN6epiloq13decode_kernelINS_6DecodeEEEvT_", "_ZN6epiloq12wgmma_kernelINS_5WgmmaEEEvT_"


@pytest.mark.parametrize(
    ("symbols", "products", "expected"),
    [
        ([WGMMA], {"HGMMA"}, None),
        ([WGMMA], {"HMMA"}, "wgmma"),
        ([WGMMA], set(), "wgmma"),
        ([RING, RING], {"HMMA"}, None),
        ([RING], {"HGMMA"}, "mma.sync"),
        ([RING], set(), "mma.sync"),
        ([RING, WGMMA], {"HMMA"}, "wgmma"),
    ],
)
def test_sm90_code_has_the_product_of_its_kernels(symbols: list[str], products: set[str], expected: str | None) -> None:
    assert cuda_check.lacks_product(symbols, products) == expected
