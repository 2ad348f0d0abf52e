#pragma once

#include "gradfuse/op.h"

namespace gradfuse {

// Gradient of a bias that was added to groups of rows: the sum of each group's rows.
//   with group_idx:  grad_y (R, H), group j is rows group_idx[j-1] to group_idx[j] (from 0 for the first)
//   without:         grad_y (G, C, H), group g is grad_y[g]
struct GroupedBiasAddGradArgs {
  static constexpr char kName[] = "GroupedBiasAddGrad";
  static constexpr TypeSet kTypes{DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  static constexpr int64_t kMaxGroups = 2048;

  Tensor grad_y;
  std::optional<Tensor> group_idx;  // (G,): the end of each group
  MutableTensor grad_bias;          // (G, H)

  template <class Self, class Visitor>
  static void Visit(Self& self, Visitor& visitor) {
    visitor.Input("grad_y", self.grad_y, kT);
    visitor.Input("group_idx", self.group_idx, TypeSet{DType::kInt64, DType::kInt32}.Checked());
    visitor.Output("grad_bias", self.grad_bias, kT);
  }
};

GRADFUSE_DECLARE_OP(GroupedBiasAddGradArgs)

}  // namespace gradfuse
