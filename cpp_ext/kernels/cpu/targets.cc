#include "kernels/cpu/targets.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <string>

#include "gradfuse/signature.h"
#if defined(GRADFUSE_HAVE_HIGHWAY) && defined(__x86_64__)
#include <cpuid.h>
#endif

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

#if defined(GRADFUSE_HAVE_HIGHWAY) && defined(__x86_64__)
// The processor is asked itself: `__builtin_cpu_supports` needs a start-up routine of the compiler's runtime, which not
// every toolchain links, and says no to everything without it.
struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // all 0 where the processor has no such leaf

  explicit Leaf(unsigned number, unsigned subleaf = 0) { __get_cpuid_count(number, subleaf, &eax, &ebx, &ecx, &edx); }
};

template <class... Bits>
bool HasAll(unsigned flags, Bits... bits) {
  return (((flags >> bits) & 1) && ...);
}

// Which registers the operating system saves when it switches threads.
unsigned SavedRegisters() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// How many of kTargetNames this processor and its operating system run: all that compilers use by themselves of what
// Highway allows them for each. AES and PCLMULQDQ are not asked for, which some virtual machines hide.
size_t WidestOfProcessor() {
  const Leaf basic(1), features(7);
  // FMA, OSXSAVE, AVX, F16C.
  if (!HasAll(basic.ecx, 12, 27, 28, 29)) return 1;
  const unsigned saved = SavedRegisters();
  // SSE and AVX registers; BMI1, AVX2, BMI2.
  if (!HasAll(saved, 1, 2) || !HasAll(features.ebx, 3, 5, 8)) return 1;
  // Masks and both halves of the 512-bit registers; AVX-512 F, DQ, CD, BW, VL.
  if (!HasAll(saved, 5, 6, 7) || !HasAll(features.ebx, 16, 17, 28, 30, 31)) return 2;
  // VBMI, VBMI2, GFNI, VAES, VPCLMULQDQ, VNNI, BITALG, VPOPCNTDQ; a second part of the leaf; in it BF16.
  if (!HasAll(features.ecx, 1, 6, 8, 9, 10, 11, 12, 14) || features.eax == 0 || !HasAll(Leaf(7, 1).eax, 5)) return 3;
  return 4;
}
#endif

}  // namespace

size_t AvailableTargets() {
#if defined(GRADFUSE_HAVE_HIGHWAY) && defined(__x86_64__)
  static const size_t available = WidestOfProcessor();
  return available;
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
