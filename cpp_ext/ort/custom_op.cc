#include "ort/custom_op.h"

#include <algorithm>
#include <climits>

namespace gradfuse::ort {

std::vector<int64_t> DimsOf(const OrtApi& api, const OrtValue* value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  ThrowIfError(api, api.GetTensorTypeAndShape(value, &info));
  const Owned<OrtTensorTypeAndShapeInfo> owner(info, api.ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  ThrowIfError(api, api.GetDimensionsCount(info, &rank));
  std::vector<int64_t> dims(rank);
  ThrowIfError(api, api.GetDimensions(info, dims.data(), rank));
  return dims;
}

std::optional<Tensor> InputReader::Next() {
  const size_t index = index_++;
  if (index >= count_) return std::nullopt;
  const OrtValue* value = nullptr;
  ThrowIfError(api_, api_.KernelContext_GetInput(context_, index, &value));
  if (value == nullptr) return std::nullopt;
  const std::vector<int64_t> dims = DimsOf(api_, value);
  Tensor tensor(DataOf(api_, value), types_[index], Shape(dims.data(), dims.size()));
  tensor.on_host = on_host_[index];
  return tensor;
}

void OutputMaker::Output(const char* name, MutableTensor& tensor, const TypeSet&) {
  const size_t index = index_++;
  const Shape& shape = shapes_[index];
  OrtValue* value = nullptr;
  if (index < count_) {
    ThrowIfError(
        api_, api_.KernelContext_GetOutput(context_, index, shape.dims(), static_cast<size_t>(shape.rank()), &value));
  }
  if (value == nullptr) {
    if (status.ok()) status = Refuse(name, "absent", "a named output");
    return;
  }
  if (index == 0) first = value;
  void* data = nullptr;
  ThrowIfError(api_, api_.GetTensorMutableData(value, &data));
  tensor = MutableTensor(data, types_[index], shape);
  // An execution provider's allocator has no other way to say it.
  if (data == nullptr && tensor.NumBytes() > 0 && status.ok()) {
    status = Status(StatusCode::kFailed, std::string("out of memory for ") + name);
  }
}

std::vector<Signature::Types> Signature::Combinations() const {
  int choices = 1;
  for (const TypeSet& types : inputs_) choices *= types.choices();
  std::vector<Types> combinations;
  const auto add = [&](DType t, DType a) {
    for (int index = 0; index < choices; ++index) {
      int rest = index;
      Types& combination = combinations.emplace_back();
      for (const TypeSet& types : inputs_) {
        combination.inputs.push_back(types.Choice(rest % types.choices(), t, a));
        rest /= types.choices();
      }
      for (const TypeSet& types : outputs_) combination.outputs.push_back(types.Choice(0, t, a));
    }
  };
  for (DType t : t_) add(t, t);
  // After those, as the host takes the first that fits where inputs that would tell T are absent.
  const bool has_a = std::any_of(inputs_.begin(), inputs_.end(), [](const TypeSet& types) { return types.is_a(); });
  for (DType t : has_a ? t_ : TypeSet()) {
    if (t != DType::kBFloat16 && TypeSet::IsActivationOf(DType::kBFloat16, t)) add(t, DType::kBFloat16);
  }
  return combinations;
}

std::vector<bool> Signature::InputIsOnHost(bool reads_device) const {
  std::vector<bool> on_host;
  for (const TypeSet& types : inputs_) on_host.push_back(reads_device || types.read_by_host());
  return on_host;
}

CustomOp::CustomOp(const OrtApi& api_, uint32_t version_, const char* name_, const char* provider_,
                   std::vector<bool> input_is_on_host_, const Signature& signature, Signature::Types types_)
    : OrtCustomOp{},
      api(api_),
      name(name_),
      provider(provider_),
      input_is_on_host(std::move(input_is_on_host_)),
      input_is_optional(signature.input_is_optional()),
      types(std::move(types_)) {
  version = version_;
  GetName = [](const OrtCustomOp* op) { return From(op).name; };
  GetExecutionProviderType = [](const OrtCustomOp* op) { return From(op).provider; };
  GetInputTypeCount = [](const OrtCustomOp* op) { return From(op).types.inputs.size(); };
  GetInputType = [](const OrtCustomOp* op, size_t index) { return ToOnnx(From(op).types.inputs[index]); };
  GetInputCharacteristic = [](const OrtCustomOp* op, size_t index) {
    return From(op).input_is_optional[index] ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  GetInputMemoryType = [](const OrtCustomOp* op, size_t index) {
    return From(op).provider != nullptr && From(op).input_is_on_host[index] ? OrtMemTypeCPUInput : OrtMemTypeDefault;
  };
  GetOutputTypeCount = [](const OrtCustomOp* op) { return From(op).types.outputs.size(); };
  GetOutputType = [](const OrtCustomOp* op, size_t index) { return ToOnnx(From(op).types.outputs[index]); };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return INT_MAX; };
}

std::string PrefixOf(const OrtApi& api, const char* op, const OrtKernelInfo* info) {
  size_t size = 0;  // with the terminating zero
  std::string node;
  if (Succeeded(api, api.KernelInfo_GetNodeName(info, nullptr, &size)) && size > 0) {
    node.resize(size);
    if (Succeeded(api, api.KernelInfo_GetNodeName(info, node.data(), &size))) node.resize(size - 1);
  }
  return std::string(op) + " (node '" + node + "'): ";
}

}  // namespace gradfuse::ort
