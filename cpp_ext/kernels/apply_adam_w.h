#pragma once

#include <cmath>
#include <cstdint>

#include "gradfuse/macros.h"
#include "gradfuse/ops/apply_adam_w.h"

namespace gradfuse {

// The factors of the loops of ApplyAdamW and ApplyAdamW8bit: computed in float64 and rounded once.
struct AdamWFactors {
  float gradient_scale;
  float kept_share;    // of the parameter, before the update
  float weight_decay;  // what of the parameter is added to the gradient
  float beta1;
  float beta1_rest;  // 1 - beta1
  float beta2;
  float beta2_rest;
  float step_size;
  float root_correction;
  float root_factor;  // 1 / root_correction
  float epsilon;
};

// As an attribute 0.999 is 0.99900001, and 1 - beta would be off by a hundred-thousandth.
GRADFUSE_HOST_DEVICE inline double ExactBeta(float beta) {
  constexpr double kUnits = 1e7;
  return std::nearbyint(beta * kUnits) / kUnits;
}

// Whether new_exp_avg is computed from the gradient's end, as torch.lerp begins at the nearer one.
inline bool FromGradient(const ApplyAdamWArgs& args) { return 1 - ExactBeta(args.beta1) >= 0.5; }

// Whether weight decay is added to the gradient.
template <class Args>
bool Penalizes(const Args& args) {
  return args.decoupled_weight_decay == 0 && args.weight_decay != 0;
}

// The attributes of an update, and its factors at a learning rate and a step.
struct AdamWScalars {
  float beta1;
  float beta2;
  float epsilon;
  float weight_decay;
  bool decoupled;

  template <class Args>
  explicit AdamWScalars(const Args& args)
      : beta1(args.beta1),
        beta2(args.beta2),
        epsilon(args.epsilon),
        weight_decay(args.weight_decay),
        decoupled(args.decoupled_weight_decay != 0) {}

  GRADFUSE_HOST_DEVICE AdamWFactors At(float learning_rate, int64_t step, float gradient_scale) const {
    const double rate = learning_rate;
    const double count = static_cast<double>(step) + 1;
    const double exact1 = ExactBeta(beta1);
    const double exact2 = ExactBeta(beta2);
    AdamWFactors factors{};
    factors.gradient_scale = gradient_scale;
    factors.kept_share = decoupled ? static_cast<float>(1 - rate * weight_decay) : 1.0F;
    factors.weight_decay = weight_decay;
    factors.beta1 = static_cast<float>(exact1);
    factors.beta1_rest = static_cast<float>(1 - exact1);
    factors.beta2 = static_cast<float>(exact2);
    factors.beta2_rest = static_cast<float>(1 - exact2);
    factors.step_size = static_cast<float>(rate / (1 - std::pow(exact1, count)));
    const double root_correction = std::sqrt(1 - std::pow(exact2, count));
    factors.root_correction = static_cast<float>(root_correction);
    factors.root_factor = static_cast<float>(1 / root_correction);
    factors.epsilon = epsilon;
    return factors;
  }
};

// The memory of an update.
template <class T>
struct AdamWTensors {
  const T* parameter;
  const T* gradient;
  const T* exp_avg;
  const T* exp_avg_sq;
  T* new_parameter;
  T* new_exp_avg;
  T* new_exp_avg_sq;

  explicit AdamWTensors(const ApplyAdamWArgs& args)
      : parameter(args.parameter.Data<T>()),
        gradient(args.gradient.Data<T>()),
        exp_avg(args.exp_avg.Data<T>()),
        exp_avg_sq(args.exp_avg_sq.Data<T>()),
        new_parameter(args.new_parameter.MutableData<T>()),
        new_exp_avg(args.new_exp_avg.MutableData<T>()),
        new_exp_avg_sq(args.new_exp_avg_sq.MutableData<T>()) {}

  // Goes on to the elements from `count` on.
  void Advance(int64_t count) {
    parameter += count;
    gradient += count;
    exp_avg += count;
    exp_avg_sq += count;
    new_parameter += count;
    new_exp_avg += count;
    new_exp_avg_sq += count;
  }
};

}  // namespace gradfuse
