#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "gradfuse/parallel.h"
#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_direct.h"
#include "kernels/cpu/packed_loops.h"
#include "kernels/cpu/task_memory.h"
#include "kernels/dispatch.h"

// Where tasks of convolutions put what they pack.
namespace gradfuse::cpu {

using Geometry = ConvolutionGeometry;

// How the large side is packed along a dimension, so that one place of the kernel meets elements that are neighbours: a
// row for each remainder of positions by the stride, with the zeros of the padding that windows meet. Rows lie one
// after the other. Where one ends in zeros and the next begins with some, they share them.
struct PackedAxis {
  struct Row {
    int64_t remainder;
    int64_t windows;  // positions that are met
    int64_t begin;    // of the elements that are there
    int64_t end;
  };

  PackedAxis(const Geometry& g, int axis) : pitch(g.small[axis]) {
    const int64_t stride = g.stride[axis];
    for (int64_t tap = 0; tap < g.kernel[axis]; ++tap) {
      const int64_t reach = tap * g.dilation[axis];
      size_t found = 0;
      while (found < rows.size() && rows[found].remainder != reach % stride) ++found;
      if (found == rows.size()) rows.push_back({reach % stride, 0, 0, 0});
      rows[found].windows = std::max(rows[found].windows, g.small[axis] + reach / stride);
      row_of_tap.push_back(static_cast<int64_t>(found));
      shift_of_tap.push_back(reach / stride);
    }
    for (Row& row : rows) {
      const int64_t first = g.padding[axis] - row.remainder;  // of the elements, in positions before the stride
      row.begin = first <= 0 ? 0 : CeilDiv(first, stride);
      const int64_t last = g.large[axis] + first;
      row.end = last <= 0 ? 0 : std::min(row.windows, CeilDiv(last, stride));
      if (row.begin >= row.end) {
        row.begin = row.windows;
        row.end = 0;
      }
      pitch = std::max({pitch, row.end, row.windows - row.begin});
    }
  }

  std::vector<Row> rows;
  std::vector<int64_t> row_of_tap;
  std::vector<int64_t> shift_of_tap;
  int64_t pitch;
};

// The same of all dimensions: planes, one for each row of each dimension with each of the others. With several items at
// once each place has an element of every item, side by side, and sizes, pitches and shifts count elements.
class PackedPlanes {
 public:
  explicit PackedPlanes(const Geometry& g, int64_t items = 1)
      : g_(g),
        items_(items),
        depth_(g, 0),
        height_(g, 1),
        width_(g, 2),
        size_(depth_.pitch * height_.pitch * width_.pitch * items),
        count_(static_cast<int64_t>(depth_.rows.size() * height_.rows.size() * width_.rows.size())) {
    for (int64_t tap0 = 0; tap0 < g.kernel[0]; ++tap0) {
      for (int64_t tap1 = 0; tap1 < g.kernel[1]; ++tap1) {
        for (int64_t tap2 = 0; tap2 < g.kernel[2]; ++tap2) {
          plane_of_tap_.push_back(
              (depth_.row_of_tap[tap0] * static_cast<int64_t>(height_.rows.size()) + height_.row_of_tap[tap1]) *
                  static_cast<int64_t>(width_.rows.size()) +
              width_.row_of_tap[tap2]);
          shift_of_tap_.push_back(
              PlaceOf(depth_.shift_of_tap[tap0], height_.shift_of_tap[tap1], width_.shift_of_tap[tap2]));
        }
      }
    }
    largest_shift_ = *std::max_element(shift_of_tap_.begin(), shift_of_tap_.end());
  }

  int64_t size() const { return size_; }                   // of a plane
  int64_t count() const { return count_; }                 // of planes
  int64_t pitch() const { return width_.pitch * items_; }  // of rows
  int64_t plane_pitch() const { return height_.pitch * pitch(); }
  int64_t largest_shift() const { return largest_shift_; }
  int64_t plane_of_tap(int64_t tap) const { return plane_of_tap_[tap]; }
  int64_t shift_of_tap(int64_t tap) const { return shift_of_tap_[tap]; }
  // By how many rows a tap shifts a plane.
  int64_t rows_of_tap(int64_t tap) const { return height_.shift_of_tap[tap / g_.kernel[2] % g_.kernel[1]]; }
  // Whether every element of the large side is in a plane.
  bool has_all() const {
    const PackedAxis* const axes[] = {&depth_, &height_, &width_};
    for (int axis = 0; axis < Geometry::kSpatial; ++axis) {
      int64_t elements = 0;
      for (const auto& row : axes[axis]->rows) elements += std::max<int64_t>(0, row.end - row.begin);
      if (elements != g_.large[axis]) return false;
    }
    return true;
  }
  // Whether a plane is the large side as it is.
  bool is_plain() const { return count_ == 1 && size_ == g_.large_size && size_ == g_.small_size; }

  // Packs a channel of an item to planes that are `distance` apart. What is not written was 0 before.
  template <class T, class Pack>
  T PackLarge(const Pack& pack, const T* from, T* to, int64_t distance) const {
    T check = 0;
    for (const auto& depth : depth_.rows) {
      for (const auto& height : height_.rows) {
        for (const auto& width : width_.rows) {
          for (int64_t z = depth.begin; z < depth.end && width.begin < width.end && height.begin < height.end; ++z) {
            const int64_t plane = ElementOf(0, z, depth.remainder);
            const int64_t row = plane * g_.large[1] + ElementOf(1, height.begin, height.remainder);
            const int64_t first = row * g_.large[2] + ElementOf(2, width.begin, width.remainder);
            check += pack(from + first, g_.stride[1] * g_.large[2], g_.stride[2], height.end - height.begin,
                          width.end - width.begin, to + PlaceOf(z, height.begin, width.begin), pitch());
          }
          to += distance;
        }
      }
    }
    return check;
  }

  // Writes the elements of plane `index` to where they are in a channel.
  template <class T>
  void UnpackLarge(int64_t index, const T* from, T* to) const {
    const auto& width = width_.rows[static_cast<size_t>(index) % width_.rows.size()];
    const auto& height = height_.rows[static_cast<size_t>(index) / width_.rows.size() % height_.rows.size()];
    const auto& depth = depth_.rows[static_cast<size_t>(index) / width_.rows.size() / height_.rows.size()];
    const int64_t step = g_.stride[2];
    for (int64_t z = depth.begin; z < depth.end; ++z) {
      for (int64_t y = height.begin; y < height.end; ++y) {
        const int64_t row = ElementOf(0, z, depth.remainder) * g_.large[1] + ElementOf(1, y, height.remainder);
        T* const into = to + row * g_.large[2] + ElementOf(2, width.begin, width.remainder);
        const T* const row_from = from + (z * height_.pitch + y) * width_.pitch + width.begin;
        if (step == 1) {
          std::copy_n(row_from, std::max<int64_t>(0, width.end - width.begin), into);
        } else {
          for (int64_t i = 0; i < width.end - width.begin; ++i) into[i * step] = row_from[i];
        }
      }
    }
  }

  // A row of a plane, number `y`: where it is packed, and where its `count` elements are in a channel of the large
  // side.
  struct LargeRow {
    int64_t plane;
    int64_t y;
    int64_t from;
    int64_t to;
    int64_t count;
  };

  // The rows of all planes that have elements.
  std::vector<LargeRow> LargeRows() const {
    std::vector<LargeRow> rows;
    int64_t plane = 0;
    for (const auto& depth : depth_.rows) {
      for (const auto& height : height_.rows) {
        for (const auto& width : width_.rows) {
          for (int64_t z = depth.begin; z < depth.end && width.begin < width.end; ++z) {
            for (int64_t y = height.begin; y < height.end; ++y) {
              const int64_t row = ElementOf(0, z, depth.remainder) * g_.large[1] + ElementOf(1, y, height.remainder);
              rows.push_back({plane, y, PlaceOf(z, y, width.begin),
                              row * g_.large[2] + ElementOf(2, width.begin, width.remainder), width.end - width.begin});
            }
          }
          ++plane;
        }
      }
    }
    return rows;
  }

  // Writes the windows of packed sums to a channel of the small side. Returns whether all are finite.
  template <class T, class Write>
  bool UnpackSmall(const Write& write, const T* from, const Finish<T>& finish, T* to) const {
    bool is_finite = true;
    for (int64_t z = 0; z < g_.small[0]; ++z) {
      is_finite &= write(from + z * plane_pitch(), pitch(), g_.small[1], g_.small[2], finish,
                         to + z * g_.small[1] * g_.small[2]);
    }
    return is_finite;
  }

  // Where windows [begin, end) of items lie, whose planes are `item_pitch` apart.
  std::vector<Piece> PiecesOfSmall(int64_t begin, int64_t end, int64_t item_pitch) const {
    std::vector<Piece> pieces;
    for (int64_t place = begin; place < end;) {
      const int64_t x = place % g_.small[2];
      const int64_t y = place / g_.small[2] % g_.small[1];
      const int64_t z = place / g_.small[2] / g_.small[1] % g_.small[0];
      const int64_t count = std::min(g_.small[2] - x, end - place);
      pieces.push_back(
          {place / g_.small_size * item_pitch + z * plane_pitch() + y * pitch() + x, place - begin, count});
      place += count;
    }
    return pieces;
  }

  // The same for the small side, which has one plane.
  template <class T, class Pack>
  T PackSmall(const Pack& pack, const T* from, T* to) const {
    T check = 0;
    for (int64_t z = 0; z < g_.small[0]; ++z) {
      check += pack(from + z * g_.small[1] * g_.small[2], g_.small[2], 1, g_.small[1], g_.small[2],
                    to + z * plane_pitch(), pitch());
    }
    return check;
  }

 private:
  int64_t ElementOf(int axis, int64_t position, int64_t remainder) const {
    return position * g_.stride[axis] + remainder - g_.padding[axis];
  }
  int64_t PlaceOf(int64_t z, int64_t y, int64_t x) const {
    return ((z * height_.pitch + y) * width_.pitch + x) * items_;
  }

  const Geometry& g_;
  int64_t items_;
  PackedAxis depth_;
  PackedAxis height_;
  PackedAxis width_;
  int64_t size_;
  int64_t count_;
  std::vector<int64_t> plane_of_tap_;
  std::vector<int64_t> shift_of_tap_;
  int64_t largest_shift_;
};

constexpr int64_t kProductBytes = 512 << 10;  // what a task packs is to fit the second-level cache
constexpr int64_t kLongestVector = 16;

// An odd number of cache lines, so that rows of this length do not meet in few places of the cache.
inline int64_t OddLines(int64_t elements) { return (CeilDiv(elements, kLongestVector) | 1) * kLongestVector; }

// What tasks found on the way.
struct Findings {
  std::atomic<bool> not_finite{false};
  std::atomic<bool> no_memory{false};
};

// Adds up sums of slices, in order.
template <class T>
void AddSlices(const T* sums, int64_t slices, int64_t count, T* out, const ParallelFor& parallel) {
  constexpr int64_t kTask = 4096;
  parallel(CeilDiv(count, kTask), (slices + 1) * count * static_cast<int64_t>(sizeof(T)), [&](int64_t task) {
    const int64_t begin = task * kTask;
    const int64_t end = std::min(count, begin + kTask);
    std::copy(sums + begin, sums + end, out + begin);
    for (int64_t slice = 1; slice < slices; ++slice) {
      const T* const from = sums + slice * count;
      for (int64_t i = begin; i < end; ++i) out[i] += from[i];
    }
  });
}

// A channel of the large side with the padding that windows meet, and without what none meets.
class PaddedPlane {
 public:
  explicit PaddedPlane(const Geometry& g) : g_(g) {
    for (int axis = 0; axis < Geometry::kSpatial; ++axis) {
      extent_[axis] = (g.small[axis] - 1) * g.stride[axis] + (g.kernel[axis] - 1) * g.dilation[axis] + 1;
      begin_[axis] = std::min(g.padding[axis], extent_[axis]);
      end_[axis] = std::clamp(g.large[axis] + g.padding[axis], begin_[axis], extent_[axis]);
    }
    direct::ForEachTap(g, [&](int64_t, int64_t tap0, int64_t tap1, int64_t tap2) {
      shifts_.push_back(At(tap0 * g.dilation[0], tap1 * g.dilation[1], tap2 * g.dilation[2]));
    });
  }

  int64_t size() const { return extent_[0] * extent_[1] * extent_[2]; }
  const std::vector<int64_t>& shifts() const { return shifts_; }  // of the places of the kernel
  int64_t At(int64_t z, int64_t y, int64_t x) const { return (z * extent_[1] + y) * extent_[2] + x; }

  template <class T>
  void Copy(const T* from, T* to) const {
    for (int64_t z = begin_[0]; z < end_[0]; ++z) {
      for (int64_t y = begin_[1]; y < end_[1]; ++y) {
        const int64_t row = (z - g_.padding[0]) * g_.large[1] + y - g_.padding[1];
        std::copy_n(from + row * g_.large[2] + begin_[2] - g_.padding[2], end_[2] - begin_[2],
                    to + At(z, y, begin_[2]));
      }
    }
  }

 private:
  const Geometry& g_;
  std::array<int64_t, Geometry::kSpatial> extent_{};
  std::array<int64_t, Geometry::kSpatial> begin_{};
  std::array<int64_t, Geometry::kSpatial> end_{};
  std::vector<int64_t> shifts_;
};

// Whether packed planes are about as large as the tensors: padding and dilation may be billions.
inline bool CanPack(const Geometry& g) {
  constexpr double kSmall = 1 << 16;
  constexpr double kMostTimes = 16;
  double packed = 1;
  for (int axis = 0; axis < Geometry::kSpatial; ++axis) {
    const auto stride = static_cast<double>(g.stride[axis]);
    const double reach = static_cast<double>(g.kernel[axis] - 1) * static_cast<double>(g.dilation[axis]);
    packed *= std::min(stride, static_cast<double>(g.kernel[axis])) *
              (static_cast<double>(g.small[axis]) + reach / stride + 1);
  }
  return packed <= std::max(kSmall, kMostTimes * static_cast<double>(g.small_size + g.large_size));
}

inline bool IsEmpty(const Geometry& g) { return g.batch * g.small_size * g.small_channels * g.large_channels == 0; }

}  // namespace gradfuse::cpu
