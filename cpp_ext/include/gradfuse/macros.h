#pragma once

#define GRADFUSE_INLINE inline __attribute__((always_inline))

// On a kernel's inner loop: compiled once for each level of x86-64, the level chosen when the library is loaded. All
// that such a loop calls must be GRADFUSE_INLINE.
#ifdef GRADFUSE_HAVE_TARGET_CLONES
#define GRADFUSE_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define GRADFUSE_MULTIVERSION __attribute__((noinline))
#endif
