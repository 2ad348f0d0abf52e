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
// How many addresses are added at least.
constexpr size_t kGrowth = 32 * kPage;
// What lies between pools at least, as of two copies of the library.
constexpr size_t kRoom = size_t{1} << 33;
// No value is as long.
constexpr size_t kMost = size_t{1} << 46;

constexpr size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

#ifdef __linux__
// Maps addresses, without memory as yet, from `wanted` on or nowhere; if it is null, where the system likes. Null where
// that is not possible.
unsigned char* Map(unsigned char* wanted, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
#ifdef MAP_FIXED_NOREPLACE
  if (wanted != nullptr) flags |= MAP_FIXED_NOREPLACE;
#endif
  void* found = mmap(wanted, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  if (wanted == nullptr || found == wanted) return static_cast<unsigned char*>(found);
  munmap(found, bytes);
  return nullptr;
}
#endif

}  // namespace

std::unique_ptr<MemoryPool> MemoryPool::Create() {
#ifdef __linux__
  // The system maps from the top of the addresses down, so that there is room to grow in the middle.
  unsigned char* top = Map(nullptr, kPage);
  if (top == nullptr) return nullptr;
  munmap(top, kPage);
  const uintptr_t distance = reinterpret_cast<uintptr_t>(top) / 64 / kRoom * kRoom;
  for (uintptr_t place = 32; place < 40 && distance > 0; ++place) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that nothing has as yet
    unsigned char* base = Map(reinterpret_cast<unsigned char*>(place * distance), kGrowth);
    if (base != nullptr) return std::unique_ptr<MemoryPool>(new MemoryPool(base));
  }
#endif
  return nullptr;
}

MemoryPool::MemoryPool(unsigned char* base) : base_(base), size_(kGrowth) { free_.emplace(0, kGrowth); }

MemoryPool::~MemoryPool() {
#ifdef __linux__
  munmap(base_, size_);
#endif
}

bool MemoryPool::Grow(size_t bytes) {
#ifdef __linux__
  // What is free at the end is part of it.
  const size_t size = size_;
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  const size_t start = last != free_.end() && last->first + last->second == size ? last->first : size;
  const size_t more = RoundUp(std::max(bytes - (size - start), kGrowth), kPage);
  if (Map(base_ + size, more) == nullptr) return false;
  free_[start] = size + more - start;
  size_ = size + more;
  return true;
#else
  return bytes == 0;
#endif
}

bool MemoryPool::Contains(const void* memory) const {
  const auto* at = static_cast<const unsigned char*>(memory);
  return at >= base_ && at < base_ + size_;
}

void* MemoryPool::Allocate(size_t bytes) {
  if (bytes > kMost) return nullptr;
  bytes = std::max(RoundUp(bytes, kAlignment), kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  // The shortest that is long enough. There are few: what is free is joined.
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->second >= bytes && (best == free_.end() || range->second < best->second)) best = range;
  }
  if (best == free_.end()) {
    if (!Grow(bytes)) return nullptr;
    best = std::prev(free_.end());
  }
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
#ifdef __linux__
  // Addresses as well, as far as nothing is behind them.
  if (free_.empty()) return;
  const auto last = std::prev(free_.end());
  const auto [start, length] = *last;
  const size_t end = std::max(RoundUp(start, kPage), kGrowth);
  if (start + length < size_ || end >= size_) return;
  munmap(base_ + end, size_ - end);
  size_ = end;
  pages_.resize(std::min(pages_.size(), end / kPage));
  if (end > start) {
    last->second = end - start;
  } else {
    free_.erase(last);
  }
#endif
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
