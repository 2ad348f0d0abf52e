#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>

// Runs CUDA kernels on the host, for tests: a block's threads are fibres, which take turns in random order wherever
// they meet, some warps far ahead of others. So a missing barrier shows as a result that changes from run to run, a
// barrier that not all threads reach is an error, and the sanitizers of the host's compiler see every access. Shared
// memory is filled with garbage before a block runs. Blocks of a grid run one after the other, in random order too.

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (::gradfuse::simt::Here().thread)
#define blockIdx (::gradfuse::simt::Here().block)
#define blockDim (::gradfuse::simt::Here().block_size)
#define gridDim (::gradfuse::simt::Here().grid_size)

namespace gradfuse::simt {

// A kernel did what no device allows. The message says what.
class KernelError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

struct Extent {
  unsigned x;
};
struct Position {
  Extent thread;
  Extent block;
  Extent block_size;
  Extent grid_size;
};

// Runs `thread` once for every thread of a grid.
// Throws KernelError.
void Run(unsigned blocks, unsigned threads, const std::function<void()>& thread);

// What stands for a device's stream: the grids that it is given run in order, at any later time.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void Add(std::function<void()> grid) = 0;
};

// Starts a grid on a stream, or, without one, runs it.
// Throws KernelError.
void Launch(void* stream, unsigned blocks, unsigned threads, std::function<void()> thread);

// As many blocks as a grid may have: none to speak of, or, at random, so few that kernels must loop.
int64_t MaxBlocks();

// Starts the random order of all that follows.
void Seed(uint64_t seed);

// What follows is for kernels.

const Position& Here();

[[noreturn]] void Fail(const char* what);

// All threads of the block, and all lanes of the warp.
void Barrier();
void WarpBarrier();

// The value that the lane with number (own lane ^ mask) brought.
uint64_t ShuffleXorBits(uint64_t bits, int mask);

template <class T>
T ShuffleXor(T value, int mask) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = ShuffleXorBits(bits, mask);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The block's array of shared memory that is declared at a place in the source.
void* SharedBytes(const void* place, size_t bytes);

template <class T>
T* SharedArray(const void* place, size_t count) {
  return static_cast<T*>(SharedBytes(place, count * sizeof(T)));
}

template <class T>
T Load(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) Fail("a load of a misaligned address");
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

template <class T>
void Store(void* address, const T& value) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0) Fail("a store to a misaligned address");
  std::memcpy(address, &value, sizeof value);
}

}  // namespace gradfuse::simt
