#pragma once

#include "gradfuse/packed_weight.h"
#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {

// A weight of few bits, as kernels read it.
template <class T>
struct PackedNumbers {
  const uint8_t* weight;
  const T* scales;
  const uint8_t* zero_points;
  int64_t blocks;
  int64_t size;
  int64_t row_bytes;
  int64_t zero_point_bytes;
  int bits;

  explicit PackedNumbers(const PackedWeight& args)
      : weight(args.weight.Data<uint8_t>()),
        scales(args.scales.Data<T>()),
        zero_points(args.zero_points ? args.zero_points->Data<uint8_t>() : nullptr),
        blocks(args.Blocks()),
        size(args.BlockSize()),
        row_bytes(args.Blocks() * args.weight.shape[2]),
        zero_point_bytes(args.ZeroPointBytes()),
        bits(static_cast<int>(args.bits)) {}

  __device__ float At(int64_t row, int64_t column) const {
    const int mask = (1 << bits) - 1;
    const int64_t block = column / size;
    int zero = 1 << (bits - 1);
    if (zero_points != nullptr) {
      zero = (zero_points[row * zero_point_bytes + block * bits / 8] >> static_cast<int>(block * bits % 8)) & mask;
    }
    const int number = (weight[row * row_bytes + column * bits / 8] >> static_cast<int>(column * bits % 8)) & mask;
    return static_cast<float>(number - zero) * Widen(scales[row * blocks + block]);
  }
};

}  // namespace gradfuse::cuda
