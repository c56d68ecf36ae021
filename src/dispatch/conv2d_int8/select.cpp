#include "dispatch/conv2d_int8/select.h"

#include <algorithm>
#include <sstream>

#include "core/ceil_div.h"
#include "dispatch/conv2d_int8/tables.h"
#include "epiloq/error.h"
#include "kernels/conv2d/im2col.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

constexpr int kMaxGridY = 65535;
constexpr std::int64_t kMaxGridX = (std::int64_t{1} << 31) - 1;

// Every problem has a tile, on SM75 too.
static_assert([] {
  for (int vector : {16, 4, 1}) {
    if (std::ranges::count(kTiles.begin() + kFirstSm75Tile, kTiles.end(), vector, &TileConfig::vector) == 0)
      return false;
  }
  return true;
}());

// These fit in the shared memory that needs no opt-in.
static_assert(std::ranges::all_of(kTiles.begin() + kFirstSm75Tile, kTiles.end(),
                                  [](TileConfig const& c) { return c.shared_bytes() <= 48 * 1024; }));

// The widest copies that channels, pointers and strides allow.
int vector_of(Problem const& p, int channels) {
  conv2d::Shape const& s = p.shape;
  auto const address = [](void const* pointer) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer));
  };
  for (int vector : {16, 4}) {
    std::int64_t const multiples[] = {channels, address(p.x), address(p.weight), s.x_image, s.x_row, s.x_pixel};
    if (std::ranges::all_of(multiples, [vector](std::int64_t value) { return value % vector == 0; })) return vector;
  }
  return 1;
}

std::int64_t blocks_of(TileConfig const& c, conv2d::Shape const& s) {
  return ceil_div(conv2d::pixels(s), c.tile_m()) * ceil_div(s.co / s.groups, c.tile_n());
}

int columns_of(conv2d::Shape const& s) { return s.kh * s.kw * (s.ci / s.groups); }
int stages_of(TileConfig const& c, conv2d::Shape const& s) {
  return static_cast<int>(ceil_div(columns_of(s), c.depth));
}

bool fits(TileConfig const& c, int vector, Target const& t) {
  if (c.shared_bytes() > t.shared_bytes || vector % c.vector != 0) return false;
  auto const row = &c - kTiles.data();
  if (c.mma == Mma::kWgmma) return t.has_wgmma;
  return t.arch != Arch::kSm75 || row >= kFirstSm75Tile;
}

// CTAs on the busiest SM. A GPC with fewer free SMs than a cluster has CTAs leaves them idle.
std::int64_t blocks_of_sm(std::int64_t clusters, int split, Target const& t) {
  if (clusters <= clusters_at_once(split, 1, t)) return 1;
  return std::max<std::int64_t>(2, ceil_div(2 * kSmsOfClusters * clusters, kClusters[1][split - 1] * t.sm_count));
}

// Cycles of the busiest SM: its throughput bound, and waves of its resident CTAs, each at least as long as one CTA's
// latency.
double cycles_of(TileConfig const& c, std::int64_t clusters, int stages, int split, Target const& t) {
  Costs const costs = costs_of(c.mma);
  double const outputs = c.tile_m() * c.tile_n(), bytes = c.stage_bytes();
  double const work = bytes * costs.byte * copies_of(c.vector);
  double const stage = work + costs.stage + bytes * kWaitOfByte / c.ahead();
  double const alone =
      static_cast<double>(ceil_div(stages, split)) * stage + kBlock + kOutputOfThread * outputs / c.threads();
  std::int64_t const of_sm = blocks_of_sm(clusters, split, t);
  double const waiting = static_cast<double>(ceil_div(of_sm, c.blocks)) * alone;
  double const working = kEnd + static_cast<double>(of_sm) * (work * stages / split + outputs * costs.output);
  return std::max(waiting, working) + kShown * std::min(waiting, working) + kCluster[split - 1];
}

Choice tile_of(conv2d::Shape const& s, int vector, Target const& t) {
  Choice best{Family::kTiled, -1, vector};
  double least = 0;
  for (int row = 0; row < static_cast<int>(kTiles.size()); ++row) {
    TileConfig const& c = kTiles[row];
    if (c.vector != vector || !fits(c, vector, t)) continue;
    std::int64_t const blocks = blocks_of(c, s) * s.groups, enough = std::int64_t{t.sm_count} * c.blocks;
    int const stages = stages_of(c, s);
    for (int split = 1; split <= most_split(stages, t) && (split == 1 || blocks * (split - 1) < enough); ++split) {
      double const cycles = cycles_of(c, blocks, stages, split, t);
      if (best.row >= 0 && cycles >= least) continue;
      best.row = row;
      best.split = split;
      least = cycles;
    }
  }
  return best;
}

Choice checked_tile(Conv2dInt8Kernel const& kernel, conv2d::Shape const& s, int vector, Target const& t) {
  bool const is_row = kernel.row >= 0 && kernel.row < static_cast<int>(kTiles.size());
  char const* why = nullptr;
  if (!is_row || !fits(kTiles[kernel.row], vector, t)) {
    why = "no such row, not for this architecture, its shared memory or these channels";
  } else if (kernel.split < 1 || kernel.split > most_split(stages_of(kTiles[kernel.row], s), t)) {
    why = "no such split";
  }
  if (why != nullptr)
    throw InvalidArgument(std::string("epiloq.conv2d_int8: kernel: expected one that fits, got one that does not: ") +
                          why);
  return {Family::kTiled, kernel.row, kTiles[kernel.row].vector, kernel.split};
}

[[noreturn]] void refuse(std::string const& what) {
  throw Unsupported("epiloq.conv2d_int8: x: the CUDA kernels support " + what + "; the CPU has no such limit");
}

}  // namespace

Choice choose(Problem const& p, Target const& t, std::optional<Conv2dInt8Kernel> const& kernel) {
  conv2d::Shape const& s = p.shape;
  if (!conv2d::fits(s)) refuse("images of at most 2^28 lines and columns, less than 2^31 elements apart");
  if (s.ci == s.groups && !kernel) {
    int const vector = s.co == s.ci ? std::min(vector_of(p, s.ci), 4) : 1;
    if (s.co > kMaxGridY * vector) refuse("fewer channels, each with weights of its own");
    return {Family::kDepthwise, 0, vector};
  }
  int const vector = vector_of(p, s.ci / s.groups);
  Choice const choice = kernel ? checked_tile(*kernel, s, vector, t) : tile_of(s, vector, t);
  if (blocks_of(kTiles[choice.row], s) > kMaxGridX || s.groups > kMaxGridY) {
    refuse("at most 65535 groups, and fewer pixels and channels");
  }
  return choice;
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDepthwise) {
    text << "depthwise dp4a, " << choice.vector << (choice.vector == 1 ? " channel" : " channels") << " per thread";
    return text.str();
  }
  TileConfig const& c = kTiles[choice.row];
  text << "implicit product, " << (c.mma == Mma::kWgmma ? "wgmma " : "mma.sync ") << c.tile_m() << " pixels x "
       << c.tile_n() << " channels of " << c.warp_m << 'x' << c.warp_n << ", " << c.stages << " stages of " << c.depth
       << ", copies of " << c.vector << (c.vector == 1 ? " channel" : " channels");
  if (choice.split > 1) text << ", K over clusters of " << choice.split;
  return text.str();
}

}  // namespace epiloq::ops::conv2d_int8
