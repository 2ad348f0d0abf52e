#include "gradfuse/ops/threshold_backward.h"

namespace gradfuse {

Status Check(const ThresholdBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.self.shape == args.grad_output.shape, "self", Describe(args.self),
                  Describe(args.grad_output) + " as grad_output");
  return {};
}

std::vector<Shape> OutputShapes(const ThresholdBackwardArgs& args) { return {args.grad_output.shape}; }

}  // namespace gradfuse
