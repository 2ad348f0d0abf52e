#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "gradfuse/signature.h"
#include "kernels/checks.h"

// Code that the cross-entropy ops share. Their arguments have target, reduction, ignore_index and label_smoothing.
namespace gradfuse {

template <class Args>
Status CheckTargets(const Args& args, int64_t classes) {
  const int64_t* target = args.target.template Data<int64_t>();
  for (int64_t row = 0; row < args.target.shape[0]; ++row) {
    const bool fits = target[row] >= 0 && target[row] < classes;
    GRADFUSE_EXPECT(
        fits || target[row] == args.ignore_index, "target[" + std::to_string(row) + "]", std::to_string(target[row]),
        "a class in [0, " + std::to_string(classes) + ") or ignore_index " + std::to_string(args.ignore_index));
  }
  return {};
}

template <class Args>
Status CheckOptions(const Args& args) {
  const std::string& reduction = args.reduction;
  GRADFUSE_EXPECT(reduction == "mean" || reduction == "sum" || reduction == "none", "reduction", Quote(reduction),
                  "'mean', 'sum' or 'none'");
  GRADFUSE_EXPECT(args.label_smoothing >= 0 && args.label_smoothing <= 1, "label_smoothing",
                  Describe(args.label_smoothing), "a number in [0, 1]");
  return {};
}

template <class Args>
Status CheckGradLoss(const Args& args, const Tensor& grad_loss, int64_t rows) {
  if (args.reduction == "none") {
    return CheckShape("grad_loss", grad_loss, {rows}, ", one value a row, as reduction is 'none'");
  }
  GRADFUSE_EXPECT(grad_loss.shape == Shape{} || grad_loss.shape == Shape{1}, "grad_loss", Describe(grad_loss),
                  "shape () or (1), as reduction is '" + args.reduction + "'");
  return {};
}

// The scalars of all rows, as in the formulas at CrossEntropyLossGradArgs and LinearCrossEntropyArgs.
struct CrossEntropyCoefficients {
  double target = 0;     // q_i = target * g_i * w[y_i]
  double smoothing = 0;  // s_i = smoothing * g_i
  double weight_sum = 0;
  double denominator = 1;
};

// Of checked arguments; `weight` may be null.
template <class Args, class Real>
CrossEntropyCoefficients CoefficientsOf(const Args& args, int64_t classes, const Real* weight) {
  const int64_t* target = args.target.template Data<int64_t>();
  double denominator = 1;
  if (args.reduction == "mean") {
    denominator = 0;
    for (int64_t row = 0; row < args.target.shape[0]; ++row) {
      if (target[row] != args.ignore_index) denominator += weight ? weight[target[row]] : 1;
    }
  }
  double weight_sum = static_cast<double>(classes);
  if (weight) {
    weight_sum = 0;
    for (int64_t c = 0; c < classes; ++c) weight_sum += weight[c];
  }
  const double smoothing = args.label_smoothing;
  return {(1 - smoothing) / denominator, smoothing / (denominator * static_cast<double>(classes)), weight_sum,
          denominator};
}

}  // namespace gradfuse
