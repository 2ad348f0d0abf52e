#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Batch normalization in training mode, over all but the channels, with n elements a channel:
//   save_mean = mean of input;  save_invstd = 1 / sqrt(variance + eps), of the variance that divides by n
//   output = weight (input - save_mean) save_invstd + bias, with relu at least 0
//   new_running_mean = (1 - momentum) running_mean + momentum save_mean
//   new_running_var = (1 - momentum) running_var + momentum variance, of the variance that divides by n - 1
struct BatchNormArgs {
  static constexpr char kName[] = "BatchNorm";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};

  Tensor input;                        // (N, C, ...)
  std::optional<Tensor> weight;        // (C)
  std::optional<Tensor> bias;          // (C)
  std::optional<Tensor> running_mean;  // (C)
  std::optional<Tensor> running_var;   // (C)
  float momentum = 0.1F;
  float eps = 1e-5F;
  int64_t relu = 0;
  MutableTensor output;  // (N, C, ...)
  // (C) each; the last two (0) without the running statistic.
  MutableTensor save_mean;
  MutableTensor save_invstd;
  MutableTensor new_running_mean;
  MutableTensor new_running_var;

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("input", self.input, kA);
    visitor.Input("weight", self.weight, kT);
    visitor.Input("bias", self.bias, kT);
    visitor.Input("running_mean", self.running_mean, kT);
    visitor.Input("running_var", self.running_var, kT);
    visitor.Attribute("momentum", self.momentum);
    visitor.Attribute("eps", self.eps);
    visitor.Attribute("relu", self.relu);
    visitor.Output("output", self.output, kA);
    visitor.Output("save_mean", self.save_mean, kT);
    visitor.Output("save_invstd", self.save_invstd, kT);
    visitor.Output("new_running_mean", self.new_running_mean, kT);
    visitor.Output("new_running_var", self.new_running_var, kT);
  }
};

GRADFUSE_DECLARE_OP(BatchNormArgs)

}  // namespace gradfuse
