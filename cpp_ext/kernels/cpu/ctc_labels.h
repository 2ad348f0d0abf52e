#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/ctc_common.h"
#include "kernels/dispatch.h"

namespace gradfuse::cpu {

// The labels of all items, read from whatever type and layout targets has.
class CtcLabels {
 public:
  CtcLabels(const Tensor& targets, const Tensor& target_lengths)
      : lengths_(target_lengths.Data<int64_t>()), longest_(LongestTarget(target_lengths)) {
    const int64_t items = target_lengths.shape[0];
    starts_.reserve(static_cast<size_t>(items));
    WithTargetType(targets.dtype, [&](auto type) {
      for (int64_t item = 0; item < items; ++item) {
        const auto joined = static_cast<int64_t>(labels_.size());
        const auto* source = static_cast<decltype(type)>(targets.data) + FirstLabel(targets, item, joined);
        for (int64_t index = 0; index < lengths_[item]; ++index) {
          labels_.push_back(static_cast<int64_t>(ToDouble(source[index])));
        }
        starts_.push_back(joined);
      }
    });
  }

  int64_t length(int64_t item) const { return lengths_[item]; }
  const int64_t* labels(int64_t item) const { return labels_.data() + starts_[static_cast<size_t>(item)]; }
  int64_t longest() const { return longest_; }

 private:
  const int64_t* lengths_;
  int64_t longest_;
  std::vector<int64_t> labels_;
  std::vector<int64_t> starts_;
};

// Cuts the scratch memory of one item into arrays, aligned for vectors, with room before and after them for what
// whole vectors, kSideBySide of them, read and write beside what is asked for. Zeros at first. Made for all items
// before the threads start: nothing is allocated, so nothing can fail, inside a task.
template <class Real>
class Scratch {
 public:
  Scratch(int64_t items, int64_t arrays, int64_t array_size)
      : array_size_(CeilDiv(array_size, kAlignment) * kAlignment + kBefore + kAfter),
        item_size_(arrays * array_size_),
        memory_(static_cast<size_t>(items * item_size_ + kAlignment)) {
    const auto behind = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory_.data()) / sizeof(Real)) % kAlignment;
    first_ = memory_.data() + (behind == 0 ? 0 : kAlignment - behind) + kBefore;
  }

  Real* Array(int64_t item, int64_t index) { return first_ + item * item_size_ + index * array_size_; }

 private:
  static constexpr int64_t kAlignment = 16;  // elements, as all others here
  static constexpr int64_t kBefore = 16;
  static constexpr int64_t kAfter = 32;

  int64_t array_size_;
  int64_t item_size_;
  std::vector<Real> memory_;
  Real* first_;
};

// Fills skip[s], the log of whether a path may reach state s from s - 2, for the 2 length + 1 states of an item: only
// an odd state's label may follow the label before it without a blank, and only if the two differ.
template <class Real>
void FillSkip(const int64_t* labels, int64_t length, Real* skip) {
  constexpr Real kNever = -std::numeric_limits<Real>::infinity();
  for (int64_t state = 0; state < 2 * length + 1; ++state) skip[state] = kNever;
  for (int64_t index = 1; index < length; ++index) {
    if (labels[index] != labels[index - 1]) skip[2 * index + 1] = 0;
  }
}

}  // namespace gradfuse::cpu
