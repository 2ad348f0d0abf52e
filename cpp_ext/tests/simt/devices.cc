// In place of ort/devices.cc: onnxruntime's CPU provider runs the CUDA kernels, on the machine of the tests.

#include "ort/devices.h"

#include <type_traits>

#include "gradfuse/op_table.h"
#include "ort/cuda_device.h"

namespace gradfuse {
namespace cuda {

void DeleteFault::operator()(int32_t* fault) const { delete fault; }
Fault NewFault() { return Fault(new int32_t(0)); }

}  // namespace cuda

namespace ort {
namespace {

class SimtDevice : public CudaDevice {
 public:
  static constexpr const char* kProvider = nullptr;
  using CudaDevice::CudaDevice;
};

}  // namespace

void AppendAllCustomOps(const OrtApi& api, uint32_t version, std::vector<std::unique_ptr<CustomOp>>& ops) {
  ForEachOp(OpTable(),
            [&](auto* null) { AppendCustomOps<std::remove_pointer_t<decltype(null)>, SimtDevice>(api, version, ops); });
}

}  // namespace ort
}  // namespace gradfuse
