// In place of capi/cuda_device.cc: the device "cuda" of the C API is the machine of the tests, whose memory the C API
// takes for one that the host cannot read.

#include <cstdlib>
#include <cstring>
#include <new>

#include "capi/cuda_faults.h"
#include "capi/device.h"
#include "capi/error.h"

namespace gradfuse {
namespace cuda {

void DeleteFault::operator()(int32_t* fault) const { delete fault; }
Fault NewFault() { return Fault(new int32_t(0)); }

}  // namespace cuda

namespace capi {
namespace {

class Simt final : public Device {
 public:
  bool is_host() const override { return false; }
  void Set(int32_t) override {}
  void Reset(int32_t) override {}

  void* Allocate(size_t bytes) override {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes) != 0) throw std::bad_alloc();
    return memory;
  }
  void Free(void* memory) override { std::free(memory); }
  void Copy(void* to, const void* from, size_t bytes, aclrtMemcpyKind) override { std::memcpy(to, from, bytes); }

  aclrtStream CreateStream() override { return new char; }
  void DestroyStream(aclrtStream stream) override {
    faults_.Forget(stream);
    delete static_cast<char*>(stream);
  }
  void Synchronize(aclrtStream stream) override { faults_.ThrowAny(stream); }
  void ExpectStream(aclrtStream) override {}
  void Execute(std::unique_ptr<Executor> executor, char* workspace, aclrtStream stream) override {
    Queue queue;
    queue.stream = stream;
    queue.fault = faults_.CellOf(stream, *executor);
    executor->StartOnCuda(workspace, queue);
  }

 private:
  CudaFaults faults_;
};

}  // namespace

Device* CudaDeviceOrNull() {
  static Device& device = *new Simt;
  return &device;
}

}  // namespace capi
}  // namespace gradfuse
