#include "capi/device.h"

#include <cstdlib>
#include <string>

#include "capi/error.h"

namespace gradfuse::capi {
namespace {

Device& Choose() {
  const char* variable = std::getenv("GRADFUSE_DEVICE");
  const std::string name = variable == nullptr ? "" : variable;
  if (name == "cpu") return CpuDevice();
  if (!name.empty() && name != "cuda") {
    throw Error(ACL_ERROR_INVALID_PARAM, "GRADFUSE_DEVICE is '" + name + "'; expected 'cpu' or 'cuda'");
  }
#ifdef GRADFUSE_HAVE_CUDA
  if (Device* cuda = CudaDeviceOrNull()) return *cuda;
  const char* reason = "no GPU is to be found";
#else
  const char* reason = "this library is built without CUDA";
#endif
  if (name == "cuda") throw Error(ACL_ERROR_INVALID_PARAM, std::string("GRADFUSE_DEVICE is 'cuda', but ") + reason);
  return CpuDevice();
}

}  // namespace

Device& Device::Current() {
  static Device& device = Choose();
  return device;
}

}  // namespace gradfuse::capi
