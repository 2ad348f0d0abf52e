#pragma once

#include <cstddef>
#include <cstdint>

// The CUDA kernels and the device behind C functions, so that Python's ctypes can test and time them without any other
// package. Functions that give an int give 0 for success; gradfuse_device_error says what failed.
extern "C" {

// A tensor of device memory, or of host memory where on_host is set. A rank of -1 stands for an absent one.
struct GradfuseTensor {
  void* data;
  int32_t dtype;  // as in gradfuse::DType
  int32_t rank;
  int64_t dims[8];
  int32_t on_host;
};

struct GradfuseAttribute {
  const char* name;
  const char* text;
  int64_t integer;
  float number;
  const int64_t* list;
  int64_t list_size;
};

const char* gradfuse_device_error();

// Bytes of workspace that an op needs for these arguments, or -1. Tensors are inputs, then outputs, in the order of the
// op's signature; attributes that are not given have their defaults.
int64_t gradfuse_device_workspace(const char* op, const GradfuseTensor* tensors, int32_t tensor_count,
                                  const GradfuseAttribute* attributes, int32_t attribute_count);
// Starts an op. `fault` is as in gradfuse::Queue.
int gradfuse_device_run(const char* op, const GradfuseTensor* tensors, int32_t tensor_count,
                        const GradfuseAttribute* attributes, int32_t attribute_count, void* workspace, void* fault);

// Memory and time: of the GPU in cuda_memory.cc, of the host in simt_memory.cc.
int gradfuse_device_name(char* text, size_t size);
void* gradfuse_device_allocate(size_t bytes);  // null where it fails
int gradfuse_device_free(void* memory);
int gradfuse_device_upload(void* device, const void* host, size_t bytes);
int gradfuse_device_download(void* host, const void* device, size_t bytes);
int gradfuse_device_fill(void* device, int byte, size_t bytes);
int gradfuse_device_copy(void* to, const void* from, size_t bytes);  // is not waited for
int gradfuse_device_synchronize();
void* gradfuse_device_event();  // null where it fails
int gradfuse_device_record(void* event);
int gradfuse_device_elapsed(void* first, void* last, float* milliseconds);  // waits for the last
}
