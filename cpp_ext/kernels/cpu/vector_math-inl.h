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

// What exp and log need to know of a floating-point type. exp(x) = 2^n e^r with n = round(x / ln 2) and
// |r| <= ln 2 / 2.
template <class Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kLowest = -87.0f;  // below it the result is 0
  static constexpr float kHighest = 89.0f;  // above it the result overflows
  // 1.5 * 2^23, to which what is added is rounded to a whole number, and what exponents are biased by, less 1: the low
  // bits of this + n are the exponent of 2^(n - 1).
  static constexpr float kRound = 12582912.0f + 126;
  static constexpr int kMantissaBits = 23;
  // ln 2 in two parts (Cody and Waite), so that r is exact to the last place.
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;
};

template <>
struct ExpConstants<double> {
  static constexpr double kLowest = -708.2;
  static constexpr double kHighest = 710.0;
  static constexpr double kRound = 6755399441055744.0 + 1022;  // 1.5 * 2^52
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

// 2 e^r to the precision that a result of the type of the last argument keeps: for float a fitted polynomial, for
// double the Taylor series, for bfloat16 and float16 shorter ones, wrong by at most 1.3e-4 and 5.4e-6 of it.
template <class D>
GRADFUSE_INLINE hn::Vec<D> TwiceExp(D d, hn::Vec<D> r, const float*) {
  return Polynomial(d, r, 2.76291966e-3f, 1.67374338e-2f, 8.33367762e-2f, 3.33330410e-1f, 9.99999868e-1f, 2.0f, 2.0f);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> TwiceExp(D d, hn::Vec<D> r, const double*) {
  return Polynomial(d, r, 2 / 6227020800., 2 / 479001600., 2 / 39916800., 2 / 3628800., 2 / 362880., 2 / 40320.,
                    2 / 5040., 2 / 720., 2 / 120., 2 / 24., 2 / 6., 1., 2., 2.);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> TwiceExp(D d, hn::Vec<D> r, const BFloat16*) {
  return Polynomial(d, r, 3.33256168e-1f, 1.00788358f, 2.0f, 2.0f);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> TwiceExp(D d, hn::Vec<D> r, const Half*) {
  return Polynomial(d, r, 8.25553346e-2f, 3.35070610e-1f, 1.00010240f, 2.0f, 2.0f);
}

// exp without branches or tables, with NaN, infinities and overflow as std::exp, and 0 for results below 2^-125
// (double: 2^-1021), for loops that take such numbers for 0. For float and double it is at most 1.2 units in the last
// place from the true value; T says what the result is for.
template <class T, class D>
GRADFUSE_INLINE hn::Vec<D> Exp(D d, hn::Vec<D> x) {
  using Real = hn::TFromD<D>;
  using C = ExpConstants<Real>;
  const hn::RebindToUnsigned<D> u;
  const auto bounded = hn::Min(hn::Set(d, C::kHighest), hn::Max(hn::Set(d, C::kLowest), x));  // NaN stays NaN
  const auto shifted = hn::MulAdd(bounded, hn::Set(d, Real(1.44269504088896340736)), hn::Set(d, C::kRound));
  const auto n = shifted - hn::Set(d, C::kRound);
  auto r = bounded;
  if constexpr (std::is_same_v<T, Real>) {
    r = hn::NegMulAdd(n, hn::Set(d, C::kLn2Low), hn::NegMulAdd(n, hn::Set(d, C::kLn2High), r));
  } else {
    r = hn::NegMulAdd(n, hn::Set(d, Real(0.693147180559945309)), r);
  }
  // Its exponent is from 0, which makes it 0, to the largest of a finite number.
  const auto half_power = hn::BitCast(d, hn::ShiftLeft<C::kMantissaBits>(hn::BitCast(u, shifted)));
  return TwiceExp(d, r, static_cast<const T*>(nullptr)) * half_power;
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
