#pragma once

#include <cmath>

#include "gradfuse/float16.h"

namespace gradfuse::cpu {

// exp without branches or tables, so that loops over it become vector code: at most 1.1 units in the last place from
// the true value (found over all floats), with NaN, infinities, overflow and subnormal results as std::exp.
// exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite) so that r is exact
// to the last place, e^r by a polynomial of degree 6.
GRADFUSE_INLINE float Exp(float x) {
  constexpr float kLowest = -104.0f;  // below it the result rounds to 0
  constexpr float kHighest = 89.0f;   // above it the result overflows
  x = x < kLowest ? kLowest : x;      // comparisons that a NaN passes through
  x = x > kHighest ? kHighest : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.38145983e-3f;
  p = p * r + 8.36871690e-3f;
  p = p * r + 4.16683881e-2f;
  p = p * r + 1.66665205e-1f;
  p = p * r + 4.99999934e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors: n from -150 to 128 is more than one float's exponent holds.
  const int32_t exponent = static_cast<int32_t>(internal::BitsOf(shifted)) - static_cast<int32_t>(0x4b400000);
  const int32_t half = exponent >> 1;
  const float low = internal::FloatOf(static_cast<uint32_t>(half + 127) << 23);
  const float high = internal::FloatOf(static_cast<uint32_t>(exponent - half + 127) << 23);
  return p * low * high;
}

GRADFUSE_INLINE double Exp(double x) { return std::exp(x); }

// log of 1 <= x <= 3, less than 1 unit in the last place from the true value (found over all floats). NaN stays NaN.
// log(x) = k ln 2 + log(1 + f) with x = 2^k (1 + f) and 1 + f near [sqrt(1/2), sqrt(2)].
GRADFUSE_INLINE float LogUpTo3(float x) {
  const bool above_sqrt2 = x > 1.41421356f;
  const bool above_sqrt8 = x > 2.82842712f;
  const float k = (above_sqrt2 ? 1.0f : 0.0f) + (above_sqrt8 ? 1.0f : 0.0f);
  const float f = x * (above_sqrt2 ? 0.5f : 1.0f) * (above_sqrt8 ? 0.5f : 1.0f) - 1.0f;
  float p = -7.63574166e-2f;
  p = p * f + 1.27627847e-1f;
  p = p * f - 1.31603008e-1f;
  p = p * f + 1.42016062e-1f;
  p = p * f - 1.66233305e-1f;
  p = p * f + 2.00012323e-1f;
  p = p * f - 2.50008219e-1f;
  p = p * f + 3.33333317e-1f;
  const float square = f * f;
  return k * 6.93359375e-1f + (f - (square * 0.5f - p * f * square + k * 2.12194440e-4f));
}

GRADFUSE_INLINE double LogUpTo3(double x) { return std::log(x); }

}  // namespace gradfuse::cpu
