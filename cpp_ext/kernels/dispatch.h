#pragma once

#include <type_traits>

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

// Calls body with zeros of A and T, the types of activations and of what else an operator takes. ShortTypes: without
// float64.
template <bool kShortTypes, class Body>
decltype(auto) WithActivationTypes(DType a, DType t, const Body& body) {
  const auto with_t = [&](auto type) -> decltype(auto) {
    using T = decltype(type);
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, Half>) {
      if (a == DType::kBFloat16) return body(BFloat16{}, T{});
    }
    return body(T{}, T{});
  };
  if constexpr (kShortTypes) {
    return WithShortFloatType(t, with_t);
  } else {
    return WithFloatType(t, with_t);
  }
}

constexpr int64_t CeilDiv(int64_t numerator, int64_t denominator) {
  return numerator / denominator + (numerator % denominator != 0 ? 1 : 0);
}

}  // namespace gradfuse
