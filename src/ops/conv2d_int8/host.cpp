// From sums to outputs on the CPU: the definition in float64, which is exact up to its one rounding of each operation,
// in loops that compilers vectorise.

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/host_rows.h"
#include "ops/conv2d_int8/kernels.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

// A channel's parameters as the loop wants them, for every channel.
struct Channels {
  std::vector<double> scale, bias;
  std::vector<std::int32_t> correction;

  Channels(Finish const& f, int co) : scale(co, f.scale[0]), bias(co), correction(co) {
    if (f.scale_is_vector) scale.assign(f.scale, f.scale + co);
    if (f.bias != nullptr) bias.assign(f.bias, f.bias + co);
    if (f.correction != nullptr) correction.assign(f.correction, f.correction + co);
  }
};

// acc - correction may wrap on the way to a true value that fits.
inline double restored(std::int32_t acc, std::int32_t correction, double scale, double bias) {
  auto const sum = static_cast<std::int32_t>(static_cast<std::uint32_t>(acc) - static_cast<std::uint32_t>(correction));
  return static_cast<double>(sum) * scale + bias;
}

EPILOQ_CLONES void requantize(std::int32_t const* acc, std::int32_t const* correction, double const* scale,
                              double const* bias, int co, double lo, double hi, double zero, std::int8_t* out) {
  for (int n = 0; n < co; ++n) {
    double r = restored(acc[n], correction[n], scale[n], bias[n]);
    r = r == r ? r : 0.;
    r = r < lo ? lo : r;
    r = r > hi ? hi : r;
    r = std::nearbyint(r) + zero;
    r = r < -128. ? -128. : r;
    r = r > 127. ? 127. : r;
    out[n] = static_cast<std::int8_t>(static_cast<std::int32_t>(r));
  }
}

// NaN passes the clamp.
EPILOQ_CLONES void restore(std::int32_t const* acc, std::int32_t const* correction, double const* scale,
                           double const* bias, int co, double lo, double hi, float* out) {
  for (int n = 0; n < co; ++n) {
    double r = restored(acc[n], correction[n], scale[n], bias[n]);
    r = r < lo ? lo : r;
    r = r > hi ? hi : r;
    out[n] = static_cast<float>(r);
  }
}

}  // namespace

void finish_on_host(std::int32_t const* acc, std::int64_t rows, int co, Finish const& f, DType out_dtype, void* out,
                    std::int64_t out_pixel) {
  if (rows == 0 || co == 0) return;
  Channels const c(f, co);
  std::vector<float> row(co);
  for (std::int64_t i = 0; i < rows; ++i, acc += co) {
    if (out_dtype == DType::kInt8) {
      requantize(acc, c.correction.data(), c.scale.data(), c.bias.data(), co, f.lo, f.hi, f.output_zero,
                 static_cast<std::int8_t*>(out) + i * out_pixel);
    } else {
      restore(acc, c.correction.data(), c.scale.data(), c.bias.data(), co, f.lo, f.hi, row.data());
      write_row(row.data(), co, out_dtype, out, i * out_pixel);
    }
  }
}

}  // namespace epiloq::ops::conv2d_int8
