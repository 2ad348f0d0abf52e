#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of maximum pooling over 1 to 3 spatial dimensions: each element of grad_output is added to the element of
// grad_input where its window has its maximum. Window o has the elements o stride - padding + k dilation. Of equal
// maxima the first counts, and of NaN, which is larger than all numbers, the last, as in PyTorch. A window wholly in
// the padding has none.
struct MaxPoolBackwardArgs {
  static constexpr char kName[] = "MaxPoolBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  static constexpr int kMaxSpatial = 3;
  using Numbers = std::vector<int64_t>;

  Tensor grad_output;  // (N, C, ...)
  Tensor input;        // (N, C, ...)
  // Each one number for all spatial dimensions, or one for each; of padding also those at the beginnings and then those
  // at the ends.
  Numbers kernel_size{1};
  Numbers stride{1};
  Numbers padding{0};
  Numbers dilation{1};
  int64_t ceil_mode = 0;
  MutableTensor grad_input;  // of the shape of input

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kT);
    visitor.Input("input", self.input, kT);
    visitor.Attribute("kernel_size", self.kernel_size);
    visitor.Attribute("stride", self.stride);
    visitor.Attribute("padding", self.padding);
    visitor.Attribute("dilation", self.dilation);
    visitor.Attribute("ceil_mode", self.ceil_mode);
    visitor.Output("grad_input", self.grad_input, kT);
  }
};

GRADFUSE_DECLARE_OP(MaxPoolBackwardArgs)

}  // namespace gradfuse
