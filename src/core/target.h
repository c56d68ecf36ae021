#pragma once

#include <initializer_list>

#include "epiloq/device.h"

namespace epiloq {

// What the choice of a kernel depends on of a device.
struct Target {
  Arch arch;
  int sm_count;
  int shared_bytes;        // that a block may have
  bool has_wgmma = false;  // SM90 itself: what came after runs other kernels of kSm90, but lacks the instruction
};

// What an architecture's first card has, for answers without a device. Throws InvalidArgument for one that is not
// `served`.
Target nominal(Arch arch, std::initializer_list<Arch> served);

}  // namespace epiloq
