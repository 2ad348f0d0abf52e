#include "gradfuse/ops/square_grad.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const SquareGradArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  return CheckShape("x", args.x, args.grad.shape, " as grad");
}

std::vector<Shape> OutputShapes(const SquareGradArgs& args) { return {args.x.shape}; }

}  // namespace gradfuse
