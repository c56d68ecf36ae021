#pragma once

#include <optional>
#include <string>

#include "core/target.h"
#include "epiloq/grouped_packed_mm.h"
#include "kernels/launch/expert_gemv.h"
#include "kernels/launch/expert_tiles.h"
#include "kernels/launch/fp4_wgmma.h"

namespace epiloq::ops::grouped_packed_mm {

enum class Family { kTiles, kGemv, kWgmma, kExperts, kExpertDecode, kExpertGemv };

struct Choice {
  Format format;
  int row;    // of the family's table: kRows, kGemvRows, kWgmmaRows, kExpertRows, kExpertDecodeRows, kExpertGemvRows
  int tiles;  // of tokens, at most
  int split;
  Family family = Family::kTiles;
};

// Null if no kernel supports the weight: its group size, or bits other than 4 and 8.
std::optional<Format> format_of(weight_only_mm::Weight const& weight, WeightFormat format);

// Whether FP4 weights have a WGMMA kernel: one matrix, x of bfloat16 or, for NVFP4, float16; on SM90.
bool has_wgmma(Problem const& problem, DType x, Format format, Target const& target);
// Whether experts' weights have a row of kExpertRows: FP4 whose products with scales x's type represents; integers, but
// with scales of x's type where they are rounded; experts without gaps between their rows of x; on SM90.
bool has_expert_wgmma(int row, Problem const& problem, DType x, Format format, Target const& target);
// Whether they have the rows of kExpertDecodeRows: as above, integers with scales of x's type.
bool has_expert_decode(Problem const& problem, DType x, Format format, Target const& target);
// Rows per expert on average from which the rows of kExpertRows are used, measured on an H200: of integers; of FP4.
inline constexpr std::array kExpertRowsFrom{6, 97}, kFp4ExpertRowsFrom{5, 49};
// Up to so many rows per expert the rows of kExpertDecodeRows are used: with integers; with FP4.
inline constexpr int kMostExpertDecodeRows = 8, kMostFp4ExpertDecodeRows = 12;
// M from which one FP4 matrix uses WGMMA; and from which, without WGMMA, W is dequantised for a dense product.
inline constexpr int kWgmmaFromRows = 17, kDenseFromRows = 65;

// For one matrix of FP4 weights a GEMV at small M and WGMMA at large M, unless batch invariance is on.
// For experts the GEMV at few tokens, while its CTAs fit the device; then the persistent kernels, WGMMA at many rows
// per expert, unless they have too few tiles for the SMs. Otherwise the narrowest tile that holds an expert's rows on
// average. K is split so that the CTAs fill the device.
Choice choose(Problem const& problem, DType x, Format format, Target const& target);
// The given kernel. Throws InvalidArgument if it does not exist or does not fit.
Choice choose(Problem const& problem, DType x, Format format, Target const& target,
              GroupedPackedMmKernel const& kernel);

std::string describe(Choice const& choice);

}  // namespace epiloq::ops::grouped_packed_mm
