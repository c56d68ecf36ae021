#include "dispatch/conv2d_int8/launch.h"

#include <array>
#include <utility>

#include "epiloq/device.h"
#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "dispatch/conv2d_int8/tables.h"
#include "kernels/launch/conv2d_int8.h"
#endif

namespace epiloq::ops::conv2d_int8 {

#if EPILOQ_HAS_CUDA
namespace {

template <int kRow>
constexpr LaunchTiled built() {
  constexpr bool kIsBuilt = kRow < kFirstSm80Tile   ? EPILOQ_HAS_SM90
                            : kRow < kFirstSm75Tile ? EPILOQ_HAS_SM80 || EPILOQ_HAS_SM90
                                                    : true;
  if constexpr (kIsBuilt) return &launch_tiled<kRow>;
  return nullptr;
}

template <int... kRows>
LaunchTiled row_of(int row, std::integer_sequence<int, kRows...>) {
  static constexpr LaunchTiled kTable[] = {built<kRows>()...};
  return kTable[row];
}

void launch_row(Choice const& choice, Problem const& problem, int device, Stream stream) {
  conv2d::Shape const& s = problem.shape;
  int const channels = s.ci / s.groups, outputs = s.co / s.groups;
  TileConfig const& c = kTiles[choice.row];
  int const tiles_n = (outputs + c.tile_n() - 1) / c.tile_n();
  unsigned const tiles_m = (conv2d::pixels(s) + c.tile_m() - 1) / c.tile_m();
  TiledProblem const tiled{problem,
                           channels,
                           outputs,
                           s.kh * s.kw * channels,
                           tiles_n,
                           fill_of(problem),
                           conv2d::Column::of(s, channels, c.depth),
                           has_whole_runs(problem, kRun)};
  LaunchTiled const launch = row_of(choice.row, std::make_integer_sequence<int, static_cast<int>(kTiles.size())>{});
  launch(tiled, tiles_m * tiles_n, choice.split, device, stream);
}

}  // namespace

void launch(Choice const& choice, Problem const& problem, int device, Stream stream) {
  DeviceGuard const guard(device);
  if (choice.family == Family::kDepthwise) return launch_depthwise(problem, choice.vector, stream);
  launch_row(choice, problem, device, stream);
}
#else
void launch(Choice const&, Problem const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::conv2d_int8
