#pragma once

#include <vector>

#include "gradfuse/parallel.h"
#include "gradfuse/queue.h"
#include "gradfuse/signature.h"

namespace gradfuse {

// Gradient of the squares of all elements with respect to them: grad_x = factor x grad.
struct SquareGradArgs {
  static constexpr char kName[] = "SquareGrad";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor grad;
  Tensor x;
  float factor = 2;
  Tensor grad_x;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad", self.grad, kT);
    visitor.Input("x", self.x, kT);
    visitor.Attribute("factor", self.factor);
    visitor.Output("grad_x", self.grad_x, kT);
  }
};

Status Check(const SquareGradArgs& args);
std::vector<Shape> OutputShapes(const SquareGradArgs& args);
namespace cpu {
void Run(const SquareGradArgs& args, const ParallelFor& parallel);
}
namespace cuda {
int64_t WorkspaceBytes(const SquareGradArgs& args);
Status Run(const SquareGradArgs& args, const Queue& queue);
}  // namespace cuda

}  // namespace gradfuse
