#pragma once

#include <cstdint>
#include <cstring>

#include "gradfuse/macros.h"

namespace gradfuse {

// The two 16-bit formats, as storage only: arithmetic happens in float. Conversions to float are exact; conversions
// from it round once, to nearest even. NaN stays NaN, and the 16-bit formats' subnormals are kept, also while the
// processor flushes those of float. No branches, so that loops over them become vector code.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

namespace internal {

GRADFUSE_INLINE float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

GRADFUSE_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace internal

GRADFUSE_INLINE float ToCompute(float value) { return value; }
GRADFUSE_INLINE double ToCompute(double value) { return value; }

GRADFUSE_INLINE float ToCompute(BFloat16 value) { return internal::FloatOf(static_cast<uint32_t>(value.bits) << 16); }

GRADFUSE_INLINE float ToCompute(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fffu)
                           << 13;  // mantissa and exponent in float's places
  const uint32_t exponent = shifted & 0x0f800000u;
  const uint32_t normal = shifted + ((127u - 15u) << 23);
  const uint32_t special = normal + ((128u - 16u) << 23);  // Inf and NaN
  // A subnormal m * 2^-24 is (1 + m * 2^-10) * 2^-14 less its implied one: exact, and no float subnormal on the way.
  const uint32_t subnormal = internal::BitsOf(internal::FloatOf(normal + (1u << 23)) - internal::FloatOf(113u << 23));
  const uint32_t finite = exponent == 0 ? subnormal : normal;
  return internal::FloatOf(sign | (exponent == 0x0f800000u ? special : finite));
}

template <class T>
T FromCompute(float value);

template <>
GRADFUSE_INLINE float FromCompute<float>(float value) {
  return value;
}

template <>
GRADFUSE_INLINE BFloat16 FromCompute<BFloat16>(float value) {
  const uint32_t bits = internal::BitsOf(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

template <>
GRADFUSE_INLINE Half FromCompute<Half>(float value) {
  const uint32_t bits = internal::BitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 puts a subnormal's last place at the last place of the sum, so that the addition rounds it.
  const uint32_t subnormal = internal::BitsOf(internal::FloatOf(magnitude) + 0.5f) - internal::BitsOf(0.5f);
  const uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t large = magnitude > 0x7f800000u ? quiet_nan : 0x7c00u;
  return {static_cast<uint16_t>(sign | (magnitude >= ((127u + 16u) << 23) ? large : finite))};
}

template <class T>
T FromCompute(double value);

template <>
GRADFUSE_INLINE double FromCompute<double>(double value) {
  return value;
}

// The type that values of T are computed in.
template <class T>
struct ComputeTypeOf {
  using type = float;
};
template <>
struct ComputeTypeOf<double> {
  using type = double;
};
template <class T>
using ComputeType = typename ComputeTypeOf<T>::type;

}  // namespace gradfuse
