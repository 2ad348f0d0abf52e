#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Elementwise operators in one pass over memory. expression assigns y0, and y1 and y2 if they are wanted, as in
//   t = Sigmoid(x0); y0 = Mul(Mul(x0, t), x1)
// docs/operators.md has its grammar and operators. They compute in float32 and round once each. Every input that is
// there is read, but x0 need not be. Kept() is true where the dropout keeps an element: where its 31 random bits, of
// seed, draw + drawn and its place in the shape of x0, are at least dropout_threshold.
struct PointwiseArgs {
  static constexpr char kName[] = "Pointwise";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr int kOverwrittenInput = 0;  // x0
  static constexpr int kInputs = 8;
  static constexpr int kOutputs = 3;

  Tensor x0;                             // of the shape of the outputs
  std::optional<Tensor> x[kInputs - 1];  // x1 to x7, which broadcast to it
  std::optional<Tensor> seed;            // one element
  std::optional<Tensor> drawn;           // one element
  std::string expression = "y0 = x0";
  int64_t dropout_threshold = 0;
  int64_t draw = 0;
  MutableTensor y[kOutputs];  // of the shape of x0; (0) where expression does not assign it

  // Null where there is none.
  const Tensor* Input(int index) const {
    if (index == 0) return &x0;
    const std::optional<Tensor>& other = x[index - 1];
    return other ? &*other : nullptr;
  }

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("x0", self.x0, kT);
    static constexpr const char* kNames[] = {"x1", "x2", "x3", "x4", "x5", "x6", "x7"};
    for (int index = 0; index < kInputs - 1; ++index) visitor.Input(kNames[index], self.x[index], kT);
    visitor.Input("seed", self.seed, DType::kInt64);
    visitor.Input("drawn", self.drawn, DType::kInt64);
    visitor.Attribute("expression", self.expression);
    visitor.Attribute("dropout_threshold", self.dropout_threshold);
    visitor.Attribute("draw", self.draw);
    visitor.Output("y0", self.y[0], kT);
    visitor.Output("y1", self.y[1], kT);
    visitor.Output("y2", self.y[2], kT);
  }
};

GRADFUSE_DECLARE_OP(PointwiseArgs)

}  // namespace gradfuse
