#pragma once

#define GRADFUSE_INLINE inline __attribute__((always_inline))

// Of functions that CUDA kernels call too.
#ifdef __CUDACC__
#define GRADFUSE_HOST_DEVICE __host__ __device__
#else
#define GRADFUSE_HOST_DEVICE
#endif
