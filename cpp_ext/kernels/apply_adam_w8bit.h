#pragma once

#include <cstdint>

#include "gradfuse/macros.h"
#include "gradfuse/ops/apply_adam_w8bit.h"
#include "kernels/apply_adam_w.h"

namespace gradfuse {

// The map of codes to multiples of a block's scale: see ops/apply_adam_w8bit.h.
constexpr int32_t kMeanZero = 128;
constexpr float kMeanUnits = 127.0F * 127.0F;
constexpr float kRootUnits = 256.0F * 256.0F;

// The square that a code is the root of is a number times this. Scales for which it would overflow count as 0.
GRADFUSE_HOST_DEVICE inline float UnitsPerScale(float units, float scale) {
  constexpr float kSmallest = 0x1p-100F;
  return scale >= kSmallest ? units / scale : 0.0F;
}

// The memory of an update.
template <class T>
struct AdamW8bitTensors {
  const T* parameter;
  const T* gradient;
  const uint8_t* exp_avg;
  const uint8_t* exp_avg_sq;
  const float* exp_avg_scale;
  const float* exp_avg_sq_scale;
  T* new_parameter;
  uint8_t* new_exp_avg;
  uint8_t* new_exp_avg_sq;
  float* new_exp_avg_scale;
  float* new_exp_avg_sq_scale;

  explicit AdamW8bitTensors(const ApplyAdamW8bitArgs& args)
      : parameter(args.parameter.Data<T>()),
        gradient(args.gradient.Data<T>()),
        exp_avg(args.exp_avg.Data<uint8_t>()),
        exp_avg_sq(args.exp_avg_sq.Data<uint8_t>()),
        exp_avg_scale(args.exp_avg_scale.Data<float>()),
        exp_avg_sq_scale(args.exp_avg_sq_scale.Data<float>()),
        new_parameter(args.new_parameter.MutableData<T>()),
        new_exp_avg(args.new_exp_avg.MutableData<uint8_t>()),
        new_exp_avg_sq(args.new_exp_avg_sq.MutableData<uint8_t>()),
        new_exp_avg_scale(args.new_exp_avg_scale.MutableData<float>()),
        new_exp_avg_sq_scale(args.new_exp_avg_sq_scale.MutableData<float>()) {}

  // Goes on to the blocks from `count` on.
  void Advance(int64_t count) {
    const int64_t elements = count * ApplyAdamW8bitArgs::kBlock;
    parameter += elements;
    gradient += elements;
    exp_avg += elements;
    exp_avg_sq += elements;
    exp_avg_scale += count;
    exp_avg_sq_scale += count;
    new_parameter += elements;
    new_exp_avg += elements;
    new_exp_avg_sq += elements;
    new_exp_avg_scale += count;
    new_exp_avg_sq_scale += count;
  }
};

}  // namespace gradfuse
