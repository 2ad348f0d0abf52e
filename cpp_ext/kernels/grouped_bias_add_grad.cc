#include "gradfuse/ops/grouped_bias_add_grad.h"

namespace gradfuse {
namespace {

template <class Index>
Status CheckEnds(const Tensor& group_idx, int64_t rows) {
  const Index* ends = group_idx.Data<Index>();
  const int64_t groups = group_idx.shape[0];
  int64_t previous = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = ends[group];
    const std::string name = "group_idx[" + std::to_string(group) + "]";
    GRADFUSE_EXPECT(end >= previous, name, std::to_string(end),
                    "at least " + std::to_string(previous) + ": ends of groups do not decrease");
    if (group + 1 == groups) {
      GRADFUSE_EXPECT(end == rows, name, std::to_string(end),
                      std::to_string(rows) + ": the last group ends with the last row of grad_y");
    }
    previous = end;
  }
  return {};
}

}  // namespace

Status Check(const GroupedBiasAddGradArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  if (!args.group_idx) {
    GRADFUSE_EXPECT(args.grad_y.shape.rank() == 3, "grad_y", Describe(args.grad_y),
                    "3 dimensions (G,C,H), as group_idx is absent");
    return {};
  }
  GRADFUSE_EXPECT(args.grad_y.shape.rank() == 2, "grad_y", Describe(args.grad_y),
                  "2 dimensions (R,H), as group_idx is given");
  const Tensor& group_idx = *args.group_idx;
  GRADFUSE_EXPECT(group_idx.shape.rank() == 1 && group_idx.shape[0] <= GroupedBiasAddGradArgs::kMaxGroups, "group_idx",
                  Describe(group_idx),
                  "shape (G) with G at most " + std::to_string(GroupedBiasAddGradArgs::kMaxGroups));
  const int64_t rows = args.grad_y.shape[0];
  GRADFUSE_EXPECT(group_idx.shape[0] > 0 || rows == 0, "group_idx", Describe(group_idx),
                  "a group for each of the " + std::to_string(rows) + " rows of grad_y");
  if (!group_idx.on_host) return {};
  return group_idx.dtype == DType::kInt32 ? CheckEnds<int32_t>(group_idx, rows) : CheckEnds<int64_t>(group_idx, rows);
}

std::vector<Shape> OutputShapes(const GroupedBiasAddGradArgs& args) {
  const Shape& grad_y = args.grad_y.shape;
  return {args.group_idx ? Shape{args.group_idx->shape[0], grad_y[1]} : Shape{grad_y[0], grad_y[2]}};
}

}  // namespace gradfuse
