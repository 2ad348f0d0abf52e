// In place of capi/cuda_device.cc: the device "cuda" of the C API is the machine of the tests, whose memory the C API
// takes for one that the host cannot read.

#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "capi/cuda_faults.h"
#include "capi/device.h"
#include "capi/error.h"
#include "tests/simt/simt.h"

namespace gradfuse {
namespace cuda {

void DeleteFault::operator()(int32_t* fault) const { delete fault; }
Fault NewFault() { return Fault(new int32_t(0)); }

}  // namespace cuda

namespace capi {
namespace {

// Does nothing until someone waits for it.
class Stream final : public simt::Stream {
 public:
  ~Stream() override { Drain(); }
  void Add(std::function<void()> work) override { work_.push_back(std::move(work)); }
  void Drain() {
    for (const std::function<void()>& work : std::exchange(work_, {})) work();
  }

 private:
  std::vector<std::function<void()>> work_;
};

Stream& At(aclrtStream stream) { return static_cast<Stream&>(*static_cast<simt::Stream*>(stream)); }

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

  aclrtStream CreateStream() override { return static_cast<simt::Stream*>(new Stream); }
  void DestroyStream(aclrtStream stream) override {
    faults_.Forget(stream);
    delete &At(stream);
  }
  void Synchronize(aclrtStream stream) override {
    if (stream != nullptr) At(stream).Drain();
    faults_.ThrowAny(stream);
  }
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
