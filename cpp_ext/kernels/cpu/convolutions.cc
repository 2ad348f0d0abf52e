#include "kernels/cpu/convolutions.h"

#include <algorithm>
#include <new>
#include <vector>

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/convolution_direct.h"
#include "kernels/cpu/convolution_items.h"
#include "kernels/cpu/convolution_tiles.h"
#include "kernels/cpu/packed_loops.h"
#include "kernels/cpu/packed_planes.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convolutions.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/packed_loops-inl.h"

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// The gradient of the large side, plane by plane as it is packed: an element is the sum of weights times the packed
// small side, shifted. Sums between rows mean nothing and are left out. Weights meet zeros of the padding, so that all
// must be finite; returns false where one is not.
template <class T>
bool SumsOfPlanes(const Geometry& g, const T* small, const T* weight, T* out, const ParallelFor& parallel) {
  const PackedPlanes planes(g);
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto pack_filters = GRADFUSE_DISPATCH(PackFilters<T>);
  const FilterOrder order(g, planes);
  const int64_t at_once = order.at_once();
  const int64_t tiles = order.tiles();

  // As many items at once as fill some tiles of places, and fit the second-level cache.
  constexpr int64_t kPackedBytes = 512 << 10;
  constexpr int64_t kFewestPlaces = 256;
  constexpr int64_t kTasks = 16;
  const int64_t item_bytes = g.small_channels * planes.size() * static_cast<int64_t>(sizeof(T));
  const int64_t most_items = std::clamp<int64_t>(kPackedBytes / std::max<int64_t>(item_bytes, 1), 1, g.batch);
  const int64_t wanted_items = std::max(CeilDiv(g.batch, kTasks), CeilDiv(kFewestPlaces, planes.size()));
  const int64_t blocks = CeilDiv(g.batch, std::min(most_items, wanted_items));
  const int64_t items_at_once = CeilDiv(g.batch, blocks);
  // Each task packs for itself: it is to have enough to do with that.
  constexpr int64_t kFewestTiles = 16;
  const int64_t wanted_parts = std::min(CeilDiv(kTasks, blocks * g.groups), tiles / kFewestTiles);
  const int64_t tiles_of_task = CeilDiv(tiles, std::max<int64_t>(1, wanted_parts));
  const int64_t parts = CeilDiv(tiles, tiles_of_task);
  const int64_t places = items_at_once * planes.size();
  const int64_t front = CeilDiv(planes.largest_shift(), kLongestVector) * kLongestVector;
  const int64_t length = (CeilDiv(front + places + kMostPlacesOfTile, kLongestVector) | 1) * kLongestVector;
  const bool has_all = planes.has_all();
  Findings findings;
  const int64_t cost = g.batch * g.small_size * g.groups * g.small_channels * g.large_channels * taps;
  parallel(blocks * g.groups * parts, cost, [&](int64_t task) {
    const int64_t part = task % parts;
    const int64_t group = task / parts % g.groups;
    const int64_t first = task / parts / g.groups * items_at_once;
    const int64_t items = std::min(items_at_once, g.batch - first);
    if (items <= 0) return;
    const TaskMemory<T> packed(g.small_channels * length);
    const TaskMemory<T> sums(at_once * length);
    const TaskMemory<T> weights(g.small_channels * taps * at_once);
    if (packed.data() == nullptr || sums.data() == nullptr || weights.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    for (int64_t m = 0; m < g.small_channels; ++m) {
      for (int64_t item = 0; item < items; ++item) {
        const int64_t channel = ((first + item) * g.groups + group) * g.small_channels + m;
        planes.PackSmall(pack, small + channel * g.small_size,
                         packed.data() + m * length + front + item * planes.size());
      }
    }
    Filters<T> filters{};
    filters.pairs = g.pairs;
    filters.planes = packed.data() + front;
    filters.plane_pitch = length;
    filters.plane_count = g.small_channels;
    filters.place_count = items * planes.size();
    filters.sums = sums.data();
    filters.sums_pitch = length;
    T check = 0;
    for (int64_t tile = part * tiles_of_task; tile < std::min(tiles, (part + 1) * tiles_of_task); ++tile) {
      const int64_t begin = tile * at_once;
      const int64_t end = std::min(g.large_channels, begin + at_once);
      const auto channel_at = [&](int64_t item, int64_t channel) {
        return out + (((first + item) * g.groups + group) * g.large_channels + channel) * g.large_size;
      };
      if (!has_all) {
        for (int64_t item = 0; item < items; ++item) {
          std::fill_n(channel_at(item, begin), (end - begin) * g.large_size, T{});
        }
      }
      check += pack_filters(order.Tile(weight, group, tile, weights.data()));
      filters.weights = weights.data();
      for (int64_t plane = 0; plane < planes.count(); ++plane) {
        const std::vector<int64_t>& shifts = order.ShiftsOf(plane);
        filters.shifts = shifts.data();
        filters.tap_count = static_cast<int64_t>(shifts.size());
        add_filters(filters, at_once == 1);
        filters.weights += g.small_channels * filters.tap_count * at_once;
        for (int64_t channel = begin; channel < end; ++channel) {
          for (int64_t item = 0; item < items; ++item) {
            planes.UnpackLarge(plane, sums.data() + (channel - begin) * length + item * planes.size(),
                               channel_at(item, channel));
          }
        }
      }
    }
    if (!(check == 0)) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// Where planes are small, the zeros between their rows are a large share of them. There the gradients are products of
// matrices over the windows alone.

// Windows side by side that meet neighbours of the large side with a place of the kernel.
struct Run {
  int64_t small;
  int64_t large;
  int64_t count;
};

std::vector<std::vector<Run>> RunsOfTaps(const Geometry& g) {
  std::vector<std::vector<Run>> runs;
  direct::ForEachTap(g, [&](int64_t, int64_t tap0, int64_t tap1, int64_t tap2) {
    runs.emplace_back();
    direct::ForEachRow(g, tap0, tap1, tap2, [&](int64_t small, int64_t large, int64_t count) {
      runs.back().push_back({small, large, count});
    });
  });
  return runs;
}

// The gradient of the large side: for each (channel, place of the kernel) a sum over channels of the small side, which
// is then added to where the windows meet the large side.
template <class T>
void SumsOfWindows(const Geometry& g, const T* small, const T* weight, T* out, const ParallelFor& parallel) {
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const std::vector<std::vector<Run>> runs = RunsOfTaps(g);
  const int64_t taps = g.kernel_size;
  const int64_t windows_bytes = g.small_channels * g.small_size * static_cast<int64_t>(sizeof(T));
  // A tile's sums are to fit the first-level cache.
  constexpr int64_t kMostPlaces = 512;
  const int64_t most_items = std::min(kProductBytes / windows_bytes, CeilDiv(kMostPlaces, g.small_size));
  const int64_t blocks = CeilDiv(g.batch, std::clamp<int64_t>(most_items, 1, g.batch));
  const int64_t items_of_block = CeilDiv(g.batch, blocks);
  const int64_t length = OddLines(CeilDiv(items_of_block * g.small_size, kMostPlacesOfTile) * kMostPlacesOfTile);

  // By block of items, group and channel: the windows of all items of the block.
  constexpr int64_t kChannelsOfTask = 16;
  const int64_t channels = g.groups * g.small_channels;
  const TaskMemory<T> windows(blocks * channels * length);
  if (windows.data() == nullptr) throw std::bad_alloc();
  parallel(CeilDiv(channels, kChannelsOfTask), 2 * g.batch * g.groups * windows_bytes, [&](int64_t task) {
    const int64_t end = std::min(channels, (task + 1) * kChannelsOfTask);
    for (int64_t n = 0; n < g.batch; ++n) {
      for (int64_t channel = task * kChannelsOfTask; channel < end; ++channel) {
        std::copy_n(
            small + (n * channels + channel) * g.small_size, g.small_size,
            windows.data() + (n / items_of_block * channels + channel) * length + n % items_of_block * g.small_size);
      }
    }
  });

  constexpr int64_t kTasks = 16;
  const int64_t channel_bytes = g.small_channels * taps * static_cast<int64_t>(sizeof(T));
  const int64_t most_channels = std::max<int64_t>(1, kProductBytes / 2 / channel_bytes);
  const int64_t channels_of_task =
      std::min(most_channels, CeilDiv(g.large_channels, CeilDiv(kTasks, blocks * g.groups)));
  const int64_t parts = CeilDiv(g.large_channels, channels_of_task);
  const int64_t tile_size = OddLines(g.small_channels * kChannelsAtOnce);
  const int64_t no_shift = 0;
  std::atomic<bool> no_memory{false};
  parallel(blocks * g.groups * parts, g.batch * g.small_size * channels * g.large_channels * taps, [&](int64_t task) {
    const int64_t first_channel = task % parts * channels_of_task;
    const int64_t group = task / parts % g.groups;
    const int64_t block = task / parts / g.groups;
    const int64_t items = std::min(items_of_block, g.batch - block * items_of_block);
    const int64_t rows = std::min(channels_of_task, g.large_channels - first_channel) * taps;
    const int64_t tiles = CeilDiv(rows, kChannelsAtOnce);
    if (items <= 0) return;
    const TaskMemory<T> weights(tiles * tile_size);
    const TaskMemory<T> sums(kChannelsAtOnce * length);
    if (weights.data() == nullptr || sums.data() == nullptr) {
      no_memory = true;
      return;
    }
    for (int64_t m = 0; m < g.small_channels; ++m) {
      const T* const from = weight + ((group * g.small_channels + m) * g.large_channels + first_channel) * taps;
      // Rows lie in pages of their own, which the processor does not look ahead to.
      constexpr int64_t kAhead = 8;
      for (int64_t row = 0; row < rows && m + kAhead < g.small_channels; row += kLongestVector) {
        __builtin_prefetch(from + kAhead * g.large_channels * taps + row);
      }
      T* to = weights.data() + m * kChannelsAtOnce;
      int64_t row = 0;
      for (; row + kChannelsAtOnce <= rows; row += kChannelsAtOnce, to += tile_size) {
        std::copy_n(from + row, kChannelsAtOnce, to);
      }
      std::copy(from + row, from + rows, to);
    }
    const auto channel_at = [&](int64_t item, int64_t channel) {
      const int64_t n = block * items_of_block + item;
      return out + ((n * g.groups + group) * g.large_channels + first_channel + channel) * g.large_size;
    };
    for (int64_t item = 0; item < items; ++item) std::fill_n(channel_at(item, 0), rows / taps * g.large_size, T{});
    Filters<T> filters{};
    filters.pairs = g.pairs;
    filters.planes = windows.data() + (block * g.groups + group) * g.small_channels * length;
    filters.plane_pitch = length;
    filters.plane_count = g.small_channels;
    filters.shifts = &no_shift;
    filters.tap_count = 1;
    filters.place_count = items * g.small_size;
    filters.sums = sums.data();
    filters.sums_pitch = length;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      filters.weights = weights.data() + tile * tile_size;
      add_filters(filters, /*is_single=*/false);
      const int64_t first = tile * kChannelsAtOnce;
      for (int64_t row = first; row < std::min(rows, first + kChannelsAtOnce); ++row) {
        for (int64_t item = 0; item < items; ++item) {
          const T* const from = sums.data() + (row - first) * length + item * g.small_size;
          T* const to = channel_at(item, row / taps);
          for (const Run& run : runs[static_cast<size_t>(row % taps)]) {
            for (int64_t i = 0; i < run.count; ++i) to[run.large + i * g.stride[2]] += from[run.small + i];
          }
        }
      }
    }
  });
  if (no_memory) throw std::bad_alloc();
}

// Measured: with enough channels to sum over, what is saved of zeros is worth the sums that are added to the large
// side.
bool PaysByWindows(const Geometry& g) {
  constexpr int64_t kFewestChannels = 64;
  if (g.small_channels < kFewestChannels) return false;
  return g.stride[2] > 1 || PackedPlanes(g).size() * 5 >= g.small_size * 6;
}

// A convolution of the large side: an element of the small one is the sum of weights times packed planes, shifted.
// Weights meet zeros of the padding: returns whether all results are finite, and else they may be wrong.
template <class T>
bool SumsOfLarge(const Geometry& g, const PackedPlanes& planes, const T* large, const T* weight,
                 const Finishes<T>& finishes, T* out, const ParallelFor& parallel) {
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto write = GRADFUSE_DISPATCH(WriteRows<T>);
  const WeightTiles<T> tiles(g, weight);
  const int64_t item_bytes = g.large_channels * planes.count() * planes.size() * static_cast<int64_t>(sizeof(T));
  // As many items at once as fill some tiles of places, and fit the second-level cache.
  constexpr int64_t kFewestPlaces = 256;
  constexpr int64_t kTasks = 16;
  const int64_t most_items = std::clamp<int64_t>(kProductBytes / std::max<int64_t>(item_bytes, 1), 1, g.batch);
  const int64_t wanted_items = std::max(CeilDiv(g.batch, kTasks), CeilDiv(kFewestPlaces, planes.size()));
  const int64_t blocks = CeilDiv(g.batch, std::min(most_items, wanted_items));
  const int64_t items_at_once = CeilDiv(g.batch, blocks);
  const int64_t length = OddLines(items_at_once * planes.size() + planes.largest_shift() + kMostPlacesOfTile);
  // Each task packs for itself: it is to have enough to do with that.
  constexpr int64_t kFewestTiles = 16;
  const int64_t wanted_parts = std::min(CeilDiv(kTasks, blocks * g.groups), tiles.count() / kFewestTiles);
  const int64_t tiles_of_part = CeilDiv(tiles.count(), std::max<int64_t>(1, wanted_parts));
  const int64_t parts = CeilDiv(tiles.count(), tiles_of_part);
  std::vector<int64_t> shifts;
  for (int64_t tap = 0; tap < taps; ++tap) {
    shifts.push_back(-(planes.plane_of_tap(tap) * length + planes.shift_of_tap(tap)));
  }
  Findings findings;
  const int64_t cost = g.batch * g.small_size * g.groups * g.small_channels * tiles.rows();
  parallel(blocks * g.groups * parts, cost, [&](int64_t task) {
    const int64_t part = task % parts;
    const int64_t group = task / parts % g.groups;
    const int64_t first = task / parts / g.groups * items_at_once;
    const int64_t items = std::min(items_at_once, g.batch - first);
    if (items <= 0) return;
    const TaskMemory<T> packed(g.large_channels * planes.count() * length);
    const TaskMemory<T> sums(tiles.at_once() * length);
    if (packed.data() == nullptr || sums.data() == nullptr) {
      findings.no_memory = true;
      return;
    }
    for (int64_t channel = 0; channel < g.large_channels; ++channel) {
      T* const to = packed.data() + channel * planes.count() * length;
      for (int64_t item = 0; item < items; ++item) {
        const T* const from = large + (((first + item) * g.groups + group) * g.large_channels + channel) * g.large_size;
        planes.PackLarge(pack, from, to + item * planes.size(), length);
      }
    }
    Filters<T> filters{};
    filters.pairs = g.pairs;
    filters.planes = packed.data();
    filters.plane_pitch = planes.count() * length;
    filters.plane_count = g.large_channels;
    filters.shifts = shifts.data();
    filters.tap_count = taps;
    filters.weight_pitch = tiles.rows();
    filters.place_count = items * planes.size();
    filters.sums = sums.data();
    filters.sums_pitch = length;
    bool is_finite = true;
    for (int64_t tile = part * tiles_of_part; tile < std::min(tiles.count(), (part + 1) * tiles_of_part); ++tile) {
      filters.weights = tiles.Of(group, tile);
      add_filters(filters, tiles.at_once() == 1);
      const int64_t begin = tile * tiles.at_once();
      for (int64_t one = begin; one < std::min(g.small_channels, begin + tiles.at_once()); ++one) {
        const int64_t channel = group * g.small_channels + one;
        for (int64_t item = 0; item < items; ++item) {
          T* const to = out + ((first + item) * g.groups * g.small_channels + channel) * g.small_size;
          is_finite &= planes.UnpackSmall(write, sums.data() + (one - begin) * length + item * planes.size(),
                                          finishes.Of(channel), to);
        }
      }
    }
    if (!is_finite) findings.not_finite = true;
  });
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// The same of windows that are copied side by side, in panels, so that no zeros between rows are multiplied.
template <class T>
bool SumsOfPanels(const Geometry& g, const PackedPlanes& planes, const T* large, const T* weight,
                  const Finishes<T>& finishes, T* out, const ParallelFor& parallel) {
  const int64_t taps = g.kernel_size;
  const auto pack = GRADFUSE_DISPATCH(PackRows<T>);
  const auto copy_panel = GRADFUSE_DISPATCH(CopyPanel<T>);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto write = GRADFUSE_DISPATCH(WriteRows<T>);
  const WeightTiles<T> tiles(g, weight);
  const int64_t channels = g.groups * g.large_channels;
  // A plane ends in the zeros that the next one of the same remainders begins with.
  const int64_t plane_size = planes.size() + (planes.count() > 1 ? planes.largest_shift() : 0);
  const int64_t channel_size = planes.count() * plane_size;
  const int64_t item_size = channels * channel_size;
  const int64_t most_items =
      std::clamp<int64_t>(kMostKept / static_cast<int64_t>(sizeof(T)) / std::max<int64_t>(item_size, 1), 1, g.batch);
  const int64_t blocks = CeilDiv(g.batch, most_items);
  const int64_t items_at_once = CeilDiv(g.batch, blocks);
  const int64_t panels = CeilDiv(items_at_once * g.small_size, kPanel);
  const int64_t panel_size = tiles.rows() * kPanel + kMostPlacesOfTile;
  // Few panels are copied before, and split by tiles of channels.
  constexpr int64_t kTasks = 16;
  const bool is_split = panels * g.groups < kTasks;
  const int64_t parts = is_split ? std::min(CeilDiv(kTasks, panels * g.groups), tiles.count()) : 1;
  const int64_t tiles_of_part = CeilDiv(tiles.count(), parts);
  std::vector<int64_t> shifts;
  std::vector<int64_t> shifts_of_panel;
  for (int64_t tap = 0; tap < taps; ++tap) {
    shifts.push_back(-(planes.plane_of_tap(tap) * plane_size + planes.shift_of_tap(tap)));
    shifts_of_panel.push_back(-tap * kPanel);
  }
  const TaskMemory<T> packed(items_at_once * item_size + planes.largest_shift() + kMostPlacesOfTile);
  const TaskMemory<T> shared(is_split ? panels * g.groups * panel_size : 0);
  if (packed.data() == nullptr || shared.data() == nullptr) throw std::bad_alloc();
  Findings findings;
  for (int64_t first = 0; first < g.batch; first += items_at_once) {
    const int64_t items = std::min(items_at_once, g.batch - first);
    const int64_t places = items * g.small_size;
    parallel(items * channels, 2 * items * item_size * static_cast<int64_t>(sizeof(T)), [&](int64_t task) {
      planes.PackLarge(pack, large + (first * channels + task) * g.large_size, packed.data() + task * channel_size,
                       plane_size);
    });
    const auto copy = [&](int64_t panel, int64_t group, T* to) {
      const int64_t begin = panel * kPanel;
      const std::vector<Piece> pieces = planes.PiecesOfSmall(begin, std::min(places, begin + kPanel), item_size);
      copy_panel({packed.data() + group * g.large_channels * channel_size, channel_size, g.large_channels,
                  shifts.data(), taps, pieces.data(), static_cast<int64_t>(pieces.size()), to});
    };
    if (is_split) {
      parallel(panels * g.groups, 2 * panels * g.groups * panel_size * static_cast<int64_t>(sizeof(T)),
               [&](int64_t task) {
                 if (task / g.groups * kPanel >= places) return;
                 copy(task / g.groups, task % g.groups, shared.data() + task * panel_size);
               });
    }
    parallel(panels * g.groups * parts, places * g.groups * g.small_channels * tiles.rows(), [&](int64_t task) {
      const int64_t part = task % parts;
      const int64_t group = task / parts % g.groups;
      const int64_t panel = task / parts / g.groups;
      const int64_t begin = panel * kPanel;
      const int64_t end = std::min(places, begin + kPanel);
      if (begin >= end) return;
      const TaskMemory<T> own(is_split ? 0 : panel_size);
      if (own.data() == nullptr) {
        findings.no_memory = true;
        return;
      }
      if (!is_split) copy(panel, group, own.data());
      alignas(64) T sums[kChannelsAtOnce * kPanel + kMostPlacesOfTile];
      Filters<T> filters{};
      filters.pairs = g.pairs;
      filters.planes = is_split ? shared.data() + (panel * g.groups + group) * panel_size : own.data();
      filters.plane_pitch = taps * kPanel;
      filters.plane_count = g.large_channels;
      filters.shifts = shifts_of_panel.data();
      filters.tap_count = taps;
      filters.weight_pitch = tiles.rows();
      filters.place_count = end - begin;
      filters.sums = sums;
      filters.sums_pitch = kPanel;
      bool is_finite = true;
      for (int64_t tile = part * tiles_of_part; tile < std::min(tiles.count(), (part + 1) * tiles_of_part); ++tile) {
        filters.weights = tiles.Of(group, tile);
        add_filters(filters, tiles.at_once() == 1);
        const int64_t first_channel = tile * tiles.at_once();
        for (int64_t one = first_channel; one < std::min(g.small_channels, first_channel + tiles.at_once()); ++one) {
          const int64_t channel = group * g.small_channels + one;
          for (int64_t place = begin; place < end;) {
            const int64_t item = place / g.small_size;
            const int64_t count = std::min(end, (item + 1) * g.small_size) - place;
            T* const to = out + ((first + item) * g.groups * g.small_channels + channel) * g.small_size;
            is_finite &= write(sums + (one - first_channel) * kPanel + place - begin, count, 1, count,
                               finishes.Of(channel), to + place % g.small_size);
            place += count;
          }
        }
      }
      if (!is_finite) findings.not_finite = true;
    });
  }
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

// Measured: copying a row of a panel takes as long as multiplying it with 12 channels.
bool PaysByPanel(const Geometry& g, const PackedPlanes& planes) {
  constexpr int64_t kFewestChannels = 128;
  return g.small_channels >= kFewestChannels && (planes.count() > 1 || planes.size() * 20 >= g.small_size * 21);
}

}  // namespace

template <class T>
void TransposedConvolution(const Geometry& g, const T* small, const T* weight, T* out, const ParallelFor& parallel) {
  if (!IsEmpty(g) && CanPack(g)) {
    if (PaysByItems(g)) {
      if (TransposedConvolutionOfItems(g, small, weight, out, parallel)) return;
    } else if (PaysByWindows(g)) {
      SumsOfWindows(g, small, weight, out, parallel);
      return;
    } else if (SumsOfPlanes(g, small, weight, out, parallel)) {
      return;
    }
  }
  direct::TransposedConvolution(g, small, weight, out, parallel);
}

template <class T>
void Convolution(const Geometry& g, const T* large, const T* weight, const T* bias, bool relu, T* out,
                 const ParallelFor& parallel) {
  if (!IsEmpty(g) && CanPack(g)) {
    const PackedPlanes planes(g);
    const Finishes<T> finishes{bias, relu};
    const bool is_finite = PaysByItems(g)           ? ConvolutionOfItems(g, large, weight, finishes, out, parallel)
                           : PaysByPanel(g, planes) ? SumsOfPanels(g, planes, large, weight, finishes, out, parallel)
                                                    : SumsOfLarge(g, planes, large, weight, finishes, out, parallel);
    const int64_t weights = g.groups * g.small_channels * g.large_channels * g.kernel_size;
    const auto is_number = [](T one) { return one * 0 == 0; };
    if (is_finite || std::all_of(weight, weight + weights, is_number)) return;
  }
  direct::Convolution(g, large, weight, bias, relu, out, parallel);
}

template void Convolution(const Geometry&, const float*, const float*, const float*, bool, float*, const ParallelFor&);
template void Convolution(const Geometry&, const double*, const double*, const double*, bool, double*,
                          const ParallelFor&);
template void TransposedConvolution(const Geometry&, const float*, const float*, float*, const ParallelFor&);
template void TransposedConvolution(const Geometry&, const double*, const double*, double*, const ParallelFor&);

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
