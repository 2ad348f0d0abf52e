// GPUs on the host, for tests of the execution provider. What is put on a stream waits until someone waits for it.
// Memory cannot be touched but by that work; it is filled with garbage when it is handed out and when it is given back.
// What CUDA would refuse or crash on is an error. The environment variable GRADFUSE_VIRTUAL_GPUS says how many there
// are: two, if it is not set.

#include "tests/simt/virtual_gpu.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ort/provider/gpu.h"
#include "tests/simt/simt.h"

namespace gradfuse::gpu {
namespace {

constexpr int kMaxGpus = 2;
constexpr size_t kBytes = 256 << 20;  // of a GPU's memory
constexpr size_t kAlignment = 256;
constexpr unsigned char kGarbage = 0xff;

thread_local int current_gpu = 0;

struct Gpu {
  char* memory = nullptr;
  std::map<size_t, size_t> free{{0, kBytes}};  // offset to bytes
  std::map<size_t, size_t> used;
  GradfuseVirtualGpuCounts counts = {};
};

class Machine {
 public:
  static Machine& Get() {
    static Machine& machine = *new Machine;
    return machine;
  }

  // One thing happens at a time.
  std::recursive_mutex mutex;
  Gpu gpus[kMaxGpus];

  // Opens the memory of all GPUs while it lives.
  class Access {
   public:
    Access() {
      if (Get().depth_++ == 0) Get().Protect(PROT_READ | PROT_WRITE);
    }
    ~Access() {
      if (--Get().depth_ == 0) Get().Protect(PROT_NONE);
    }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
  };

  bool Contains(const void* memory) const {
    const auto* byte = static_cast<const char*>(memory);
    return byte >= memory_ && byte < memory_ + kMaxGpus * kBytes;
  }

 private:
  Machine() {
    void* memory = mmap(nullptr, kMaxGpus * kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    for (int gpu = 0; gpu < kMaxGpus; ++gpu) gpus[gpu].memory = memory_ + static_cast<size_t>(gpu) * kBytes;
  }
  void Protect(int access) {
    if (mprotect(memory_, kMaxGpus * kBytes, access) != 0) std::abort();
  }

  char* memory_ = nullptr;
  int depth_ = 0;
};

using Lock = std::lock_guard<std::recursive_mutex>;

Gpu& CurrentGpu() { return Machine::Get().gpus[current_gpu]; }

struct Stream : simt::Stream {
  int gpu = current_gpu;
  std::deque<std::function<void()>> work;

  void Add(std::function<void()> item) override {
    const Lock lock(Machine::Get().mutex);
    if (gpu != current_gpu) throw Error("virtual GPU: a kernel is started on a stream of another GPU");
    ++Machine::Get().gpus[gpu].counts.kernels;
    work.push_back(std::move(item));
  }

  void Next() {
    const std::function<void()> item = std::move(work.front());
    work.pop_front();
    const Machine::Access access;
    item();
  }
  void Drain() {
    while (!work.empty()) Next();
  }
};

struct Recorded {
  Stream* stream;
  bool happened = false;
};
struct Event {
  int gpu = current_gpu;
  std::shared_ptr<Recorded> last;

  static void Await(const std::shared_ptr<Recorded>& recorded) {
    while (recorded != nullptr && !recorded->happened) recorded->stream->Next();
  }
};

Stream& StreamAt(void* stream) {
  if (stream == nullptr) throw Error("virtual GPU: work without a stream");
  return *static_cast<Stream*>(static_cast<simt::Stream*>(stream));
}

Stream& OwnStreamAt(void* stream) {
  Stream& found = StreamAt(stream);
  if (found.gpu != current_gpu) throw Error("virtual GPU: a stream of another GPU");
  return found;
}

size_t Rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Blocks that were given back, joined with their neighbours.
void Release(Gpu& gpu, size_t offset) {
  const auto block = gpu.used.find(offset);
  size_t bytes = block->second;
  gpu.used.erase(block);
  std::memset(gpu.memory + offset, kGarbage, bytes);
  auto next = gpu.free.lower_bound(offset);
  if (next != gpu.free.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = gpu.free.erase(next);
  }
  if (next != gpu.free.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  gpu.free.emplace(offset, bytes);
}

}  // namespace

bool IsVirtual(const void* memory) { return Machine::Get().Contains(memory); }

std::vector<Info> List(std::string& why_none) {
  const char* wanted = std::getenv("GRADFUSE_VIRTUAL_GPUS");
  const int count = wanted == nullptr ? kMaxGpus : std::min(std::atoi(wanted), kMaxGpus);
  std::vector<Info> gpus;
  for (int gpu = 0; gpu < count; ++gpu) {
    gpus.push_back({"virtual GPU of the tests", "0000:0" + std::to_string(gpu + 1) + ":00.0"});
  }
  if (gpus.empty()) why_none = "there is no virtual GPU";
  return gpus;
}

Selection::Selection(int gpu) : previous_(current_gpu) {
  if (gpu < 0 || gpu >= kMaxGpus) throw Error("virtual GPU: there is no GPU " + std::to_string(gpu));
  changed_ = gpu != previous_;
  current_gpu = gpu;
}
Selection::~Selection() {
  if (changed_) current_gpu = previous_;
}

void* NewStream() {
  const Lock lock(Machine::Get().mutex);
  ++CurrentGpu().counts.streams;
  return static_cast<simt::Stream*>(new Stream);
}

void DeleteStream(void* stream) {
  const Lock lock(Machine::Get().mutex);
  Stream* found = &StreamAt(stream);
  found->Drain();
  --Machine::Get().gpus[found->gpu].counts.streams;
  delete found;
}

void Synchronize(void* stream) {
  const Lock lock(Machine::Get().mutex);
  StreamAt(stream).Drain();
}

void* NewEvent() {
  const Lock lock(Machine::Get().mutex);
  ++CurrentGpu().counts.events;
  return new Event;
}

void DeleteEvent(void* event) {
  const Lock lock(Machine::Get().mutex);
  auto* found = static_cast<Event*>(event);
  --Machine::Get().gpus[found->gpu].counts.events;
  delete found;
}

void Record(void* event, void* stream) {
  const Lock lock(Machine::Get().mutex);
  Stream& found = OwnStreamAt(stream);
  auto recorded = std::make_shared<Recorded>(Recorded{&found});
  static_cast<Event*>(event)->last = recorded;
  found.work.push_back([recorded] { recorded->happened = true; });
}

void WaitOnDevice(void* stream, void* event) {
  const Lock lock(Machine::Get().mutex);
  const auto last = static_cast<Event*>(event)->last;
  StreamAt(stream).work.push_back([last] { Event::Await(last); });
}

void WaitOnHost(void* event) {
  const Lock lock(Machine::Get().mutex);
  Event::Await(static_cast<Event*>(event)->last);
}

void* Allocate(size_t bytes, void* stream) {
  const Lock lock(Machine::Get().mutex);
  OwnStreamAt(stream);
  Gpu& gpu = CurrentGpu();
  const size_t wanted = Rounded(bytes);
  for (const auto& [offset, size] : gpu.free) {
    if (size < wanted) continue;
    const size_t begin = offset;
    const size_t rest = size - wanted;
    gpu.free.erase(begin);
    if (rest > 0) gpu.free.emplace(begin + wanted, rest);
    gpu.used.emplace(begin, wanted);
    ++gpu.counts.blocks_in_use;
    const Machine::Access access;
    std::memset(gpu.memory + begin, kGarbage, wanted);
    return gpu.memory + begin;
  }
  return nullptr;
}

void Free(void* memory, void* stream) {
  const Lock lock(Machine::Get().mutex);
  Gpu& gpu = CurrentGpu();
  const auto offset = static_cast<size_t>(static_cast<char*>(memory) - gpu.memory);
  if (gpu.used.count(offset) == 0) {
    std::fputs("virtual GPU: what is given back was not handed out\n", stderr);
    std::abort();
  }
  --gpu.counts.blocks_in_use;
  OwnStreamAt(stream).work.push_back([&gpu, offset] { Release(gpu, offset); });
}

void Copy(void* to, const void* from, size_t bytes, void* stream) {
  const Lock lock(Machine::Get().mutex);
  Stream& found = OwnStreamAt(stream);
  GradfuseVirtualGpuCounts& counts = CurrentGpu().counts;
  if (IsVirtual(to) && IsVirtual(from)) {
    ++counts.device_to_device;
    found.work.push_back([=] { std::memcpy(to, from, bytes); });
  } else if (IsVirtual(to)) {
    ++counts.host_to_device;
    const auto* begin = static_cast<const char*>(from);
    found.work.push_back(
        [to, read = std::vector<char>(begin, begin + bytes)] { std::memcpy(to, read.data(), read.size()); });
  } else if (IsVirtual(from)) {
    // As late as it may be: as with page-locked memory.
    ++counts.device_to_host;
    found.work.push_back([=] { std::memcpy(to, from, bytes); });
  } else {
    throw Error("virtual GPU: a copy from host to host");
  }
}

}  // namespace gradfuse::gpu

extern "C" __attribute__((visibility("default"))) void gradfuse_virtual_gpu_counts(int gpu,
                                                                                   GradfuseVirtualGpuCounts* counts) {
  const gradfuse::gpu::Lock lock(gradfuse::gpu::Machine::Get().mutex);
  *counts = gradfuse::gpu::Machine::Get().gpus[gpu].counts;
}
