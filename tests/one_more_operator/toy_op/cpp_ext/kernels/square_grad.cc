#include "gradfuse/ops/square_grad.h"

namespace gradfuse {

Status Check(const SquareGradArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.x.shape == args.grad.shape, "x", Describe(args.x), Describe(args.grad) + " as grad");
  return {};
}

std::vector<Shape> OutputShapes(const SquareGradArgs& args) { return {args.x.shape}; }

}  // namespace gradfuse
