// Compiles the loops of a kernel once for each instruction set, from one source: Highway's mechanism, where the library
// is built with Highway. A source file of loops begins with
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "kernels/cpu/<this file>"
//   #include "kernels/cpu/foreach_target.h"
//   #include "kernels/cpu/vectors-inl.h"
//
// and has loops between HWY_BEFORE_NAMESPACE() and HWY_AFTER_NAMESPACE(), in gradfuse::cpu::HWY_NAMESPACE; whatever
// comes once only, behind `#if HWY_ONCE`, calls them by GRADFUSE_DISPATCH.
#ifdef GRADFUSE_HAVE_HIGHWAY
// The scalar loops are the baseline, which runs everywhere. Of the levels between SSE2 and AVX2 no machine of the last
// ten years stops at one, and loops on vectors of unknown size (SVE, RVV) would need another form.
#ifndef HWY_BASELINE_TARGETS
#define HWY_BROKEN_EMU128 1  // HWY_SCALAR is the name of the baseline, with compilers too for which it is HWY_EMU128
#define HWY_BASELINE_TARGETS HWY_SCALAR
#define HWY_DISABLED_TARGETS (~(HWY_SCALAR | HWY_AVX2 | HWY_AVX3 | HWY_AVX3_ZEN4 | HWY_NEON_WITHOUT_AES))
#endif
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>
#endif
