#pragma once

#include <onnxruntime_c_api.h>

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "gradfuse/status.h"
#include "gradfuse/tensor.h"

// ONNX Runtime through its raw C API: the C++ wrappers of a header call functions that older runtimes lack.
namespace gradfuse::ort {

// A call into ONNX Runtime failed, with what it says about that.
class OrtError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void ThrowIfError(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw OrtError(message);
}

// What ONNX Runtime made for us, with the function of its API that gives it back.
template <class Object>
using Owned = std::unique_ptr<Object, void(ORT_API_CALL*)(Object*)>;

// Whether `status` means success. Releases it.
inline bool Succeeded(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return true;
  api.ReleaseStatus(status);
  return false;
}

constexpr OrtErrorCode ToOrt(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return ORT_OK;
    case StatusCode::kInvalidArgument: return ORT_INVALID_ARGUMENT;
    case StatusCode::kNotSupported: return ORT_NOT_IMPLEMENTED;
    case StatusCode::kFailed: return ORT_FAIL;
  }
  return ORT_FAIL;
}

// Where the elements of a tensor are, to read them. The function for that has a mutable argument, as others write.
inline const void* DataOf(const OrtApi& api, const OrtValue* value) {
  void* data = nullptr;
  // NOLINTNEXTLINE(*-const-cast): ONNX Runtime before 1.23 has no function that takes a const argument
  ThrowIfError(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  return data;
}

// Runs body, which returns a Status, where ONNX Runtime calls in: every failure becomes an OrtStatus, and no exception
// leaves.
template <class Body>
OrtStatus* Guarded(const OrtApi& api, const Body& body) noexcept {
  try {
    const Status status = body();
    if (status.ok()) return nullptr;
    return api.CreateStatus(ToOrt(status.code()), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return api.CreateStatus(ORT_FAIL, "gradfuse: out of memory");
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_FAIL, error.what());
  }
}

constexpr ONNXTensorElementDataType ToOnnx(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case DType::kFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case DType::kBFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case DType::kFloat64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;
    case DType::kInt32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case DType::kInt64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    case DType::kBool: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
    case DType::kInt8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case DType::kUInt8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    case DType::kInt16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16;
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

}  // namespace gradfuse::ort
