#include "gradfuse/ops/batch_norm_backward.h"

#include <algorithm>
#include <string>

namespace gradfuse {
namespace {

Status CheckShape(const char* name, const Tensor& tensor, const Shape& shape, const char* why) {
  GRADFUSE_EXPECT(tensor.shape == shape, name, Describe(tensor), Describe(tensor.dtype, shape) + why);
  return {};
}

}  // namespace

Status Check(const BatchNormBackwardArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const Shape& whole = args.input.shape;
  GRADFUSE_EXPECT(whole.rank() >= 2, "input", Describe(args.input), "2 to 8 dimensions (N,C,...)");
  GRADFUSE_RETURN_IF_ERROR(CheckShape("grad_output", args.grad_output, whole, " as input"));
  if (args.relu_output) GRADFUSE_RETURN_IF_ERROR(CheckShape("relu_output", *args.relu_output, whole, " as input"));
  const Shape channels{whole[1]};
  const char* const why = " as the channels of input";
  if (args.weight) GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", *args.weight, channels, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("save_mean", args.save_mean, channels, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("save_invstd", args.save_invstd, channels, why));
  const bool mask_fits = args.output_mask.size() == 3 && std::all_of(args.output_mask.begin(), args.output_mask.end(),
                                                                     [](int64_t one) { return one == 0 || one == 1; });
  GRADFUSE_EXPECT(mask_fits, "output_mask", Describe(args.output_mask), "3 numbers, 0 or 1");
  return {};
}

std::vector<Shape> OutputShapes(const BatchNormBackwardArgs& args) {
  const Shape nothing{0};
  const Shape channels{args.input.shape[1]};
  return {args.output_mask[0] != 0 ? args.input.shape : nothing, args.output_mask[1] != 0 ? channels : nothing,
          args.output_mask[2] != 0 ? channels : nothing};
}

}  // namespace gradfuse
