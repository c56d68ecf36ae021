"""Every kernel source that moves several elements at once, and what guarantees that their addresses are aligned.

A misaligned access ends a process on a GPU, and no test without a GPU can run one. So each source is listed with the
number of its vector accesses and their guarantee, for an access that is added or changed to be argued for. Accesses of
shared memory by the functions of common/ptx are not counted: their addresses consist of constants.
`tests/cpp/ops/test_alignment.cpp` drives the checks and the dispatch that the guarantees name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "src" / "kernels"
pytestmark = pytest.mark.skipif(not KERNELS.is_dir(), reason="not inside a checkout")

ACCESS = re.compile(
    r"cp_async(?:4|16)\(|bulk_load\(|tma_load(?:_multicast)?\(|tma_store\(|encode_tensor_map\(|tensor_map_of\("
    r"|row_tiles_of\(|copy_or_fill<|(?:ld|st)\.(?:global|shared)[\w.:]*\.v[24]|cp\.async[a-z.]*\.(?:shared|bulk)"
    r"|\.load(?:_cached|_if)?\(|store_at_once\("
    r"|reinterpret_cast<(?:u?int[24]|float[24]|u?char2|[A-Za-z_:]*(?:Vector|Chunk|Word|half2|bfloat162))(?: const)?\*>"
)

# Guarantees.
SHARED = "Shared memory or registers; its layout is made of constants, multiples of the access."
WRAPPER = "Instructions alone; callers are listed."
REFUSED = (
    "`Checker::aligned16` refuses the pointers, and other strides get a generic kernel (`aligned` of the problem)."
)
PACKED = "Packed weights: `checked_weight` refuses pointers off 16 bytes; they are contiguous, in units of 16 bytes."
TOKENS = "Rows of x: `why_dense` or `unsupported_reason` leaves rows off 16 bytes to a dense product."
TESTED = "The kernel or its launch tests pointer and stride, and moves elements otherwise."
WORKSPACE = "Workspaces and weights, contiguous, in units of 16 bytes: `shaped` of online_quant_mm.cpp refuses others."
IN_VECTORS = "`in_vectors`, `plan_rows` and `Aligned` of the quantisers leave others to a kernel that moves elements."
FOUR = "One element of four bytes, which `Checker::tensor` requires to be aligned."

ACCESSES = {
    "common/w4a16/fp4_step.cuh": (2, SHARED),
    "common/online_quant_epilogue.cuh": (4, TESTED + " Out: `aligned`; sums: " + SHARED),
    "common/ptx/cluster.cuh": (1, WRAPPER),
    "common/ptx/cp_async.cuh": (6, WRAPPER),
    "common/ptx/shared_memory.cuh": (5, WRAPPER),
    "common/ptx/tma.cuh": (12, WRAPPER),
    "common/tensor_map.h": (6, WRAPPER + " The driver refuses a map whose address or stride is off 16 bytes."),
    "common/w4a16/dequantize_tiles.cuh": (
        2,
        "Out, if K is a multiple of 8: refused by dequantize_fp4.cpp and weight_only_mm.cpp.",
    ),
    "common/w4a16/epilogue.cuh": (5, TESTED + " Four rows of out: `aligned`, `is_full`."),
    "conv2d/int8_epilogue.cuh": (2, TESTED + " `whole` is has_whole_runs of the output."),
    "conv2d/int8_producer.cuh": (
        6,
        "`vector_of` chooses a kernel by the widest copies that pointers and strides allow.",
    ),
    "conv2d/int8_split_k.cuh": (3, SHARED),
    "experts/combine_rows.cu": (1, IN_VECTORS),
    "experts/gather_rows.cu": (1, IN_VECTORS + " Rows off 16 bytes are refused by expert_routing.cpp."),
    "generic/attention/decode_attention.cuh": (
        17,
        "Queries, keys, values: `starts_on_16_bytes`, else torch's attention. Workspace: refused by `checked`. Mask: "
        + TESTED
        + " The rest: "
        + SHARED,
    ),
    "generic/attention/merge.cuh": (1, SHARED),
    "generic/fp4_dequantize.cu": (3, PACKED),
    "generic/fp8_weight_mm.cu": (7, TOKENS + " Likewise rows of the weight. Dequantising: " + TESTED),
    "generic/permute_tokens.cu": (2, TESTED + " Its output is scratch, which w4a8_mm.cpp refuses off 16 bytes."),
    "generic/rms_norm.cu": (2, IN_VECTORS),
    "generic/silu_and_mul.cu": (4, IN_VECTORS),
    "generic/table_mm.cu": (6, TOKENS + " Likewise codes off 8 bytes. Dequantising: " + TESTED),
    "generic/w4a16_dequantize.cu": (5, PACKED),
    "generic/widen_tokens.cu": (6, TESTED + " `aligned` of w4a8_mm.cpp."),
    "quantize/blockwise_int8.cu": (5, IN_VECTORS + " Four parameters at once: " + WORKSPACE),
    "quantize/fp8.cu": (6, IN_VECTORS),
    "quantize/int8.cu": (2, IN_VECTORS),
    "quantize/quantize.cuh": (7, IN_VECTORS),
    "quantize/quantized_rows.cuh": (3, IN_VECTORS),
    "quantize/normed_rows.cuh": (2, IN_VECTORS),
    "quantize/rms_norm.cu": (4, IN_VECTORS),
    "quantize/silu_and_mul.cu": (2, IN_VECTORS),
    "sm75/online_quant_mainloop.cuh": (6, WORKSPACE),
    "sm80/conv2d_w4a16_gemm.cuh": (1, "`has_chunks`: pointer and strides of x, else a dense convolution."),
    "sm80/gemm_skinny.cuh": (3, REFUSED),
    "sm80/groupwise_gemm.cuh": (2, REFUSED + " The other is an atomic."),
    "sm80/online_quant_gemm.cuh": (3, SHARED),
    "sm80/online_quant_mainloop.cuh": (1, WORKSPACE),
    "sm80/w4a16/gemm.cuh": (1, TOKENS),
    "sm80/w4a16/gemv.cuh": (5, TOKENS + " The sums: " + SHARED),
    "sm80/w4a16/gemv_fp4.cuh": (3, TOKENS),
    "sm80/w4a16/gemv_integer.cuh": (7, TOKENS + " The rest: " + SHARED),
    "sm80/w4a16/warp_tile.cuh": (
        9,
        PACKED + " Parameters of a group are 16 rows of at least a byte. The rest: " + SHARED,
    ),
    "sm80/w4a16/warp_tile_fp4.cuh": (3, PACKED + " Scales of a group are 16 bytes."),
    "sm90/conv2d_w4a16_gemm.cuh": (2, "`has_chunks` and `image_map_of`: pointer and strides of x."),
    "sm90/groupwise_epilogue.cuh": (
        12,
        "Out: `has_lines`, else elements. Scales and zero points: " + FOUR + " " + SHARED,
    ),
    "sm90/groupwise_gemm.cuh": (
        8,
        REFUSED
        + " Maps of scales and of out are made only after can_copy_scales, may_copy_all_scales, can_store_boxes.",
    ),
    "sm90/groupwise_mainloop.cuh": (2, SHARED),
    "sm90/groupwise_producer.cuh": (
        6,
        "To shared memory at multiples of 1024 bytes (8 rows of 128). Boxes begin at columns that are multiples of 128 "
        "bytes; those of scales, without swizzle, at tokens that are multiples of 4, as can_copy_scales requires.",
    ),
    "sm90/groupwise_scale_producer.cuh": (4, "By TMA as the producer's, four K steps at once; else " + FOUR),
    "sm90/groupwise_store.cuh": (
        2,
        "`can_store_boxes`: pointer, stride and length of D's rows. From slots of a multiple of 128 bytes.",
    ),
    "sm90/online_quant/online_quant_producer.cuh": (9, WORKSPACE + " Out: `stores_boxes`, else rows by threads."),
    "sm90/online_quant/online_quant_store.cuh": (1, "`stores_boxes`: pointer, stride and N."),
    "sm90/w4a16/expert_tiles.cuh": (
        1,
        TOKENS + " Boxes of w4a16_launch.cuh's maps, in chunks of a multiple of 8 lines of 128 bytes.",
    ),
    "sm90/w4a16/w4a16_decode_tma.cuh": (1, SHARED),
    "sm90/w4a16/w4a16_launch.cuh": (3, PACKED + " " + TOKENS + " A single row gets a stride that is a multiple of 8."),
    "sm90/w4a16/w4a16_producer.cuh": (4, "Boxes of w4a16_launch.cuh's maps, to stages of a multiple of 128 bytes."),
    "sm90/w4a16/w4a16_stage_loads.cuh": (1, SHARED),
}

# CUTLASS's GEMMs copy 16 bytes at a time too, of operands and of D, without a line that says so here.
CUTLASS = {"sm80/gemm_cutlass.h": REFUSED, "sm90/gemm_cutlass.h": REFUSED}


def accesses(source: Path) -> int:
    lines = (line.partition("//")[0] for line in source.read_text(encoding="utf-8").splitlines())
    return sum(len(ACCESS.findall(line)) for line in lines)


def test_every_vector_access_has_a_guarantee() -> None:
    sources = [path for path in KERNELS.rglob("*") if path.suffix in {".cu", ".cuh", ".h"}]
    found = {str(path.relative_to(KERNELS)): accesses(path) for path in sources}
    assert {name: count for name, count in found.items() if count} == {name: n for name, (n, _) in ACCESSES.items()}


def test_every_use_of_cutlass_is_listed() -> None:
    by_cutlass = re.compile(r"GemmUniversalAdapter|CollectiveBuilder")
    found = {str(p.relative_to(KERNELS)) for p in KERNELS.rglob("*.*") if by_cutlass.search(p.read_text("utf-8"))}
    assert found == set(CUTLASS)


def test_guarantees_name_what_exists() -> None:
    """Functions and variables that are named in the guarantees occur in the sources."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.*"))
    named = {
        word
        for _, guarantee in ACCESSES.values()
        for word in re.findall(r"`(?:\w+::)?(\w+)`|\b(can_\w+|may_\w+|has_\w+)\b|\b(\w+\.cpp)\b", guarantee)
        for word in word
        if word and not word.endswith(".cpp")
    }
    assert {"in_vectors", "can_copy_scales", "aligned16"} <= named
    assert [name for name in named if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize(
    "line", ["cp_async16(to, from);", "x = *reinterpret_cast<uint4 const*>(at);", 'asm("ld.global.nc.v4.b32 {%0}");']
)
def test_an_access_is_recognised(line: str) -> None:
    assert len(ACCESS.findall(line)) == 1
