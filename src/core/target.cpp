#include "core/target.h"

#include <algorithm>
#include <string>

#include "epiloq/error.h"

namespace epiloq {
namespace {

// T4, A100, RTX 4090, H100
constexpr Target kFirstCards[] = {
    {Arch::kSm75, 40, 65536}, {Arch::kSm80, 108, 166912}, {Arch::kSm89, 128, 101376}, {Arch::kSm90, 132, 232448, true}};

}  // namespace

Target nominal(Arch arch, std::initializer_list<Arch> served) {
  std::string names;
  for (Target const& card : kFirstCards) {
    if (std::find(served.begin(), served.end(), card.arch) == served.end()) continue;
    if (card.arch == arch) return card;
    names += (names.empty() ? "" : ", ") + name(card.arch);
  }
  throw InvalidArgument("epiloq.explain: arch: expected one of " + names + ", got " + name(arch));
}

}  // namespace epiloq
