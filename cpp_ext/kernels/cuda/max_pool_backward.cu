#include "gradfuse/ops/max_pool_backward.h"
#include "kernels/cuda/device.cuh"
#include "kernels/max_pool_geometry.h"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Params {
  MaxPoolGeometry g;
  const T* grad;
  const T* input;
  T* out;
};

// The place in a plane of the maximum of a window; -1 where all of it lies in the padding.
template <class T>
__device__ int64_t PlaceOfMaximum(const MaxPoolGeometry& g, const int64_t (&window)[3], const T* plane) {
  int64_t found = -1;
  ComputeType<T> best = 0;
  int64_t at[3];
  for (int64_t depth = 0; depth < g.kernel[0]; ++depth) {
    at[0] = window[0] * g.stride[0] - g.padding[0] + depth * g.dilation[0];
    if (at[0] < 0 || at[0] >= g.sizes[0]) continue;
    for (int64_t height = 0; height < g.kernel[1]; ++height) {
      at[1] = window[1] * g.stride[1] - g.padding[1] + height * g.dilation[1];
      if (at[1] < 0 || at[1] >= g.sizes[1]) continue;
      for (int64_t width = 0; width < g.kernel[2]; ++width) {
        at[2] = window[2] * g.stride[2] - g.padding[2] + width * g.dilation[2];
        if (at[2] < 0 || at[2] >= g.sizes[2]) continue;
        const int64_t place = (at[0] * g.sizes[1] + at[1]) * g.sizes[2] + at[2];
        const ComputeType<T> value = Widen(plane[place]);
        if (found >= 0 && !(value > best) && value == value) continue;
        found = place;
        best = value;
      }
    }
  }
  return found;
}

// The windows along a dimension that meet an element: from the first to the last there may be others between them.
struct Windows {
  __device__ Windows(const MaxPoolGeometry& g, int axis, int64_t element) {
    const int64_t behind = element + g.padding[axis] - g.dilation[axis] * (g.kernel[axis] - 1);
    first = behind <= 0 ? 0 : (behind + g.stride[axis] - 1) / g.stride[axis];
    last = (element + g.padding[axis]) / g.stride[axis];
    if (last >= g.windows[axis]) last = g.windows[axis] - 1;
  }

  int64_t first;
  int64_t last;
};

// Each thread adds up the gradient of an element of the input, window by window.
template <class T>
__global__ void __launch_bounds__(kThreads) GradInput(const __grid_constant__ Params<T> params) {
  const MaxPoolGeometry& g = params.g;
  const int64_t total = g.planes * g.plane_size;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < total; index += stride) {
    const int64_t plane = index / g.plane_size;
    const int64_t place = index % g.plane_size;
    const T* input = params.input + plane * g.plane_size;
    const T* grad = params.grad + plane * g.window_count;
    const Windows depths(g, 0, place / g.sizes[2] / g.sizes[1]);
    const Windows heights(g, 1, place / g.sizes[2] % g.sizes[1]);
    const Windows widths(g, 2, place % g.sizes[2]);
    ComputeType<T> sum = 0;
    int64_t window[3];
    for (window[0] = depths.first; window[0] <= depths.last; ++window[0]) {
      for (window[1] = heights.first; window[1] <= heights.last; ++window[1]) {
        for (window[2] = widths.first; window[2] <= widths.last; ++window[2]) {
          if (PlaceOfMaximum(g, window, input) != place) continue;
          sum += Widen(grad[(window[0] * g.windows[1] + window[1]) * g.windows[2] + window[2]]);
        }
      }
    }
    params.out[index] = Narrow<T>(sum);
  }
}

template <class T>
Status RunTyped(const MaxPoolBackwardArgs& args, const Queue& queue) {
  const Params<T> params{MaxPoolGeometry(args), args.grad_output.Data<T>(), args.input.Data<T>(),
                         args.grad_input.MutableData<T>()};
  return Launch(queue, GradInput<T>, CeilDiv(args.input.NumElements(), kThreads), kThreads, params);
}

}  // namespace

int64_t WorkspaceBytes(const MaxPoolBackwardArgs&) { return 0; }

Status Run(const MaxPoolBackwardArgs& args, const Queue& queue) {
  return WithFloatType(args.input.dtype, [&](auto type) { return RunTyped<decltype(type)>(args, queue); });
}

}  // namespace gradfuse::cuda
