#include "gradfuse/ops/max_pool_backward.h"

#include <algorithm>
#include <cmath>
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

// Of an element of a plane, as wide as numbers are.
template <class T>
using PlaceOf = std::conditional_t<sizeof(ComputeType<T>) == 8, int64_t, int32_t>;

// Some numbers of a range, which begins at 0.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
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

  Range taps[2] = {};
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
        if (found >= 0 && !(value > best) && !std::isnan(value)) continue;
        found = place;
        best = value;
      }
    }
  }
  return found;
}

// Whether windows are of 2 x 2 elements and lie in the plane side by side.
inline bool IsOfSquares(const MaxPoolGeometry& g) {
  if (g.kernel[0] != 1 || g.stride[0] != 1 || g.padding[0] != 0) return false;
  for (int axis = 1; axis < MaxPoolGeometry::kSpatial; ++axis) {
    if (g.kernel[axis] != 2 || g.stride[axis] != 2 || g.padding[axis] != 0 || g.dilation[axis] != 1) return false;
    if (2 * g.windows[axis] > g.sizes[axis]) return false;
  }
  return true;
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

// How loops reach the elements from `begin` on of `count` that two vectors side by side have.
GRADFUSE_INLINE Part PartOfTwo(int64_t lanes, int64_t begin, int64_t count) {
  return Part{static_cast<size_t>(std::max<int64_t>(0, std::min(lanes, count - begin)))};
}

// Every second element, from the first on and from the second on, of the elements at `from`; `count` may be read.
template <class D>
struct Pairs {
  hn::Vec<D> even;
  hn::Vec<D> odd;
};
template <class D, class T>
GRADFUSE_INLINE Pairs<D> LoadPairs(D d, const T* from, int64_t count) {
  if constexpr (hn::MaxLanes(D()) == 1) {
    return {Load(Whole(), d, from), count > 1 ? Load(Whole(), d, from + 1) : hn::Zero(d)};
#if GRADFUSE_HAS_VECTORS
  } else {
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    if (count >= 2 * lanes) {
      const auto low = Load(Whole(), d, from);
      const auto high = Load(Whole(), d, from + lanes);
      return {hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low)};
    }
    const auto low = Load(PartOfTwo(lanes, 0, count), d, from);
    const auto high = count <= lanes ? hn::Zero(d) : Load(PartOfTwo(lanes, lanes, count), d, from + lanes);
    return {hn::ConcatEven(d, high, low), hn::ConcatOdd(d, high, low)};
#endif
  }
}

// Writes `count` elements of what LoadPairs loads.
template <class D, class T>
GRADFUSE_INLINE void StorePairs(D d, hn::Vec<D> even, hn::Vec<D> odd, T* to, int64_t count) {
  if constexpr (hn::MaxLanes(D()) == 1) {
    Store(Whole(), even, d, to);
    if (count > 1) Store(Whole(), odd, d, to + 1);
#if GRADFUSE_HAS_VECTORS
  } else {
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto low = hn::InterleaveWholeLower(d, even, odd);
    const auto high = hn::InterleaveWholeUpper(d, even, odd);
    if (count >= 2 * lanes) {
      Store(Whole(), low, d, to);
      Store(Whole(), high, d, to + lanes);
      return;
    }
    Store(PartOfTwo(lanes, 0, count), low, d, to);
    if (count > lanes) Store(PartOfTwo(lanes, lanes, count), high, d, to + lanes);
#endif
  }
}

// Whether a window's maximum moves from `best` to an element behind it.
template <class V>
GRADFUSE_INLINE auto Replaces(V value, V best) {
  return hn::Or(best < value, hn::IsNaN(value));
}

// The gradient of a plane with windows of 2 x 2 that lie in it side by side. Each element is written once.
template <class T>
void PlaneGradOfSquares(const MaxPoolGeometry& g, const T* grad, const T* plane, T* out) {
  const TagOf<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t windows = g.windows[2];
  const int64_t width = g.sizes[2];
  const T* end = plane + g.plane_size;
  for (int64_t row = 0; row < g.windows[1]; ++row, grad += windows, plane += 2 * width, out += 2 * width) {
    for (int64_t window = 0; window < windows; window += lanes) {
      const int64_t count = std::min(lanes, windows - window);
      const auto top = LoadPairs(d, plane + 2 * window, end - plane - 2 * window);
      const auto bottom = LoadPairs(d, plane + width + 2 * window, end - plane - width - 2 * window);
      const auto second = Replaces(top.odd, top.even);
      auto best = hn::IfThenElse(second, top.odd, top.even);
      const auto third = Replaces(bottom.even, best);
      best = hn::IfThenElse(third, bottom.even, best);
      const auto fourth = Replaces(bottom.odd, best);
      const auto of_all =
          count == lanes ? Load(Whole(), d, grad + window) : Load(Part{static_cast<size_t>(count)}, d, grad + window);
      const auto of_three = hn::IfThenZeroElse(fourth, of_all);
      const auto of_two = hn::IfThenZeroElse(third, of_three);
      StorePairs(d, hn::IfThenZeroElse(second, of_two), hn::IfThenElseZero(second, of_two), out + 2 * window,
                 2 * count);
      StorePairs(d, hn::IfThenElseZero(third, of_three), hn::IfThenElseZero(fourth, of_all), out + width + 2 * window,
                 2 * count);
    }
    std::fill(out + 2 * windows, out + width, T{});
    std::fill(out + width + 2 * windows, out + 2 * width, T{});
  }
  std::fill_n(out, (g.sizes[1] - 2 * g.windows[1]) * width, T{});
}

// The places of the maxima of `count` windows, at most a vector of them, none of which meets padding along the last
// dimension, each less the distance of its window from the first of these.
template <int kStride, class T>
GRADFUSE_INLINE hn::Vec<Places<TagOf<T>>> FindMaxima(const MaxPoolGeometry& g, const WindowRow& row, int64_t first,
                                                     int64_t count, const T* plane) {
  using D = TagOf<T>;
  const D d;
  const Places<D> p;
  const int64_t stride = g.stride[2];
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  // Whole vectors are loaded up to the end of the plane, also where lanes hold no window: loads of a part are slow.
  const auto load = [&](int64_t place) HWY_ATTR {
    const T* from = plane + place;
    const int64_t readable = g.plane_size - place;
    if constexpr (kStride == 2 && hn::MaxLanes(D()) > 1) {
      return LoadPairs(d, from, readable).even;
    } else if constexpr (kStride == 1 || hn::MaxLanes(D()) == 1) {
      return readable >= lanes ? Load(Whole(), d, from) : Load(Part{static_cast<size_t>(readable)}, d, from);
    } else {
      ComputeType<T> values[kMostLanes<D>];
      for (int64_t i = 0; i < count; ++i) values[i] = ToCompute(from[i * stride]);
      for (int64_t i = count; i < kMostLanes<D>; ++i) values[i] = 0;
      return hn::LoadU(d, values);
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
        const auto value = load(place);
        const auto places = hn::Set(p, static_cast<PlaceOf<T>>(place));
        if (is_first) {
          best = value;
          found = places;
          is_first = false;
          continue;
        }
        const auto replaces = Replaces(value, best);
        best = hn::IfThenElse(replaces, value, best);
        found = hn::IfThenElse(hn::RebindMask(p, replaces), places, found);
      }
    }
  }
  return found;
}

// The windows of a row that meet no padding along the last dimension.
GRADFUSE_INLINE Range WholeWindows(const MaxPoolGeometry& g) {
  const int64_t reach = g.dilation[2] * (g.kernel[2] - 1);
  const Range first = Inside(-g.padding[2], g.stride[2], g.windows[2], g.sizes[2]);
  const Range last = Inside(reach - g.padding[2], g.stride[2], g.windows[2], g.sizes[2]);
  return {first.begin, std::max(first.begin, last.end)};
}

// sums += the gradients of a row of windows.
template <int kStride, class T>
void AddRow(const MaxPoolGeometry& g, const WindowRow& row, const T* grad, const T* plane, ComputeType<T>* sums) {
  using D = TagOf<T>;
  const D d;
  const Places<D> p;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const bool fits = g.plane_size <= std::numeric_limits<PlaceOf<T>>::max();
  const Range whole = fits ? WholeWindows(g) : Range{0, 0};
  const auto add_one = [&](int64_t window) {
    const int64_t place = PlaceOfMaximum(g, row, window, plane);
    if (place >= 0) sums[place] += ToCompute(grad[window]);
  };
  for (int64_t window = 0; window < whole.begin; ++window) add_one(window);
  for (int64_t window = whole.begin; window < whole.end; window += lanes) {
    const int64_t count = std::min(lanes, whole.end - window);
    const auto found = FindMaxima<kStride>(g, row, window, count, plane);
    PlaceOf<T> places[kMostLanes<D>];
    hn::StoreU(found, p, places);
    for (int64_t i = 0; i < count; ++i) sums[places[i] + i * g.stride[2]] += ToCompute(grad[window + i]);
  }
  for (int64_t window = whole.end; window < g.windows[2]; ++window) add_one(window);
}

// sums += the gradients of the windows of a plane.
template <int kStride, class T>
void AddPlane(const MaxPoolGeometry& g, const T* grad, const T* plane, ComputeType<T>* sums) {
  for (int64_t depth = 0; depth < g.windows[0]; ++depth) {
    for (int64_t height = 0; height < g.windows[1]; ++height, grad += g.windows[2]) {
      const WindowRow row(g, depth, height);
      const bool meets = row.taps[0].begin < row.taps[0].end && row.taps[1].begin < row.taps[1].end;
      if (meets) AddRow<kStride>(g, row, grad, plane, sums);
    }
  }
}

// The gradient of a plane. 16-bit types are added up in `scratch`, a plane of float32.
template <class T>
void PlaneGrad(const MaxPoolGeometry& g, const T* grad, const T* plane, ComputeType<T>* scratch, T* out) {
  if (IsOfSquares(g)) return PlaneGradOfSquares(g, grad, plane, out);
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
    ForEachVector(d, g.plane_size, [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, sums + i), d, out + i); });
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

  // A task has some planes.
  constexpr bool kIsShort = !std::is_same_v<T, ComputeType<T>>;
  constexpr int64_t kTask = 32768;
  constexpr int64_t kMostTasks = 64;
  const int64_t planes_per_task =
      std::max({int64_t{1}, kTask / geometry.plane_size, CeilDiv(geometry.planes, kMostTasks)});
  const int64_t tasks = CeilDiv(geometry.planes, planes_per_task);
  const int64_t scratch_size = kIsShort && !IsOfSquares(geometry) ? geometry.plane_size : 0;
  std::vector<ComputeType<T>> scratch(static_cast<size_t>(tasks * scratch_size));
  const int64_t cost = args.grad_output.NumBytes() + args.input.NumBytes() + args.grad_input.NumBytes();
  parallel(tasks, cost, [&](int64_t task) {
    const int64_t first = task * planes_per_task;
    for (int64_t plane = first; plane < std::min(geometry.planes, first + planes_per_task); ++plane) {
      plane_grad(geometry, grad + plane * geometry.window_count, input + plane * geometry.plane_size,
                 scratch.data() + task * scratch_size, out + plane * geometry.plane_size);
    }
  });
}

}  // namespace

void Run(const MaxPoolBackwardArgs& args, const ParallelFor& parallel) {
  WithFloatType(args.input.dtype, [&](auto type) { RunTyped<decltype(type)>(args, parallel); });
}

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
