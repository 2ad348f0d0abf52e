#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gradfuse/macros.h"

#ifndef GRADFUSE_HAVE_HIGHWAY
#define HWY_NAMESPACE N_SCALAR
#define HWY_BEFORE_NAMESPACE() static_assert(true, "for the semicolon")
#define HWY_AFTER_NAMESPACE() static_assert(true, "for the semicolon")
#define HWY_ATTR
#define HWY_ONCE 1
#define HWY_LIKELY(condition) __builtin_expect(!!(condition), 1)
#endif

// The operations of Highway that loops use, on vectors of one lane: plain numbers. Loops over these are the scalar
// code, which needs nothing but a compiler; it may make vector code of them. Names and meanings are Highway's.
namespace gradfuse::cpu::one_lane {

template <class T>
struct ScalableTag {
  using Lane = T;
};

template <class D>
using TFromD = typename D::Lane;
template <class D>
using Vec = typename D::Lane;
template <class V>
using TFromV = V;
template <class T, class D>
using Rebind = ScalableTag<T>;
template <class D>
using RebindToUnsigned =
    ScalableTag<std::conditional_t<sizeof(TFromD<D>) == 8, uint64_t,
                                   std::conditional_t<sizeof(TFromD<D>) == 4, uint32_t, uint16_t>>>;

template <class D>
using RebindToSigned = ScalableTag<std::make_signed_t<TFromD<RebindToUnsigned<D>>>>;

template <class D>
constexpr size_t Lanes(D) {
  return 1;
}
template <class D>
constexpr size_t MaxLanes(D) {
  return 1;
}

template <class D>
GRADFUSE_INLINE Vec<D> Set(D, TFromD<D> value) {
  return value;
}
template <class D>
GRADFUSE_INLINE Vec<D> Zero(D) {
  return {};
}
template <class D>
GRADFUSE_INLINE Vec<D> LoadU(D, const TFromD<D>* from) {
  return *from;
}
template <class D>
GRADFUSE_INLINE void StoreU(Vec<D> value, D, TFromD<D>* to) {
  *to = value;
}
template <class D>
GRADFUSE_INLINE void Stream(Vec<D> value, D, TFromD<D>* to) {
  *to = value;
}
template <class D>
GRADFUSE_INLINE Vec<D> GatherIndex(D, const TFromD<D>* from, int32_t index) {
  return from[index];
}
template <class D>
GRADFUSE_INLINE Vec<D> LoadN(D, const TFromD<D>* from, size_t lanes) {
  return lanes == 0 ? Vec<D>{} : *from;
}
template <class D>
GRADFUSE_INLINE void StoreN(Vec<D> value, D, TFromD<D>* to, size_t lanes) {
  if (lanes != 0) *to = value;
}
template <class D, class From>
GRADFUSE_INLINE Vec<D> BitCast(D, From value) {
  static_assert(sizeof(Vec<D>) == sizeof(From), "of one size");
  Vec<D> result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

template <class V>
GRADFUSE_INLINE V MulAdd(V a, V b, V c) {
  return a * b + c;
}
template <class V>
GRADFUSE_INLINE V NegMulAdd(V a, V b, V c) {
  return c - a * b;
}
template <class V>
GRADFUSE_INLINE V MulSub(V a, V b, V c) {
  return a * b - c;
}
template <class V>
GRADFUSE_INLINE V Sqrt(V a) {
  return std::sqrt(a);
}
template <class V>
GRADFUSE_INLINE V Abs(V a) {
  return std::abs(a);
}
template <class V>
GRADFUSE_INLINE V CopySign(V magnitude, V sign) {
  return std::copysign(magnitude, sign);
}
// Of a NaN, as of equal values, the second.
template <class V>
GRADFUSE_INLINE V Max(V a, V b) {
  return a > b ? a : b;
}
template <class V>
GRADFUSE_INLINE V Min(V a, V b) {
  return a < b ? a : b;
}
template <class V>
GRADFUSE_INLINE V IfThenElse(bool mask, V yes, V no) {
  return mask ? yes : no;
}
template <class V>
GRADFUSE_INLINE V IfThenElseZero(bool mask, V yes) {
  return mask ? yes : V{};
}
template <class V>
GRADFUSE_INLINE V IfThenZeroElse(bool mask, V no) {
  return mask ? V{} : no;
}
template <class D>
GRADFUSE_INLINE bool FirstN(D, size_t lanes) {
  return lanes != 0;
}
GRADFUSE_INLINE bool And(bool a, bool b) { return a && b; }
template <class D>
GRADFUSE_INLINE bool AllFalse(D, bool mask) {
  return !mask;
}
GRADFUSE_INLINE bool Or(bool a, bool b) { return a || b; }
template <class V>
GRADFUSE_INLINE bool IsNaN(V value) {
  return value != value;  // NOLINT(misc-redundant-expression): of a NaN, and of nothing else, it is true
}
template <int kBits, class V>
GRADFUSE_INLINE V ShiftLeft(V value) {
  return value << kBits;
}
template <int kBits, class V>
GRADFUSE_INLINE V ShiftRight(V value) {
  return value >> kBits;
}
template <class D, class V>
GRADFUSE_INLINE Vec<D> PromoteTo(D, V value) {
  return static_cast<Vec<D>>(value);
}
template <class D, class V>
GRADFUSE_INLINE Vec<D> ConvertTo(D, V value) {
  return static_cast<Vec<D>>(value);
}
template <class D, class V>
GRADFUSE_INLINE Vec<D> TruncateTo(D, V value) {
  return static_cast<Vec<D>>(value);
}
template <class D>
GRADFUSE_INLINE bool RebindMask(D, bool mask) {
  return mask;
}
template <class D, class DFrom>
GRADFUSE_INLINE bool PromoteMaskTo(D, DFrom, bool mask) {
  return mask;
}
template <class V>
GRADFUSE_INLINE V OddEven(V, V even) {
  return even;
}
template <class D, class V>
GRADFUSE_INLINE V ReduceSum(D, V value) {
  return value;
}
template <class D, class V>
GRADFUSE_INLINE V ReduceMax(D, V value) {
  return value;
}

}  // namespace gradfuse::cpu::one_lane
