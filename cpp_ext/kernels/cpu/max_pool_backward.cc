#include "gradfuse/ops/max_pool_backward.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"
#include "kernels/max_pool_geometry.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/max_pool_backward.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

// What the loops of all instruction sets share.
#ifndef GRADFUSE_MAX_POOL_BACKWARD_SHARED
#define GRADFUSE_MAX_POOL_BACKWARD_SHARED
namespace gradfuse::cpu {
namespace {

// Some numbers of a range, which begins at 0.
struct Range {
  int64_t begin;
  int64_t end;
};

// Of `count` numbers, those for which 0 <= first + number step < size.
inline Range Inside(int64_t first, int64_t step, int64_t count, int64_t size) {
  const int64_t begin = first >= 0 ? 0 : std::min(count, CeilDiv(-first, step));
  const int64_t end = first >= size ? 0 : std::min(count, (size - 1 - first) / step + 1);
  return {begin, std::max(begin, end)};
}

// A row of windows of a plane: the elements of their windows that lie in the plane along the first two dimensions.
struct WindowRow {
  WindowRow(const MaxPoolGeometry& g, int64_t depth, int64_t height) {
    const int64_t at[] = {depth, height};
    int64_t first[2];
    for (int axis = 0; axis < 2; ++axis) {
      first[axis] = at[axis] * g.stride[axis] - g.padding[axis];
      taps[axis] = Inside(first[axis], g.dilation[axis], g.kernel[axis], g.sizes[axis]);
    }
    begin = (first[0] * g.sizes[1] + first[1]) * g.sizes[2] - g.padding[2];
  }

  // Where in the plane the element of the first window is, with that of its row first. The place may be in the padding.
  int64_t Place(const MaxPoolGeometry& g, int64_t depth, int64_t height) const {
    return begin + (depth * g.dilation[0] * g.sizes[1] + height * g.dilation[1]) * g.sizes[2];
  }

  Range taps[2];
  int64_t begin;
};

// The place of the maximum of a window that may lie in the padding; -1 where all of it does.
template <class T>
int64_t PlaceOfMaximum(const MaxPoolGeometry& g, const WindowRow& row, int64_t window, const T* plane) {
  const int64_t first = window * g.stride[2] - g.padding[2];
  const Range taps = Inside(first, g.dilation[2], g.kernel[2], g.sizes[2]);
  int64_t found = -1;
  ComputeType<T> best = 0;
  for (int64_t depth = row.taps[0].begin; depth < row.taps[0].end; ++depth) {
    for (int64_t height = row.taps[1].begin; height < row.taps[1].end; ++height) {
      const int64_t line = row.Place(g, depth, height) + window * g.stride[2];
      for (int64_t tap = taps.begin; tap < taps.end; ++tap) {
        const int64_t place = line + tap * g.dilation[2];
        const ComputeType<T> value = ToCompute(plane[place]);
        if (found >= 0 && !(value > best) && value == value) continue;  // NOLINT(misc-redundant-expression): no NaN
        found = place;
        best = value;
      }
    }
  }
  return found;
}

}  // namespace
}  // namespace gradfuse::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class D>
using Places = hn::RebindToSigned<D>;  // of the maxima that the lanes of a vector hold

template <class D>
constexpr int64_t kMostLanes = static_cast<int64_t>(hn::MaxLanes(D()));

// Adds the gradients of `count` windows, at most a vector of them, none of which meets padding along the last
// dimension. `at` is Whole, or Part of so many lanes.
template <int kStride, class T, class At>
GRADFUSE_INLINE void AddWindows(const MaxPoolGeometry& g, const WindowRow& row, At at, int64_t first, int64_t count,
                                const T* grad, const T* plane, ComputeType<T>* sums) {
  using D = TagOf<T>;
  using Real = ComputeType<T>;
  const D d;
  const Places<D> p;
  const int64_t stride = g.stride[2];
  // The elements of neighbouring windows, from the first one's on.
  const auto load = [&](const T* from) HWY_ATTR {
    if constexpr (kStride == 1 || hn::MaxLanes(D()) == 1) {
      return Load(at, d, from);
#if GRADFUSE_HAS_VECTORS
    } else if constexpr (kStride == 2) {
      // Nothing is read behind the last window's element.
      const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
      if constexpr (std::is_same_v<At, Whole>) {
        return hn::ConcatEven(d, Load(at, d, from + lanes), Load(at, d, from));
      } else {
        const int64_t elements = 2 * count - 1;
        const Part low{static_cast<size_t>(std::min(lanes, elements))};
        const Part high{static_cast<size_t>(std::max<int64_t>(0, elements - lanes))};
        const auto behind = high.lanes == 0 ? hn::Zero(d) : Load(high, d, from + lanes);
        return hn::ConcatEven(d, behind, Load(low, d, from));
      }
    } else {
      Real values[kMostLanes<D>];
      for (int64_t i = 0; i < count; ++i) values[i] = ToCompute(from[i * stride]);
      for (int64_t i = count; i < kMostLanes<D>; ++i) values[i] = 0;
      return hn::LoadU(d, values);
#endif
    }
  };
  auto best = hn::Zero(d);
  auto found = hn::Zero(p);
  bool is_first = true;
  for (int64_t depth = row.taps[0].begin; depth < row.taps[0].end; ++depth) {
    for (int64_t height = row.taps[1].begin; height < row.taps[1].end; ++height) {
      const int64_t line = row.Place(g, depth, height) + first * stride;
      for (int64_t tap = 0; tap < g.kernel[2]; ++tap) {
        const int64_t place = line + tap * g.dilation[2];
        const auto value = load(plane + place);
        const auto places = hn::Set(p, static_cast<hn::TFromD<Places<D>>>(place));
        if (is_first) {
          best = value;
          found = places;
          is_first = false;
          continue;
        }
        const auto larger = hn::Or(best < value, hn::IsNaN(value));
        best = hn::IfThenElse(larger, value, best);
        found = hn::IfThenElse(hn::RebindMask(p, larger), places, found);
      }
    }
  }
  hn::TFromD<Places<D>> place[kMostLanes<D>];
  hn::StoreU(found, p, place);
  for (int64_t i = 0; i < count; ++i) sums[place[i] + i * stride] += ToCompute(grad[first + i]);
}

// sums += the gradients of the windows of a plane.
template <int kStride, class T>
void AddPlane(const MaxPoolGeometry& g, const T* grad, const T* plane, ComputeType<T>* sums) {
  using D = TagOf<T>;
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  // The windows that meet no padding along the last dimension.
  const int64_t windows = g.windows[2];
  const int64_t reach = g.dilation[2] * (g.kernel[2] - 1);
  const Range first = Inside(-g.padding[2], g.stride[2], windows, g.sizes[2]);
  const Range last = Inside(reach - g.padding[2], g.stride[2], windows, g.sizes[2]);
  Range whole{first.begin, std::max(first.begin, last.end)};
  // Lanes hold places.
  if (g.plane_size > std::numeric_limits<hn::TFromD<Places<D>>>::max()) whole = {0, 0};
  for (int64_t depth = 0; depth < g.windows[0]; ++depth) {
    for (int64_t height = 0; height < g.windows[1]; ++height, grad += windows) {
      const WindowRow row(g, depth, height);
      if (row.taps[0].begin == row.taps[0].end || row.taps[1].begin == row.taps[1].end) continue;
      const auto add_one = [&](int64_t window) {
        const int64_t place = PlaceOfMaximum(g, row, window, plane);
        if (place >= 0) sums[place] += ToCompute(grad[window]);
      };
      for (int64_t window = 0; window < whole.begin; ++window) add_one(window);
      int64_t window = whole.begin;
      for (; window + lanes < whole.end; window += lanes) {
        AddWindows<kStride>(g, row, Whole(), window, lanes, grad, plane, sums);
      }
      if (window < whole.end) {
        const int64_t rest = whole.end - window;
        AddWindows<kStride>(g, row, Part{static_cast<size_t>(rest)}, window, rest, grad, plane, sums);
      }
      for (window = whole.end; window < windows; ++window) add_one(window);
    }
  }
}

// The gradient of a plane. 16-bit types are added up in `scratch`, a plane of float32.
template <class T>
void PlaneGrad(const MaxPoolGeometry& g, const T* grad, const T* plane, ComputeType<T>* scratch, T* out) {
  constexpr bool kIsShort = !std::is_same_v<T, ComputeType<T>>;
  ComputeType<T>* sums = scratch;
  if constexpr (!kIsShort) sums = out;
  std::fill_n(sums, g.plane_size, ComputeType<T>{0});
  switch (g.stride[2]) {
    case 1: AddPlane<1>(g, grad, plane, sums); break;
    case 2: AddPlane<2>(g, grad, plane, sums); break;
    default: AddPlane<0>(g, grad, plane, sums); break;
  }
  if constexpr (kIsShort) {
    const TagOf<T> d;
    ForEachVector(d, g.plane_size,
                  [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, sums + i), d, out + i); });
  }
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class T>
void RunTyped(const MaxPoolBackwardArgs& args, const ParallelFor& parallel) {
  const MaxPoolGeometry geometry(args);
  if (geometry.planes == 0) return;
  const T* grad = args.grad_output.Data<T>();
  const T* input = args.input.Data<T>();
  T* out = args.grad_input.MutableData<T>();
  const auto plane_grad = GRADFUSE_DISPATCH(PlaneGrad<T>);

  // A task has some planes. Those of 16-bit types have a plane of sums each.
  constexpr bool kIsShort = !std::is_same_v<T, ComputeType<T>>;
  constexpr int64_t kTask = 32768;
  constexpr int64_t kMostScratch = 32;
  int64_t planes_per_task = std::max<int64_t>(1, kTask / geometry.plane_size);
  if (kIsShort) planes_per_task = std::max(planes_per_task, CeilDiv(geometry.planes, kMostScratch));
  const int64_t tasks = CeilDiv(geometry.planes, planes_per_task);
  std::vector<ComputeType<T>> scratch(kIsShort ? static_cast<size_t>(tasks * geometry.plane_size) : 0);
  const int64_t cost = args.grad_output.NumBytes() + args.input.NumBytes() + args.grad_input.NumBytes();
  parallel(tasks, cost, [&](int64_t task) {
    const int64_t first = task * planes_per_task;
    for (int64_t plane = first; plane < std::min(geometry.planes, first + planes_per_task); ++plane) {
      plane_grad(geometry, grad + plane * geometry.window_count, input + plane * geometry.plane_size,
                 kIsShort ? scratch.data() + task * geometry.plane_size : nullptr, out + plane * geometry.plane_size);
    }
  });
}

}  // namespace

void Run(const MaxPoolBackwardArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.input.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
