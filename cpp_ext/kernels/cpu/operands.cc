#include "kernels/cpu/operands.h"

#include <algorithm>

#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/operands.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class T>
void Widen(const T* from, int64_t count, bool rounds, float* to) {
  const TagOf<T> d;
  ForEachVector<Sweep>(d, count, [&](int64_t i, auto at) HWY_ATTR {
    auto value = Load(at, d, from + i);
    if (rounds) value = Widened(d, RoundedToBFloat16(d, value), static_cast<const BFloat16*>(nullptr));
    Store(at, value, d, to + i);
  });
}

template <class T>
void Narrow(const float* from, int64_t count, T* to) {
  const TagOf<T> d;
  ForEachVector<Sweep>(d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, from + i), d, to + i); });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

// Calls body(begin, count) for parts of so many numbers.
template <class Body>
void ForEachPart(int64_t count, int64_t bytes_of_number, const ParallelFor& parallel, const Body& body) {
  constexpr int64_t kPart = 32768;
  parallel(CeilDiv(count, kPart), bytes_of_number * count,
           [&](int64_t task) { body(task * kPart, std::min(kPart, count - task * kPart)); });
}

}  // namespace

void WidenAll(const Tensor& tensor, bool rounds, float* to, const ParallelFor& parallel) {
  WithShortFloatType(tensor.dtype, [&](auto type) {
    using T = decltype(type);
    const auto widen = GRADFUSE_DISPATCH(Widen<T>);
    const T* const from = tensor.Data<T>();
    ForEachPart(tensor.NumElements(), sizeof(T) + sizeof(float), parallel,
                [&](int64_t begin, int64_t size) { widen(from + begin, size, rounds, to + begin); });
  });
}

template <class T>
void NarrowAll(const float* from, int64_t count, T* to, const ParallelFor& parallel) {
  const auto narrow = GRADFUSE_DISPATCH(Narrow<T>);
  ForEachPart(count, sizeof(T) + sizeof(float), parallel,
              [&](int64_t begin, int64_t size) { narrow(from + begin, size, to + begin); });
}

template void NarrowAll(const float*, int64_t, Half*, const ParallelFor&);
template void NarrowAll(const float*, int64_t, BFloat16*, const ParallelFor&);

}  // namespace gradfuse::cpu
#endif  // HWY_ONCE
