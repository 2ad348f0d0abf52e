// In place of ort/devices.cc: onnxruntime's CPU provider and the execution provider of this library run the CUDA
// kernels on the machine of the tests.

#include "ort/devices.h"

#include <optional>
#include <string>
#include <type_traits>

#include "gradfuse/op_table.h"
#include "ort/cuda_device.h"
#include "tests/simt/virtual_gpu.h"

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

// Looks whether every tensor is in the memory where a kernel looks for it.
class PlaceCheck {
 public:
  void Input(const char* name, const Tensor& tensor, const TypeSet&) { Expect(name, tensor, !tensor.on_host); }
  void Input(const char* name, const std::optional<Tensor>& tensor, const TypeSet&) {
    if (tensor) Expect(name, *tensor, !tensor->on_host);
  }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char* name, const MutableTensor& tensor, const TypeSet&) {
    Expect(name, {tensor.data, tensor}, true);
  }

  Status status;

 private:
  void Expect(const char* name, const Tensor& tensor, bool on_gpu) {
    if (tensor.NumElements() == 0 || gpu::IsVirtual(tensor.data) == on_gpu) return;
    status = Refuse(name, on_gpu ? "in host memory" : "in memory of the GPU", "the other");
  }
};

class VirtualDevice : public ProviderDevice {
 public:
  using ProviderDevice::ProviderDevice;

  template <class Args>
  Status Run(const Args& args, OrtKernelContext* context, const OrtValue* output) const {
    PlaceCheck check;
    Args::Visit(args, check);
    GRADFUSE_RETURN_IF_ERROR(check.status);
    return ProviderDevice::Run(args, context, output);
  }
};

}  // namespace

void AppendAllCustomOps(const OrtApi& api, uint32_t version, std::vector<std::unique_ptr<CustomOp>>& ops) {
  ForEachOp(OpTable(), [&](auto* null) {
    using Args = std::remove_pointer_t<decltype(null)>;
    AppendCustomOps<Args, SimtDevice>(api, version, ops);
    AppendCustomOps<Args, VirtualDevice>(api, version, ops);
  });
}

}  // namespace ort
}  // namespace gradfuse
