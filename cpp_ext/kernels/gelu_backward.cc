#include "gradfuse/ops/gelu_backward.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const GeluBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.approximate == "none" || args.ByTanh(), "approximate", Quote(args.approximate),
                  "'none' or 'tanh'");
  return CheckShape("self", args.self, args.grad_output.shape, " as grad_output");
}

std::vector<Shape> OutputShapes(const GeluBackwardArgs& args) { return {args.grad_output.shape}; }

}  // namespace gradfuse
