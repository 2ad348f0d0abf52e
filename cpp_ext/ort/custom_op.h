#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gradfuse/op_table.h"
#include "gradfuse/parallel.h"
#include "gradfuse/signature.h"
#include "ort/api.h"

// Makes a custom op of ONNX Runtime from the arguments of any op.
namespace gradfuse::ort {

// The sizes of a tensor's dimensions.
std::vector<int64_t> DimsOf(const OrtApi& api, const OrtValue* value);

// A device says where nodes of an op run:
//
//   static constexpr const char* kProvider;   the execution provider, nullptr for the CPU's
//   static constexpr bool kOnHost;            whether the host can read all inputs, not just those that are ReadByHost
//   explicit Device(const OrtApi&);           made once for a node
//   Status Run(const Args&, OrtKernelContext*, const OrtValue* output) const;

// The session's own thread pool.
class OrtParallelFor final : public ParallelFor {
 public:
  OrtParallelFor(const OrtApi& api, const OrtKernelContext* context) : api_(api), context_(context) {}

 protected:
  void Run(int64_t count, Call call, void* body) const override {
    ThrowIfError(api_, api_.KernelContext_ParallelFor(context_, call, static_cast<size_t>(count), 0, body));
  }

 private:
  const OrtApi& api_;
  const OrtKernelContext* context_;
};

class CpuDevice {
 public:
  static constexpr const char* kProvider = nullptr;
  static constexpr bool kOnHost = true;

  explicit CpuDevice(const OrtApi& api) : api_(api) {}

  template <class Args>
  Status Run(const Args& args, OrtKernelContext* context, const OrtValue*) const {
    cpu::Run(args, OrtParallelFor(api_, context));
    return {};
  }

 private:
  const OrtApi& api_;
};

// Reads a node's attributes; those that it does not have keep their defaults.
class AttributeReader {
 public:
  AttributeReader(const OrtApi& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  template <class Value>
  void Input(const char*, const Value&, const TypeSet&) {}
  void Output(const char*, const MutableTensor&, const TypeSet&) {}
  void Attribute(const char* name, int64_t& value) {
    if (!Read(name, value)) ExpectAbsent(name, "an int");
  }
  void Attribute(const char* name, float& value) {
    if (!Read(name, value)) ExpectAbsent(name, "a float");
  }
  void Attribute(const char* name, std::string& value) {
    if (!Read(name, value)) ExpectAbsent(name, "a string");
  }
  void Attribute(const char* name, std::vector<int64_t>& values) {
    if (!Read(name, values)) ExpectAbsent(name, "a list of ints");
  }

  Status status;

 private:
  bool Read(const char* name, int64_t& value) const {
    return Succeeded(api_, api_.KernelInfoGetAttribute_int64(info_, name, &value));
  }
  bool Read(const char* name, float& value) const {
    return Succeeded(api_, api_.KernelInfoGetAttribute_float(info_, name, &value));
  }
  bool Read(const char* name, std::string& value) const {
    size_t size = 0;  // with the terminating zero
    if (!Succeeded(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size)) || size == 0) return false;
    std::string text(size, '\0');
    if (!Succeeded(api_, api_.KernelInfoGetAttribute_string(info_, name, text.data(), &size))) return false;
    text.resize(size - 1);
    value = std::move(text);
    return true;
  }
  bool Read(const char* name, std::vector<int64_t>& values) const {
    size_t size = 0;
    if (!Succeeded(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size))) return false;
    std::vector<int64_t> found(size);
    if (!Succeeded(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, found.data(), &size))) return false;
    values = std::move(found);
    return true;
  }

  // ONNX Runtime fails alike for an attribute that is absent and for one of another kind.
  void ExpectAbsent(const char* name, const char* wanted) {
    int64_t int_value;
    float float_value;
    std::string string_value;
    size_t size = 0;
    if (Read(name, int_value)) {
      status = Refuse(name, "an int", wanted);
    } else if (Read(name, float_value)) {
      status = Refuse(name, "a float", wanted);
    } else if (Read(name, string_value)) {
      status = Refuse(name, "a string", wanted);
    } else if (Succeeded(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size)) ||
               Succeeded(api_, api_.KernelInfoGetAttributeArray_float(info_, name, nullptr, &size))) {
      status = Refuse(name, "a list", wanted);
    }
  }

  const OrtApi& api_;
  const OrtKernelInfo* info_;
};

// Points the inputs of an op's arguments at the tensors of a call.
class InputReader {
 public:
  InputReader(const OrtApi& api, const OrtKernelContext* context, const std::vector<DType>& types,
              const std::vector<bool>& on_host)
      : api_(api), context_(context), types_(types), on_host_(on_host) {
    ThrowIfError(api, api.KernelContext_GetInputCount(context, &count_));
  }

  void Input(const char* name, Tensor& tensor, const TypeSet&) {
    if (std::optional<Tensor> value = Next()) {
      tensor = *value;
    } else if (status.ok()) {
      status = Refuse(name, "absent", "a tensor");
    }
  }
  void Input(const char*, std::optional<Tensor>& tensor, const TypeSet&) { tensor = Next(); }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char*, const MutableTensor&, const TypeSet&) {}

  Status status;

 private:
  std::optional<Tensor> Next();

  const OrtApi& api_;
  const OrtKernelContext* context_;
  const std::vector<DType>& types_;
  const std::vector<bool>& on_host_;
  size_t count_ = 0;
  size_t index_ = 0;
};

// Makes the outputs of a call, of given shapes, and points an op's arguments at them.
class OutputMaker {
 public:
  OutputMaker(const OrtApi& api, OrtKernelContext* context, const std::vector<Shape>& shapes,
              const std::vector<DType>& types)
      : api_(api), context_(context), shapes_(shapes), types_(types) {
    ThrowIfError(api, api.KernelContext_GetOutputCount(context, &count_));
  }

  template <class Value>
  void Input(const char*, const Value&, const TypeSet&) {}
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char* name, MutableTensor& tensor, const TypeSet&);

  Status status;
  const OrtValue* first = nullptr;  // of the outputs

 private:
  const OrtApi& api_;
  OrtKernelContext* context_;
  const std::vector<Shape>& shapes_;
  const std::vector<DType>& types_;
  size_t count_ = 0;
  size_t index_ = 0;
};

// The element types that the inputs and outputs of an op take, and which of its inputs may be absent.
class Signature {
 public:
  template <class Args>
  static Signature Of() {
    Signature signature;
    signature.t_ = Args::kTypes;
    const Args args;
    Args::Visit(args, signature);
    return signature;
  }

  void Input(const char*, const Tensor&, const TypeSet& types) { AddInput(types, false); }
  void Input(const char*, const std::optional<Tensor>&, const TypeSet& types) { AddInput(types, true); }
  template <class Value>
  void Attribute(const char*, const Value&) {}
  void Output(const char*, const MutableTensor&, const TypeSet& types) { outputs_.push_back(types); }

  struct Types {
    std::vector<DType> inputs;
    std::vector<DType> outputs;
  };
  // Every combination: T is one choice, each further input that takes several types another.
  std::vector<Types> Combinations() const;

  const std::vector<bool>& input_is_optional() const { return input_is_optional_; }
  // Whether each input is in host memory, on a device whose memory it can read or not.
  std::vector<bool> InputIsOnHost(bool reads_device) const;

 private:
  void AddInput(const TypeSet& types, bool optional) {
    inputs_.push_back(types);
    input_is_optional_.push_back(optional);
  }

  TypeSet t_;
  std::vector<TypeSet> inputs_;
  std::vector<TypeSet> outputs_;
  std::vector<bool> input_is_optional_;
};

// An op for one combination of element types, as ONNX Runtime registers it.
struct CustomOp : OrtCustomOp {
  CustomOp(const OrtApi& api, uint32_t version, const char* name, const char* provider,
           std::vector<bool> input_is_on_host, const Signature& signature, Signature::Types types);

  static const CustomOp& From(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

  const OrtApi& api;
  const char* name;
  const char* provider;
  std::vector<bool> input_is_on_host;
  std::vector<bool> input_is_optional;
  Signature::Types types;
};

// `<op> (node 'name'): `, with which every message of a node begins.
std::string PrefixOf(const OrtApi& api, const char* op, const OrtKernelInfo* info);

// The input in whose memory the CPU's kernel may write the first output, if nothing else reads it any more:
// Args::kOverwrittenInput, or -1 where there is none.
template <class Args, class = void>
struct OverwrittenInput {
  static constexpr int kIndex = -1;
};
template <class Args>
struct OverwrittenInput<Args, std::void_t<decltype(Args::kOverwrittenInput)>> {
  static constexpr int kIndex = Args::kOverwrittenInput;
};

// A node of an op: its attributes, and during a call its tensors.
template <class Args, class Device>
class Kernel {
 public:
  // Makes `op` create, run and destroy nodes of this kind.
  static void Install(OrtCustomOp& op) {
    op.CreateKernelV2 = Create;
    op.KernelComputeV2 = Compute;
    op.KernelDestroy = Destroy;
    if constexpr (OverwrittenInput<Args>::kIndex >= 0 && std::is_same_v<Device, CpuDevice>) {
      op.GetMayInplace = GetOverwritten;
      op.ReleaseMayInplace = ReleaseOverwritten;
    }
  }

 private:
  explicit Kernel(const CustomOp& op) : op_(op), device_(op.api) {}

  static OrtStatus* ORT_API_CALL Create(const OrtCustomOp* ort_op, const OrtApi*, const OrtKernelInfo* info,
                                        void** kernel) {
    const CustomOp& op = CustomOp::From(ort_op);
    return Guarded(op.api, [&]() -> Status {
      auto self = std::unique_ptr<Kernel>(new Kernel(op));
      self->prefix_ = PrefixOf(op.api, op.name, info);
      AttributeReader attributes(op.api, info);
      Args::Visit(self->attributes_, attributes);
      if (!attributes.status.ok()) return self->Named(attributes.status);
      *kernel = self.release();
      return {};
    });
  }

  static OrtStatus* ORT_API_CALL Compute(void* kernel, OrtKernelContext* context) {
    const Kernel& self = *static_cast<const Kernel*>(kernel);
    return Guarded(self.op_.api, [&] { return self.Named(self.Call(context)); });
  }

  static void ORT_API_CALL Destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

  static size_t ORT_API_CALL GetOverwritten(int** inputs, int** outputs) {
    *inputs = new int(OverwrittenInput<Args>::kIndex);
    *outputs = new int(0);
    return 1;
  }
  // NOLINTNEXTLINE(readability-non-const-parameter): the signature is ONNX Runtime's.
  static void ORT_API_CALL ReleaseOverwritten(int* inputs, int* outputs) {
    delete inputs;
    delete outputs;
  }

  Status Call(OrtKernelContext* context) const {
    Args args = attributes_;
    InputReader inputs(op_.api, context, op_.types.inputs, op_.input_is_on_host);
    Args::Visit(args, inputs);
    GRADFUSE_RETURN_IF_ERROR(inputs.status);
    GRADFUSE_RETURN_IF_ERROR(Check(args));
    const std::vector<Shape> shapes = OutputShapes(args);
    OutputMaker outputs(op_.api, context, shapes, op_.types.outputs);
    Args::Visit(args, outputs);
    GRADFUSE_RETURN_IF_ERROR(outputs.status);
    return device_.Run(args, context, outputs.first);
  }

  Status Named(const Status& status) const {
    return status.ok() ? status : Status(status.code(), prefix_ + status.message());
  }

  const CustomOp& op_;
  std::string prefix_;
  Args attributes_;
  Device device_;
};

// The custom ops of `Args` on a device, one for each combination of element types, appended to `ops`.
template <class Args, class Device>
void AppendCustomOps(const OrtApi& api, uint32_t version, std::vector<std::unique_ptr<CustomOp>>& ops) {
  const Signature signature = Signature::Of<Args>();
  for (Signature::Types& types : signature.Combinations()) {
    ops.push_back(std::make_unique<CustomOp>(api, version, Args::kName, Device::kProvider,
                                             signature.InputIsOnHost(Device::kOnHost), signature, std::move(types)));
    Kernel<Args, Device>::Install(*ops.back());
  }
}

}  // namespace gradfuse::ort
