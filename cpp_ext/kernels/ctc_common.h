#pragma once

#include <algorithm>

#include "gradfuse/float16.h"
#include "gradfuse/ops/ctc_loss.h"

namespace gradfuse {

// Calls body with a null pointer to the element type of `targets`.
template <class Body>
auto WithTargetType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kInt32: return body(static_cast<const int32_t*>(nullptr));
    case DType::kBool: return body(static_cast<const bool*>(nullptr));
    case DType::kFloat32: return body(static_cast<const float*>(nullptr));
    case DType::kFloat16: return body(static_cast<const Half*>(nullptr));
    default: return body(static_cast<const int64_t*>(nullptr));
  }
}

// The value of a label of any type; no type holds a class that double does not.
template <class T>
double ToDouble(T label) {
  return static_cast<double>(label);
}
inline double ToDouble(Half label) { return ToCompute(label); }

// Where the labels of item `item` begin in `targets`; `joined` is the number of labels of the items before it.
inline int64_t FirstLabel(const Tensor& targets, int64_t item, int64_t joined) {
  return targets.shape.rank() == 2 ? item * targets.shape[1] : joined;
}

// The longest of all target lengths, 0 where there are none.
inline int64_t LongestTarget(const Tensor& target_lengths) {
  const int64_t* lengths = target_lengths.Data<int64_t>();
  const int64_t count = target_lengths.NumElements();
  return count == 0 ? 0 : *std::max_element(lengths, lengths + count);
}

// The checks that the forward and the backward pass share: all but those of what only the latter takes.
Status CheckCtc(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                const Tensor& target_lengths, int64_t blank, int64_t zero_infinity);

}  // namespace gradfuse
