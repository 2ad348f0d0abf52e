// Rows of blocks of attention's scores. Included once for each instruction set.
#if defined(GRADFUSE_SCORE_ROWS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADFUSE_SCORE_ROWS_INL_H
#undef GRADFUSE_SCORE_ROWS_INL_H
#else
#define GRADFUSE_SCORE_ROWS_INL_H
#endif

#include <limits>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {

template <class T, MaskKind kKind>
using MaskElement = std::conditional_t<kKind == MaskKind::kAdded, T, uint8_t>;

// The mask of one row, at neighbouring places.
template <class T, MaskKind kKind>
class RowMask {
 public:
  explicit RowMask(const ScoreBlock<T>& block) : block_(block) {}

  const MaskElement<T, kKind>* Of(int64_t row) {
    if constexpr (kKind == MaskKind::kNone) return nullptr;
    const auto* const first = static_cast<const MaskElement<T, kKind>*>(block_.mask) + row * block_.mask_row_stride;
    if (block_.mask_key_stride == 1 || block_.keys == 1) return first;
    std::fill_n(repeated_, block_.keys, *first);
    return repeated_;
  }

 private:
  const ScoreBlock<T>& block_;
  MaskElement<T, kKind> repeated_[kBlockKeys];
};

// The masked scores of a vector of keys, from the key-th of a row on. Lanes that are not there see nothing.
template <class T, MaskKind kKind, class At>
GRADFUSE_INLINE hn::Vec<TagOf<T>> MaskedScores(At at, const ComputeType<T>* products, int64_t key,
                                               hn::Vec<TagOf<T>> scale, const MaskElement<T, kKind>* mask) {
  const TagOf<T> d;
  const auto never = hn::Set(d, -std::numeric_limits<ComputeType<T>>::infinity());
  auto scores = Load(at, d, products + key);
  if constexpr (kKind == MaskKind::kAdded) {
    scores = hn::MulAdd(scores, scale, Load(at, d, mask + key));
  } else {
    scores = scores * scale;
  }
  if constexpr (kKind == MaskKind::kShown) scores = hn::IfThenElse(LoadMask(at, d, mask + key), scores, never);
  if constexpr (std::is_same_v<At, Part>) scores = hn::IfThenElse(hn::FirstN(d, at.lanes), scores, never);
  return scores;
}

// What the dropout multiplies neighbouring probabilities by.
template <class Real>
void DropoutGains(const Dropout& dropout, uint32_t place, int64_t count, Real* gains) {
  const auto gain = static_cast<Real>(dropout.gain());
  for (int64_t i = 0; i < count; ++i) {
    gains[i] = dropout.Keeps(place + static_cast<uint32_t>(i)) ? gain : Real{0};
  }
}

}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
