#pragma once

#include "gradfuse/float16.h"
#include "gradfuse/tensor.h"

namespace gradfuse {

// Calls body with a value of the element type that `dtype` names, one of the floating-point types, and returns its
// result.
template <class Body>
decltype(auto) WithFloatType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16: return body(Half{});
    case DType::kBFloat16: return body(BFloat16{});
    case DType::kFloat64: return body(double{});
    default: return body(float{});
  }
}

// The same without float64, for ops that do not take it.
template <class Body>
decltype(auto) WithShortFloatType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat16: return body(Half{});
    case DType::kBFloat16: return body(BFloat16{});
    default: return body(float{});
  }
}

constexpr int64_t CeilDiv(int64_t numerator, int64_t denominator) {
  return numerator / denominator + (numerator % denominator != 0 ? 1 : 0);
}

}  // namespace gradfuse
