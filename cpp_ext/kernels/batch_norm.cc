#include "gradfuse/ops/batch_norm.h"

#include <string>

namespace gradfuse {

Status Check(const BatchNormArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  GRADFUSE_EXPECT(args.input.shape.rank() >= 2, "input", Describe(args.input), "2 to 8 dimensions (N,C,...)");
  const Shape channels{args.input.shape[1]};
  const auto check = [&](const char* name, const std::optional<Tensor>& tensor) -> Status {
    GRADFUSE_EXPECT(!tensor || tensor->shape == channels, name, Describe(*tensor),
                    Describe(tensor->dtype, channels) + " as the channels of input");
    return {};
  };
  GRADFUSE_RETURN_IF_ERROR(check("weight", args.weight));
  GRADFUSE_RETURN_IF_ERROR(check("bias", args.bias));
  GRADFUSE_RETURN_IF_ERROR(check("running_mean", args.running_mean));
  GRADFUSE_RETURN_IF_ERROR(check("running_var", args.running_var));
  GRADFUSE_EXPECT(args.momentum >= 0 && args.momentum <= 1, "momentum", Describe(args.momentum), "0 to 1");
  GRADFUSE_EXPECT(args.eps >= 0, "eps", Describe(args.eps), "0 or more");
  GRADFUSE_EXPECT(args.relu == 0 || args.relu == 1, "relu", std::to_string(args.relu), "0 or 1");
  return {};
}

std::vector<Shape> OutputShapes(const BatchNormArgs& args) {
  const Shape nothing{0};
  const Shape channels{args.input.shape[1]};
  return {args.input.shape, channels, channels, args.running_mean ? channels : nothing,
          args.running_var ? channels : nothing};
}

}  // namespace gradfuse
