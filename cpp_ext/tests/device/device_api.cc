#include "tests/device/device_api.h"

#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "gradfuse/op_table.h"
#include "gradfuse/signature.h"

namespace gradfuse {
namespace {

thread_local std::string last_error;

// Points an op's arguments at the tensors and attributes of a call.
class ArgumentReader {
 public:
  ArgumentReader(const GradfuseTensor* tensors, int32_t tensor_count, const GradfuseAttribute* attributes,
                 int32_t attribute_count)
      : tensors_(tensors), tensor_count_(tensor_count), attributes_(attributes), attribute_count_(attribute_count) {}

  void Input(const char* name, Tensor& tensor, const TypeSet&) { Required(name, tensor); }
  void Input(const char*, std::optional<Tensor>& tensor, const TypeSet&) {
    if (const GradfuseTensor* given = Next()) Point(*given, tensor.emplace());
  }
  void Output(const char* name, MutableTensor& tensor, const TypeSet&) {
    Required(name, tensor);
    outputs.push_back(tensor.shape);
  }
  void Attribute(const char* name, int64_t& value) {
    if (const GradfuseAttribute* found = Find(name)) value = found->integer;
  }
  void Attribute(const char* name, float& value) {
    if (const GradfuseAttribute* found = Find(name)) value = found->number;
  }
  void Attribute(const char* name, std::string& value) {
    if (const GradfuseAttribute* found = Find(name)) value = found->text;
  }
  void Attribute(const char* name, std::vector<int64_t>& values) {
    if (const GradfuseAttribute* found = Find(name)) values.assign(found->list, found->list + found->list_size);
  }

  Status status;
  std::vector<Shape> outputs;

 private:
  template <class AnyTensor>
  void Required(const char* name, AnyTensor& tensor) {
    if (const GradfuseTensor* given = Next()) {
      Point(*given, tensor);
    } else if (status.ok()) {
      status = Refuse(name, "absent", "a tensor");
    }
  }
  // The next tensor of the call; null where it is absent.
  const GradfuseTensor* Next() {
    if (index_ >= tensor_count_) return nullptr;
    const GradfuseTensor& given = tensors_[index_++];
    return given.rank < 0 ? nullptr : &given;
  }
  static TensorLayout LayoutOf(const GradfuseTensor& given) {
    return {static_cast<DType>(given.dtype), Shape(given.dims, static_cast<size_t>(given.rank))};
  }
  static void Point(const GradfuseTensor& given, Tensor& tensor) {
    tensor = Tensor(given.data, LayoutOf(given));
    tensor.on_host = given.on_host != 0;
  }
  static void Point(const GradfuseTensor& given, MutableTensor& tensor) {
    tensor = MutableTensor(given.data, LayoutOf(given));
  }
  const GradfuseAttribute* Find(const char* name) const {
    for (int32_t index = 0; index < attribute_count_; ++index) {
      if (std::strcmp(attributes_[index].name, name) == 0) return &attributes_[index];
    }
    return nullptr;
  }

  const GradfuseTensor* tensors_;
  int32_t tensor_count_;
  const GradfuseAttribute* attributes_;
  int32_t attribute_count_;
  int32_t index_ = 0;
};

// Calls body(args) with the checked arguments of the op that is called `name`.
template <class Body>
Status WithArguments(const char* name, ArgumentReader& reader, const Body& body) {
  Status status(StatusCode::kInvalidArgument, std::string("there is no op ") + name);
  ForEachOp(OpTable(), [&](auto* null) {
    using Args = std::remove_pointer_t<decltype(null)>;
    if (std::strcmp(Args::kName, name) != 0) return;
    Args args;
    Args::Visit(args, reader);
    status = reader.status;
    if (status.ok()) status = Check(args);
    if (status.ok() && OutputShapes(args) != reader.outputs)
      status = Refuse("an output", "of another shape", "its own");
    if (status.ok()) status = body(args);
  });
  return status;
}

template <class Body>
bool Succeeds(const Body& body) {
  try {
    const Status status = body();
    last_error = status.message();
    return status.ok();
  } catch (const std::exception& error) {
    last_error = error.what();
    return false;
  }
}

}  // namespace
}  // namespace gradfuse

using namespace gradfuse;

const char* gradfuse_device_error() { return last_error.c_str(); }

int64_t gradfuse_device_workspace(const char* op, const GradfuseTensor* tensors, int32_t tensor_count,
                                  const GradfuseAttribute* attributes, int32_t attribute_count) {
  int64_t bytes = -1;
  ArgumentReader reader(tensors, tensor_count, attributes, attribute_count);
  const bool succeeds = Succeeds([&] {
    return WithArguments(op, reader, [&](const auto& args) {
      bytes = cuda::WorkspaceBytes(args);
      return Status();
    });
  });
  return succeeds ? bytes : -1;
}

int gradfuse_device_run(const char* op, const GradfuseTensor* tensors, int32_t tensor_count,
                        const GradfuseAttribute* attributes, int32_t attribute_count, void* workspace, void* fault) {
  ArgumentReader reader(tensors, tensor_count, attributes, attribute_count);
  const Queue queue{nullptr, workspace, static_cast<int32_t*>(fault)};
  return Succeeds([&] { return WithArguments(op, reader, [&](const auto& args) { return cuda::Run(args, queue); }); })
             ? 0
             : 1;
}
