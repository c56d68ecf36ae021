#include "ops/conv2d_weight_only/launch.h"

#include "epiloq/device.h"

namespace epiloq::ops::conv2d_weight_only {

bool launch(Problem const&, int device, Stream) {
  device_properties(device);
  return false;
}

std::string explain(Problem const&, int device) {
  device_properties(device);
  return "de-quantise, then a dense convolution (this build has no kernel of its own)";
}

}  // namespace epiloq::ops::conv2d_weight_only
