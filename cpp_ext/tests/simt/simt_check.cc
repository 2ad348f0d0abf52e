// Prints what the machine of the tests says to kernels that are right and to kernels that are wrong, one line each. A
// test runs it.

#include <cstdio>
#include <set>
#include <string>

#include "kernels/cuda/device.cuh"

namespace gradfuse::cuda {
namespace {

constexpr int kThreads = 64;

__global__ void Sum(float* out) {
  const float sum = SumOverBlock<kThreads>(static_cast<float>(threadIdx.x));
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

__global__ void MissedBarrier(float*) {
  if (threadIdx.x < 40) Barrier();
}

__global__ void MissedShuffle(float* out) {
  if (threadIdx.x % kWarp < 31) out[0] = ShuffleXor(1.0f, 1);
}

__global__ void MixedShuffles(float* out) { out[0] = ShuffleXor(1.0f, threadIdx.x % 2 == 0 ? 1 : 2); }

__global__ void Misaligned(float* out) { StoreOnce(out + 1, Pack<float, 4>{}); }

__global__ void UnwrittenShared(float* out) {
  GRADFUSE_SHARED(float, shared, kThreads);
  out[threadIdx.x] = shared[threadIdx.x];
}

// Whoever comes last wins, as no barrier stands between writing and reading.
__global__ void Race(float* out) {
  GRADFUSE_SHARED(float, shared, 1);
  shared[0] = static_cast<float>(threadIdx.x);
  Barrier();
  if (threadIdx.x == 0) out[0] = shared[0];
}

// No barrier stands between reading in one round and writing in the next.
__global__ void RaceOfRounds(float* out) {
  GRADFUSE_SHARED(float, shared, 1);
  float sum = 0;
  for (int round = 1; round <= 8; ++round) {
    if (threadIdx.x == 0) shared[0] = static_cast<float>(round);
    Barrier();
    sum = sum * 8 + shared[0];
  }
  if (threadIdx.x == kThreads - 1) out[0] = sum;
}

std::string Outcome(void (*kernel)(float*)) {
  alignas(16) static float out[kThreads];
  try {
    const Status status = Launch(Queue{}, kernel, 1, kThreads, out);
    return status.ok() ? std::to_string(out[0]) : status.message();
  } catch (const simt::KernelError& error) {
    return error.what();
  }
}

bool Changes(void (*kernel)(float*)) {
  std::set<std::string> outcomes;
  for (int run = 0; run < 50; ++run) outcomes.insert(Outcome(kernel));
  return outcomes.size() > 1;
}

void PrintAll() {
  std::printf("sum: %s\n", Outcome(Sum).c_str());
  std::printf("missed barrier: %s\n", Outcome(MissedBarrier).c_str());
  std::printf("missed shuffle: %s\n", Outcome(MissedShuffle).c_str());
  std::printf("mixed shuffles: %s\n", Outcome(MixedShuffles).c_str());
  std::printf("misaligned: %s\n", Outcome(Misaligned).c_str());
  std::printf("unwritten shared memory: %s\n", Outcome(UnwrittenShared).find("nan") != std::string::npos ? "nan" : "?");
  std::printf("race: %s\n", Changes(Race) ? "changes from run to run" : "stays the same");
  std::printf("race of rounds: %s\n", Changes(RaceOfRounds) ? "changes from run to run" : "stays the same");
  std::printf("no race: %s\n", Changes(Sum) ? "changes from run to run" : "stays the same");
  std::printf("sum after all that: %s\n", Outcome(Sum).c_str());
}

}  // namespace
}  // namespace gradfuse::cuda

int main() { gradfuse::cuda::PrintAll(); }
