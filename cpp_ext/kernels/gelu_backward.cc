#include "gradfuse/ops/gelu_backward.h"

namespace gradfuse {

Status Check(const GeluBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.approximate == "none" || args.ByTanh(), "approximate", Quote(args.approximate),
                  "'none' or 'tanh'");
  GRADFUSE_EXPECT(args.self.shape == args.grad_output.shape, "self", Describe(args.self),
                  Describe(args.grad_output) + " as grad_output");
  return {};
}

std::vector<Shape> OutputShapes(const GeluBackwardArgs& args) { return {args.grad_output.shape}; }

}  // namespace gradfuse
