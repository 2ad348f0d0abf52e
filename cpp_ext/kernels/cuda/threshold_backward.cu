#include "gradfuse/ops/threshold_backward.h"
#include "kernels/cuda/elementwise.cuh"

namespace gradfuse::cuda {
namespace {

template <class Real>
struct Gradient {
  Real threshold;

  __device__ Real operator()(Real grad, Real x) const { return x <= threshold ? Real{0} : grad; }
};

template <class T>
Status RunTyped(const ThresholdBackwardArgs& args, const Queue& queue) {
  using Real = ComputeType<T>;
  const Gradient<Real> gradient{static_cast<Real>(args.threshold)};
  return RunElementwise<T>(queue, args.grad_output, args.self, gradient, args.grad_input);
}

}  // namespace

int64_t WorkspaceBytes(const ThresholdBackwardArgs&) { return 0; }

Status Run(const ThresholdBackwardArgs& args, const Queue& queue) {
  return WithFloatType(args.self.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
