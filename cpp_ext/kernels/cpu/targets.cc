#include "kernels/cpu/targets.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <string>

#include "gradfuse/signature.h"

namespace gradfuse::cpu {
namespace {

constexpr char kVariable[] = "GRADFUSE_SIMD_TARGET";

// The target that the variable names; the last where it is unset or says something else.
size_t WidestWanted() {
  const char* wanted = std::getenv(kVariable);
  const auto* found = wanted ? std::find(std::begin(kTargetNames), std::end(kTargetNames), std::string(wanted))
                             : std::end(kTargetNames);
  return static_cast<size_t>(std::min(found, std::end(kTargetNames) - 1) - std::begin(kTargetNames));
}

std::atomic<size_t>& Chosen() {
  static std::atomic<size_t> chosen(std::min(WidestWanted(), AvailableTargets() - 1));
  return chosen;
}

}  // namespace

size_t AvailableTargets() {
#if defined(GRADFUSE_HAVE_HIGHWAY) && defined(__x86_64__)
  // No processor has AVX2 and FMA but lacks F16C, which not every compiler can ask for.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2")) return 1;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd")) {
    return 2;
  }
  // What Highway's HWY_AVX3_ZEN4 lets the compiler use, but for VAES, which not every compiler can ask for. No
  // processor has all of these and lacks it.
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                    __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vnni") &&
                    __builtin_cpu_supports("avx512bitalg") && __builtin_cpu_supports("avx512vpopcntdq") &&
                    __builtin_cpu_supports("gfni") && __builtin_cpu_supports("vpclmulqdq");
  return bf16 ? 4 : 3;
#elif defined(GRADFUSE_HAVE_HIGHWAY)
  return std::size(kTargetNames);
#else
  return 1;
#endif
}

size_t ChosenTarget() { return Chosen().load(std::memory_order_relaxed); }

void ChooseTarget(size_t target) { Chosen().store(target, std::memory_order_relaxed); }

Status CheckTargetVariable() {
  const char* wanted = std::getenv(kVariable);
  if (wanted == nullptr) return {};
  std::string names;
  for (const char* name : kTargetNames) {
    if (std::string(wanted) == name) return {};
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return Refuse(kVariable, std::string("'") + wanted + "'", "one of " + names);
}

}  // namespace gradfuse::cpu
