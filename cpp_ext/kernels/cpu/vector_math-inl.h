// Exponential, logarithm and activations of vectors. Included once for each instruction set.
#if defined(GRADFUSE_VECTOR_MATH_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADFUSE_VECTOR_MATH_INL_H
#undef GRADFUSE_VECTOR_MATH_INL_H
#else
#define GRADFUSE_VECTOR_MATH_INL_H
#endif

#include <limits>

#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {

// What exp and log need to know of a floating-point type. exp(x) = 2^n e^r with n = round(x / ln 2) and
// |r| <= ln 2 / 2.
template <class Real>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kLowest = -88.0f;      // below it 2^n is 0
  static constexpr float kHighest = 88.72284f;  // just above 128 ln 2, where results overflow
  static constexpr float kLowestUsual = -87.5f;
  // 1.5 * 2^23: what is added to it is rounded to a whole number, which is in its low bits.
  static constexpr float kRound = 12582912.0f;
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  // ln 2 in two parts (Cody and Waite), so that r is exact to the last place.
  static constexpr float kLn2High = 0.693359375f;
  static constexpr float kLn2Low = -2.12194440e-4f;
};

template <>
struct ExpConstants<double> {
  static constexpr double kLowest = -709.2;
  static constexpr double kHighest = 709.7827128933841;
  static constexpr double kLowestUsual = -708.5;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
  static constexpr double kLn2High = 6.93147180369123816490e-01;  // 33 bits
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
};

// A polynomial by Horner's scheme, the coefficient of the highest power first, times a factor. Where that is the same
// for all vectors of a loop, the loop has the products ready.
template <class D, class... Real>
GRADFUSE_INLINE hn::Vec<D> Polynomial(D d, hn::Vec<D> factor, hn::Vec<D> x, hn::TFromD<D> first, Real... rest) {
  auto sum = factor * hn::Set(d, first);
  ((sum = hn::MulAdd(sum, x, factor * hn::Set(d, rest))), ...);
  return sum;
}

// exp(x) = power e^rest.
template <class V>
struct SplitExp {
  V power;
  V rest;
};

// Which numbers exp is asked of: it need not look for others. kUsualLogProb: such as AreUsualLogProbs is true of.
enum class Of { kAny, kNotPositive, kUsualLogProb };

// Whether kLowestUsual <= x <= -0, for four vectors at once: as whole numbers, the bits of negative floats grow with
// their magnitude, and all others are above those.
template <class D>
GRADFUSE_INLINE bool AreUsualLogProbs(D d, hn::Vec<D> x0, hn::Vec<D> x1, hn::Vec<D> x2, hn::Vec<D> x3) {
  const hn::RebindToSigned<D> i;
  const auto most =
      hn::Max(hn::Max(hn::BitCast(i, x0), hn::BitCast(i, x1)), hn::Max(hn::BitCast(i, x2), hn::BitCast(i, x3)));
  return hn::AllFalse(i, most > hn::BitCast(i, hn::Set(d, ExpConstants<hn::TFromD<D>>::kLowestUsual)));
}

// The larger and the smaller of a bound and x, or NaN where x is one: with x second, x86's own instructions do that;
// those of AArch64 give the bound.
template <class V>
GRADFUSE_INLINE V AtLeast(V bound, V x) {
#if HWY_ARCH_X86
  return hn::Max(bound, x);
#else
  return hn::IfThenElse(x < bound, bound, x);
#endif
}
template <class V>
GRADFUSE_INLINE V AtMost(V bound, V x) {
#if HWY_ARCH_X86
  return hn::Min(bound, x);
#else
  return hn::IfThenElse(x > bound, bound, x);
#endif
}

template <Of kOf, int kHalvings, class D>
GRADFUSE_INLINE hn::Vec<D> Bounded(D d, hn::Vec<D> x) {
  using C = ExpConstants<hn::TFromD<D>>;
  if constexpr (kOf == Of::kUsualLogProb) return x;
  const auto bounded = AtLeast(hn::Set(d, C::kLowest + kHalvings), x);
  return kOf == Of::kNotPositive ? bounded : AtMost(hn::Set(d, C::kHighest), bounded);
}

// power = 2^(n - kHalvings).
template <class T, int kHalvings, Of kOf, class D>
GRADFUSE_INLINE SplitExp<hn::Vec<D>> Split(D d, hn::Vec<D> x) {
  using Real = hn::TFromD<D>;
  using C = ExpConstants<Real>;
  const hn::RebindToUnsigned<D> u;
  const auto bounded = Bounded<kOf, kHalvings>(d, x);
  const auto round = hn::Set(d, C::kRound + C::kBias - kHalvings);
  const auto shifted = hn::MulAdd(bounded, hn::Set(d, Real(1.44269504088896340736)), round);
  const auto n = shifted - round;
  // Its exponent is from 0, which makes it 0, to that of infinity.
  const auto power = hn::BitCast(d, hn::ShiftLeft<C::kMantissaBits>(hn::BitCast(u, shifted)));
  if constexpr (!std::is_same_v<T, Real>) {
    return {power, hn::NegMulAdd(n, hn::Set(d, Real(0.693147180559945309)), bounded)};
  }
  return {power, hn::NegMulAdd(n, hn::Set(d, C::kLn2Low), hn::NegMulAdd(n, hn::Set(d, C::kLn2High), bounded))};
}

// factor e^r to the precision that a result of the type of the last argument keeps: for float a fitted polynomial, for
// double the Taylor series, for bfloat16 and float16 shorter ones, wrong by at most 1.3e-4 and 5.4e-6 of it.
template <class D>
GRADFUSE_INLINE hn::Vec<D> ExpOfRest(D d, hn::Vec<D> factor, hn::Vec<D> r, const float*) {
  return Polynomial(d, factor, r, 1.38145983e-3f, 8.36871690e-3f, 4.16683881e-2f, 1.66665205e-1f, 4.99999934e-1f, 1.0f,
                    1.0f);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> ExpOfRest(D d, hn::Vec<D> factor, hn::Vec<D> r, const double*) {
  return Polynomial(d, factor, r, 1 / 6227020800., 1 / 479001600., 1 / 39916800., 1 / 3628800., 1 / 362880., 1 / 40320.,
                    1 / 5040., 1 / 720., 1 / 120., 1 / 24., 1 / 6., 1 / 2., 1., 1.);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> ExpOfRest(D d, hn::Vec<D> factor, hn::Vec<D> r, const BFloat16*) {
  return Polynomial(d, factor, r, 1.66628084e-1f, 5.03941790e-1f, 1.0f, 1.0f);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> ExpOfRest(D d, hn::Vec<D> factor, hn::Vec<D> r, const Half*) {
  return Polynomial(d, factor, r, 4.12776673e-2f, 1.67535305e-1f, 5.00051200e-1f, 1.0f, 1.0f);
}

#if GRADFUSE_AVX512
// Vectors of 16 floats have a table of 2^(j / 32) in two registers: power = 2^(k / 32 - kHalvings) with
// k = round(32 x / ln 2), and e^rest needs few terms, as |rest| <= ln 2 / 64. The table has bits of floats, less what
// the low five of k leave there when k is moved to the exponent.
alignas(64) inline constexpr uint32_t kPowers[32] = {
    0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
    0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
    0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
    0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3};
using Floats = hn::ScalableTag<float>;

template <class T, int kHalvings, Of kOf>
GRADFUSE_INLINE SplitExp<hn::Vec<Floats>> Split(Floats d, hn::Vec<Floats> x) {
  using C = ExpConstants<float>;
  const hn::RebindToUnsigned<Floats> u;
  const auto bounded = Bounded<kOf, kHalvings>(d, x);
  const auto round = hn::Set(d, C::kRound - 32 * kHalvings);
  const auto shifted = hn::MulAdd(bounded, hn::Set(d, 46.1662413f), round);
  const auto k = shifted - round;
  const auto bits = hn::BitCast(u, shifted);
  const auto entry = hn::TwoTablesLookupLanes(u, hn::Load(u, kPowers), hn::Load(u, kPowers + 16),
                                              hn::Indices512<uint32_t>{bits.raw});  // by the low five bits
  const auto power = hn::BitCast(d, entry + hn::ShiftLeft<18>(bits));
  if constexpr (!std::is_same_v<T, float>) {
    return {power, hn::NegMulAdd(k, hn::Set(d, 2.16608494e-2f), bounded)};
  }
  return {power, hn::NegMulAdd(k, hn::Set(d, -6.63107611e-6f), hn::NegMulAdd(k, hn::Set(d, 2.16674805e-2f), bounded))};
}

// For float wrong by at most 2^-30, for bfloat16 2.9e-5, for float16 1.1e-7 of it, beside roundings.
GRADFUSE_INLINE hn::Vec<Floats> ExpOfRest(Floats d, hn::Vec<Floats> factor, hn::Vec<Floats> r, const float*) {
  return Polynomial(d, factor, r, 1.66666667e-1f, 0.5f, 1.0f, 1.0f);
}
GRADFUSE_INLINE hn::Vec<Floats> ExpOfRest(Floats d, hn::Vec<Floats> factor, hn::Vec<Floats> r, const BFloat16*) {
  return Polynomial(d, factor, r, 1.0f, 1.0000293f);
}
GRADFUSE_INLINE hn::Vec<Floats> ExpOfRest(Floats d, hn::Vec<Floats> factor, hn::Vec<Floats> r, const Half*) {
  return Polynomial(d, factor, r, 0.5f, 1.0f, 1.0f);
}
#endif

// exp without branches, with NaN, infinities and overflow as std::exp, and 0 for results below 2^-125 (double:
// 2^-1021), for loops that flush subnormals. For float it is at most 1.4 units in the last place from the true value,
// for double 1.2; T says what the result is for.
template <class T, Of kOf = Of::kAny, class D>
GRADFUSE_INLINE hn::Vec<D> Exp(D d, hn::Vec<D> x) {
  const auto split = Split<T, 1, kOf>(d, x);
#if GRADFUSE_AVX512
  if constexpr (std::is_same_v<T, float>) {
    // 2 e^rest less 1, which is rounded half as far, and the last rounding is that of the sum.
    const auto more = Polynomial(d, hn::Set(d, 1.0f), split.rest, 3.33333333e-1f, 1.0f, 2.0f, 1.0f);
    return hn::MulAdd(split.power, more, split.power);
  }
#endif
  return ExpOfRest(d, hn::Set(d, hn::TFromD<D>(2)), split.rest, static_cast<const T*>(nullptr)) * split.power;
}

// scale exp(x) - shift, for a scale that is the same for all vectors, in one operation less. Of exp(x) above
// 2^127.5 (double: 2^1023.5) it makes infinity.
template <class T, Of kOf = Of::kAny, class D>
GRADFUSE_INLINE hn::Vec<D> ScaledExpMinus(D d, hn::Vec<D> scale, hn::Vec<D> x, hn::Vec<D> shift) {
  const auto split = Split<T, 0, kOf>(d, x);
  return hn::MulSub(ExpOfRest(d, scale, split.rest, static_cast<const T*>(nullptr)), split.power, shift);
}

// log(1 + f) - f + f^2 / 2, for 1 + f from sqrt(1/2) to sqrt(2). For float a polynomial, fitted; for double as fdlibm
// does it, with s = f / (2 + f): s (f^2 / 2 + 2 (s^2 / 3 + s^4 / 5 + ...)).
template <class D>
GRADFUSE_INLINE hn::Vec<D> LogTail(D d, hn::Vec<D> f, hn::Vec<D> square, float) {
  return f * square *
         Polynomial(d, hn::Set(d, 1.0f), f, -7.63574166e-2f, 1.27627847e-1f, -1.31603008e-1f, 1.42016062e-1f,
                    -1.66233305e-1f, 2.00012323e-1f, -2.50008219e-1f, 3.33333317e-1f);
}
template <class D>
GRADFUSE_INLINE hn::Vec<D> LogTail(D d, hn::Vec<D> f, hn::Vec<D> square, double) {
  const auto s = f / (f + hn::Set(d, 2.0));
  const auto s2 = s * s;
  const auto series = s2 * Polynomial(d, hn::Set(d, 2.0), s2, 1. / 21, 1. / 19, 1. / 17, 1. / 15, 1. / 13, 1. / 11,
                                      1. / 9, 1. / 7, 1. / 5, 1. / 3);
  return s * hn::MulAdd(square, hn::Set(d, 0.5), series);
}

// 1 / x where x and 1 / x are normal and positive, less than 1 unit in the last place from the true value.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Reciprocal(D d, hn::Vec<D> x) {
#if GRADFUSE_AVX512
  if constexpr (std::is_same_v<hn::TFromD<D>, float>) {
    // A division keeps the port of half of all arithmetic for 16 cycles. 14 bits, and twice as many by Newton's method.
    const auto close = hn::ApproximateReciprocal(x);
    return hn::MulAdd(close, hn::NegMulAdd(x, close, hn::Set(d, 1.0f)), close);
  }
#endif
  return hn::Set(d, hn::TFromD<D>(1)) / x;
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
  return hn::MulAdd(k, hn::Set(d, C::kLn2High), f - hn::MulSub(square, half, tail));
}

// log of any float, less than 1 unit in the last place from the true value: -infinity of 0, and NaN of negative
// numbers.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Log(D d, hn::Vec<D> x) {
  using C = ExpConstants<float>;
  const hn::RebindToSigned<D> i;
  const hn::RebindToUnsigned<D> u;
  const auto zero = hn::Zero(d);
  const auto one = hn::Set(d, 1.0f);
  const auto is_subnormal = x < hn::Set(d, std::numeric_limits<float>::min());
  const auto bits = hn::BitCast(u, x * hn::IfThenElse(is_subnormal, hn::Set(d, 33554432.0f), one));  // 2^25
  // Of x = 2^k (1 + f) with 1 + f from sqrt(1/2) on.
  const auto whole = hn::ShiftRight<C::kMantissaBits>(hn::BitCast(i, bits - hn::Set(u, 0x3f3504f3u)));
  const auto k = hn::ConvertTo(d, whole) - hn::IfThenElseZero(is_subnormal, hn::Set(d, 25.0f));
  const auto f = hn::BitCast(d, bits - hn::ShiftLeft<C::kMantissaBits>(hn::BitCast(u, whole))) - one;
  const auto square = f * f;
  const auto tail = hn::MulAdd(k, hn::Set(d, C::kLn2Low), LogTail(d, f, square, 0.0f));
  const auto log = hn::MulAdd(k, hn::Set(d, C::kLn2High), f - hn::MulSub(square, hn::Set(d, 0.5f), tail));
  const auto infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  const auto nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  const auto of_rest = hn::IfThenElse(x == zero, zero - infinity, hn::IfThenElse(x == infinity, x, nan));
  return hn::IfThenElse(hn::And(x > zero, x < infinity), log, of_rest);
}

// 1 / (1 + exp(-x)), at most 3 units in the last place from the true value; below -87, of which the result is as good
// as 0, as of -87. NaN stays NaN.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Sigmoid(D d, hn::Vec<D> x) {
  const auto bounded = AtLeast(hn::Set(d, -87.0f), x);
  return Reciprocal(d, Exp<float>(d, hn::Zero(d) - bounded) + hn::Set(d, 1.0f));
}

// At most 6 units in the last place from the true value. NaN stays NaN. x P(x^2) / Q(x^2), fitted up to 9.02, from
// where on float32 has no number between the result and 1.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Tanh(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto bounded = AtMost(hn::Set(d, 9.02f), AtLeast(hn::Set(d, -9.02f), x));
  const auto square = bounded * bounded;
  const auto numerator =
      bounded * Polynomial(d, one, square, 1.33190756e-8f, 2.05834858e-5f, 3.49403499e-3f, 1.33797184e-1f, 1.0f);
  const auto denominator =
      Polynomial(d, one, square, 7.76202171e-7f, 3.28309339e-4f, 2.58710738e-2f, 4.67130333e-1f, 1.0f);
  const auto ratio = numerator * Reciprocal(d, denominator);
  return AtMost(one, AtLeast(hn::Set(d, -1.0f), ratio));
}

// At most 2 units in the last place from the true value. NaN stays NaN. Up to 1 x + x P(x^2), and from there on
// 1 - exp(Q(x)), both fitted; from 3.95 on float32 has no number between the result and 1.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Erf(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  const auto size = AtMost(hn::Set(d, 3.95f), hn::Abs(x));
  const auto share = Polynomial(d, one, size * size, 7.85385432e-5f, -8.01019149e-4f, 5.18832744e-3f, -2.68538118e-2f,
                                1.12835851e-1f, -3.76126258e-1f, 1.28379166e-1f);
  const auto small = hn::MulAdd(size, share, size);
  const auto log_of_rest = Polynomial(d, one, size, 1.86378951e-4f, -2.94765585e-3f, 2.18380538e-2f, -1.03106732e-1f,
                                      -6.38144859e-1f, -1.12708917f, -3.41527222e-4f);
  const auto large = one - Exp<float, Of::kNotPositive>(d, log_of_rest);
  return hn::CopySign(hn::IfThenElse(size < one, small, large), x);
}

}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
