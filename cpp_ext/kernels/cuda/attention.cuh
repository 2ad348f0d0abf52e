#pragma once

#include "kernels/attention.h"
#include "kernels/cuda/device.cuh"

// Scores of attention, one by one.
namespace gradfuse::cuda {

constexpr int kAttentionThreads = 128;

template <class T>
struct AttentionScores {
  using Real = ComputeType<T>;

  template <class Args>
  explicit AttentionScores(const Args& args)
      : query(args.query.template Data<T>()),
        key(args.key.template Data<T>()),
        value(args.value.template Data<T>()),
        sizes(args),
        causal(args),
        scale(static_cast<Real>(AttentionScale(args))),
        threshold(args.dropout_threshold),
        draw(args.draw),
        gain(static_cast<Real>(Dropout(args.dropout_threshold, 0, 0).gain())) {
    if (args.attn_mask) {
      const AttentionMask mask(*args.attn_mask);
      (args.attn_mask->dtype == DType::kBool ? shown : added) = mask.data;
      for (int axis = 0; axis < 4; ++axis) mask_strides[axis] = mask.strides[axis];
    }
    if (args.dropout_threshold != 0) {
      seed = args.seed->template Data<int64_t>();
      drawn = args.drawn ? args.drawn->template Data<int64_t>() : nullptr;
    }
  }

  // The masked score of a row of the head-th head of all.
  __device__ Real Score(int64_t head, int64_t key_head, int64_t row, int64_t at) const {
    const T* const queries = query + (head * sizes.rows + row) * sizes.width;
    const T* const keys = key + (key_head * sizes.keys + at) * sizes.width;
    Real sum = 0;
    for (int64_t i = 0; i < sizes.width; ++i) sum += Widen(queries[i]) * Widen(keys[i]);
    const int64_t place = head / sizes.heads * mask_strides[0] + head % sizes.heads * mask_strides[1] +
                          row * mask_strides[2] + at * mask_strides[3];
    if (shown != nullptr) return static_cast<const uint8_t*>(shown)[place] != 0 ? scale * sum : Never<Real>();
    return added == nullptr ? scale * sum : scale * sum + Widen(static_cast<const T*>(added)[place]);
  }

  // What the dropout multiplies a probability by.
  __device__ Real Gain(int64_t head, int64_t row, int64_t at) const {
    if (seed == nullptr) return 1;
    const Dropout dropout(threshold, *seed, draw + (drawn == nullptr ? 0 : *drawn));
    return dropout.Keeps(static_cast<uint32_t>((head * sizes.rows + row) * sizes.keys + at)) ? gain : Real{0};
  }

  const T* query;
  const T* key;
  const T* value;
  const void* shown = nullptr;  // attn_mask, if it is of truth values
  const void* added = nullptr;  // attn_mask, if it is added
  const int64_t* seed = nullptr;
  const int64_t* drawn = nullptr;
  AttentionSizes sizes;
  CausalMask causal;
  int64_t mask_strides[4] = {};
  Real scale;
  int64_t threshold;
  int64_t draw;
  Real gain;
};

}  // namespace gradfuse::cuda
