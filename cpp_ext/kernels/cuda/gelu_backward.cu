#include "gradfuse/ops/gelu_backward.h"
#include "kernels/cuda/elementwise.cuh"

namespace gradfuse::cuda {
namespace {

// The slope of the unit at x; at -x it is 1 less that, and below 0 nothing cancels.
template <bool kByTanh>
__device__ float Slope(float x) {
  // From the bounds on a slope is 0 or 1.
  const float size = fminf(fabsf(x), kByTanh ? 10.f : 15.f);
  const float square = size * size;
  float below;
  if constexpr (kByTanh) {
    const float twice_scaled = 1.59576912f * size;
    const float share = 1 / (1 + expf(twice_scaled * (1 + 0.044715f * square)));
    below = share * (1 - (1 - share) * twice_scaled * (1 + 0.134145f * square));
  } else {
    below = 0.5f * erfcf(0.70710678f * size) - 0.39894228f * size * expf(-0.5f * square);
  }
  below += 0 * x;  // NaN at infinity, where the formula has it
  return x < 0 ? below : 1 - below;
}

template <bool kByTanh>
struct Gradient {
  __device__ float operator()(float grad, float x) const { return grad * Slope<kByTanh>(x); }
};

template <class T>
Status RunTyped(const GeluBackwardArgs& args, const Queue& queue) {
  const auto run = [&](auto gradient) {
    return RunElementwise<T>(queue, args.grad_output, args.self, gradient, args.grad_input);
  };
  return args.ByTanh() ? run(Gradient<true>()) : run(Gradient<false>());
}

}  // namespace

int64_t WorkspaceBytes(const GeluBackwardArgs&) { return 0; }

Status Run(const GeluBackwardArgs& args, const Queue& queue) {
  return WithShortFloatType(args.self.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
