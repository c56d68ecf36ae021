#pragma once

// Layers whose fastest kernel was measured and which the cost model misses by more than a few percent. Written by
// `tools/tune.py fit --write`, from the same measurements as the numbers in costs.h.

#include <cstdint>
#include <optional>

#include "core/target.h"
#include "dispatch/weight_only_mm/candidates.h"
#include "epiloq/weight_only_mm.h"

namespace epiloq::ops::weight_only_mm {

// A problem of scale groups of at least a K step, on the card whose memory has that rate and that many SMs.
struct Measured {
  int memory_gb_s, bits;
  std::int64_t m, n, k;
  Choice choice;
};
inline constexpr int kMeasuredSms = 132;

// clang-format off
// [tools/tune.py: begin]
inline constexpr Measured kMeasured[]{
    {3352, 4, 1, 2112, 7168, {Family::kGemv, 1, 4}},
    {3352, 4, 1, 2304, 9216, {Family::kGemv, 1, 4}},
    {3352, 4, 1, 2560, 4096, {Family::kGemv, 11, 1}},
    {3352, 4, 1, 3072, 8192, {Family::kGemv, 1, 3}},
    {3352, 4, 1, 3200, 8640, {Family::kGemv, 1, 3}},
    {3352, 4, 1, 4096, 14336, {Family::kGemv, 11, 1}},
    {3352, 4, 1, 4608, 4608, {Family::kGemv, 3, 6}},
    {3352, 4, 1, 5120, 2880, {Family::kGemv, 4, 3}},
    {3352, 4, 1, 5120, 5120, {Family::kGemv, 3, 5}},
    {3352, 4, 1, 34816, 5120, {Family::kGemv, 1, 1}},
    {3352, 4, 2, 3584, 3584, {Family::kGemv, 12, 1}},
    {3352, 4, 2, 4096, 2304, {Family::kGemv, 11, 1}},
    {3352, 4, 2, 4096, 3840, {Family::kGemv, 12, 1}},
    {3352, 4, 2, 4096, 5376, {Family::kGemv, 12, 1}},
    {3352, 4, 2, 5120, 5120, {Family::kGemv, 3, 5}},
    {3352, 4, 2, 6144, 4096, {Family::kGemv, 9, 1}},
    {3352, 4, 2, 8192, 2048, {Family::kGemv, 10, 1}},
    {3352, 4, 2, 11008, 2048, {Family::kGemv, 10, 1}},
    {3352, 4, 3, 14336, 4096, {Family::kGemv, 10, 1}},
    {3352, 4, 3, 18944, 3584, {Family::kGemv, 7, 1}},
    {3352, 4, 4, 1280, 8192, {Family::kGemv, 9, 4}},
    {3352, 4, 4, 2048, 2048, {Family::kGemv, 8, 1}},
    {3352, 4, 4, 4608, 3584, {Family::kDecode, 0, 3}},
    {3352, 4, 4, 8192, 1024, {Family::kDecode, 0, 1}},
    {3352, 4, 8, 3072, 8192, {Family::kDecode, 1, 8}},
    {3352, 4, 8, 4096, 4096, {Family::kGemv, 12, 1}},
    {3352, 4, 8, 5120, 2880, {Family::kDecode, 1, 4}},
    {3352, 4, 12, 576, 576, {Family::kDecode, 4, 3}},
    {3352, 4, 12, 1024, 1024, {Family::kDecode, 4, 5}},
    {3352, 4, 12, 2048, 2048, {Family::kDecode, 4, 3}},
    {3352, 4, 12, 4096, 4096, {Family::kDecode, 4, 3}},
    {3352, 4, 12, 5120, 13824, {Family::kDecode, 5, 5}},
    {3352, 4, 16, 1024, 2816, {Family::kDecode, 4, 4}},
    {3352, 4, 16, 2048, 2048, {Family::kDecode, 4, 3}},
    {3352, 4, 16, 4096, 3840, {Family::kDecode, 4, 3}},
    {3352, 4, 16, 4096, 4096, {Family::kDecode, 4, 3}},
    {3352, 4, 16, 4096, 5376, {Family::kDecode, 4, 3}},
    {3352, 4, 16, 37888, 3584, {Family::kDecode, 6, 1}},
    {3352, 4, 24, 3584, 18944, {Family::kWgmma, 2, 4}},
    {3352, 4, 24, 3840, 15360, {Family::kWgmma, 2, 4}},
    {3352, 4, 24, 7168, 16384, {Family::kWgmma, 2, 2}},
    {3352, 4, 32, 2560, 4096, {Family::kWgmma, 2, 4}},
    {3352, 4, 32, 5120, 2880, {Family::kWgmma, 2, 2}},
    {3352, 4, 32, 6144, 4096, {Family::kWgmma, 2, 2}},
    {3352, 4, 32, 7168, 5120, {Family::kWgmma, 2, 2}},
    {3352, 4, 33, 576, 576, {Family::kWgmma, 3, 5}},
    {3352, 4, 33, 1536, 576, {Family::kWgmma, 3, 2}},
    {3352, 4, 33, 6144, 4096, {Family::kWgmma, 6, 2}},
    {3352, 4, 33, 8192, 8192, {Family::kWgmma, 6, 2}},
    {3352, 4, 48, 1024, 2816, {Family::kWgmma, 6, 6}},
    {3352, 4, 48, 4096, 2304, {Family::kWgmma, 7, 2}},
    {3352, 4, 64, 576, 576, {Family::kWgmma, 3, 5}},
    {3352, 4, 64, 1536, 576, {Family::kWgmma, 3, 2}},
    {3352, 4, 96, 1536, 576, {Family::kWgmma, 7, 2}},
    {3352, 4, 96, 2304, 2048, {Family::kWgmma, 9, 3}},
    {3352, 4, 128, 576, 1536, {Family::kWgmma, 7, 5}},
    {3352, 4, 128, 1536, 576, {Family::kWgmma, 7, 2}},
    {3352, 4, 128, 3584, 18944, {Family::kWgmma, 8, 8}},
    {3352, 4, 128, 5120, 13824, {Family::kWgmma, 8, 5}},
    {3352, 4, 192, 5120, 13824, {Family::kWgmma, 4, 2}},
    {3352, 4, 256, 896, 896, {Family::kWgmma, 7, 2}},
    {3352, 4, 256, 2112, 7168, {Family::kWgmma, 9, 2}},
    {3352, 4, 384, 1024, 4096, {Family::kWgmma, 6, 2}},
    {3352, 4, 384, 5120, 13824, {Family::kWgmma, 8, 2}},
    {3352, 4, 1024, 5120, 5120, {Family::kWgmma, 10, 1}},
    {3352, 4, 2048, 1536, 7168, {Family::kWgmma, 11, 1}},
    {3352, 8, 1, 19456, 2560, {Family::kGemv, 3, 1}},
    {3352, 8, 2, 7168, 18432, {Family::kGemv, 13, 2}},
    {3352, 8, 4, 896, 4864, {Family::kGemv, 7, 5}},
    {3352, 8, 4, 4096, 2560, {Family::kDecode, 1, 5}},
    {3352, 8, 4, 28672, 4096, {Family::kGemv, 12, 1}},
    {3352, 8, 8, 1024, 4096, {Family::kDecode, 0, 8}},
    {3352, 8, 8, 2048, 2048, {Family::kDecode, 0, 4}},
    {3352, 8, 8, 2112, 7168, {Family::kDecode, 0, 6}},
    {3352, 8, 8, 24576, 1536, {Family::kDecode, 2, 1}},
    {3352, 8, 16, 576, 576, {Family::kDecode, 4, 3}},
    {3352, 8, 16, 2048, 5632, {Family::kDecode, 4, 6}},
    {3352, 8, 16, 4096, 2304, {Family::kDecode, 4, 3}},
    {3352, 8, 32, 1536, 576, {Family::kWgmma, 3, 3}},
    {3352, 8, 32, 13824, 5120, {Family::kWgmma, 3, 1}},
    {3352, 8, 32, 32768, 512, {Family::kWgmma, 2, 1}},
    {3352, 8, 64, 576, 576, {Family::kWgmma, 3, 5}},
    {3352, 8, 64, 576, 1536, {Family::kWgmma, 3, 4}},
    {3352, 8, 64, 1536, 576, {Family::kWgmma, 3, 2}},
    {3352, 8, 128, 5120, 13824, {Family::kWgmma, 8, 5}},
    {3352, 8, 128, 18944, 3584, {Family::kWgmma, 8, 1}},
    {3352, 8, 192, 28672, 4096, {Family::kWgmma, 5, 1}},
    {3352, 8, 200, 3584, 18944, {Family::kWgmma, 10, 2}},
    {3352, 8, 200, 3840, 15360, {Family::kWgmma, 10, 2}},
    {3352, 8, 256, 10240, 5120, {Family::kWgmma, 5, 1}},
    {3352, 8, 384, 2112, 7168, {Family::kWgmma, 10, 2}},
    {3352, 8, 512, 5120, 13824, {Family::kWgmma, 10, 2}},
    {3352, 8, 1024, 5120, 5120, {Family::kWgmma, 10, 1}},
    {3352, 8, 1024, 5120, 13824, {Family::kWgmma, 11, 2}},
    {3352, 8, 4096, 1280, 8192, {Family::kWgmma, 10, 1}},
    {3352, 8, 4096, 5376, 21504, {Family::kWgmma, 10, 1}},
    {3352, 8, 4096, 5760, 2304, {Family::kWgmma, 10, 1}},
    {4917, 4, 1, 2112, 7168, {Family::kGemv, 12, 1}},
    {4917, 4, 1, 13824, 5120, {Family::kGemv, 1, 1}},
    {4917, 4, 2, 5120, 5120, {Family::kGemv, 3, 5}},
    {4917, 4, 4, 14336, 4096, {Family::kDecode, 1, 1}},
    {4917, 4, 8, 14336, 4096, {Family::kDecode, 1, 1}},
    {4917, 4, 384, 6144, 4096, {Family::kWgmma, 11, 1}},
    {4917, 4, 784, 512, 128, {Family::kWgmma, 7, 1}},
    {4917, 8, 1, 6144, 4096, {Family::kGemv, 1, 1}},
    {4917, 8, 1, 8192, 8192, {Family::kGemv, 1, 1}},
    {4917, 8, 1, 10240, 8192, {Family::kGemv, 10, 1}},
    {4917, 8, 2, 4096, 4096, {Family::kGemv, 12, 1}},
    {4917, 8, 2, 5120, 13824, {Family::kGemv, 5, 3}},
    {4917, 8, 2, 10240, 8192, {Family::kGemv, 10, 1}},
    {4917, 8, 2, 18944, 3584, {Family::kGemv, 5, 1}},
    {4917, 8, 2, 24576, 1536, {Family::kGemv, 5, 1}},
    {4917, 8, 256, 4096, 4096, {Family::kWgmma, 6, 1}},
    {4917, 8, 256, 28672, 4096, {Family::kWgmma, 10, 1}},
};
// [tools/tune.py: end]
// clang-format on

// The measured choice for a problem, or for one with as many tokens as share a tuned choice (dispatch/tuning.h).
std::optional<Choice> measured_choice(WeightOnlyMmProblem const& problem, Target const& target);

}  // namespace epiloq::ops::weight_only_mm
