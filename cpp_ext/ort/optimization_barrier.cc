#include "ort/optimization_barrier.h"

#include <string>
#include <vector>

namespace gradfuse::ort {
namespace {

constexpr char kName[] = "OptimizationBarrier";

OrtStatus* ORT_API_CALL Create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo*, void** kernel) {
  // NOLINTNEXTLINE(*-const-cast): kernels are mutable to ONNX Runtime; this one is the op, which has no state
  *kernel = const_cast<OrtCustomOp*>(op);
  return nullptr;
}

OrtStatus* ORT_API_CALL Compute(void* kernel, OrtKernelContext* context) {
  const OrtApi& api = CustomOp::From(static_cast<const OrtCustomOp*>(kernel)).api;
  return Guarded(api, [&]() -> Status {
    const OrtValue* first = nullptr;
    ThrowIfError(api, api.KernelContext_GetInput(context, 0, &first));
    OrtTensorTypeAndShapeInfo* info = nullptr;
    ThrowIfError(api, api.GetTensorTypeAndShape(first, &info));
    const Owned<OrtTensorTypeAndShapeInfo> owner(info, api.ReleaseTensorTypeAndShapeInfo);
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    ThrowIfError(api, api.GetTensorElementType(info, &type));
    size_t count = 0;
    ThrowIfError(api, api.GetTensorShapeElementCount(info, &count));
    if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || count != 1) {
      return {StatusCode::kInvalidArgument, std::string(kName) + ": the first input is no scalar of float32"};
    }
    OrtValue* output = nullptr;
    ThrowIfError(api, api.KernelContext_GetOutput(context, 0, nullptr, 0, &output));
    void* data = nullptr;
    ThrowIfError(api, api.GetTensorMutableData(output, &data));
    *static_cast<float*>(data) = *static_cast<const float*>(DataOf(api, first));
    return {};
  });
}

void ORT_API_CALL Destroy(void*) {}

}  // namespace

std::unique_ptr<CustomOp> MakeOptimizationBarrier(const OrtApi& api, uint32_t version) {
  auto op = std::make_unique<CustomOp>(api, version, kName, nullptr, std::vector<bool>{true}, Signature(),
                                       Signature::Types{{}, {DType::kFloat32}});
  op->GetInputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
  op->GetInputType = [](const OrtCustomOp*, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; };
  op->GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_VARIADIC; };
  op->GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op->CreateKernelV2 = Create;
  op->KernelComputeV2 = Compute;
  op->KernelDestroy = Destroy;
  return op;
}

}  // namespace gradfuse::ort
