#include "gradfuse/ops/mse_loss_backward.h"

#include <algorithm>

namespace gradfuse {
namespace {

// The broadcast shape of grad_output, self and target, of shapes that broadcast.
Shape BroadcastShape(const MseLossBackwardArgs& args) {
  const Shape* const shapes[] = {&args.grad_output.shape, &args.self.shape, &args.target.shape};
  int rank = 0;
  for (const Shape* shape : shapes) rank = std::max(rank, shape->rank());
  int64_t dims[kMaxRank];
  std::fill_n(dims, kMaxRank, 1);
  for (const Shape* shape : shapes) {
    for (int axis = 0; axis < shape->rank(); ++axis) {
      int64_t& dim = dims[rank - shape->rank() + axis];
      if ((*shape)[axis] != 1) dim = (*shape)[axis];
    }
  }
  return {dims, static_cast<size_t>(rank)};
}

bool BroadcastsTo(const Shape& shape, const Shape& whole) {
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (shape[axis] != 1 && shape[axis] != whole[whole.rank() - shape.rank() + axis]) return false;
  }
  return true;
}

// Operands that exist can broadcast to something that cannot.
bool FitsInMemory(const Shape& shape, DType dtype) {
  int64_t bytes = SizeOf(dtype);
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (shape[axis] == 0) return true;
  }
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (__builtin_mul_overflow(bytes, shape[axis], &bytes)) return false;
  }
  return true;
}

}  // namespace

Status Check(const MseLossBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.reduction >= MseLossBackwardArgs::kNone && args.reduction <= MseLossBackwardArgs::kSum,
                  "reduction", std::to_string(args.reduction), "0 (none), 1 (mean) or 2 (sum)");
  const Shape whole = BroadcastShape(args);
  const bool broadcast = BroadcastsTo(args.grad_output.shape, whole) && BroadcastsTo(args.self.shape, whole) &&
                         BroadcastsTo(args.target.shape, whole);
  GRADFUSE_EXPECT(broadcast, "grad_output",
                  Describe(args.grad_output) + ", self " + Describe(args.self) + " and target " + Describe(args.target),
                  "shapes that broadcast together");
  GRADFUSE_EXPECT(FitsInMemory(whole, args.self.dtype), "grad_input", Describe(args.self.dtype, whole),
                  "fewer than 2^63 bytes");
  return {};
}

std::vector<Shape> OutputShapes(const MseLossBackwardArgs& args) { return {BroadcastShape(args)}; }

}  // namespace gradfuse
