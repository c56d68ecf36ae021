#include "dispatch/w4a8_mm/launch.h"

#include <utility>

#include "epiloq/device.h"
#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "kernels/launch/w4a8_mm.h"
#endif

namespace epiloq::ops::w4a8_mm {

#if EPILOQ_HAS_CUDA && EPILOQ_HAS_SM90
namespace {

using ByGroups = std::array<std::array<Launch, 3>, 2>;  // by type of the output, scale groups per K step

template <int... kRow>
constexpr auto table(std::integer_sequence<int, kRow...>) {
  return std::array<ByGroups, sizeof...(kRow)>{
      ByGroups{{{{&launch_wgmma<kRow, DType::kFloat16, 1>, &launch_wgmma<kRow, DType::kFloat16, 2>,
                  &launch_wgmma<kRow, DType::kFloat16, 4>}},
                {{&launch_wgmma<kRow, DType::kBFloat16, 1>, &launch_wgmma<kRow, DType::kBFloat16, 2>,
                  &launch_wgmma<kRow, DType::kBFloat16, 4>}}}}...};
}
constexpr auto kTable = table(std::make_integer_sequence<int, static_cast<int>(kRows.size())>{});

}  // namespace

void launch(Choice const& choice, Problem const& problem, DType out, int device, Stream stream) {
  DeviceGuard const guard(device);
  int const group = problem.product.weight.group, groups = group == 32 ? 2 : group == 64 ? 1 : 0;
  launch_permute(problem, device, stream);
  kTable[choice.row][out == DType::kBFloat16][groups](problem, choice.split, device, stream);
}
#else
void launch(Choice const&, Problem const&, DType, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::w4a8_mm
