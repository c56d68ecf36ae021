#include "ops/conv2d_int8/select.h"

#include <algorithm>
#include <sstream>

#include "epiloq/error.h"
#include "ops/conv2d/im2col.h"
#include "ops/conv2d_int8/configs.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

constexpr int kMaxGridY = 65535;
constexpr std::int64_t kMaxGridX = (std::int64_t{1} << 31) - 1;

// Any problem has a tile, on SM75 as well.
static_assert([] {
  for (int vector : {16, 4, 1}) {
    if (std::ranges::count(kTiles.begin() + kFirstSm75Tile, kTiles.end(), vector, &TileConfig::vector) == 0)
      return false;
  }
  return true;
}());

// Without asking for more than a kernel may have without being asked.
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

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t blocks_of(TileConfig const& c, conv2d::Shape const& s) {
  return ceil_div(conv2d::pixels(s), c.tile_m()) * ceil_div(s.co / s.groups, c.tile_n());
}

// Cycles of the busiest SM.
double cycles_of(TileConfig const& c, conv2d::Shape const& s, Target const& t) {
  double const outputs = c.tile_m() * c.tile_n(), columns = static_cast<double>(s.kh) * s.kw * (s.ci / s.groups);
  double const block = outputs * (columns / c.rate + kCyclesOfOutput) + kCyclesOfBlock / c.blocks;
  return static_cast<double>(ceil_div(blocks_of(c, s) * s.groups, t.sm_count)) * block;
}

[[noreturn]] void refuse(std::string const& what) {
  throw Unsupported("epiloq.conv2d_int8: x: the CUDA kernels take " + what + "; the CPU has no such limit");
}

}  // namespace

Choice choose(Problem const& p, Target const& t) {
  conv2d::Shape const& s = p.shape;
  if (!conv2d::fits(s)) refuse("images of at most 2^28 lines and columns, less than 2^31 elements apart");
  if (s.ci == s.groups) {
    int const vector = s.co == s.ci ? std::min(vector_of(p, s.ci), 4) : 1;
    if (s.co > kMaxGridY * vector) refuse("fewer channels, each with weights of its own");
    return {Family::kDepthwise, 0, vector};
  }
  int const vector = vector_of(p, s.ci / s.groups);
  int best = -1;
  for (int row = t.arch == Arch::kSm75 ? kFirstSm75Tile : 0; row < static_cast<int>(kTiles.size()); ++row) {
    TileConfig const& c = kTiles[row];
    if (c.vector != vector || c.shared_bytes() > t.shared_bytes) continue;
    if (best < 0 || cycles_of(c, s, t) < cycles_of(kTiles[best], s, t)) best = row;
  }
  if (blocks_of(kTiles[best], s) > kMaxGridX || s.groups > kMaxGridY) {
    refuse("at most 65535 groups, and fewer pixels and channels");
  }
  return {Family::kTiled, best, vector};
}

std::string describe(Choice const& choice) {
  std::ostringstream text;
  if (choice.family == Family::kDepthwise) {
    text << "depthwise dp4a, " << choice.vector << (choice.vector == 1 ? " channel" : " channels") << " a thread";
    return text.str();
  }
  TileConfig const& c = kTiles[choice.row];
  text << "implicit product, mma.sync " << c.tile_m() << " pixels x " << c.tile_n() << " channels, warp " << c.warp_m
       << 'x' << c.warp_n << ", stages " << c.stages << ", copies of " << c.vector
       << (c.vector == 1 ? " channel" : " channels");
  return text.str();
}

bool has_whole_runs(Problem const& p, int count) {
  std::int64_t const size = size_of(p.out_dtype), bytes = std::min<std::int64_t>(count * size, 16);
  bool const in_groups =
      p.shape.groups == 1 || p.shape.ci == p.shape.groups || p.shape.co / p.shape.groups % count == 0;
  return in_groups && reinterpret_cast<std::uintptr_t>(p.out) % bytes == 0 && p.shape.out_pixel * size % bytes == 0;
}

}  // namespace epiloq::ops::conv2d_int8
