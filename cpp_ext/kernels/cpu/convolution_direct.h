#pragma once

#include <algorithm>
#include <cstdint>

#include "gradfuse/parallel.h"
#include "kernels/convolution_geometry.h"
#include "kernels/dispatch.h"

// The same as convolutions.h by plain loops over nothing but what windows meet: for what the faster loops do not do,
// and where infinities and NaN must not be multiplied with zeros that stand for padding.
namespace gradfuse::cpu::direct {

using Geometry = ConvolutionGeometry;

// The windows [begin, end) that meet the large side with an element of the kernel, of all along a dimension.
struct Span {
  Span(const Geometry& g, int axis, int64_t tap) : offset(tap * g.dilation[axis] - g.padding[axis]) {
    const int64_t stride = g.stride[axis];
    begin = offset >= 0 ? 0 : CeilDiv(-offset, stride);
    end = g.large[axis] <= offset ? 0 : std::min(g.small[axis], CeilDiv(g.large[axis] - offset, stride));
    begin = std::min(begin, end);
  }

  int64_t begin;
  int64_t end;
  int64_t offset;  // of what window 0 meets, on the large side
};

// Calls body(small, large, count) for each row of windows that meet elements of the large side at a place of the
// kernel: where the first window and the first element are in their planes.
template <class Body>
void ForEachRow(const Geometry& g, int64_t tap0, int64_t tap1, int64_t tap2, const Body& body) {
  const Span depth(g, 0, tap0);
  const Span height(g, 1, tap1);
  const Span width(g, 2, tap2);
  if (width.begin == width.end) return;
  for (int64_t z = depth.begin; z < depth.end; ++z) {
    for (int64_t y = height.begin; y < height.end; ++y) {
      const int64_t large_row = (z * g.stride[0] + depth.offset) * g.large[1] + y * g.stride[1] + height.offset;
      body((z * g.small[1] + y) * g.small[2] + width.begin,
           large_row * g.large[2] + width.begin * g.stride[2] + width.offset, width.end - width.begin);
    }
  }
}

// Calls body(tap, tap0, tap1, tap2) for each place of the kernel.
template <class Body>
void ForEachTap(const Geometry& g, const Body& body) {
  int64_t tap = 0;
  for (int64_t tap0 = 0; tap0 < g.kernel[0]; ++tap0) {
    for (int64_t tap1 = 0; tap1 < g.kernel[1]; ++tap1) {
      for (int64_t tap2 = 0; tap2 < g.kernel[2]; ++tap2) body(tap++, tap0, tap1, tap2);
    }
  }
}

template <class T>
void GradWeight(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  const int64_t filters = g.groups * g.small_channels * g.large_channels;
  const int64_t taps = g.kernel_size;
  parallel(filters, filters * taps * g.batch * g.small_size, [&](int64_t filter) {
    const int64_t small_channel = filter / g.large_channels;
    const int64_t large_channel = small_channel / g.small_channels * g.large_channels + filter % g.large_channels;
    ForEachTap(g, [&](int64_t tap, int64_t tap0, int64_t tap1, int64_t tap2) {
      double sum = 0;
      for (int64_t n = 0; n < g.batch; ++n) {
        const T* s = small + (n * g.groups * g.small_channels + small_channel) * g.small_size;
        const T* l = large + (n * g.groups * g.large_channels + large_channel) * g.large_size;
        ForEachRow(g, tap0, tap1, tap2, [&](int64_t small_at, int64_t large_at, int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            sum += static_cast<double>(s[small_at + i]) * static_cast<double>(l[large_at + i * g.stride[2]]);
          }
        });
      }
      out[filter * taps + tap] = static_cast<T>(sum);
    });
  });
}

template <class T>
void TransposedConvolution(const Geometry& g, const T* small, const T* weight, T* out, const ParallelFor& parallel) {
  const int64_t channels = g.groups * g.large_channels;
  const int64_t taps = g.kernel_size;
  const int64_t cost = g.batch * channels * g.small_channels * taps * g.small_size;
  parallel(g.batch * channels, cost, [&](int64_t task) {
    const int64_t n = task / channels;
    const int64_t channel = task % channels;
    const int64_t group = channel / g.large_channels;
    T* to = out + task * g.large_size;
    std::fill_n(to, g.large_size, T{});
    for (int64_t m = group * g.small_channels; m < (group + 1) * g.small_channels; ++m) {
      const T* s = small + (n * g.groups * g.small_channels + m) * g.small_size;
      const T* w = weight + (m * g.large_channels + channel % g.large_channels) * taps;
      ForEachTap(g, [&](int64_t tap, int64_t tap0, int64_t tap1, int64_t tap2) {
        const T factor = w[tap];
        ForEachRow(g, tap0, tap1, tap2, [&](int64_t small_at, int64_t large_at, int64_t count) {
          for (int64_t i = 0; i < count; ++i) to[large_at + i * g.stride[2]] += factor * s[small_at + i];
        });
      });
    }
  });
}

template <class T>
void Convolution(const Geometry& g, const T* large, const T* weight, const T* bias, bool relu, T* out,
                 const ParallelFor& parallel) {
  const int64_t channels = g.groups * g.small_channels;
  const int64_t taps = g.kernel_size;
  const int64_t cost = g.batch * channels * g.large_channels * taps * g.small_size;
  parallel(g.batch * channels, cost, [&](int64_t task) {
    const int64_t n = task / channels;
    const int64_t channel = task % channels;
    const int64_t first = channel / g.small_channels * g.large_channels;
    T* to = out + task * g.small_size;
    std::fill_n(to, g.small_size, bias == nullptr ? T{} : bias[channel]);
    for (int64_t c = 0; c < g.large_channels; ++c) {
      const T* l = large + (n * g.groups * g.large_channels + first + c) * g.large_size;
      const T* w = weight + (channel * g.large_channels + c) * taps;
      ForEachTap(g, [&](int64_t tap, int64_t tap0, int64_t tap1, int64_t tap2) {
        const T factor = w[tap];
        ForEachRow(g, tap0, tap1, tap2, [&](int64_t small_at, int64_t large_at, int64_t count) {
          for (int64_t i = 0; i < count; ++i) to[small_at + i] += factor * l[large_at + i * g.stride[2]];
        });
      });
    }
    for (int64_t i = 0; relu && i < g.small_size; ++i) to[i] = to[i] < 0 ? T{} : to[i];
  });
}

}  // namespace gradfuse::cpu::direct
