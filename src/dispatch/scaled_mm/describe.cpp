// The description of a choice that epiloq.explain prints.

#include <sstream>

#include "dispatch/scaled_mm/select.h"
#include "dispatch/scaled_mm/tables.h"

namespace epiloq::ops::scaled_mm {
namespace {

char const* const kScheduleNames[] = {"warp-specialised", "pingpong", "cooperative"};

std::string describe(CutlassMmaConfig const& c, char const* arch) {
  std::ostringstream text;
  text << arch << " mma.sync " << c.tile.m << 'x' << c.tile.n << 'x' << c.tile.k << " warp " << c.warp.m << 'x'
       << c.warp.n << 'x' << c.warp.k << " stages " << c.stages;
  if (c.fast_accum) text << " fast accumulation";
  return text.str();
}

std::string describe(CutlassWgmmaConfig const& c) {
  std::ostringstream text;
  text << "sm90 wgmma " << (c.swap ? "swap " : "") << c.tile.m << 'x' << c.tile.n << 'x' << c.tile.k << " cluster "
       << c.cluster_m << 'x' << c.cluster_n << ' ' << kScheduleNames[static_cast<int>(c.schedule)];
  if (c.fast_accum) text << " fast accumulation";
  return text.str();
}

std::string describe(SkinnyConfig const& c) {
  std::ostringstream text;
  text << "sm80 skinny " << c.panels << " panels of 16 weight rows, " << c.tokens << " tokens, " << c.warps
       << " warps, unroll " << c.unroll;
  return text.str();
}

}  // namespace

std::string describe(Choice const& choice) {
  switch (choice.family) {
    case Family::kGenericInt8:
      return "generic dp4a to int8 (slow: before SM80, or K % 16, N % 8 or a stride keeps rows off 16 bytes)";
    case Family::kSm80Int8:
      return describe(kSm80Tiles[choice.row], "sm80") + " to int8";
    case Family::kGeneric:
      return "generic dp4a (slow: K % 16, N % 8 or a row stride keeps rows off 16 bytes; pad the weight once)";
    case Family::kGenericFloat8:
      return "generic fp32 (slow: K % 16, N % 8 or a row stride keeps rows off 16 bytes; pad the weight once)";
    case Family::kSkinny:
      return describe(kSkinnyTiles[choice.row]);
    case Family::kSm75:
      return describe(kSm75Tiles[choice.row], "sm75");
    case Family::kSm80:
      return describe(kSm80Tiles[choice.row], "sm80");
    case Family::kSm89:
      return describe(kSm89Tiles[choice.row], "sm89");
    case Family::kSm90:
      return describe(kSm90Tiles[choice.row]);
    case Family::kSm90Float8:
      return describe(kSm90Float8Tiles[choice.row]);
    case Family::kGroupwise:
      return groupwise_mm::describe(choice.groupwise);
  }
  return "";
}

}  // namespace epiloq::ops::scaled_mm
