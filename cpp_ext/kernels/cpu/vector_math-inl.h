// Exponential and logarithm of vectors. Included once for each instruction set.
#if defined(GRADFUSE_VECTOR_MATH_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADFUSE_VECTOR_MATH_INL_H
#undef GRADFUSE_VECTOR_MATH_INL_H
#else
#define GRADFUSE_VECTOR_MATH_INL_H
#endif

#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {

// What exp needs to know of a floating-point type. exp(x) = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2.
template <class Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kLowest = -104.0f;     // below it the result rounds to 0
  static constexpr float kHighest = 89.0f;      // above it the result overflows
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  static constexpr uint32_t kRoundBits = 0x4b400000;
  static constexpr uint32_t kBias = 127;
  static constexpr int kMantissaBits = 23;
  // ln 2 in two parts (Cody and Waite), so that r is exact to the last place.
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;
};

template <>
struct ExpConstants<double> {
  static constexpr double kLowest = -746.0;
  static constexpr double kHighest = 710.0;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr uint64_t kRoundBits = 0x4338000000000000;
  static constexpr uint64_t kBias = 1023;
  static constexpr int kMantissaBits = 52;
  static constexpr double kLn2High = 6.93147180369123816490e-01;  // 33 bits
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
};

// A polynomial by Horner's scheme, the coefficient of the highest power first.
template <class D, class... Real>
GRADFUSE_INLINE hn::Vec<D> Polynomial(D d, hn::Vec<D> x, hn::TFromD<D> first, Real... rest) {
  auto sum = hn::Set(d, first);
  ((sum = hn::MulAdd(sum, x, hn::Set(d, rest))), ...);
  return sum;
}

// (e^r - 1 - r) / r^2: for float a fitted polynomial, for double the Taylor series.
template <class D>
GRADFUSE_INLINE hn::Vec<D> ExpTail(D d, hn::Vec<D> r, float) {
  return Polynomial(d, r, 1.38145983e-3f, 8.36871690e-3f, 4.16683881e-2f, 1.66665205e-1f, 4.99999934e-1f);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> ExpTail(D d, hn::Vec<D> r, double) {
  return Polynomial(d, r, 1 / 6227020800., 1 / 479001600., 1 / 39916800., 1 / 3628800., 1 / 362880., 1 / 40320.,
                    1 / 5040., 1 / 720., 1 / 120., 1 / 24., 1 / 6., 1 / 2.);
}

// exp without branches or tables, at most 1.1 units in the last place from the true value, with NaN, infinities,
// overflow and subnormal results as std::exp.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Exp(D d, hn::Vec<D> x) {
  using Real = hn::TFromD<D>;
  using C = ExpConstants<Real>;
  const hn::RebindToUnsigned<D> u;
  const auto bounded = hn::Min(hn::Set(d, C::kHighest), hn::Max(hn::Set(d, C::kLowest), x));  // NaN stays NaN
  const auto shifted = hn::MulAdd(bounded, hn::Set(d, Real(1.44269504088896340736)), hn::Set(d, C::kRound));
  const auto n = shifted - hn::Set(d, C::kRound);
  const auto r = hn::NegMulAdd(n, hn::Set(d, C::kLn2Low), hn::NegMulAdd(n, hn::Set(d, C::kLn2High), bounded));
  const auto p = hn::MulAdd(ExpTail(d, r, Real()), r * r, r) + hn::Set(d, Real(1));
  // 2^n in two factors: n reaches from below the smallest exponent of a normal number to above the largest. Both
  // exponents with their biases together are n + 2 kBias, which is positive.
  const auto biased = hn::BitCast(u, shifted) - hn::Set(u, C::kRoundBits - 2 * C::kBias);
  const auto low = hn::ShiftRight<1>(biased);
  const auto high = biased - low;
  return p * hn::BitCast(d, hn::ShiftLeft<C::kMantissaBits>(low)) *
         hn::BitCast(d, hn::ShiftLeft<C::kMantissaBits>(high));
}

// log(1 + f) - f + f^2 / 2, for 1 + f from sqrt(1/2) to sqrt(2). For float a polynomial, fitted; for double as fdlibm
// does it, with s = f / (2 + f): s (f^2 / 2 + 2 (s^2 / 3 + s^4 / 5 + ...)).
template <class D>
GRADFUSE_INLINE hn::Vec<D> LogTail(D d, hn::Vec<D> f, hn::Vec<D> square, float) {
  return f * square *
         Polynomial(d, f, -7.63574166e-2f, 1.27627847e-1f, -1.31603008e-1f, 1.42016062e-1f, -1.66233305e-1f,
                    2.00012323e-1f, -2.50008219e-1f, 3.33333317e-1f);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> LogTail(D d, hn::Vec<D> f, hn::Vec<D> square, double) {
  const auto s = f / (f + hn::Set(d, 2.0));
  const auto s2 = s * s;
  const auto series =
      s2 * Polynomial(d, s2, 2. / 21, 2. / 19, 2. / 17, 2. / 15, 2. / 13, 2. / 11, 2. / 9, 2. / 7, 2. / 5, 2. / 3);
  return s * hn::MulAdd(square, hn::Set(d, 0.5), series);
}

// log of 1 <= x <= 3, less than 1 unit in the last place from the true value. NaN stays NaN. log(x) = k ln 2 +
// log(1 + f) with x = 2^k (1 + f).
template <class D>
GRADFUSE_INLINE hn::Vec<D> LogUpTo3(D d, hn::Vec<D> x) {
  using Real = hn::TFromD<D>;
  using C = ExpConstants<Real>;
  const auto one = hn::Set(d, Real(1));
  const auto half = hn::Set(d, Real(0.5));
  const auto above_sqrt2 = x > hn::Set(d, Real(1.41421356237309504880));
  const auto above_sqrt8 = x > hn::Set(d, Real(2.82842712474619009760));
  const auto k = hn::IfThenElseZero(above_sqrt2, one) + hn::IfThenElseZero(above_sqrt8, one);
  const auto f = x * hn::IfThenElse(above_sqrt2, half, one) * hn::IfThenElse(above_sqrt8, half, one) - one;
  const auto square = f * f;
  const auto tail = hn::MulAdd(k, hn::Set(d, C::kLn2Low), LogTail(d, f, square, Real()));
  return hn::MulAdd(k, hn::Set(d, C::kLn2High), f - (hn::MulSub(square, half, tail)));
}

}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
