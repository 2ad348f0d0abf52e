#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// What the execution provider asks of GPUs: CUDA's in cuda_gpu.cc, in tests one on the host. Streams and events are
// CUDA's, or what stands for them.
namespace gradfuse::gpu {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Info {
  std::string name;
  std::string pci_bus_id;  // such as 0000:65:00.0
};

// The GPUs that this process can use; a GPU's number is its place here. Where there is none, `why_none` says why.
std::vector<Info> List(std::string& why_none);

// Makes a GPU the one of the calling thread, and then again the one that it was before.
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
// The event is to happen when all that is on the stream by now is done.
void Record(void* event, void* stream);
// What is put on the stream from now on begins when the event has happened.
void WaitOnDevice(void* stream, void* event);
void WaitOnHost(void* event);

// Memory that may be used in the order of a stream, and is given back in the order of a stream. Null where there is not
// as much.
void* Allocate(size_t bytes, void* stream);
void Free(void* memory, void* stream);

// Between memory of the host and of the GPU, in the order of a stream. What is read from the host, unless it is
// page-locked, was read when the call returns; what is written to the host is there when the stream has come so far.
void Copy(void* to, const void* from, size_t bytes, void* stream);

}  // namespace gradfuse::gpu
