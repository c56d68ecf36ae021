// The devices that tests launch on: device n has n SMs.

#include "epiloq/device.h"

namespace epiloq {

DeviceProperties const& device_properties(int device) {
  static DeviceProperties properties;
  properties.sm_count = device;
  return properties;
}

}  // namespace epiloq
