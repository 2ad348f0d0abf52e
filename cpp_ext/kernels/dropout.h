#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "gradfuse/macros.h"
#include "gradfuse/signature.h"

// The dropout of the operators that have one.
namespace gradfuse {

// What it makes of an element's random bits: docs/export.md says what they are a hash of.
class Dropout {
 public:
  static constexpr int64_t kRange = int64_t{1} << 31;

  constexpr Dropout(int64_t threshold, int64_t seed, int64_t number)
      : threshold_(static_cast<uint32_t>(threshold)),
        // Of the seed's 31 bits, as a remainder that is not negative.
        key_((static_cast<uint32_t>(seed) & 0x7FFFFFFFu) * 0x9E3779B1u + static_cast<uint32_t>(number) * 0x85EBCA77u) {}

  // Whether the element at a place of the tensor stays.
  GRADFUSE_INLINE constexpr bool Keeps(uint32_t place) const {
    uint32_t word = place * 0x9E3779B1u;
    word = ((word ^ (word >> 15)) + key_) * 0x21F0AAADu;
    word = (word ^ (word >> 13)) * 0x735A2D97u;
    return (word >> 1) >= threshold_;
  }

  // Of what stays.
  constexpr double gain() const { return static_cast<double>(kRange) / static_cast<double>(kRange - threshold_); }

 private:
  uint32_t threshold_;
  uint32_t key_;
};

namespace internal {

inline Status CheckNumber(const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return {};
  GRADFUSE_EXPECT(tensor->shape.rank() <= 1 && tensor->NumElements() == 1, name, Describe(*tensor),
                  "int64() or int64(1)");
  return {};
}

}  // namespace internal

// The checks of single arguments.
template <class Args>
Status CheckDropout(const Args& args) {
  GRADFUSE_RETURN_IF_ERROR(internal::CheckNumber("seed", args.seed));
  GRADFUSE_RETURN_IF_ERROR(internal::CheckNumber("drawn", args.drawn));
  GRADFUSE_EXPECT(args.dropout_threshold >= 0 && args.dropout_threshold < Dropout::kRange, "dropout_threshold",
                  std::to_string(args.dropout_threshold), "0 to " + std::to_string(Dropout::kRange - 1));
  return {};
}

}  // namespace gradfuse
