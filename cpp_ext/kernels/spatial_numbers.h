#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gradfuse/signature.h"

// Attributes with a number for each spatial dimension, or one for all of them.
namespace gradfuse {

// Of attributes and of sizes in space: sums of products of two fit 64 bits.
inline constexpr int64_t kMostInSpace = std::numeric_limits<int32_t>::max();

// The number of a list for a spatial dimension.
inline int64_t At(const std::vector<int64_t>& numbers, int axis) {
  return numbers.size() == 1 ? numbers[0] : numbers[static_cast<size_t>(axis)];
}

// Of a list of paddings: it may also have those at all beginnings, then those at all ends.
inline int64_t PaddingAtEnd(const std::vector<int64_t>& padding, int spatial, int axis) {
  const bool symmetric = static_cast<int>(padding.size()) != 2 * spatial;
  return At(padding, symmetric ? axis : spatial + axis);
}

inline Status CheckNumbers(const char* name, const std::vector<int64_t>& numbers, int spatial, bool may_have_ends,
                           int64_t least) {
  const auto size = static_cast<int>(numbers.size());
  const bool fits = size == 1 || size == spatial || (may_have_ends && size == 2 * spatial);
  const bool in_range = std::all_of(numbers.begin(), numbers.end(),
                                    [&](int64_t number) { return number >= least && number <= kMostInSpace; });
  const std::string lengths = (spatial == 1 ? "1" : "1 or " + std::to_string(spatial)) +
                              (may_have_ends ? " or " + std::to_string(2 * spatial) : "");
  GRADFUSE_EXPECT(fits && in_range, name, Describe(numbers),
                  lengths + " numbers from " + std::to_string(least) + " to 2147483647");
  return {};
}

}  // namespace gradfuse
