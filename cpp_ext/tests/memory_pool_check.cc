// A MemoryPool under random sizes and lifetimes, from several threads: `memory_pool_check SEED` prints what is wrong.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "ort/memory_pool.h"

namespace {

constexpr size_t kAddresses = size_t{1} << 33;
constexpr size_t kStride = 512;
constexpr size_t kMib = size_t{1} << 20;

struct Value {
  unsigned char* data;
  size_t bytes;
  unsigned char mark;
};

int faults = 0;

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  ++faults;
}

// Bytes from `start` on that have memory, as the system says, up to where nothing is mapped.
size_t Resident(unsigned char* start) {
  size_t found = 0;
  std::vector<unsigned char> pages(2 * kMib / 4096);
  for (; mincore(start, 2 * kMib, pages.data()) == 0; start += 2 * kMib) {
    found +=
        4096 * static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; }));
  }
  return found;
}

void Work(gradfuse::ort::MemoryPool& pool, unsigned seed, int steps) {
  std::mt19937 random(seed);
  std::vector<Value> values;
  for (int step = 0; step < steps; ++step) {
    if (values.empty() || (random() % 3 != 0 && values.size() < 40)) {
      const size_t bytes = 1 + random() % (size_t{1} << (12 + random() % 12));
      auto* data = static_cast<unsigned char*>(pool.Allocate(bytes));
      Expect(data != nullptr, "no memory");
      Expect(reinterpret_cast<uintptr_t>(data) % 4096 == 0, "not aligned");
      Expect(pool.Contains(data) && pool.Contains(data + bytes - 1), "outside the pool");
      values.push_back({data, bytes, static_cast<unsigned char>(random())});
      for (size_t at = 0; at < bytes; at += kStride) data[at] = values.back().mark;
      data[bytes - 1] = values.back().mark;
    } else {
      std::swap(values[random() % values.size()], values.back());
      const Value& value = values.back();
      bool same = value.data[value.bytes - 1] == value.mark;
      for (size_t at = 0; at < value.bytes; at += kStride) same = same && value.data[at] == value.mark;
      Expect(same, "another value, or nothing, is where a value was");
      pool.Free(value.data);
      values.pop_back();
    }
    if (step % 500 == 0) pool.Trim();
  }
  for (const Value& value : values) pool.Free(value.data);
}

}  // namespace

int main(int, char** arguments) {
  const unsigned seed = static_cast<unsigned>(std::atoi(arguments[1]));
  const auto pool = gradfuse::ort::MemoryPool::Create();
  Expect(pool != nullptr, "no pool");
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 3; ++thread) threads.emplace_back(Work, std::ref(*pool), 3 * seed + thread, 2000);
  for (std::thread& thread : threads) thread.join();
  Expect(pool->used() == 0, "in use when all is free");

  pool->Trim();
  auto* first = static_cast<unsigned char*>(pool->Allocate(1));
  pool->Free(first);
  auto* all = static_cast<unsigned char*>(pool->Allocate(kAddresses));
  Expect(all != nullptr, "no memory");
  Expect(pool->Allocate(size_t{1} << 50) == nullptr, "more than there is");
  Expect(all == first, "free ranges are not joined");
  pool->Free(all);
  pool->Trim();
  Expect(pool->held() == 0, "memory after Trim");
  // Somebody else may have the addresses by now.
  const size_t small = 64 * kMib;
  void* behind = all + small;
  Expect(mmap(behind, kMib, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == behind,
         "addresses after Trim");
  Expect(pool->Allocate(small + 1) == nullptr, "addresses of somebody else");
  Expect(pool->Allocate(small) == all && pool->Allocate(1) == nullptr, "less than there is");

  // Alternating sizes leave ranges that nothing fits: what is held is bounded all the same.
  const auto other = gradfuse::ort::MemoryPool::Create();
  std::mt19937 random(seed);
  auto* base = static_cast<unsigned char*>(other->Allocate(1));
  other->Free(base);
  size_t most = 0;
  std::vector<Value> values;
  for (int step = 0; step < 400; ++step) {
    const size_t bytes = kMib + random() % (16 * kMib);
    values.push_back({static_cast<unsigned char*>(other->Allocate(bytes)), bytes, 0});
    for (size_t at = 0; at < bytes; at += 4096) values.back().data[at] = 1;
    most = std::max(most, other->used());
    while (other->used() > 100 * kMib) {
      std::swap(values[random() % values.size()], values.back());
      other->Free(values.back().data);
      values.pop_back();
    }
    const size_t resident = Resident(base);
    Expect(resident > 0, "nothing is seen");
    Expect(resident <= other->held(), "more memory than is counted");
    Expect(resident <= most + 16 * kMib, "more memory than the most in use and 16 MiB");
  }
  return faults == 0 ? 0 : 1;
}
