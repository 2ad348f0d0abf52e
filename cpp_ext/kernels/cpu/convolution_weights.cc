#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_direct.h"
#include "kernels/cpu/convolution_items.h"
#include "kernels/cpu/convolutions.h"
#include "kernels/cpu/packed_loops.h"
#include "kernels/cpu/packed_planes.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convolution_weights.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/packed_loops-inl.h"

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// The weight gradient as products of matrices, of the small side by (channel of the large side, place of the kernel),
// over all places of all items: each column is a packed plane from a place on. Products with the zeros between rows
// and in the padding are 0 if all numbers are finite; returns false where one is not.
template <class T>
bool ProductsOfPlanes(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  const PackedPlanes planes(g);
  const int64_t taps = g.kernel_size;
  const int64_t all_columns = g.large_channels * taps;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_products = GRADFUSE_DISPATCH(AddProducts<T>);

  // What a part of a block of rows and columns takes is to fit the second-level cache.
  constexpr int64_t kMostRows = 64;
  const int64_t most_channels = std::clamp<int64_t>(128 / planes.count(), 8, 64);
  constexpr int64_t kFewestPlaces = 1024;
  constexpr int64_t kTasks = 16;
  constexpr int64_t kPackedBytes = 2 << 20;
  const int64_t row_blocks = CeilDiv(g.small_channels, kMostRows);
  const int64_t column_blocks = CeilDiv(g.large_channels, most_channels);
  const int64_t rows_of_block = CeilDiv(g.small_channels, row_blocks);
  const int64_t channels_of_block = CeilDiv(g.large_channels, column_blocks);
  const int64_t blocks = g.groups * row_blocks * column_blocks;
  const int64_t most_slices = std::max<int64_t>(1, g.batch * planes.size() / kFewestPlaces);
  const int64_t wanted_slices = std::min({CeilDiv(kTasks, blocks), most_slices, g.batch});
  const int64_t items_of_slice = CeilDiv(g.batch, wanted_slices);
  const int64_t slices = CeilDiv(g.batch, items_of_slice);

  // Planes that need no packing are used where they are, if they are long enough.
  const bool in_place = planes.is_plain() && planes.size() >= 256;
  const int64_t item_bytes =
      (rows_of_block + channels_of_block * planes.count()) * planes.size() * static_cast<int64_t>(sizeof(T));
  const int64_t items_at_once =
      in_place ? 1 : std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(item_bytes, 1), 1, items_of_slice);
  // An odd number of cache lines, so that planes do not meet in few places of the cache.
  const int64_t needed = items_at_once * planes.size() + planes.largest_shift() + kLongestVector;
  const int64_t length = (CeilDiv(needed, kLongestVector) | 1) * kLongestVector;
  const int64_t part = taps == 1 ? 512 : 1024;

  const int64_t filters = g.groups * g.small_channels * all_columns;
  std::vector<T> sums(static_cast<size_t>(slices > 1 ? slices * filters : 0));
  Findings findings;
  const int64_t cost = g.batch * g.small_size * filters;
  parallel(blocks * slices, cost, [&](int64_t task) {
    const int64_t slice = task % slices;
    const int64_t block = task / slices;
    const int64_t group = block / (row_blocks * column_blocks);
    const int64_t first_row = block / column_blocks % row_blocks * rows_of_block;
    const int64_t first_channel = block % column_blocks * channels_of_block;
    const int64_t rows = std::min(rows_of_block, g.small_channels - first_row);
    const int64_t channels = std::min(channels_of_block, g.large_channels - first_channel);
    if (rows <= 0 || channels <= 0) return;
    const TaskMemory<T> packed_rows(in_place ? 0 : rows * length);
    const TaskMemory<T> packed_channels(in_place ? 0 : channels * planes.count() * length);
    const std::unique_ptr<const T*[]> columns(new (std::nothrow) const T*[channels * taps + kLongestVector]);
    if (packed_rows.data() == nullptr || packed_channels.data() == nullptr || columns == nullptr) {
      findings.no_memory = true;
      return;
    }
    T* const slice_sums = slices > 1 ? sums.data() + slice * filters : out;
    Products<T> products{};
    products.pairs = g.pairs;
    products.row_count = rows;
    products.columns = columns.get();
    products.column_count = channels * taps;
    products.columns_first = taps == 1;
    products.sums = slice_sums + (group * g.small_channels + first_row) * all_columns + first_channel * taps;
    products.sums_pitch = all_columns;
    products.rows = packed_rows.data();
    products.row_pitch = length;
    const auto set_columns = [&](const T* first, int64_t distance) {
      for (int64_t column = 0; column < channels * taps + kLongestVector; ++column) {
        const int64_t real = std::min(column, channels * taps - 1);
        columns[column] = first + (real / taps * planes.count() + planes.plane_of_tap(real % taps)) * distance +
                          planes.shift_of_tap(real % taps);
      }
    };
    set_columns(packed_channels.data(), length);
    T check = 0;
    const int64_t begin = slice * items_of_slice;
    const int64_t end = std::min(g.batch, begin + items_of_slice);
    for (int64_t first = begin; first < end; first += items_at_once) {
      const int64_t items = std::min(items_at_once, end - first);
      for (int64_t item = 0; item < items; ++item) {
        const int64_t n = first + item;
        const T* const s = small + ((n * g.groups + group) * g.small_channels + first_row) * g.small_size;
        const T* const l = large + ((n * g.groups + group) * g.large_channels + first_channel) * g.large_size;
        if (in_place) {
          products.rows = s;
          products.row_pitch = g.small_size;
          set_columns(l, g.large_size);
          continue;
        }
        for (int64_t row = 0; row < rows; ++row) {
          check +=
              planes.PackSmall(pack, s + row * g.small_size, packed_rows.data() + row * length + item * planes.size());
        }
        for (int64_t channel = 0; channel < channels; ++channel) {
          check += planes.PackLarge(pack, l + channel * g.large_size,
                                    packed_channels.data() + channel * planes.count() * length + item * planes.size(),
                                    length);
        }
      }
      add_products(products, items * planes.size(), 1, part, first == begin);
    }
    if (!(check == 0)) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  if (findings.not_finite) return false;
  if (slices > 1) AddSlices(sums.data(), slices, filters, out, parallel);
  return true;
}

// The same where each group has one channel on both sides: of each channel the large side is packed, and rows of the
// small side are used where they are.
template <class T>
bool ProductsOfChannels(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  const PackedPlanes planes(g);
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_taps = GRADFUSE_DISPATCH(AddTaps<T>);
  const int64_t length = planes.size() + planes.largest_shift() + kLongestVector;
  // Channels of one item lie one after the other: a task reads some of them in one sweep.
  constexpr int64_t kSweepBytes = 32 << 10;
  constexpr int64_t kTasks = 16;
  const int64_t plane_bytes = g.large_size * static_cast<int64_t>(sizeof(T));
  const int64_t channels_of_task =
      std::max<int64_t>(1, std::min(CeilDiv(kSweepBytes, plane_bytes), CeilDiv(g.groups, kTasks)));
  Findings findings;
  parallel(CeilDiv(g.groups, channels_of_task), g.batch * g.groups * g.small_size * taps, [&](int64_t task) {
    const int64_t first = task * channels_of_task;
    const int64_t end = std::min(g.groups, first + channels_of_task);
    const TaskMemory<T> packed(planes.count() * length);
    if (packed.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    std::fill_n(out + first * taps, (end - first) * taps, T{});
    T check = 0;
    for (int64_t n = 0; n < g.batch; ++n) {
      for (int64_t channel = first; channel < end; ++channel) {
        const T* const rows = small + (n * g.groups + channel) * g.small_size;
        check += planes.PackLarge(pack, large + (n * g.groups + channel) * g.large_size, packed.data(), length);
        for (int64_t tap = 0; tap < taps; tap += kTapsAtOnce) {
          const int64_t count = std::min(kTapsAtOnce, taps - tap);
          for (int64_t z = 0; z < g.small[0]; ++z) {
            const T* at[kTapsAtOnce];
            for (int64_t one = 0; one < count; ++one) {
              at[one] = packed.data() + planes.plane_of_tap(tap + one) * length + planes.shift_of_tap(tap + one) +
                        z * planes.plane_pitch();
            }
            check += add_taps(rows + z * g.small[1] * g.small[2], g.small[1], g.small[2], at, planes.pitch(), count,
                              out + channel * taps + tap);
          }
        }
      }
    }
    if (!(check == 0)) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// Where planes are small, the zeros between their rows are a large share of them. There the gradient is a product of
// matrices over the windows alone.

// The weight gradient: the small side by windows, times windows by (channel of the large side, place of the kernel).
// Returns false if the small side, which meets the padding, is not finite.
template <class T>
bool ProductsOfWindows(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const PaddedPlane plane(g);
  const int64_t taps = g.kernel_size;
  const int64_t windows = g.batch * g.small_size;
  const int64_t tiles = CeilDiv(g.small_channels, kChannelsAtOnce);
  std::vector<T> factors(static_cast<size_t>(g.groups * tiles * windows * kChannelsAtOnce));
  Findings findings;
  parallel(g.groups * tiles, 2 * g.groups * g.small_channels * windows * static_cast<int64_t>(sizeof(T)),
           [&](int64_t task) {
             const int64_t group = task / tiles;
             const int64_t first = task % tiles * kChannelsAtOnce;
             const int64_t channels = std::min(kChannelsAtOnce, g.small_channels - first);
             T* to = factors.data() + task * windows * kChannelsAtOnce;
             T check = 0;
             for (int64_t n = 0; n < g.batch; ++n) {
               const T* const from = small + ((n * g.groups + group) * g.small_channels + first) * g.small_size;
               for (int64_t i = 0; i < g.small_size; ++i, to += kChannelsAtOnce) {
                 for (int64_t m = 0; m < channels; ++m) {
                   to[m] = from[m * g.small_size + i];
                   check += to[m] * 0;
                 }
               }
             }
             if (!(check == 0)) findings.not_finite = true;
           });
  if (findings.not_finite) return false;

  // As many channels as fill whole tiles.
  const int64_t tile_bytes = windows * kMostPlacesOfTile * static_cast<int64_t>(sizeof(T));
  const int64_t tiles_at_once = std::clamp<int64_t>(kProductBytes / tile_bytes, 1, 4);
  const int64_t channels_of_task = std::clamp<int64_t>(tiles_at_once * kMostPlacesOfTile / taps, 1, g.large_channels);
  const int64_t parts = CeilDiv(g.large_channels, channels_of_task);
  const int64_t pitch = OddLines(CeilDiv(channels_of_task * taps, kMostPlacesOfTile) * kMostPlacesOfTile);
  const int64_t no_shift = 0;
  parallel(g.groups * parts, windows * g.groups * g.small_channels * g.large_channels * taps, [&](int64_t task) {
    const int64_t group = task / parts;
    const int64_t first_channel = task % parts * channels_of_task;
    const int64_t channels = std::min(channels_of_task, g.large_channels - first_channel);
    const TaskMemory<T> packed(windows * pitch);
    const TaskMemory<T> padded(channels * plane.size());
    const TaskMemory<T> sums(kChannelsAtOnce * pitch);
    if (packed.data() == nullptr || padded.data() == nullptr || sums.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    T* to = packed.data();
    for (int64_t n = 0; n < g.batch; ++n) {
      const T* const from = large + ((n * g.groups + group) * g.large_channels + first_channel) * g.large_size;
      for (int64_t channel = 0; channel < channels; ++channel) {
        plane.Copy(from + channel * g.large_size, padded.data() + channel * plane.size());
      }
      for (int64_t z = 0; z < g.small[0]; ++z) {
        for (int64_t y = 0; y < g.small[1]; ++y) {
          for (int64_t x = 0; x < g.small[2]; ++x, to += pitch) {
            const T* window = padded.data() + plane.At(z * g.stride[0], y * g.stride[1], x * g.stride[2]);
            T* into = to;
            for (int64_t channel = 0; channel < channels; ++channel, window += plane.size()) {
              for (const int64_t shift : plane.shifts()) *into++ = window[shift];
            }
          }
        }
      }
    }
    Filters<T> filters{};
    filters.pairs = g.pairs;
    filters.planes = packed.data();
    filters.plane_pitch = pitch;
    filters.plane_count = windows;
    filters.shifts = &no_shift;
    filters.tap_count = 1;
    filters.place_count = channels * taps;
    filters.sums = sums.data();
    filters.sums_pitch = pitch;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      filters.weights = factors.data() + (group * tiles + tile) * windows * kChannelsAtOnce;
      add_filters(filters, /*is_single=*/false);
      const int64_t first = tile * kChannelsAtOnce;
      for (int64_t m = first; m < std::min(g.small_channels, first + kChannelsAtOnce); ++m) {
        std::copy_n(sums.data() + (m - first) * pitch, channels * taps,
                    out + ((group * g.small_channels + m) * g.large_channels + first_channel) * taps);
      }
    }
  });
  if (findings.no_memory) throw std::bad_alloc();
  return true;
}

// Measured: with few windows and many channels, windows take less to pack than zeros take to multiply, and few products
// less than the sums of their lanes.
bool HasFewWindows(const Geometry& g) {
  return g.batch * g.small_size <= std::clamp<int64_t>(4 * g.small_channels, 64, 512);
}

}  // namespace

template <class T>
void GradWeight(const Geometry& g, const T* small, const T* large, T* out, const ParallelFor& parallel) {
  if (IsEmpty(g)) {
    std::fill_n(out, g.groups * g.small_channels * g.large_channels * g.kernel_size, T{});
    return;
  }
  const bool by_channel = g.small_channels == 1 && g.large_channels == 1;
  const bool is_done = !CanPack(g)        ? false
                       : by_channel       ? ProductsOfChannels(g, small, large, out, parallel)
                       : PaysByItems(g)   ? GradWeightOfItems(g, small, large, out, parallel)
                       : HasFewWindows(g) ? ProductsOfWindows(g, small, large, out, parallel)
                                          : ProductsOfPlanes(g, small, large, out, parallel);
  if (!is_done) direct::GradWeight(g, small, large, out, parallel);
}

template void GradWeight(const Geometry&, const float*, const float*, float*, const ParallelFor&);
template void GradWeight(const Geometry&, const double*, const double*, double*, const ParallelFor&);

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
