#include "ort/memory_pool.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace gradfuse::ort {
namespace {

constexpr size_t kAlignment = 4096;
// What is returned at once: a huge page, as the system may give them without being asked.
constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kSlack = 8 * kPage;

constexpr size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Bytes from an address to the next page.
size_t Padding(const void* start) {
  const auto address = reinterpret_cast<uintptr_t>(start);
  return RoundUp(address, kPage) - address;
}

}  // namespace

std::unique_ptr<MemoryPool> MemoryPool::Reserve(size_t bytes) {
#ifdef __linux__
  if (bytes == 0) return nullptr;
  const size_t mapped = RoundUp(bytes, kPage) + kPage;
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping != MAP_FAILED) return std::unique_ptr<MemoryPool>(new MemoryPool(mapping, mapped));
#else
  static_cast<void>(bytes);
#endif
  return nullptr;
}

MemoryPool::MemoryPool(void* mapping, size_t mapped)
    : mapping_(mapping),
      mapped_(mapped),
      base_(static_cast<unsigned char*>(mapping) + Padding(mapping)),
      size_(mapped - kPage) {
  free_.emplace(0, size_);
}

MemoryPool::~MemoryPool() {
#ifdef __linux__
  munmap(mapping_, mapped_);
#endif
}

bool MemoryPool::Contains(const void* memory) const {
  const auto* at = static_cast<const unsigned char*>(memory);
  return at >= base_ && at < base_ + size_;
}

void* MemoryPool::Allocate(size_t bytes) {
  if (bytes > size_) return nullptr;
  bytes = std::max(RoundUp(bytes, kAlignment), kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  // The shortest that is long enough. There are few: what is free is joined.
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second >= bytes && (best == free_.end() || range->second < best->second)) best = range;
  }
  if (best == free_.end()) return nullptr;
  trimmed_ = false;
  const auto [start, length] = *best;
  used_.emplace(start, bytes);
  if (length > bytes) free_.emplace_hint(std::next(best), start + bytes, length - bytes);
  free_.erase(best);
  Count(start, bytes, true);
  bytes_used_ += bytes;
  most_used_ = std::max(most_used_, bytes_used_);
  if (bytes_held_ > most_used_ + kSlack) TrimTo(most_used_ + kSlack);
  return base_ + start;
}

void MemoryPool::Free(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = used_.find(static_cast<size_t>(static_cast<unsigned char*>(memory) - base_));
  auto [start, bytes] = *found;
  used_.erase(found);
  Count(start, bytes, false);
  bytes_used_ -= bytes;
  auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == start + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == start) {
    std::prev(next)->second += bytes;
  } else {
    free_.emplace_hint(next, start, bytes);
  }
  if (trimmed_) TrimTo(0);
}

void MemoryPool::Count(size_t start, size_t bytes, bool used) {
  const size_t end = start + bytes;
  if (pages_.size() * kPage < end) pages_.resize(RoundUp(end, kPage) / kPage);
  for (size_t number = start / kPage; number * kPage < end; ++number) {
    Page& page = pages_[number];
    const size_t part = std::min(end, (number + 1) * kPage) - std::max(start, number * kPage);
    if (used) {
      page.used += part;
      bytes_held_ += page.held ? 0 : kPage;
      page.held = true;
    } else {
      page.used -= part;
    }
  }
}

void MemoryPool::Trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  TrimTo(0);
  trimmed_ = true;
}

void MemoryPool::Lock() { mutex_.lock(); }

void MemoryPool::Unlock() { mutex_.unlock(); }

void MemoryPool::TrimTo(size_t most) {
#ifdef __linux__
  // From the end, so that what is held stays together.
  for (size_t end = pages_.size(); end > 0 && bytes_held_ > most; --end) {
    size_t start = end;
    while (start > 0 && pages_[start - 1].held && pages_[start - 1].used == 0 && bytes_held_ > most) {
      pages_[--start].held = false;
      bytes_held_ -= kPage;
    }
    if (start == end) continue;
    madvise(base_ + start * kPage, (end - start) * kPage, MADV_DONTNEED);
    end = start + 1;
  }
#else
  static_cast<void>(most);
#endif
}

size_t MemoryPool::used() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_used_;
}

size_t MemoryPool::held() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_held_;
}

}  // namespace gradfuse::ort
