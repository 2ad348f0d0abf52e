#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/packed_loops.h"
#include "kernels/cpu/packed_planes.h"
#include "kernels/dispatch.h"

// The weights of convolutions in tiles of channels, as AddFilters takes them.
namespace gradfuse::cpu {

// The weights of a convolution by tile of channels of the small side: rows of (channel of the large side, place of the
// kernel) as they are, and of a tile that is not full a copy with rows of zeros.
template <class T>
class WeightTiles {
 public:
  WeightTiles(const Geometry& g, const T* weight)
      : weight_(weight),
        channels_(g.small_channels),
        rows_(g.large_channels * g.kernel_size),
        at_once_(channels_ == 1 ? 1 : kChannelsAtOnce) {
    const int64_t left = channels_ % at_once_;
    if (left == 0) return;
    last_.resize(static_cast<size_t>(g.groups * at_once_ * rows_));
    for (int64_t group = 0; group < g.groups; ++group) {
      std::copy_n(weight + ((group + 1) * channels_ - left) * rows_, left * rows_,
                  last_.data() + group * at_once_ * rows_);
    }
  }

  int64_t at_once() const { return at_once_; }
  int64_t count() const { return CeilDiv(channels_, at_once_); }
  int64_t rows() const { return rows_; }
  const T* Of(int64_t group, int64_t tile) const {
    if ((tile + 1) * at_once_ > channels_) return last_.data() + group * at_once_ * rows_;
    return weight_ + (group * channels_ + tile * at_once_) * rows_;
  }

 private:
  const T* weight_;
  int64_t channels_;
  int64_t rows_;
  int64_t at_once_;
  std::vector<T> last_;
};

template <class T>
struct Finishes {
  const T* bias;  // or null
  bool relu;

  Finish<T> Of(int64_t channel) const {
    return {bias == nullptr ? T{} : bias[channel], relu ? T{} : -std::numeric_limits<T>::infinity()};
  }
};

// What each packed plane of the large side needs of the weights, by tile of channels of the large side.
class FilterOrder {
 public:
  FilterOrder(const Geometry& g, const PackedPlanes& planes)
      : g_(g), at_once_(g.large_channels == 1 ? 1 : kChannelsAtOnce) {
    const int64_t channels_of_last = g.large_channels - (tiles() - 1) * at_once_;
    for (int64_t plane = 0; plane < planes.count(); ++plane) {
      shifts_.emplace_back();
      rows_.emplace_back();
      for (int64_t tap = 0; tap < g.kernel_size; ++tap) {
        if (planes.plane_of_tap(tap) != plane) continue;
        shifts_.back().push_back(planes.shift_of_tap(tap));
        rows_.back().push_back(planes.rows_of_tap(tap));
        for (int64_t channel = 0; channel < at_once_; ++channel) {
          order_.push_back(channel * g.kernel_size + tap);
          order_of_last_.push_back(channel < channels_of_last ? channel * g.kernel_size + tap : -1);
        }
      }
      plane_ends_.push_back(static_cast<int64_t>(order_.size()));
    }
  }

  int64_t at_once() const { return at_once_; }
  int64_t tiles() const { return CeilDiv(g_.large_channels, at_once_); }
  int64_t tile_size() const { return g_.small_channels * g_.kernel_size * at_once_; }
  const std::vector<int64_t>& ShiftsOf(int64_t plane) const { return shifts_[static_cast<size_t>(plane)]; }
  // By how many rows the taps of a plane shift it.
  const std::vector<int64_t>& RowsOf(int64_t plane) const { return rows_[static_cast<size_t>(plane)]; }
  // Where the weights of a plane begin in a packed tile.
  int64_t Begin(int64_t plane) const {
    return plane == 0 ? 0 : g_.small_channels * plane_ends_[static_cast<size_t>(plane - 1)];
  }

  template <class T>
  FilterTile<T> Tile(const T* weight, int64_t group, int64_t tile, T* packed) const {
    const int64_t begin = tile * at_once_;
    const int64_t count = std::min(at_once_, g_.large_channels - begin);
    FilterTile<T> own{};
    own.weights = weight + (group * g_.small_channels * g_.large_channels + begin) * g_.kernel_size;
    own.pitch = g_.large_channels * g_.kernel_size;
    own.small_channels = g_.small_channels;
    own.count = count * g_.kernel_size;
    own.order = count < at_once_ ? order_of_last_.data() : order_.data();
    own.plane_ends = plane_ends_.data();
    own.plane_count = static_cast<int64_t>(plane_ends_.size());
    own.packed = packed;
    return own;
  }

 private:
  const Geometry& g_;
  int64_t at_once_;
  std::vector<std::vector<int64_t>> shifts_;
  std::vector<std::vector<int64_t>> rows_;
  std::vector<int64_t> order_;
  std::vector<int64_t> order_of_last_;
  std::vector<int64_t> plane_ends_;
};

}  // namespace gradfuse::cpu
