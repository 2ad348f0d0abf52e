#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradients of a convolution over 1 to 3 spatial dimensions, or of a transposed one. Of a convolution, with o over
// positions of grad_output and k over those of the kernel:
//   grad_input[n,c,o stride - padding + k dilation] = sum over m, o, k of grad_output[n,m,o] weight[m,c,k]
//   grad_weight[m,c,k] = sum over n, o of grad_output[n,m,o] input[n,c,o stride - padding + k dilation]
//   grad_bias[m] = sum over n, o of grad_output[n,m,o]
// In a transposed one grad_output and input change places in both products. Nothing is added for positions in the
// padding. With factors_in_bfloat16, what is multiplied is rounded to it.
struct ConvolutionBackwardArgs {
  static constexpr char kName[] = "ConvolutionBackward";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  using Numbers = std::vector<int64_t>;

  Tensor grad_output;  // (N, M, ...)
  Tensor input;        // (N, C, ...)
  Tensor weight;       // (M, C / groups, ...), or transposed (C, M / groups, ...)
  // Each one number for all spatial dimensions, or one for each; of padding also those at the beginnings and then those
  // at the ends.
  Numbers stride{1};
  Numbers padding{0};
  Numbers dilation{1};
  int64_t transposed = 0;
  Numbers output_padding{0};
  int64_t groups = 1;
  Numbers output_mask{1, 1, 1};
  int64_t factors_in_bfloat16 = 0;
  // Of the shapes of input, weight and (M); (0) where output_mask is 0.
  MutableTensor grad_input;
  MutableTensor grad_weight;
  MutableTensor grad_bias;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_output", self.grad_output, kA);
    visitor.Input("input", self.input, kA);
    visitor.Input("weight", self.weight, kT);
    visitor.Attribute("stride", self.stride);
    visitor.Attribute("padding", self.padding);
    visitor.Attribute("dilation", self.dilation);
    visitor.Attribute("transposed", self.transposed);
    visitor.Attribute("output_padding", self.output_padding);
    visitor.Attribute("groups", self.groups);
    visitor.Attribute("output_mask", self.output_mask);
    visitor.Attribute("factors_in_bfloat16", self.factors_in_bfloat16);
    visitor.Output("grad_input", self.grad_input, kA);
    visitor.Output("grad_weight", self.grad_weight, kT);
    visitor.Output("grad_bias", self.grad_bias, kT);
  }
};

GRADFUSE_DECLARE_OP(ConvolutionBackwardArgs)

}  // namespace gradfuse
