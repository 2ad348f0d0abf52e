// Devices, memory and streams of acl/acl.h.

#include <atomic>
#include <string>

#include "capi/device.h"
#include "capi/error.h"
#include "capi/executor.h"

using namespace gradfuse::capi;

namespace {

std::atomic<bool> initialized{false};

template <class Object>
void ExpectArgument(const Object* pointer, const char* name) {
  ExpectPointer(pointer, name, "an address", ACL_ERROR_INVALID_PARAM);
}

}  // namespace

aclError aclInit(const char*) {
  return Guarded("aclInit", [] {
    Device::Current();
    if (initialized.exchange(true)) throw Error(ACL_ERROR_REPEAT_INITIALIZE, "called a second time");
  });
}

aclError aclFinalize() {
  return Guarded("aclFinalize", [] {
    if (!initialized.exchange(false)) throw Error(ACL_ERROR_UNINITIALIZE, "called without aclInit");
    DropExecutors();
  });
}

aclError aclrtSetDevice(int32_t deviceId) {
  return Guarded("aclrtSetDevice", [&] { Device::Current().Set(deviceId); });
}

aclError aclrtResetDevice(int32_t deviceId) {
  return Guarded("aclrtResetDevice", [&] { Device::Current().Reset(deviceId); });
}

aclError aclrtCreateStream(aclrtStream* stream) {
  return Guarded("aclrtCreateStream", [&] {
    ExpectArgument(stream, "stream");
    *stream = Device::Current().CreateStream();
  });
}

aclError aclrtDestroyStream(aclrtStream stream) {
  return Guarded("aclrtDestroyStream", [&] {
    ExpectArgument(stream, "stream");
    Device::Current().DestroyStream(stream);
  });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  return Guarded("aclrtSynchronizeStream", [&] { Device::Current().Synchronize(stream); });
}

aclError aclrtMalloc(void** devPtr, size_t size, aclrtMemMallocPolicy) {
  return Guarded("aclrtMalloc", [&] {
    ExpectArgument(devPtr, "devPtr");
    if (size == 0) throw Error(ACL_ERROR_INVALID_PARAM, "size is 0; expected 1 or more");
    *devPtr = Device::Current().Allocate(size);
  });
}

aclError aclrtFree(void* devPtr) {
  return Guarded("aclrtFree", [&] {
    ExpectArgument(devPtr, "devPtr");
    Device::Current().Free(devPtr);
  });
}

aclError aclrtMemcpy(void* dst, size_t destMax, const void* src, size_t count, aclrtMemcpyKind kind) {
  return Guarded("aclrtMemcpy", [&] {
    if (kind < ACL_MEMCPY_HOST_TO_HOST || kind > ACL_MEMCPY_DEVICE_TO_DEVICE) {
      throw Error(ACL_ERROR_INVALID_PARAM, "kind is " + std::to_string(kind) + "; expected one of aclrtMemcpyKind");
    }
    if (count > destMax) {
      throw Error(ACL_ERROR_INVALID_PARAM,
                  "count is " + std::to_string(count) + "; expected at most destMax, " + std::to_string(destMax));
    }
    if (count == 0) return;
    ExpectArgument(dst, "dst");
    ExpectArgument(src, "src");
    Device::Current().Copy(dst, src, count, kind);
  });
}
