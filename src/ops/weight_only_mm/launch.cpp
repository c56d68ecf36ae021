#include "ops/weight_only_mm/launch.h"

#include "epiloq/error.h"

namespace epiloq::ops::weight_only_mm {

Target target_of_device(int device) {
  device_properties(device);
  return {};
}

void launch(Choice const&, Problem const&, DType, int device, Stream) { device_properties(device); }
void launch_dequantize(DequantizeProblem const&, int device, Stream) { device_properties(device); }

}  // namespace epiloq::ops::weight_only_mm
