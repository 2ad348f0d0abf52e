#pragma once

#include <cstdint>
#include <optional>

#include "gradfuse/tensor.h"

namespace gradfuse {

// A weight of few bits. Its rows are blocks of numbers, (number - zero point) scale; the lowest bits of a byte are its
// first number.
struct PackedWeight {
  Tensor weight;                      // (out, blocks, bytes of a block)
  Tensor scales;                      // (out, blocks), in any shape
  std::optional<Tensor> zero_points;  // packed as the weight, each row from a new byte on, in any shape
  int64_t bits = 4;

  int64_t OutFeatures() const { return weight.shape[0]; }
  int64_t Blocks() const { return weight.shape[1]; }
  int64_t BlockSize() const { return weight.shape[2] * 8 / bits; }
  int64_t ZeroPointBytes() const { return (Blocks() * bits + 7) / 8; }  // of a row
};

}  // namespace gradfuse
