#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "gradfuse/float16.h"
#include "gradfuse/parallel.h"
#include "kernels/attention.h"
#include "kernels/dispatch.h"

// What the loops of attention see: a block of scores, of some rows of a head and some keys, in the cache.
namespace gradfuse::cpu {

inline constexpr int64_t kBlockRows = 96;
inline constexpr int64_t kBlockKeys = 96;

// Whether and how attn_mask counts: by what it shows, or as what it adds.
enum class MaskKind { kNone, kShown, kAdded };

template <class T>
struct ScoreBlock {
  using Real = ComputeType<T>;

  int64_t rows = 0;
  int64_t keys = 0;
  std::array<int64_t, kBlockRows> seen{};  // how many keys, from the block's first on, the causal mask lets a row see
  bool any_seen = false;

  Real scale = 0;
  // Of the block's first row and key; what is null when there is no mask.
  const void* mask = nullptr;
  int64_t mask_row_stride = 0;
  int64_t mask_key_stride = 0;

  const Dropout* dropout = nullptr;
  uint32_t place = 0;  // of the first row's first key in (B, H, L, S)
  uint32_t row_places = 0;
};

// Makes the blocks of a call.
template <class T>
class ScoreBlocks {
 public:
  template <class Args>
  explicit ScoreBlocks(const Args& args)
      : sizes_(args), causal_(args), scale_(static_cast<ComputeType<T>>(AttentionScale(args))) {
    if (args.attn_mask) {
      mask_.emplace(*args.attn_mask);
      kind_ = args.attn_mask->dtype == DType::kBool ? MaskKind::kShown : MaskKind::kAdded;
    }
    if (args.dropout_threshold != 0 && args.seed) {
      const int64_t drawn = args.drawn ? *args.drawn->template Data<int64_t>() : 0;
      dropout_.emplace(args.dropout_threshold, *args.seed->template Data<int64_t>(), args.draw + drawn);
    }
  }

  const AttentionSizes& sizes() const { return sizes_; }
  const CausalMask& causal() const { return causal_; }
  MaskKind kind() const { return kind_; }

  // Of all heads of the batch the head-th.
  ScoreBlock<T> Block(int64_t head, int64_t first_row, int64_t rows, int64_t first_key, int64_t keys) const {
    ScoreBlock<T> block;
    block.rows = rows;
    block.keys = keys;
    for (int64_t r = 0; r < rows; ++r) {
      block.seen[static_cast<size_t>(r)] = std::clamp<int64_t>(causal_.Seen(first_row + r) - first_key, 0, keys);
    }
    block.any_seen = block.seen[static_cast<size_t>(rows - 1)] > 0;
    block.scale = scale_;
    if (mask_) {
      const auto& strides = mask_->strides;
      const int64_t offset = head / sizes_.heads * strides[0] + head % sizes_.heads * strides[1] +
                             first_row * strides[2] + first_key * strides[3];
      block.mask = static_cast<const char*>(mask_->data) +
                   offset * static_cast<int64_t>(kind_ == MaskKind::kShown ? sizeof(uint8_t) : sizeof(T));
      block.mask_row_stride = strides[2];
      block.mask_key_stride = strides[3];
    }
    if (dropout_) block.dropout = &*dropout_;
    block.place = static_cast<uint32_t>((head * sizes_.rows + first_row) * sizes_.keys + first_key);
    block.row_places = static_cast<uint32_t>(sizes_.keys);
    return block;
  }

 private:
  AttentionSizes sizes_;
  CausalMask causal_;
  ComputeType<T> scale_;
  std::optional<AttentionMask> mask_;
  MaskKind kind_ = MaskKind::kNone;
  std::optional<Dropout> dropout_;
};

// Runs a pass of attention in the type of its query and for the kind of its mask.
template <template <class, MaskKind> class Kernel, class Args>
void RunKernel(const Args& args, const ParallelFor& parallel) {
  WithFloatType(args.query.dtype, [&](auto type) {
    using T = decltype(type);
    if (!args.attn_mask) return Kernel<T, MaskKind::kNone>(args, parallel).Run();
    if (args.attn_mask->dtype == DType::kBool) return Kernel<T, MaskKind::kShown>(args, parallel).Run();
    return Kernel<T, MaskKind::kAdded>(args, parallel).Run();
  });
}

}  // namespace gradfuse::cpu
