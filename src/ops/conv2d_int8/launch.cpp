#include "ops/conv2d_int8/launch.h"

#include "epiloq/device.h"
#include "epiloq/error.h"

namespace epiloq::ops::conv2d_int8 {
namespace {

[[noreturn]] void refuse(int device) {
  device_properties(device);
  throw Unsupported("epiloq.conv2d_int8: this build has no kernel for cuda:" + std::to_string(device) +
                    "; the operation runs on the CPU");
}

}  // namespace

void launch(Problem const&, int device, Stream) { refuse(device); }
std::string explain(Problem const&, int device) { refuse(device); }

}  // namespace epiloq::ops::conv2d_int8
