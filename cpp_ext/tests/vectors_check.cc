// Conversions and functions of vectors as a filter: `vectors_check FUNCTION < numbers > results`, for the instruction
// set that GRADFUSE_SIMD_TARGET names. Numbers go through it in arrays of all lengths and alignments, each in memory
// of its own size, so that the address sanitizer sees a read or a write beside it.

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/flush_subnormals.h"
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/vectors_check.cc"
#include "kernels/cpu/foreach_target.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gradfuse::cpu::HWY_NAMESPACE {
namespace {

template <class From, class To>
void Convert(const From* from, int64_t count, To* to) {
  const hn::ScalableTag<float> d;
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Load(at, d, from + i), d, to + i); });
}

template <class Real>
void ExpOf(const Real* from, int64_t count, Real* to) {
  const FlushSubnormals flush;
  const hn::ScalableTag<Real> d;
  ForEachVector(d, count,
                [&](int64_t i, auto at) HWY_ATTR { Store(at, Exp<Real>(d, Load(at, d, from + i)), d, to + i); });
}

template <class Real>
void LogUpTo3Of(const Real* from, int64_t count, Real* to) {
  const hn::ScalableTag<Real> d;
  ForEachVector(d, count,
                [&](int64_t i, auto at) HWY_ATTR { Store(at, LogUpTo3(d, Load(at, d, from + i)), d, to + i); });
}

template <class Real>
void ReciprocalOf(const Real* from, int64_t count, Real* to) {
  const hn::ScalableTag<Real> d;
  ForEachVector(d, count,
                [&](int64_t i, auto at) HWY_ATTR { Store(at, Reciprocal(d, Load(at, d, from + i)), d, to + i); });
}

void SigmoidOf(const float* from, int64_t count, float* to) {
  const hn::ScalableTag<float> d;
  ForEachVector(d, count,
                [&](int64_t i, auto at) HWY_ATTR { Store(at, Sigmoid(d, Load(at, d, from + i)), d, to + i); });
}

void TanhOf(const float* from, int64_t count, float* to) {
  const hn::ScalableTag<float> d;
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Tanh(d, Load(at, d, from + i)), d, to + i); });
}

void LogOf(const float* from, int64_t count, float* to) {
  const hn::ScalableTag<float> d;
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Log(d, Load(at, d, from + i)), d, to + i); });
}

void ErfOf(const float* from, int64_t count, float* to) {
  const hn::ScalableTag<float> d;
  ForEachVector(d, count, [&](int64_t i, auto at) HWY_ATTR { Store(at, Erf(d, Load(at, d, from + i)), d, to + i); });
}

}  // namespace
}  // namespace gradfuse::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gradfuse::cpu {
namespace {

template <class From, class To>
int Filter(void (*function)(const From*, int64_t, To*)) {
  std::vector<From> numbers;
  From buffer[4096];
  for (size_t read; (read = std::fread(buffer, sizeof(From), 4096, stdin)) > 0;) {
    numbers.insert(numbers.end(), buffer, buffer + read);
  }
  constexpr size_t kLongest = 53;  // more than three of the longest vectors of float
  constexpr size_t kOffsets = 16;
  size_t length = 0;
  size_t offset = 0;
  for (size_t begin = 0; begin < numbers.size(); begin += length) {
    length = std::min(numbers.size() - begin, length % kLongest + 1);
    offset = length == 1 ? (offset + 1) % kOffsets : offset;
    const auto from = std::make_unique<From[]>(offset + length);
    const auto to = std::make_unique<To[]>(offset + length);
    std::memcpy(from.get() + offset, numbers.data() + begin, length * sizeof(From));
    function(from.get() + offset, static_cast<int64_t>(length), to.get() + offset);
    std::fwrite(to.get() + offset, sizeof(To), length, stdout);
  }
  return 0;
}

int Run(const std::string& name) {
  if (name == "half_to_float") return Filter(GRADFUSE_DISPATCH(Convert<Half, float>));
  if (name == "float_to_half") return Filter(GRADFUSE_DISPATCH(Convert<float, Half>));
  if (name == "bfloat16_to_float") return Filter(GRADFUSE_DISPATCH(Convert<BFloat16, float>));
  if (name == "float_to_bfloat16") return Filter(GRADFUSE_DISPATCH(Convert<float, BFloat16>));
  if (name == "exp_float") return Filter(GRADFUSE_DISPATCH(ExpOf<float>));
  if (name == "exp_double") return Filter(GRADFUSE_DISPATCH(ExpOf<double>));
  if (name == "reciprocal_float") return Filter(GRADFUSE_DISPATCH(ReciprocalOf<float>));
  if (name == "reciprocal_double") return Filter(GRADFUSE_DISPATCH(ReciprocalOf<double>));
  if (name == "log_up_to_3_float") return Filter(GRADFUSE_DISPATCH(LogUpTo3Of<float>));
  if (name == "log_up_to_3_double") return Filter(GRADFUSE_DISPATCH(LogUpTo3Of<double>));
  if (name == "sigmoid_float") return Filter(GRADFUSE_DISPATCH(SigmoidOf));
  if (name == "tanh_float") return Filter(GRADFUSE_DISPATCH(TanhOf));
  if (name == "log_float") return Filter(GRADFUSE_DISPATCH(LogOf));
  if (name == "erf_float") return Filter(GRADFUSE_DISPATCH(ErfOf));
  return 1;
}

}  // namespace
}  // namespace gradfuse::cpu

int main(int argc, char** argv) { return argc == 2 ? gradfuse::cpu::Run(argv[1]) : 1; }
#endif  // HWY_ONCE
