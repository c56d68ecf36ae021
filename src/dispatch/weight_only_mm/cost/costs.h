#pragma once

// Numbers of weight_only_mm's cost model (model.h). `tools/tune.py fit --write` fits and writes those between the
// marks. Separate from tables.h, as a change there recompiles every kernel.

#include <algorithm>
#include <array>

#include "dispatch/weight_only_mm/tables.h"

namespace epiloq::ops::weight_only_mm {

// Parameters of a GPU. Times are microseconds, rates are per microsecond.
struct Hardware {
  double memory_efficiency;  // share of the memory's clock times its width that long loads reach
  double sm_load;            // kilobytes that one SM loads
  double start;              // time of a kernel's start; of a further CTA on an SM, unless its other CTAs hide it
  double latency;            // time from a load to its data
  double tensor;             // millions of 16-bit multiply-adds per SM at full clock
  double tensor_sustained;   // the same at the clock that the power limit leaves
  double convert;            // time of a warpgroup to dequantise 64 x 128 weights
  double store;              // time per 1000 elements of a CTA tile to sum them over K groups and store them
  double cluster;            // time of the barriers around a reduction over a cluster
  double dsmem;              // time per 10000 partial sums that a CTA sends
  double overlap;            // exponent of the norm that joins the memory's time with that of the SMs
};

// A warp's K step of 128 columns by mma.sync, in microseconds; a panel is 16 weight rows.
struct WarpStep {
  double gemv;           // per step
  double gemv_panel;     // per panel: dequantise and multiply
  double integer_panel;  // the same with tokens as integers
  double copy;           // per panel and 4 bits: cp.async, which GEMV warps issue themselves
  double gemv_issue;     // share of that time in which a GEMV warp occupies its quarter of the SM
  double gemv_sum;       // per panel, warp and token: the reduction over a CTA's warps
  double decode;         // of the decode kernel: latency of a step
  double decode_panel;   // occupancy of the SM per panel
  double decode_tokens;  // the same per panel and 8 tokens
};

// A kernel's measured time over the model's, by row of its table.
struct KernelFactors {
  std::array<double, kGemvRows.size()> gemv;
  std::array<double, kDecodeRows.size()> decode;
  std::array<double, kWgmmaRows.size()> wgmma;
};

struct Costs {
  Hardware hardware;
  WarpStep warp;
  KernelFactors factors;
};

// [tools/tune.py: begin]
inline constexpr Costs kSm90Costs{
    {
        .memory_efficiency = 0.927,
        .sm_load = 94.9,
        .start = 1.65,
        .latency = 0.641,
        .tensor = 3.75,
        .tensor_sustained = 3.11,
        .convert = 0.0751,
        .store = 0.0497,
        .cluster = 0.691,
        .dsmem = 1.22,
        .overlap = 2.35,
    },
    {
        .gemv = 0.0242,
        .gemv_panel = 0.0626,
        .integer_panel = 0.0425,
        .copy = 0.0669,
        .gemv_issue = 0.721,
        .gemv_sum = 0.00273,
        .decode = 0.168,
        .decode_panel = 0.00778,
        .decode_tokens = 0.00828,
    },
    {
        .gemv = {0.957, 0.993, 0.963, 1.01, 1.02, 1.03, 1.02, 1, 0.903, 0.928, 0.984, 0.977, 0.972, 0.996},
        .decode = {0.997, 0.962, 0.996, 1.05, 0.938, 1.03, 0.962},
        .wgmma = {1.03, 1, 0.992, 0.983, 0.952, 0.947, 0.962, 0.975, 1.05, 1.03, 0.956, 0.956},
    },
};
// [tools/tune.py: end]
// A kernel without a factor would cost nothing.
static_assert(std::ranges::all_of(kSm90Costs.factors.gemv, [](double factor) { return factor > 0; }));
static_assert(std::ranges::all_of(kSm90Costs.factors.decode, [](double factor) { return factor > 0; }));
static_assert(std::ranges::all_of(kSm90Costs.factors.wgmma, [](double factor) { return factor > 0; }));

// Resident CTAs per SM that the registers of a GEMV row leave, for weights of 4 and of 8 bits.
inline constexpr std::array<std::array<int, 2>, kGemvRows.size()> kGemvResidents{{
    {1, 1},
    {2, 2},
    {4, 5},
    {4, 5},
    {3, 4},
    {2, 4},
    {2, 4},
    {3, 6},
    {1, 1},
    {2, 3},
    {4, 7},
    {2, 2},
    {2, 2},
    {6, 7},
}};

// Dequantising into memory, then a 16-bit GEMM of torch: microseconds per call, the share of the memory's rate at which
// the weight is read and written, microseconds per product. Within 8 % of the 24 products measured on an H200
// (benchmarks/results/nvidia-h200/products.json).
inline constexpr struct {
  double call = 4, memory = 0.675, product = 2.94e-9;
} kDenseTime;

}  // namespace epiloq::ops::weight_only_mm
