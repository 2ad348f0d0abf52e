#pragma once

#include <string>

#include "gradfuse/packed_weight.h"
#include "gradfuse/signature.h"
#include "kernels/checks.h"

// The checks that products with a weight of few bits share.
namespace gradfuse {

inline Status CheckPackedWeight(const PackedWeight& args) {
  GRADFUSE_EXPECT(args.bits == 2 || args.bits == 4 || args.bits == 8, "bits", std::to_string(args.bits), "2, 4 or 8");
  GRADFUSE_EXPECT(args.weight.shape.rank() == 3, "weight", Describe(args.weight),
                  "rows, blocks and the bytes of a block");
  const int64_t size = args.BlockSize();
  GRADFUSE_EXPECT(size >= 16 && (size & (size - 1)) == 0, "weight", Describe(args.weight),
                  "blocks of a power of two of columns, from 16 on");
  const int64_t scales = args.OutFeatures() * args.Blocks();
  GRADFUSE_EXPECT(args.scales.NumElements() == scales, "scales", Describe(args.scales),
                  std::to_string(scales) + " elements, one a block of weight");
  if (args.zero_points) {
    const int64_t bytes = args.OutFeatures() * args.ZeroPointBytes();
    GRADFUSE_EXPECT(args.zero_points->NumElements() == bytes, "zero_points", Describe(*args.zero_points),
                    std::to_string(bytes) + " bytes, a number for each block of weight");
  }
  return {};
}

// Whether the weight has so many columns, of which the last block need not be full.
inline bool HasColumns(const PackedWeight& args, int64_t columns) {
  const int64_t most = args.Blocks() * args.BlockSize();
  return columns > most - args.BlockSize() && columns >= 1 && columns <= most;
}

inline std::string DescribeColumns(const PackedWeight& args) {
  const int64_t most = args.Blocks() * args.BlockSize();
  return std::to_string(most - args.BlockSize() + 1) + " to " + std::to_string(most);
}

}  // namespace gradfuse
