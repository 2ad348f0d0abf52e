#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// What the execution provider needs from GPUs. cuda_gpu.cc implements it with CUDA, tests with virtual GPUs on the
// host. Streams and events are CUDA's, or substitutes.
namespace gradfuse::gpu {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Info {
  std::string name;
  std::string pci_bus_id;  // such as 0000:65:00.0
};

// The GPUs that this process can use; a GPU's number is its index here. If there is none, `why_none` says why.
std::vector<Info> List(std::string& why_none);

// Selects a GPU for the calling thread. The destructor selects the previous one again.
class Selection {
 public:
  // Throws Error.
  explicit Selection(int gpu);
  ~Selection();
  Selection(const Selection&) = delete;
  Selection& operator=(const Selection&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// All that follows is for the calling thread's GPU. Functions throw Error; those that delete, and Free, do not fail.

void* NewStream();
void DeleteStream(void* stream);
// Waits until all work of a stream is done.
void Synchronize(void* stream);

void* NewEvent();
void DeleteEvent(void* event);
// The event happens when all work that is now on the stream is done.
void Record(void* event, void* stream);
// Work that is put on the stream from now on starts after the event.
void WaitOnDevice(void* stream, void* event);
void WaitOnHost(void* event);

// Memory that is allocated and freed in the order of a stream. Allocate returns null if there is not enough.
void* Allocate(size_t bytes, void* stream);
void Free(void* memory, void* stream);

// Copies between host and GPU, in the order of a stream. When the call returns, host memory has been read unless it is
// page-locked; it is written once the stream gets there.
void Copy(void* to, const void* from, size_t bytes, void* stream);

}  // namespace gradfuse::gpu
