#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "gradfuse/signature.h"
#include "kernels/dropout.h"

// The arguments of the attention kernels, forward and backward.
namespace gradfuse {

struct AttentionSizes {
  template <class Args>
  constexpr explicit AttentionSizes(const Args& args)
      : batch(args.query.shape[0]),
        heads(args.query.shape[1]),
        groups(args.key.shape[1]),
        rows(args.query.shape[2]),
        keys(args.key.shape[2]),
        width(args.query.shape[3]),
        value_width(args.value.shape[3]) {}

  // The head of keys that a head of queries reads, counted over the batch.
  constexpr int64_t KeyHead(int64_t head) const { return head / heads * groups + head % heads / (heads / groups); }

  int64_t batch;
  int64_t heads;
  int64_t groups;
  int64_t rows;
  int64_t keys;
  int64_t width;
  int64_t value_width;
};

// Keys [0, Seen(row)) are those that a row sees, where attn_mask does not hide them.
struct CausalMask {
  template <class Args>
  constexpr explicit CausalMask(const Args& args) : is_there(args.causal != 0), keys(args.key.shape[2]) {
    if (args.causal == 2) ahead = keys - args.query.shape[2];
  }

  constexpr int64_t Seen(int64_t row) const { return is_there ? std::clamp<int64_t>(row + ahead + 1, 0, keys) : keys; }
  // The first row that sees a key, of any number of rows.
  constexpr int64_t FirstRow(int64_t key) const { return is_there ? std::max<int64_t>(key - ahead, 0) : 0; }

  bool is_there;
  int64_t keys;
  int64_t ahead = 0;
};

// Strides of attn_mask along (B, H, L, S), in elements: 0 where it repeats itself.
struct AttentionMask {
  explicit AttentionMask(const Tensor& mask) : data(mask.data) {
    for (int axis = 4 - mask.shape.rank(), own = 0; axis < 4; ++axis, ++own) {
      strides[axis] = mask.shape[own] == 1 ? 0 : mask.strides[own];
    }
  }

  const void* data;
  int64_t strides[4] = {};
};

// Whether a logsumexp is so large that its neighbours are more than 1 / 1024 away, as where attn_mask adds the least
// number to all scores of a row: probabilities are then divided by their sum.
template <class Real>
constexpr bool HasFewDigits(Real logsumexp) {
  constexpr Real kMost = Real{1} / 1024 / std::numeric_limits<Real>::epsilon();
  return logsumexp > kMost || logsumexp < -kMost;
}

template <class Args>
double AttentionScale(const Args& args) {
  const auto width = static_cast<double>(std::max<int64_t>(args.query.shape[3], 1));
  return args.scale == 0 ? 1 / std::sqrt(width) : static_cast<double>(args.scale);
}

namespace internal {

template <class Args>
Status CheckAttentionMask(const Args& args, const Tensor& mask) {
  const int rank = mask.shape.rank();
  const Shape whole{args.query.shape[0], args.query.shape[1], args.query.shape[2], args.key.shape[2]};
  bool fits = rank >= 2 && rank <= 4;
  for (int axis = 4 - rank, own = 0; fits && axis < 4; ++axis, ++own) {
    fits = mask.shape[own] == 1 || mask.shape[own] == whole[axis];
  }
  GRADFUSE_EXPECT(fits, "attn_mask", Describe(mask),
                  "the last 2 to 4 dimensions of " + Describe(mask.dtype, whole) + ", each in full or 1");
  return {};
}

}  // namespace internal

// The checks of inputs and attributes that both operators share.
template <class Args>
Status CheckAttention(const Args& args) {
  GRADFUSE_RETURN_IF_ERROR(CheckLayout(args));
  const Shape& query = args.query.shape;
  const Shape& key = args.key.shape;
  const Shape& value = args.value.shape;
  GRADFUSE_EXPECT(query.rank() == 4, "query", Describe(args.query), "4 dimensions (B,H,L,E)");
  const bool key_fits = key.rank() == 4 && key[0] == query[0] && key[3] == query[3];
  GRADFUSE_EXPECT(key_fits, "key", Describe(args.key),
                  "4 dimensions (B,G,S,E), with B and E of query " + Describe(args.query));
  const bool value_fits = value.rank() == 4 && value[0] == key[0] && value[1] == key[1] && value[2] == key[2];
  GRADFUSE_EXPECT(value_fits, "value", Describe(args.value),
                  "4 dimensions (B,G,S,Ev), with B, G and S of key " + Describe(args.key));
  const bool heads_fit = key[1] == 0 ? query[1] == 0 : query[1] % key[1] == 0;
  GRADFUSE_EXPECT(heads_fit, "query", "of H " + std::to_string(query[1]),
                  "a multiple of key's G " + std::to_string(key[1]));
  if (args.attn_mask) GRADFUSE_RETURN_IF_ERROR(internal::CheckAttentionMask(args, *args.attn_mask));
  GRADFUSE_EXPECT(args.causal >= 0 && args.causal <= 2, "causal", std::to_string(args.causal), "0, 1 or 2");
  GRADFUSE_RETURN_IF_ERROR(CheckDropout(args));
  GRADFUSE_EXPECT(args.dropout_threshold == 0 || args.seed, "seed", "absent",
                  "a tensor, as dropout_threshold is " + std::to_string(args.dropout_threshold));
  return {};
}

}  // namespace gradfuse
