#include "kernels/cpu/convolution_items.h"

#include <algorithm>
#include <new>
#include <vector>

#include "kernels/convolution_geometry.h"
#include "kernels/cpu/packed_loops.h"
#include "kernels/cpu/packed_planes.h"
#include "kernels/cpu/targets.h"
#include "kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convolution_items.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/packed_loops-inl.h"

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

constexpr int64_t kMostItems = 16;
constexpr int64_t kTasks = 16;

// The batch in blocks of items that are packed side by side.
struct ItemBlocks {
  explicit ItemBlocks(int64_t items)
      : at_once(CeilDiv(items, CeilDiv(items, kMostItems))), count(CeilDiv(items, at_once)), batch(items) {}

  int64_t Items(int64_t block) const { return std::min(at_once, batch - block * at_once); }

  int64_t at_once;
  int64_t count;
  int64_t batch;
};

// One side of a convolution, some blocks of items at a time, as planes for each block and channel.
template <class T>
class PackedSide {
 public:
  // `channel_size` elements for each channel of a block, of which `front` come before the planes.
  PackedSide(const ItemBlocks& blocks, int64_t channels, int64_t channel_size, int64_t front, int64_t rounds)
      : blocks_(blocks),
        channels_(channels),
        channel_size_(channel_size),
        front_(front),
        blocks_of_round_(CeilDiv(blocks.count, rounds)),
        memory_(blocks_of_round_ * channels * channel_size, /*is_zero=*/false) {
    if (memory_.data() == nullptr) throw std::bad_alloc();
  }

  // The planes of a channel in the block with that place in its round.
  T* At(int64_t place, int64_t channel) const {
    return memory_.data() + (place * channels_ + channel) * channel_size_ + front_;
  }
  int64_t channel_size() const { return channel_size_; }

  // Packs the blocks from `first` on: `pack(pack_rows, from, to)` does a channel of `size` elements.
  template <class Pack>
  void Fill(const T* from, int64_t size, int64_t first, Findings* findings, const ParallelFor& parallel,
            const Pack& pack) const {
    const auto pack_items = GRADFUSE_DISPATCH(PackItems<T>);
    const int64_t count = std::min(blocks_of_round_, blocks_.count - first) * channels_;
    parallel(count, 2 * count * channel_size_ * static_cast<int64_t>(sizeof(T)), [&](int64_t task) {
      const int64_t block = first + task / channels_;
      T* const to = At(task / channels_, task % channels_);
      std::fill_n(to - front_, channel_size_, T{});
      const auto pack_rows = [&](const T* row, int64_t row_pitch, int64_t step, int64_t rows, int64_t width, T* into,
                                 int64_t pitch) {
        T check = 0;
        for (int64_t i = 0; i < rows; ++i) {
          check += pack_items({row + i * row_pitch, channels_ * size, blocks_.Items(block), step, width,
                               into + i * pitch, blocks_.at_once, i + 1 < rows ? row_pitch : 0});
        }
        return check;
      };
      const T* const channel = from + (block * blocks_.at_once * channels_ + task % channels_) * size;
      if (!(pack(pack_rows, channel, to) == 0)) findings->not_finite = true;
    });
  }

 private:
  const ItemBlocks& blocks_;
  int64_t channels_;
  int64_t channel_size_;
  int64_t front_;
  int64_t blocks_of_round_;
  TaskMemory<T> memory_;
};

// Taps that meet rows that are there, of taps in the order of the rows that they meet.
struct TapSpan {
  int64_t begin;
  int64_t end;
};

// In how many rounds blocks are packed, so that what is packed in one stays small.
template <class T>
int64_t Rounds(const ItemBlocks& blocks, int64_t block_size) {
  const int64_t most = kMostKept / static_cast<int64_t>(sizeof(T)) / block_size;
  return CeilDiv(blocks.count, std::clamp<int64_t>(most, 1, blocks.count));
}

// The taps with which windows of row `y` meet the large side. Over three dimensions no few of them lie together: all.
TapSpan TapsOfWindows(const Geometry& g, int64_t y) {
  if (g.kernel[0] > 1) return {0, g.kernel_size};
  int64_t begin = 0;
  int64_t end = g.kernel[1];
  const int64_t first = y * g.stride[1] - g.padding[1];
  while (begin < end && first + begin * g.dilation[1] < 0) ++begin;
  while (end > begin && first + (end - 1) * g.dilation[1] >= g.large[1]) --end;
  return {begin * g.kernel[2], end * g.kernel[2]};
}

// Those with which the small side meets row `y` of a plane, by how many rows each shifts it.
TapSpan TapsOfPlane(const Geometry& g, const std::vector<int64_t>& rows, int64_t y) {
  auto begin = rows.begin();
  auto end = rows.end();
  if (g.kernel[0] == 1) {
    while (begin != end && y - *begin >= g.small[1]) ++begin;
    while (end != begin && y - end[-1] < 0) --end;
  }
  return {begin - rows.begin(), end - rows.begin()};
}

}  // namespace

// Measured: with few channels a place takes longer to pack, and sums to write, than zeros take to multiply. Weights are
// read for each row of places, and must stay in the second-level cache.
bool PaysByItems(const ConvolutionGeometry& g) {
  constexpr int64_t kFewestItems = 4;
  constexpr int64_t kMostWeights = 160 << 10;
  constexpr double kChannelsOfGain = 3;
  const int64_t channels = std::min(g.small_channels, g.large_channels);
  if (g.kernel_size == 1 || channels == 1 || g.batch < kFewestItems) return false;
  if (g.small_channels * g.large_channels * g.kernel_size > kMostWeights) return false;
  const ItemBlocks blocks(g.batch);
  const PackedPlanes planes(g, blocks.at_once);
  const int64_t planes_of_block = g.groups * std::max(g.small_channels, g.large_channels * planes.count());
  if (planes_of_block * planes.size() > kMostKept / static_cast<int64_t>(sizeof(float))) return false;
  const int64_t row = g.small[2] * blocks.at_once;
  const auto with_zeros = static_cast<double>(blocks.count * CeilDiv(row, kLongestVector) * kLongestVector);
  const double filled = static_cast<double>(g.batch * g.small[2]) / with_zeros;
  const double filled_by_planes =
      static_cast<double>(g.small_size * blocks.at_once) / static_cast<double>(planes.size());
  return filled >= (1 + kChannelsOfGain / static_cast<double>(channels)) * filled_by_planes;
}

template <class T>
bool ConvolutionOfItems(const ConvolutionGeometry& g, const T* large, const T* weight, const Finishes<T>& finishes,
                        T* out, const ParallelFor& parallel) {
  const ItemBlocks blocks(g.batch);
  const PackedPlanes planes(g, blocks.at_once);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto write = GRADFUSE_DISPATCH(WriteItems<T>);
  const WeightTiles<T> tiles(g, weight);
  const int64_t taps = g.kernel_size;
  const int64_t length = OddLines(planes.size() + planes.largest_shift() + kMostPlacesOfTile);
  const int64_t channels = g.groups * g.large_channels;
  const int64_t rounds = Rounds<T>(blocks, channels * planes.count() * length);
  const int64_t blocks_of_round = CeilDiv(blocks.count, rounds);
  const PackedSide<T> packed(blocks, channels, planes.count() * length, 0, rounds);
  std::vector<int64_t> shifts;
  for (int64_t tap = 0; tap < taps; ++tap) {
    shifts.push_back(-(planes.plane_of_tap(tap) * length + planes.shift_of_tap(tap)));
  }
  const int64_t rows = g.small[0] * g.small[1];
  const int64_t rows_of_part = CeilDiv(rows, std::min(rows, CeilDiv(kTasks, blocks_of_round * g.groups)));
  const int64_t parts = CeilDiv(rows, rows_of_part);
  const int64_t row_size = g.small[2] * blocks.at_once;
  const int64_t item_pitch = g.groups * g.small_channels * g.small_size;
  Findings findings;
  Findings ignored;
  for (int64_t first = 0; first < blocks.count; first += blocks_of_round) {
    const int64_t here = std::min(blocks_of_round, blocks.count - first);
    packed.Fill(large, g.large_size, first, &ignored, parallel,
                [&](const auto& pack, const T* from, T* to) { return planes.PackLarge(pack, from, to, length); });
    const int64_t cost = here * rows * row_size * g.groups * g.small_channels * tiles.rows();
    parallel(here * g.groups * parts, cost, [&](int64_t task) {
      const int64_t part = task % parts;
      const int64_t group = task / parts % g.groups;
      const int64_t place = task / parts / g.groups;
      const int64_t block = first + place;
      const TaskMemory<T> sums(tiles.at_once() * OddLines(row_size + kMostPlacesOfTile), /*is_zero=*/false);
      if (sums.data() == nullptr) {
        findings.no_memory = true;
        return;
      }
      Filters<T> filters{};
      filters.pairs = g.pairs;
      filters.plane_pitch = packed.channel_size();
      filters.plane_count = g.large_channels;
      filters.weight_pitch = tiles.rows();
      filters.place_count = row_size;
      filters.sums = sums.data();
      filters.sums_pitch = OddLines(row_size + kMostPlacesOfTile);
      bool is_finite = true;
      for (int64_t row = part * rows_of_part; row < std::min(rows, (part + 1) * rows_of_part); ++row) {
        filters.planes = packed.At(place, group * g.large_channels) + row / g.small[1] * planes.plane_pitch() +
                         row % g.small[1] * planes.pitch();
        const TapSpan span = TapsOfWindows(g, row % g.small[1]);
        filters.shifts = shifts.data() + span.begin;
        filters.tap_count = span.end - span.begin;
        filters.weight_skip = taps - filters.tap_count;
        for (int64_t tile = 0; tile < tiles.count(); ++tile) {
          filters.weights = tiles.Of(group, tile) + span.begin;
          add_filters(filters, /*is_single=*/false);
          const int64_t begin = tile * tiles.at_once();
          for (int64_t one = begin; one < std::min(g.small_channels, begin + tiles.at_once()); ++one) {
            const int64_t channel = group * g.small_channels + one;
            T* const to = out + block * blocks.at_once * item_pitch + channel * g.small_size + row * g.small[2];
            is_finite &= write({to, item_pitch, blocks.Items(block), 1, g.small[2],
                                sums.data() + (one - begin) * filters.sums_pitch, blocks.at_once, g.small_size},
                               finishes.Of(channel));
          }
        }
      }
      if (!is_finite) findings.not_finite = true;
    });
  }
  if (findings.no_memory) throw std::bad_alloc();
  return !findings.not_finite;
}

template <class T>
bool TransposedConvolutionOfItems(const ConvolutionGeometry& g, const T* small, const T* weight, T* out,
                                  const ParallelFor& parallel) {
  const ItemBlocks blocks(g.batch);
  const PackedPlanes planes(g, blocks.at_once);
  const auto add_filters = GRADFUSE_DISPATCH(AddFilters<T>);
  const auto pack_filters = GRADFUSE_DISPATCH(PackFilters<T>);
  const auto write = GRADFUSE_DISPATCH(WriteItems<T>);
  const FilterOrder order(g, planes);
  const std::vector<PackedPlanes::LargeRow> rows = planes.LargeRows();
  const int64_t tiles = order.tiles();
  Findings findings;

  const TaskMemory<T> weights(g.groups * tiles * order.tile_size(), /*is_zero=*/false);
  if (weights.data() == nullptr) throw std::bad_alloc();
  parallel(g.groups * tiles, 2 * g.groups * tiles * order.tile_size() * static_cast<int64_t>(sizeof(T)),
           [&](int64_t task) {
             T* const to = weights.data() + task * order.tile_size();
             if (!(pack_filters(order.Tile(weight, task / tiles, task % tiles, to)) == 0)) findings.not_finite = true;
           });
  if (findings.not_finite) return false;

  const int64_t front = CeilDiv(planes.largest_shift(), kLongestVector) * kLongestVector;
  const int64_t length = OddLines(front + planes.size() + kMostPlacesOfTile);
  const int64_t rounds = Rounds<T>(blocks, g.groups * g.small_channels * length);
  const int64_t blocks_of_round = CeilDiv(blocks.count, rounds);
  const PackedSide<T> packed(blocks, g.groups * g.small_channels, length, front, rounds);
  const auto row_count = static_cast<int64_t>(rows.size());
  int64_t longest = 1;
  for (const auto& row : rows) longest = std::max(longest, row.count);
  const int64_t rows_of_part =
      CeilDiv(row_count, std::clamp<int64_t>(row_count, 1, CeilDiv(kTasks, blocks_of_round * g.groups)));
  const int64_t parts = rows_of_part == 0 ? 0 : CeilDiv(row_count, rows_of_part);
  const int64_t sums_pitch = OddLines(longest * blocks.at_once + kMostPlacesOfTile);
  const int64_t item_pitch = g.groups * g.large_channels * g.large_size;
  if (!planes.has_all()) {
    const int64_t size = g.groups * g.large_channels * g.large_size;
    parallel(g.batch, g.batch * size * static_cast<int64_t>(sizeof(T)),
             [&](int64_t item) { std::fill_n(out + item * size, size, T{}); });
  }
  const Finish<T> finish{T{}, -std::numeric_limits<T>::infinity()};
  Findings ignored;
  for (int64_t first = 0; first < blocks.count; first += blocks_of_round) {
    const int64_t here = std::min(blocks_of_round, blocks.count - first);
    packed.Fill(small, g.small_size, first, &ignored, parallel,
                [&](const auto& pack, const T* from, T* to) { return planes.PackSmall(pack, from, to); });
    const int64_t cost =
        here * blocks.at_once * g.small_size * g.groups * g.small_channels * g.large_channels * g.kernel_size;
    parallel(here * g.groups * parts, cost, [&](int64_t task) {
      const int64_t part = task % parts;
      const int64_t group = task / parts % g.groups;
      const int64_t place = task / parts / g.groups;
      const int64_t block = first + place;
      const TaskMemory<T> sums(order.at_once() * sums_pitch, /*is_zero=*/false);
      if (sums.data() == nullptr) {
        findings.no_memory = true;
        return;
      }
      Filters<T> filters{};
      filters.pairs = g.pairs;
      filters.plane_pitch = length;
      filters.plane_count = g.small_channels;
      filters.sums = sums.data();
      filters.sums_pitch = sums_pitch;
      for (int64_t index = part * rows_of_part; index < std::min(row_count, (part + 1) * rows_of_part); ++index) {
        const PackedPlanes::LargeRow& row = rows[static_cast<size_t>(index)];
        const std::vector<int64_t>& shifts = order.ShiftsOf(row.plane);
        filters.planes = packed.At(place, group * g.small_channels) + row.from;
        const TapSpan span = TapsOfPlane(g, order.RowsOf(row.plane), row.y);
        filters.shifts = shifts.data() + span.begin;
        filters.tap_count = span.end - span.begin;
        filters.weight_skip = static_cast<int64_t>(shifts.size()) - filters.tap_count;
        filters.place_count = row.count * blocks.at_once;
        for (int64_t tile = 0; tile < tiles; ++tile) {
          filters.weights = weights.data() + (group * tiles + tile) * order.tile_size() + order.Begin(row.plane) +
                            span.begin * order.at_once();
          add_filters(filters, /*is_single=*/false);
          const int64_t begin = tile * order.at_once();
          for (int64_t one = begin; one < std::min(g.large_channels, begin + order.at_once()); ++one) {
            const int64_t channel = group * g.large_channels + one;
            T* const to = out + block * blocks.at_once * item_pitch + channel * g.large_size + row.to;
            write({to, item_pitch, blocks.Items(block), g.stride[2], row.count,
                   sums.data() + (one - begin) * sums_pitch, blocks.at_once, g.large_size},
                  finish);
          }
        }
      }
    });
  }
  if (findings.no_memory) throw std::bad_alloc();
  return true;
}

template <class T>
bool GradWeightOfItems(const ConvolutionGeometry& g, const T* small, const T* large, T* out,
                       const ParallelFor& parallel) {
  const ItemBlocks blocks(g.batch);
  const PackedPlanes planes(g, blocks.at_once);
  const auto add_products = GRADFUSE_DISPATCH(AddProducts<T>);
  const int64_t taps = g.kernel_size;
  const int64_t all_columns = g.large_channels * taps;
  const int64_t small_length = OddLines(planes.size() + kLongestVector);
  const int64_t length = OddLines(planes.size() + planes.largest_shift() + kLongestVector);
  const int64_t small_channels = g.groups * g.small_channels;
  const int64_t large_channels = g.groups * g.large_channels;
  const int64_t rounds = std::max(Rounds<T>(blocks, small_channels * small_length),
                                  Rounds<T>(blocks, large_channels * planes.count() * length));
  const int64_t blocks_of_round = CeilDiv(blocks.count, rounds);
  const PackedSide<T> packed_small(blocks, small_channels, small_length, 0, rounds);
  const PackedSide<T> packed_large(blocks, large_channels, planes.count() * length, 0, rounds);

  constexpr int64_t kMostRows = 32;
  constexpr int64_t kMostChannels = 32;
  const int64_t row_blocks = CeilDiv(g.small_channels, kMostRows);
  const int64_t column_blocks = CeilDiv(g.large_channels, kMostChannels);
  const int64_t rows_of_block = CeilDiv(g.small_channels, row_blocks);
  const int64_t channels_of_block = CeilDiv(g.large_channels, column_blocks);
  const int64_t products_of_round = g.groups * row_blocks * column_blocks;
  // Rows of places of all blocks of a round, one after the other. Rows between planes are zeros.
  const int64_t row_size = g.small[2] * blocks.at_once;
  const int64_t segments = (g.small[0] - 1) * (planes.plane_pitch() / planes.pitch()) + g.small[1];
  constexpr int64_t kFewestPlaces = 4096;
  const int64_t most_slices = std::max<int64_t>(1, blocks_of_round * segments * row_size / kFewestPlaces);
  const int64_t segments_of_slice =
      CeilDiv(blocks_of_round * segments, std::min(CeilDiv(kTasks, products_of_round), most_slices));
  const int64_t slices = CeilDiv(blocks_of_round * segments, segments_of_slice);
  constexpr int64_t kPart = 1024;

  const int64_t filters = g.groups * g.small_channels * all_columns;
  std::vector<T> sums(static_cast<size_t>(slices > 1 ? slices * filters : 0));
  Findings findings;
  for (int64_t first = 0; first < blocks.count; first += blocks_of_round) {
    const int64_t here = std::min(blocks_of_round, blocks.count - first);
    packed_small.Fill(small, g.small_size, first, &findings, parallel,
                      [&](const auto& pack, const T* from, T* to) { return planes.PackSmall(pack, from, to); });
    packed_large.Fill(large, g.large_size, first, &findings, parallel,
                      [&](const auto& pack, const T* from, T* to) { return planes.PackLarge(pack, from, to, length); });
    if (findings.not_finite) return false;
    parallel(products_of_round * slices, here * segments * row_size * filters, [&](int64_t task) {
      const int64_t slice = task % slices;
      const int64_t product = task / slices;
      const int64_t group = product / (row_blocks * column_blocks);
      const int64_t first_row = product / column_blocks % row_blocks * rows_of_block;
      const int64_t first_channel = product % column_blocks * channels_of_block;
      const int64_t rows = std::min(rows_of_block, g.small_channels - first_row);
      const int64_t channels = std::min(channels_of_block, g.large_channels - first_channel);
      if (rows <= 0 || channels <= 0) return;
      const std::unique_ptr<const T*[]> columns(new (std::nothrow) const T*[channels * taps + kColumnsAtOnce]);
      if (columns == nullptr) {
        findings.no_memory = true;
        return;
      }
      Products<T> products{};
      products.pairs = g.pairs;
      products.row_count = rows;
      products.row_pitch = packed_small.channel_size();
      products.columns = columns.get();
      products.column_count = channels * taps;
      products.sums = (slices > 1 ? sums.data() + slice * filters : out) +
                      (group * g.small_channels + first_row) * all_columns + first_channel * taps;
      products.sums_pitch = all_columns;
      products.segment_pitch = planes.pitch();
      bool is_first = first == 0;
      const int64_t end = std::min(here * segments, (slice + 1) * segments_of_slice);
      for (int64_t segment = slice * segments_of_slice; segment < end;) {
        const int64_t place = segment / segments;
        const int64_t count = std::min(end, (place + 1) * segments) - segment;
        const int64_t offset = segment % segments * planes.pitch();
        products.rows = packed_small.At(place, group * g.small_channels + first_row) + offset;
        for (int64_t column = 0; column < channels * taps + kColumnsAtOnce; ++column) {
          const int64_t real = std::min(column, channels * taps - 1);
          columns[static_cast<size_t>(column)] =
              packed_large.At(place, group * g.large_channels + first_channel + real / taps) +
              planes.plane_of_tap(real % taps) * length + planes.shift_of_tap(real % taps) + offset;
        }
        add_products(products, row_size, count, kPart, is_first);
        is_first = false;
        segment += count;
      }
    });
  }
  if (findings.no_memory) throw std::bad_alloc();
  if (slices > 1) AddSlices(sums.data(), slices, filters, out, parallel);
  return true;
}

template bool ConvolutionOfItems(const ConvolutionGeometry&, const float*, const float*, const Finishes<float>&, float*,
                                 const ParallelFor&);
template bool ConvolutionOfItems(const ConvolutionGeometry&, const double*, const double*, const Finishes<double>&,
                                 double*, const ParallelFor&);
template bool TransposedConvolutionOfItems(const ConvolutionGeometry&, const float*, const float*, float*,
                                           const ParallelFor&);
template bool TransposedConvolutionOfItems(const ConvolutionGeometry&, const double*, const double*, double*,
                                           const ParallelFor&);
template bool GradWeightOfItems(const ConvolutionGeometry&, const float*, const float*, float*, const ParallelFor&);
template bool GradWeightOfItems(const ConvolutionGeometry&, const double*, const double*, double*, const ParallelFor&);

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
