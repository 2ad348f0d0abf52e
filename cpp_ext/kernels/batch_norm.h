#pragma once

#include <algorithm>
#include <cstdint>

#include "gradfuse/tensor.h"
#include "kernels/dispatch.h"

namespace gradfuse {

// A tensor (N, C, ...) as `batch` items of `channels` planes of `size` elements.
struct ChannelPlanes {
  explicit ChannelPlanes(const Shape& shape) : batch(shape[0]), channels(shape[1]) {
    for (int axis = 2; axis < shape.rank(); ++axis) size *= shape[axis];
  }

  int64_t count() const { return batch * size; }  // of the elements of a channel

  int64_t batch;
  int64_t channels;
  int64_t size = 1;
};

// How the planes are cut into tasks: channel by channel, and of few channels each into parts of the batch.
class BatchParts {
 public:
  explicit BatchParts(const ChannelPlanes& planes) : planes_(planes) {
    const int64_t most = planes.channels >= kFewChannels ? 1 : CeilDiv(kFewChannels, planes.channels);
    items_ = std::max<int64_t>(1, CeilDiv(planes.batch, most));
    count_ = std::max<int64_t>(1, CeilDiv(planes.batch, items_));
  }

  int64_t count() const { return count_; }  // of the parts of a channel
  int64_t Channel(int64_t task) const { return task / count_; }
  // The first element of a task, and how many planes it has.
  int64_t Begin(int64_t task) const { return (FirstItem(task) * planes_.channels + Channel(task)) * planes_.size; }
  int64_t Items(int64_t task) const { return std::min(items_, planes_.batch - FirstItem(task)); }

 private:
  static constexpr int64_t kFewChannels = 16;

  int64_t FirstItem(int64_t task) const { return task % count_ * items_; }

  const ChannelPlanes& planes_;
  int64_t items_;
  int64_t count_;
};

namespace cpu {

// How many elements are added up in the type of the computation, before they are in double.
constexpr int64_t kAddedTogether = 4096;
// If a plane is one element, this many neighbouring channels, and rows of them, are processed together.
constexpr int64_t kChannelsPerPanel = 256;
constexpr int64_t kRowsTogether = 64;

}  // namespace cpu

// How far ahead a loop over planes asks for memory, in elements: for the next plane, which the processor does not see
// by itself, or within a large one as other sweeps do.
template <class T>
int64_t AskedAhead(int64_t size, int64_t pitch, bool is_last) {
  constexpr int64_t kLarge = 16384;
  constexpr int64_t kWithin = 3072;
  const auto width = static_cast<int64_t>(sizeof(T));
  if (size * width > kLarge) return kWithin / width;
  return is_last ? 0 : pitch;
}

}  // namespace gradfuse
