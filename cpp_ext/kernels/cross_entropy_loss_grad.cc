#include "gradfuse/ops/cross_entropy_loss_grad.h"

namespace gradfuse {
namespace {

Status CheckTargets(const CrossEntropyLossGradArgs& args) {
  const int64_t rows = args.log_prob.shape[0];
  const int64_t classes = args.log_prob.shape[1];
  const int64_t* target = args.target.Data<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    const bool fits = target[row] >= 0 && target[row] < classes;
    GRADFUSE_EXPECT(
        fits || target[row] == args.ignore_index, "target[" + std::to_string(row) + "]", std::to_string(target[row]),
        "a class in [0, " + std::to_string(classes) + ") or ignore_index " + std::to_string(args.ignore_index));
  }
  return {};
}

}  // namespace

Status Check(const CrossEntropyLossGradArgs& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const std::string& reduction = args.reduction;
  GRADFUSE_EXPECT(reduction == "mean" || reduction == "sum" || reduction == "none", "reduction", Quote(reduction),
                  "'mean', 'sum' or 'none'");
  GRADFUSE_EXPECT(args.label_smoothing >= 0 && args.label_smoothing <= 1, "label_smoothing",
                  Describe(args.label_smoothing), "a number in [0, 1]");
  if (args.grad_zloss || args.lse_for_zloss) {
    return {StatusCode::kNotSupported, std::string(args.grad_zloss ? "grad_zloss" : "lse_for_zloss") +
                                           " is given; expected none: the z-loss is not supported"};
  }
  if (args.lse_square_scale_for_zloss != 0) {
    return {StatusCode::kNotSupported, "lse_square_scale_for_zloss is " + Describe(args.lse_square_scale_for_zloss) +
                                           "; expected 0: the z-loss is not supported"};
  }

  const Shape& log_prob = args.log_prob.shape;
  GRADFUSE_EXPECT(log_prob.rank() == 2 && log_prob[1] > 0, "log_prob", Describe(args.log_prob),
                  "shape (N,C) with C > 0");
  const Shape per_row{log_prob[0]};
  if (reduction == "none") {
    GRADFUSE_EXPECT(args.grad_loss.shape == per_row, "grad_loss", Describe(args.grad_loss),
                    Describe(args.grad_loss.dtype, per_row) + ", one value a row, as reduction is 'none'");
  } else {
    GRADFUSE_EXPECT(args.grad_loss.shape == Shape{} || args.grad_loss.shape == Shape{1}, "grad_loss",
                    Describe(args.grad_loss), "shape () or (1), as reduction is '" + reduction + "'");
  }
  GRADFUSE_EXPECT(args.target.shape == per_row, "target", Describe(args.target),
                  Describe(args.target.dtype, per_row) + ", one class a row of log_prob");
  if (args.weight) {
    const Shape per_class{log_prob[1]};
    GRADFUSE_EXPECT(args.weight->shape == per_class, "weight", Describe(*args.weight),
                    Describe(args.weight->dtype, per_class) + ", one weight a class of log_prob");
  }
  return args.target.on_host ? CheckTargets(args) : Status();
}

std::vector<Shape> OutputShapes(const CrossEntropyLossGradArgs& args) { return {args.log_prob.shape}; }

}  // namespace gradfuse
