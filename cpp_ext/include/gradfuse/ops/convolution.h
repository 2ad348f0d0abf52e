#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// A convolution over 1 to 3 spatial dimensions, with o over positions of output and k over those of the kernel:
//   output[n,m,o] = bias[m] + sum over c, k of input[n,c,o stride - padding + k dilation] weight[m,c,k]
// Or a transposed one:
//   output[n,m,o stride - padding + k dilation] = bias[m] + sum over c, o, k of input[n,c,o] weight[c,m,k]
// With relu it is at least 0. Nothing is added for positions in the padding. With factors_in_bfloat16, input and weight
// are rounded to it.
struct ConvolutionArgs {
  static constexpr char kName[] = "Convolution";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
  using Numbers = std::vector<int64_t>;

  Tensor input;                // (N, C, ...)
  Tensor weight;               // (M, C / groups, ...), or transposed (C, M / groups, ...)
  std::optional<Tensor> bias;  // (M)
  // Each one number for all spatial dimensions, or one for each; of padding also those at the beginnings and then those
  // at the ends.
  Numbers stride{1};
  Numbers padding{0};
  Numbers dilation{1};
  int64_t transposed = 0;
  Numbers output_padding{0};
  int64_t groups = 1;
  int64_t relu = 0;
  int64_t factors_in_bfloat16 = 0;
  MutableTensor output;  // (N, M, ...)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("input", self.input, kA);
    visitor.Input("weight", self.weight, kT);
    visitor.Input("bias", self.bias, kT);
    visitor.Attribute("stride", self.stride);
    visitor.Attribute("padding", self.padding);
    visitor.Attribute("dilation", self.dilation);
    visitor.Attribute("transposed", self.transposed);
    visitor.Attribute("output_padding", self.output_padding);
    visitor.Attribute("groups", self.groups);
    visitor.Attribute("relu", self.relu);
    visitor.Attribute("factors_in_bfloat16", self.factors_in_bfloat16);
    visitor.Output("output", self.output, kA);
  }
};

GRADFUSE_DECLARE_OP(ConvolutionArgs)

}  // namespace gradfuse
