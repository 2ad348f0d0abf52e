#include "gradfuse/ops/threshold_backward.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const ThresholdBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  return CheckShape("self", args.self, args.grad_output.shape, " as grad_output");
}

std::vector<Shape> OutputShapes(const ThresholdBackwardArgs& args) { return {args.grad_output.shape}; }

}  // namespace gradfuse
