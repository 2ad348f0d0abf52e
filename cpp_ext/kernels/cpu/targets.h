#pragma once

#include <cstddef>

#include "gradfuse/status.h"

// The instruction sets that loops are compiled for, from the one that runs everywhere to the widest.
namespace gradfuse::cpu {

#if defined(__x86_64__)
inline constexpr const char* kTargetNames[] = {"scalar", "avx2", "avx512", "avx512_bf16"};
#elif defined(__aarch64__)
inline constexpr const char* kTargetNames[] = {"scalar", "neon"};
#else
#error "gradfuse is for x86-64 and AArch64"
#endif

// The namespaces of those that this build has, in the same order: without Highway, the first alone.
#if !defined(GRADFUSE_HAVE_HIGHWAY)
#define GRADFUSE_FOR_EACH_TARGET(VISIT, ...) VISIT(N_SCALAR, __VA_ARGS__)
#elif defined(__x86_64__)
#define GRADFUSE_FOR_EACH_TARGET(VISIT, ...) \
  VISIT(N_SCALAR, __VA_ARGS__) VISIT(N_AVX2, __VA_ARGS__) VISIT(N_AVX3, __VA_ARGS__) VISIT(N_AVX3_ZEN4, __VA_ARGS__)
#elif defined(__aarch64__)
#define GRADFUSE_FOR_EACH_TARGET(VISIT, ...) VISIT(N_SCALAR, __VA_ARGS__) VISIT(N_NEON_WITHOUT_AES, __VA_ARGS__)
#endif

// How many of kTargetNames, from the first on, are in this build and run on this processor.
size_t AvailableTargets();

// The index in kTargetNames of the instruction set that kernels use: the widest available one, up to the one that the
// environment variable GRADFUSE_SIMD_TARGET names. The variable is read once.
size_t ChosenTarget();

// Makes kernels use another available one from now on.
void ChooseTarget(size_t target);

// Whether GRADFUSE_SIMD_TARGET is unset or one of kTargetNames.
Status CheckTargetVariable();

// A pointer to the function of this name for the chosen instruction set. There is one in the namespace of each.
#define GRADFUSE_TARGET_ADDRESS(target, ...) &target::__VA_ARGS__,
#define GRADFUSE_DISPATCH(...)                                                                     \
  [] {                                                                                             \
    using Function = decltype(&N_SCALAR::__VA_ARGS__);                                             \
    const Function functions[] = {GRADFUSE_FOR_EACH_TARGET(GRADFUSE_TARGET_ADDRESS, __VA_ARGS__)}; \
    return functions[::gradfuse::cpu::ChosenTarget()];                                             \
  }()

}  // namespace gradfuse::cpu
