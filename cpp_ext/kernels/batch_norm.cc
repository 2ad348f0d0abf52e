#include "gradfuse/ops/batch_norm.h"

#include "kernels/checks.h"

namespace gradfuse {

Status Check(const BatchNormArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.input.shape.rank() >= 2, "input", Describe(args.input), "2 to 8 dimensions (N,C,...)");
  const Shape channels{args.input.shape[1]};
  const char* const why = " as the channels of input";
  GRADFUSE_RETURN_IF_ERROR(CheckShape("weight", args.weight, channels, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("bias", args.bias, channels, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("running_mean", args.running_mean, channels, why));
  GRADFUSE_RETURN_IF_ERROR(CheckShape("running_var", args.running_var, channels, why));
  GRADFUSE_EXPECT(args.momentum >= 0 && args.momentum <= 1, "momentum", Describe(args.momentum), "0 to 1");
  GRADFUSE_EXPECT(args.eps >= 0, "eps", Describe(args.eps), "0 or more");
  return CheckFlag("relu", args.relu);
}

std::vector<Shape> OutputShapes(const BatchNormArgs& args) {
  const Shape nothing{0};
  const Shape channels{args.input.shape[1]};
  return {args.input.shape, channels, channels, args.running_mean ? channels : nothing,
          args.running_var ? channels : nothing};
}

}  // namespace gradfuse
