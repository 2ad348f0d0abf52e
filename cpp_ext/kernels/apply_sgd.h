#pragma once

#include <cstdint>

#include "gradfuse/ops/apply_sgd.h"

namespace gradfuse {

// How the gradient becomes the direction of an update.
enum class SgdMomentum : uint8_t { kNone, kPlain, kNesterov };

inline SgdMomentum MomentumOf(const ApplySgdArgs& args) {
  if (!args.momentum_buffer) return SgdMomentum::kNone;
  return args.nesterov != 0 ? SgdMomentum::kNesterov : SgdMomentum::kPlain;
}

// The memory of an update.
template <class T>
struct SgdTensors {
  const T* parameter;
  const T* gradient;
  const T* momentum_buffer;  // or null, as is the next but one
  T* new_parameter;
  T* new_momentum_buffer;

  explicit SgdTensors(const ApplySgdArgs& args)
      : parameter(args.parameter.Data<T>()),
        gradient(args.gradient.Data<T>()),
        momentum_buffer(args.momentum_buffer ? args.momentum_buffer->Data<T>() : nullptr),
        new_parameter(args.new_parameter.MutableData<T>()),
        new_momentum_buffer(args.momentum_buffer ? args.new_momentum_buffer.MutableData<T>() : nullptr) {}

  // Goes on to the elements from `count` on.
  void Advance(int64_t count) {
    parameter += count;
    gradient += count;
    new_parameter += count;
    if (momentum_buffer == nullptr) return;
    momentum_buffer += count;
    new_momentum_buffer += count;
  }
};

}  // namespace gradfuse
