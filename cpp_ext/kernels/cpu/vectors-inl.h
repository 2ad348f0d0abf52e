// Vectors of the type that values of T are computed in, and how they come from memory that holds T and go there.
// Included once for each instruction set: loops see it as gradfuse::cpu::HWY_NAMESPACE.
#if defined(GRADFUSE_VECTORS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef GRADFUSE_VECTORS_INL_H
#undef GRADFUSE_VECTORS_INL_H
#else
#define GRADFUSE_VECTORS_INL_H
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "gradfuse/float16.h"
#include "kernels/cpu/one_lane.h"

#undef GRADFUSE_HAS_VECTORS
#if defined(GRADFUSE_HAVE_HIGHWAY) && HWY_TARGET != HWY_SCALAR
#define GRADFUSE_HAS_VECTORS 1
#else
#define GRADFUSE_HAS_VECTORS 0
#endif
#undef GRADFUSE_AVX512
#undef GRADFUSE_AVX512_BF16
#ifdef GRADFUSE_HAVE_HIGHWAY
#define GRADFUSE_AVX512 (HWY_TARGET <= HWY_AVX3)
#define GRADFUSE_AVX512_BF16 (HWY_TARGET <= HWY_AVX3_ZEN4)
#else
#define GRADFUSE_AVX512 0
#define GRADFUSE_AVX512_BF16 0
#endif

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {

#if GRADFUSE_HAS_VECTORS
namespace hn = ::hwy::HWY_NAMESPACE;
#else
namespace hn = ::gradfuse::cpu::one_lane;
#endif

template <class T>
using TagOf = hn::ScalableTag<ComputeType<T>>;  // of vectors that values of T are computed in
template <class D>
using Tag16 = hn::Rebind<uint16_t, D>;
template <class D>
using Mask = decltype(hn::Zero(D()) == hn::Zero(D()));

// Asks for memory that is read soon. The one-lane loops would ask for each number.
template <class D>
GRADFUSE_INLINE void Prefetch(D, const void* from) {
  if constexpr (hn::MaxLanes(D()) > 1) __builtin_prefetch(from);
}

// The same into the second-level cache, for what is read after more than the first one holds.
template <class D>
GRADFUSE_INLINE void PrefetchFar(D, const void* from) {
  if constexpr (hn::MaxLanes(D()) > 1) __builtin_prefetch(from, 0, 2);
}

// Keeps the compiler from loading a vector again for each product that it is a factor of.
template <class V>
GRADFUSE_INLINE void KeepInRegister(V& value) {
#if GRADFUSE_HAS_VECTORS && defined(__x86_64__)
  asm("" : "+v"(value.raw));
#elif GRADFUSE_HAS_VECTORS && defined(__aarch64__)
  asm("" : "+w"(value.raw));
#else
  (void)value;
#endif
}

// How loops reach memory: whole vectors at a time, or the first lanes of one, where no others are there.
struct Whole {
  static constexpr bool kStreams = false;

  template <class D>
  GRADFUSE_INLINE hn::Vec<D> LoadBits(D d, const hn::TFromD<D>* from) const {
    return hn::LoadU(d, from);
  }
  template <class D>
  GRADFUSE_INLINE void StoreBits(hn::Vec<D> value, D d, hn::TFromD<D>* to) const {
    hn::StoreU(value, d, to);
  }
};
// The same for sweeps over tensors, which may come from beyond the caches: asks early for what comes later in the
// sweep, further ahead than the processor does by itself.
struct Sweep : Whole {
  static constexpr size_t kAhead = 3072;  // bytes

  template <class D>
  GRADFUSE_INLINE hn::Vec<D> LoadBits(D d, const hn::TFromD<D>* from) const {
    if constexpr (hn::MaxLanes(D()) > 1)
      __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead, /*rw=*/0, /*locality=*/2);
    return hn::LoadU(d, from);
  }
};
// Writes around the caches, to places that are aligned as vectors are: see streaming.h.
template <class Loads>
struct Streaming : Loads {
  static constexpr bool kStreams = true;

  template <class D>
  GRADFUSE_INLINE void StoreBits(hn::Vec<D> value, D d, hn::TFromD<D>* to) const {
    hn::Stream(value, d, to);
  }
};
template <bool kStreams, class Loads>
using Sink = std::conditional_t<kStreams, Streaming<Loads>, Loads>;
struct Part {
  size_t lanes;

  // The lanes that are not there are 0.
  template <class D>
  GRADFUSE_INLINE hn::Vec<D> LoadBits(D d, const hn::TFromD<D>* from) const {
    return hn::LoadN(d, from, lanes);
  }
  template <class D>
  GRADFUSE_INLINE void StoreBits(hn::Vec<D> value, D d, hn::TFromD<D>* to) const {
    hn::StoreN(value, d, to, lanes);
  }
};

// Float from the bits of a 16-bit type and back. The last argument says only which type it is.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Widened(D d, hn::Vec<Tag16<D>> bits, const BFloat16*) {
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(hn::RebindToUnsigned<D>(), bits)));
}
template <class D>
GRADFUSE_INLINE hn::Vec<Tag16<D>> RoundedToBFloat16(D, hn::Vec<D> value) {
  const hn::RebindToUnsigned<D> u;
  const auto bits = hn::BitCast(u, value);
  const auto high = hn::ShiftRight<16>(bits);
  const auto rounded = hn::ShiftRight<16>(bits + hn::Set(u, 0x7fff) + (high & hn::Set(u, 1)));
  const auto is_nan = hn::RebindMask(u, hn::IsNaN(value));
  return hn::TruncateTo(Tag16<D>(), hn::IfThenElse(is_nan, high | hn::Set(u, 0x40), rounded));
}
template <class D>
GRADFUSE_INLINE hn::Vec<Tag16<D>> Narrowed(D d, hn::Vec<D> value, const BFloat16*) {
#if GRADFUSE_AVX512_BF16
  // The instruction for it takes subnormal numbers for 0.
  constexpr int kSubnormal = 0x20;
  if (HWY_LIKELY(_mm512_fpclass_ps_mask(value.raw, kSubnormal) == 0)) {
    return hn::BitCast(Tag16<D>(), hn::DemoteTo(hn::Rebind<hwy::bfloat16_t, D>(), value));
  }
#endif
  return RoundedToBFloat16(d, value);
}
#if GRADFUSE_HAS_VECTORS
// These targets have instructions for it, which keep NaN and subnormals, also while those of float are flushed.
template <class D>
GRADFUSE_INLINE hn::Vec<D> Widened(D d, hn::Vec<Tag16<D>> bits, const Half*) {
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
}
template <class D>
GRADFUSE_INLINE hn::Vec<Tag16<D>> Narrowed(D, hn::Vec<D> value, const Half*) {
  return hn::BitCast(Tag16<D>(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), value));
}
#else
template <class D>
GRADFUSE_INLINE float Widened(D, uint16_t bits, const Half*) {
  return ToCompute(Half{bits});
}
template <class D>
GRADFUSE_INLINE uint16_t Narrowed(D, float value, const Half*) {
  return FromCompute<Half>(value).bits;
}
#endif

template <class At, class D>
GRADFUSE_INLINE hn::Vec<D> Load(At at, D d, const hn::TFromD<D>* from) {
  return at.LoadBits(d, from);
}
template <class At, class D, class T16, class = decltype(T16::bits)>
GRADFUSE_INLINE hn::Vec<D> Load(At at, D d, const T16* from) {
  return Widened(d, at.LoadBits(Tag16<D>(), &from->bits), from);
}
template <class At, class D>
GRADFUSE_INLINE void Store(At at, hn::Vec<D> value, D d, hn::TFromD<D>* to) {
  at.StoreBits(value, d, to);
}
template <class At, class D, class T16, class = decltype(T16::bits)>
GRADFUSE_INLINE void Store(At at, hn::Vec<D> value, D d, T16* to) {
  at.StoreBits(Narrowed(d, value, to), Tag16<D>(), &to->bits);
}
// Whether the instruction set multiplies pairs of bfloat16, which lie in the bits of a float.
inline constexpr bool kMultipliesPairs = GRADFUSE_AVX512_BF16;

// sum + a b, or of pairs the sum of both products.
template <bool kPairs, class V>
GRADFUSE_INLINE V AddProduct(V a, V b, V sum) {
#if GRADFUSE_AVX512_BF16
  if constexpr (kPairs) {
    // One instruction with this instruction set, which keeps pairs in order and takes no second sum.
    const hn::Repartition<hwy::bfloat16_t, TagOf<float>> narrow;
    V none = hn::Zero(TagOf<float>());
    return hn::ReorderWidenMulAccumulate(TagOf<float>(), hn::BitCast(narrow, a), hn::BitCast(narrow, b), sum, none);
  }
#endif
  return hn::MulAdd(a, b, sum);
}

#if GRADFUSE_AVX512_BF16
// The bits of numbers that are rounded to bfloat16.
template <class At, class D, class T>
GRADFUSE_INLINE hn::Vec<Tag16<D>> LoadBFloat16(At at, D d, const T* from) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return at.LoadBits(Tag16<D>(), &from->bits);
  } else {
    return RoundedToBFloat16(d, Load(at, d, from));
  }
}

// Pairs of the numbers from `first` and `second` on, or of zeros where the latter is null.
template <class At, class D, class T>
GRADFUSE_INLINE hn::Vec<D> LoadPairs(At at, D d, const T* first, const T* second) {
  const hn::RebindToUnsigned<D> u;
  auto bits = hn::PromoteTo(u, LoadBFloat16(at, d, first));
  if (second != nullptr) bits = bits | hn::ShiftLeft<16>(hn::PromoteTo(u, LoadBFloat16(at, d, second)));
  return hn::BitCast(d, bits);
}
#endif

// Lanes whose byte is not 0.
template <class At, class D>
GRADFUSE_INLINE Mask<D> LoadMask(At at, D d, const uint8_t* from) {
  const hn::Rebind<uint8_t, D> bytes;
  return hn::PromoteMaskTo(d, bytes, at.LoadBits(bytes, from) != hn::Zero(bytes));
}

// Calls body(index, at) for vectors of D's width at index 0, 1 width, ... of `count` elements; `at` is Part for the
// last of them, if they are fewer than its lanes, and else At.
template <class At = Whole, class D, class Body>
GRADFUSE_INLINE void ForEachVector(D d, int64_t count, const Body& body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t index = 0;
  for (; index + lanes <= count; index += lanes) body(index, At());
  if constexpr (hn::MaxLanes(D()) > 1) {
    if (index < count) body(index, Part{static_cast<size_t>(count - index)});
  }
}

#if GRADFUSE_HAS_VECTORS
// As many lanes as a block that is transposed has each way.
template <class T>
using BlockTag = hn::FixedTag<T, 16 / sizeof(T)>;

// Swaps rows and columns of a block.
template <class D>
GRADFUSE_INLINE void Transpose(D d, hn::Vec<D> (&block)[16 / sizeof(hn::TFromD<D>)]) {
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    const hn::RepartitionToWide<D> pairs;
    const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, block[0], block[1]));
    const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, block[0], block[1]));
    const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, block[2], block[3]));
    const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, block[2], block[3]));
    block[0] = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23));
    block[1] = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23));
    block[2] = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23));
    block[3] = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23));
  } else {
    const auto low = hn::InterleaveLower(d, block[0], block[1]);
    block[1] = hn::InterleaveUpper(d, block[0], block[1]);
    block[0] = low;
  }
}
#endif

// How many vectors a loop with a long chain of operations computes side by side: while one waits for a result, others
// go on.
template <class D>
constexpr int kSideBySide = hn::MaxLanes(D()) > 1 ? 2 : 1;

// How many elements of to[0], ..., to[count - 1] lie before the first place that is aligned for At to write vectors to.
template <class At, class D, class T>
GRADFUSE_INLINE int64_t Unaligned(D d, const T* to, int64_t count) {
  if constexpr (hn::MaxLanes(D()) == 1 || !At::kStreams) return 0;
  const size_t lanes = hn::Lanes(d);
  const size_t behind = reinterpret_cast<uintptr_t>(to) / sizeof(T) % lanes;
  return behind == 0 ? 0 : std::min(count, static_cast<int64_t>(lanes - behind));
}

// The same for a loop that writes to[index], ...; before streaming stores its first vector is Part, up to an alignment.
template <class At, class D, class T, class Body>
GRADFUSE_INLINE void ForEachVectorInto(T* to, D d, int64_t count, const Body& body) {
  const int64_t head = Unaligned<At>(d, to, count);
  if (head != 0) body(0, Part{static_cast<size_t>(head)});
  ForEachVector<At>(d, count - head, [&](int64_t index, auto at) HWY_ATTR { body(head + index, at); });
}

// The same for a loop that has a faster way for four vectors side by side: four(index) stands for body(index, At()),
// body(index + lanes, At()) and two more.
template <class At, class D, class T, class Four, class Body>
GRADFUSE_INLINE void ForEachFourInto(T* to, D d, int64_t count, const Four& four, const Body& body) {
  int64_t index = Unaligned<At>(d, to, count);
  if (index != 0) body(0, Part{static_cast<size_t>(index)});
  if constexpr (hn::MaxLanes(D()) > 1) {
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (; index + 4 * lanes <= count; index += 4 * lanes) four(index);
  }
  ForEachVector<At>(d, count - index, [&](int64_t rest, auto at) HWY_ATTR { body(index + rest, at); });
}

}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
