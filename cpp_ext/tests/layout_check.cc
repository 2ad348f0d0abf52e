// Prints what Check says to arguments that ONNX Runtime never hands over, one line each. A test runs it.

#include <cstdio>

#include "gradfuse/op_table.h"

namespace gradfuse {
namespace {

template <class Args>
void Print(const char* what, const Args& args) {
  const Status status = Check(args);
  std::printf("%s: %s\n", what, status.ok() ? "ok" : status.message().c_str());
}

MseLossBackwardArgs DenseArgs() {
  static float memory[64] = {};
  MseLossBackwardArgs args;
  args.grad_output = args.self = args.target = Tensor(memory, DType::kFloat32, {4, 6});
  return args;
}

void PrintAll() {
  MseLossBackwardArgs args = DenseArgs();
  Print("dense", args);

  args.target.strides[0] = 7;
  Print("gaps", args);

  args = DenseArgs();
  args.self.strides[0] = 1;
  args.self.strides[1] = 4;
  Print("transposed", args);

  args = DenseArgs();
  args.self = Tensor(args.self.data, DType::kFloat32, {1, 6});
  args.self.strides[0] = 1000;
  Print("stride of a dimension of size 1", args);

  args = DenseArgs();
  args.self = Tensor(args.self.data, DType::kFloat32, {4, 0});
  args.self.strides[0] = 1000;
  args.grad_output = args.target = args.self;
  Print("empty", args);

  args = DenseArgs();
  args.grad_output.dtype = DType::kFloat64;
  Print("type that the op does not take", args);

  args = DenseArgs();
  args.target.dtype = DType::kFloat16;
  Print("types that differ", args);

  static int64_t ends[] = {3, 9};
  GroupedBiasAddGradArgs grouped;
  grouped.grad_y = Tensor(args.self.data, DType::kFloat32, {4, 2});
  grouped.group_idx = Tensor(ends, DType::kInt64, {2});
  Print("bad values on the host", grouped);
  grouped.group_idx->on_host = false;
  Print("values elsewhere", grouped);
  grouped.group_idx->dtype = DType::kBool;
  Print("type of an index", grouped);
}

}  // namespace
}  // namespace gradfuse

int main() { gradfuse::PrintAll(); }
