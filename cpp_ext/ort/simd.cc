// Which instruction set the CPU kernels use, and when they write around the caches: for reports, tests and
// measurements.

#include <string>

#include "kernels/cpu/streaming.h"
#include "kernels/cpu/targets.h"

// A JSON list of the instruction sets that this build has and this processor runs, the widest last. Lives forever.
extern "C" __attribute__((visibility("default"))) const char* gradfuse_describe_simd_targets() {
  static const std::string& text = *new std::string([] {
    std::string names;
    for (size_t target = 0; target < gradfuse::cpu::AvailableTargets(); ++target) {
      names += (target == 0 ? "\"" : ", \"") + std::string(gradfuse::cpu::kTargetNames[target]) + '"';
    }
    return "[" + names + "]";
  }());
  return text.c_str();
}

// The name of the instruction set that kernels use. One that `wanted` names is used from now on; null where it is not
// among those of gradfuse_describe_simd_targets. Kernels that run meanwhile may use either.
extern "C" __attribute__((visibility("default"))) const char* gradfuse_simd_target(const char* wanted) {
  using namespace gradfuse::cpu;
  if (wanted == nullptr) return kTargetNames[ChosenTarget()];
  for (size_t target = 0; target < AvailableTargets(); ++target) {
    if (std::string(wanted) != kTargetNames[target]) continue;
    ChooseTarget(target);
    return kTargetNames[target];
  }
  return nullptr;
}

// From how many bytes on operators write around the caches; `wanted` is taken from now on unless it is negative.
extern "C" __attribute__((visibility("default"))) int64_t gradfuse_stream_bytes(int64_t wanted) {
  if (wanted >= 0) gradfuse::cpu::SetStreamBytes(wanted);
  return gradfuse::cpu::StreamBytes();
}
